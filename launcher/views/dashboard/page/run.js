// The page of one run.
import { Charts, between, short } from "./charts.js";
import { Records, Stream, get } from "./data.js";
import { checkpoints, strip } from "./distillation.js";
import { LogView } from "./log.js";
import { about } from "./report.js";
import { waterfall } from "./waterfall.js";
import { badge, bar, breakable, code, colourName, count, duration, el, fixed, gib, lane, moment, ms, percent, put, rate, table, tile, unitOf } from "./dom.js";

const BAD = ["lost", "diverged", "halted", "outlier", "alarm", "quarantined", "unverified", "refused", "residual_lost"];
const GOOD = ["rejoined", "active", "finished"];
const UNMARKED = ["verified", "listening", "joined", "checkpoint", "reassigned", "codec", "carried"];
const kindOf = (event) => (BAD.includes(event) ? "bad" : GOOD.includes(event) ? "good" : event === "idle" ? "amber" : "calm");
const UNDRAWN = [...UNMARKED, "idle", "active"]; // what is frequent would cross every chart
const MOST_EVENTS = 200;

export class RunPage {
  #records = new Records();
  #chosen = null; // the index of the chosen step; null follows the newest
  #due = false;

  constructor(run_id, place, onLink, say) {
    Object.assign(this, { run_id, place, onLink, say });
    this.path = `api/runs/${encodeURIComponent(run_id)}`;
  }

  async open() {
    const { records, cursor, ...state } = await get(this.path);
    this.#records.take(records);
    this.state = state;
    this.#build();
    this.stream = new Stream(`${this.path}/events`, {
      state: (fresh) => { this.state = fresh; this.#soon(); },
      records: (fresh) => {
        const events = this.#records.take(fresh).filter(({ event }) => !UNMARKED.includes(event));
        if (events.length) this.say(events.map(sentence).join("; "));
        this.#soon();
      },
      reset: () => location.reload(),
    }, (state) => { this.link = state; this.#tellLink(); });
    this.stream.cursor = cursor;
    this.stream.open();
    this.#draw();
  }

  /** Say how the page is kept up to date; a run that has ended is not live. */
  #tellLink() {
    if (this.link) this.onLink(this.link === "live" && !this.state.status.live ? "up to date" : this.link);
  }

  close() {
    this.stream?.close();
    this.charts?.close();
    this.log?.close();
    this.place.onclick = null;
  }

  #soon() {
    if (this.#due) return;
    this.#due = true;
    requestAnimationFrame(() => { this.#due = false; this.#draw(); }); // a hidden page draws nothing
  }

  #build() {
    const part = (name, className = "") => (this[name] = el("div", { className }));
    this.charts = new Charts((index, plot) => this.#choose(index, plot));
    this.charts.again = () => this.#draw();
    this.log = this.state.report || !this.state.launched ? null : new LogView(this.path, this.state.status.processes.map(({ name }) => name));
    const loss = (step) => step.loss, exposed = (step) => step.exchange_exposed_ms;
    const hidden = (step) => (step.exchange_ms == null ? null : Math.max(0, step.exchange_ms - (step.exchange_exposed_ms ?? 0)));
    const curves = [
      this.charts.add("Loss", [
        { name: "step", colour: "blue", value: loss, text: (v) => fixed(v), faint: true },
        { name: "training", colour: "blue", value: (step) => step.mean, text: (_, step) => fixed(step.loss) },
        { name: "validation", colour: "orange", value: (step) => this.scores.get(step.step)?.loss ?? null, text: (_, step) => fixed(this.#scoreAt(step.step)?.loss), points: true, late: true },
      ], { summary: between(fixed), height: 220 }),
      this.charts.add(`${unitOf(this.state.status.training)} per second`, [{ name: "all workers", colour: "green", value: (step) => step.tokens_per_second, text: count }], { least: 0, axis: short, summary: between(count), height: 220 }),
      this.state.distillation ? this.charts.add("Student beside teacher", [
        { name: "from the teacher (KL)", colour: "violet", value: (step) => step.kl, text: (v) => fixed(v) },
        { name: "with the text (CE)", colour: "teal", value: (step) => step.ce, text: (v) => fixed(v) },
      ], { summary: between(fixed) }) : this.charts.add("Exchange", [
        { name: "exposed", colour: "red", value: exposed, text: ms },
        { name: "hidden behind backward", colour: "teal", value: hidden, text: ms },
      ], { stacked: true, least: 0, axis: ms, summary: between(ms) }),
      this.charts.add("Learning rate", [{ name: "rate", colour: "violet", value: (step) => step.learning_rate, text: rate }], { axis: (v) => (v ? v.toExponential(1).replace("e-", "e−") : "0"), summary: between(rate) }),
    ];
    const score = (key) => (step) => this.scores.get(step.step)?.[key] ?? null;
    const reward = (name, colour, key) => ({ name, colour, value: score(key), text: (_, step) => fixed(this.#scoreAt(step.step)?.[key], 3), points: true, late: true });
    this.rewards = this.charts.add("Rewards", [
      reward("better", "green", "reward_chosen"), reward("worse", "red", "reward_rejected"), reward("margin", "violet", "reward_margin"),
    ], { summary: between((v) => fixed(v, 3)) });
    this.ordered = this.charts.add("Pairs in order", [
      { name: "accuracy", colour: "blue", value: score("reward_accuracy"), text: (_, step) => percent(this.#scoreAt(step.step)?.reward_accuracy), points: true, late: true },
    ], { least: 0, axis: (v) => `${Math.round(100 * v)} %` });
    curves.push(this.rewards, this.ordered);
    this.slider = el("input", { type: "range", id: "step", min: 0, step: 1, oninput: () => this.#choose(Number(this.slider.value)) });
    this.latest = el("button", { type: "button", onclick: () => { this.#chosen = null; this.#draw(); } }, "Latest");
    this.at = el("output", { htmlFor: "step" });
    this.#choices = el("div", { className: "scrub" }, el("label", { for: "step" }, "Step"), this.slider, this.at, this.latest);
    put(this.place);
    this.place.replaceChildren(...[
      part("head"),
      el("section", { "aria-label": "Figures" }, part("figures"), part("proofs")),
      this.#choices,
      el("section", { "aria-label": "Curves", className: "grid", hidden: this.state.report && !this.#records.steps.length }, curves),
      this.state.distillation ? null : el("section", { "aria-label": "Workers over time", className: "card" },
        this.charts.add("Share of each worker", [], { stacked: true, least: 0, axis: (v) => `${Math.round(100 * v)} %`, height: 200, axisSize: 68, summary: () => `${this.#records.ranks.length} workers` }), part("lanes", "lanes")),
      this.state.distillation ? el("section", { className: "card scroll", "aria-labelledby": "shards" }, el("h2", { id: "shards" }, "Distillation"), part("shards")) :
        el("section", { className: "card", "aria-labelledby": "waterfall" }, part("waterfall")),
      el("section", { className: "card scroll", "aria-labelledby": "workers" }, el("h2", { id: "workers" }, "Processes"), part("workers")),
      (this.asked = el("section", { className: "card scroll", "aria-labelledby": "answers" }, el("h2", { id: "answers" }, "Answers"), part("answers"))),
      el("section", { className: "card", "aria-labelledby": "events" }, el("h2", { id: "events" }, "Events"), part("happened", "log")),
      this.log?.section,
      ...(this.state.report ? about(this.state.report) : []),
    ].filter(Boolean));
  }

  #choices = null;

  #scoreAt(step) {
    return this.#records.validations.findLast((score) => score.step <= step);
  }

  #choose(index, plot = null) {
    const last = this.#records.steps.length - 1;
    this.#chosen = index >= last && !plot ? null : Math.min(index, last);
    this.#show(plot);
  }

  #chooseFirst(found) {
    const index = this.#records.steps.findIndex(found);
    if (index >= 0) this.#choose(index);
  }

  #draw() {
    const { steps, validations, events, ranks } = this.#records;
    this.scores = new Map(validations.map((score) => [score.step, score]));
    this.rewards.hidden = this.ordered.hidden = !validations.some((score) => score.reward_margin != null); // of pairs alone
    if (this.lanes) this.charts.setSeries("Share of each worker", ranks.map((rank) => ({
      name: `worker ${rank}`, colour: colourName(rank), text: percent,
      value: (step) => (step.worker_samples[rank] ?? 0) / (step.all || 1),
    })));
    const marks = events.filter(({ event }) => !UNDRAWN.includes(event));
    this.charts.draw(steps, marks.map(({ event, step }) => ({ step, kind: kindOf(event) })));
    this.#top();
    this.#tellLink();
    if (this.lanes) this.#lanes();
    put(this.workers, this.#processes());
    put(this.happened, this.#events());
    put(this.answers, this.#answers());
    if (this.shards) put(this.shards, strip(this.state.distillation), checkpoints(this.state.distillation));
    this.place.onclick = ({ target: { dataset: { step, moment: second } = {} } }) => {
      if (step) this.#chooseFirst((record) => record.step >= Number(step));
      else if (second) this.#chooseFirst((record) => record.time >= Number(second)); // done in that second, or being done then
    };
    this.slider.max = Math.max(0, steps.length - 1);
    this.#choices.hidden = !steps.length;
    this.#show();
  }

  #show(plot = null) {
    const { steps } = this.#records;
    const index = this.#chosen ?? steps.length - 1;
    const record = steps[index];
    if (record) {
      this.slider.value = index;
      this.slider.setAttribute("aria-valuetext", `step ${record.step}, loss ${fixed(record.loss)}`);
      this.at.textContent = `${count(record.step)} · ${moment(record.time, true)}`;
      this.latest.disabled = this.#chosen == null;
      this.charts.show(index, plot);
      this.log?.at(record.time, this.#chosen == null);
    }
    if (!this.waterfall) return;
    const [legend, ...lanes] = waterfall(record);
    put(this.waterfall, el("div", { className: "caption" }, el("h2", { id: "waterfall" }, record ? `One step: ${count(record.step)}` : "One step"), legend), lanes);
  }

  #top() {
    const { status, outcome, seconds_left: left, remarks = [], failures = [], summary = [], error, age, distillation: taught } = this.state;
    const training = status.training ?? {};
    const { step = 0, total_steps: total, budget } = training;
    const validation = training.validation ?? this.#records.validations.at(-1);
    const end = status.live ? this.state.now : training.updated;
    put(this.head,
      el("div", { className: "title" }, el("h1", {}, this.run_id), badge(status.state),
        el("span", { className: "quiet" }, status.started ? `${duration(end - status.started)}${left != null && status.live ? `, ${duration(left)} left` : ""}` : "")),
      total ? bar(step / total, `step ${count(step)} of ${count(total)}, ${percent(step / total)}`) : null,
      [error, age > 10 ? `as it was ${age} s ago` : null, status.state === "failed" ? outcome : status.state === "completed" ? null : status.reason, ...Object.values(status.unreachable ?? {}), ...remarks]
        .filter(Boolean).map((line) => el("p", { className: "remark" }, line)),
      failures.map(([first, ...lines]) => el("details", { className: "failure" }, el("summary", {}, first), code(lines))),
      summary.length ? el("details", { open: !status.live }, el("summary", {}, "Result"), code(summary)) : null);
    const { steps, events } = this.#records;
    const last = steps.at(-1) ?? {};
    const figure = (name, value, ...more) => (this.state.report && value === "–" ? null : tile(name, value, ...more)); // it lists what it lacks
    put(this.figures, el("dl", { className: "tiles" },
      figure("Loss", fixed(training.loss ?? last.loss)),
      figure("Validation", fixed(validation?.loss), validation ? `${scores(validation)}step ${count(validation.step)}` : "none yet"),
      figure(`${unitOf(training)}/s`, count(training.tokens_per_second ?? last.tokens_per_second)),
      taught ? null : figure("Exchange exposed", ms(training.exchange_exposed_ms ?? last.exchange_exposed_ms), last.exchange_ms == null ? "" : `of ${ms(last.exchange_ms)}`),
      budget ? figure("Spent", `${fixed(budget.spent, 2)} ${budget.currency ?? ""}`, budget.ceiling == null ? "" : `of ${fixed(budget.ceiling, 2)}`) : null));
    const { counted, missing, repeated } = this.#records.ledger;
    const many = (kind) => events.filter(({ event }) => event === kind);
    const proofs = many("verified"), proof = proofs.at(-1), diverged = many("diverged").length;
    const lost = many("lost").length, back = many("rejoined").length;
    const dealt = many("reassigned").reduce((sum, { samples }) => sum + (samples ?? 0), 0);
    const exact = !missing && !repeated;
    put(this.proofs, el("dl", { className: "tiles proofs" },
      figure("Samples counted", count(counted), !counted ? "" : exact ? "each exactly once" : `${count(missing)} missing, ${count(repeated)} repeated`, counted && (exact ? "good" : "bad")),
      taught || ((status.training?.expect_workers ?? status.expect_workers) === 1 && !proof) ? null : figure("Weights agree", proof ? `${proof.ranks?.length ?? ""} worker${proof.ranks?.length === 1 ? "" : "s"}` : "–", proof ? `${count(proof.proofs)} proof${proof.proofs === 1 ? "" : "s"}, last at step ${count(proof.step)}: ${(proof.digest ?? "").slice(0, 12)}` : "not proved yet", diverged ? "bad" : proof ? "good" : ""),
      taught ? null : figure("Faults survived", count(lost), lost ? `${count(back)} came back, ${count(dealt)} samples dealt again` : "no worker was lost", lost > back && status.live ? "amber" : ""),
      figure("Checkpoint", training.checkpoint ? `step ${count(training.checkpoint.step)}` : "–", training.checkpoint?.path ?? "none yet")));
  }

  /** Return of each prompt the newest answer and the first one, and those between to unfold. */
  #answers() {
    const { prompts } = this.#records;
    this.asked.hidden = !prompts.size;
    const shown = (answers) => el("ul", { className: "events" }, answers.map(([step, { time, text }]) => el("li", { className: "calm" },
      el("time", {}, moment(time, true)), el("button", { type: "button", className: "step", "data-step": step }, `step ${count(step)}`),
      text.trim() ? el("span", {}, text) : el("span", { className: "quiet" }, "(an empty answer)"))));
    return [...prompts].map(([number, { prompt, said }]) => {
      const [newest, ...older] = [...said].reverse();
      const first = older.pop();
      return [el("h3", {}, prompt), shown(first ? [newest, first] : [newest]),
        older.length ? el("details", {}, el("summary", {}, `Prompt ${number}: the answers between`), shown(older)) : null];
    });
  }

  #lanes() {
    const { steps, ranks } = this.#records;
    const [first, last] = [steps[0]?.step ?? 0, steps.at(-1)?.step ?? 0];
    const at = (step) => Math.max(first, step) - first;
    put(this.lanes, ranks.map((rank) => {
      const spells = this.#records.spells(rank);
      const said = spells.map(([state, from, to]) => `${state} from step ${from} to ${to}`).join(", ");
      return lane(`worker ${rank}`, spells.map(([state, from, to]) =>
        [`${state} ${state === "active" ? colourName(rank) : ""}`, at(from), at(to), `${state}, steps ${from} to ${to}`]), Math.max(1, last - first), said);
    }));
  }

  #processes() {
    const { status, gauges, devices, device_names: names } = this.state;
    const members = new Map((status.training?.workers ?? []).map((worker) => [worker.rank, worker]));
    const all = [...members.values()].reduce((sum, { samples }) => sum + (samples ?? 0), 0);
    const columns = [["Name"], ["Host"], ["Device"], ["State"], ["Share", 1], [`${unitOf(status.training)}/s`, 1], ["Use", 1], ["Memory (GiB)", 1], ["Watts", 1], ["°C", 1], ["Shards", 1], ["Attempt", 1], ["Last exit"]];
    const rows = status.processes.map((process) => {
      const member = (process.role === "worker" ? members.get(process.rank) : process.report) ?? {};
      const gauge = gauges[process.host]?.[devices[process.name]] ?? {};
      const coordinator = process.role === "coordinator";
      const state = process.state !== "running" ? process.state : member.state === "lost" ? "rejoining" : member.state ?? process.state;
      const device = coordinator ? "" : names[process.name] ?? process.device ?? process.backend;
      const full = gauge.memory_total ? gauge.memory_used / gauge.memory_total : 0;
      return [
        el("span", {}, process.role === "worker" ? el("i", { className: `key ${colourName(process.rank)}`, "aria-hidden": "true" }) : null, process.name),
        process.host, device, badge(state),
        member.samples != null && all ? percent(member.samples / all) : "", member.tokens_per_second == null ? "" : count(member.tokens_per_second),
        coordinator || gauge.load == null ? "" : `${gauge.load} %`,
        coordinator || gauge.memory_used == null ? "" : gauge.memory_total ? bar(full, `${gib(gauge.memory_used)} / ${gib(gauge.memory_total)}`, full > 0.95) : gib(gauge.memory_used),
        coordinator || gauge.power == null ? "" : count(gauge.power),
        coordinator || gauge.temperature == null ? "" : el("span", { className: gauge.temperature >= 85 ? "hot" : "" }, count(gauge.temperature)),
        member.shards ? `${count(member.shards_done)} / ${count(member.shards)}` : "",
        String(process.attempt), process.exit_code == null && process.signal == null ? "" : process.signal != null ? `signal ${process.signal}` : `exit ${process.exit_code}`,
      ];
    });
    return table("Processes of the run", columns, rows);
  }

  #events() {
    const shown = this.#records.events.filter(({ event }) => event !== "verified").slice(-MOST_EVENTS).reverse();
    if (!shown.length) return el("p", { className: "quiet" }, "Nothing has happened yet.");
    return el("ol", { className: "events" }, shown.map((event) => el("li", { className: kindOf(event.event) },
      el("time", {}, moment(event.time, true)),
      el("button", { type: "button", className: "step", "data-step": event.step }, `step ${count(event.step)}`),
      el("span", {}, breakable(sentence(event))))));
  }
}

/** Return a validation's figures besides its loss, in words. */
function scores({ accuracy, reward_accuracy: ordered, reward_margin: margin, figures }) {
  const parts = [accuracy == null ? "" : `accuracy ${fixed(accuracy, 3)} · `];
  if (ordered != null) parts.push(`reward accuracy ${percent(ordered)} · margin ${fixed(margin, 3)} · `);
  for (const [name, value] of Object.entries(figures ?? {})) parts.push(`${name} ${fixed(value, 3)} · `);
  return parts.join("");
}

/** Return an event in words. */
function sentence({ event, rank, reason, host, device, samples, path, ranks }) {
  const who = rank == null ? "" : `worker ${rank} `;
  const more = reason ? `: ${reason}` : "";
  switch (event) {
    case "joined": case "rejoined": return `${who}${event === "joined" ? "joined" : "is back"}${host ? ` on ${host}` : ""}${device ? ` (${device})` : ""}`;
    case "lost": return `${who}lost${more}`;
    case "reassigned": return `${count(samples)} samples of ${who}dealt again${ranks ? ` to ${ranks.map((each) => `worker ${each}`).join(", ")}` : ""}`;
    case "idle": return `${who}idle: it would slow the step`;
    case "active": return `${who}takes a share again`;
    case "checkpoint": return `checkpoint ${path ?? ""}`;
    case "resumed": return `resumed${path ? ` from ${path}` : more}`;
    default: return `${who}${event}${more || (ranks ? `: workers ${ranks.join(", ")}` : "")}`;
  }
}
