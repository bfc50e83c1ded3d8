// Two runs laid over each other, over steps, tokens or time.
import { Charts, between, short } from "./charts.js";
import { Records, Stream, get } from "./data.js";
import { badge, count, duration, el, fixed, put, table, unitOf } from "./dom.js";

const AXES = {
  steps: { at: (step) => step.step, text: short },
  tokens: { at: (step) => step.totals[3], text: short },
  time: { at: (step, first) => Math.round(step.time - first.time), text: duration },
};
const COLOURS = ["blue", "orange"];

export class ComparePage {
  #axis = "steps";
  #chosen = null;
  #due = false;

  constructor(ids, place, onLink) {
    Object.assign(this, { ids, place, onLink });
  }

  async open() {
    this.runs = await Promise.all(this.ids.map(async (run_id) => {
      const path = `api/runs/${encodeURIComponent(run_id)}`;
      const { records, cursor, ...state } = await get(path);
      const run = { run_id, state, records: new Records() };
      run.records.take(records);
      run.stream = new Stream(`${path}/events`, {
        state: (fresh) => { run.state = fresh; this.#soon(); },
        records: (fresh) => { run.records.take(fresh); this.#soon(); },
        reset: () => location.reload(),
      }, this.onLink);
      run.stream.cursor = cursor;
      return run;
    }));
    this.#build();
    for (const { stream } of this.runs) stream.open();
    this.#draw();
  }

  close() {
    for (const { stream } of this.runs ?? []) stream.close();
    this.charts?.close();
  }

  #soon() {
    if (this.#due) return;
    this.#due = true;
    requestAnimationFrame(() => { this.#due = false; this.#draw(); });
  }

  #build() {
    this.charts = new Charts((index, plot) => { this.#chosen = index; this.charts.show(index, plot); }, (value) => AXES[this.#axis].text(value));
    this.charts.again = () => this.#draw();
    const both = (read, text) => this.runs.map(({ run_id }, side) => ({
      name: run_id, colour: COLOURS[side], dash: side ? [6, 4] : undefined, gaps: true, value: (row) => read(row.now[side]), text: (_, row) => text(read(row.last[side])),
    }));
    const scores = this.runs.map((_, side) => ({
      name: "validation", colour: COLOURS[side], points: true, value: (row) => row.score[side], text: (_, row) => fixed(row.lastScore[side]),
    }));
    const radios = Object.keys(AXES).map((name) => el("label", {}, el("input", { type: "radio", name: "axis", value: name, checked: name === this.#axis,
      onchange: () => { this.#axis = name; this.#chosen = null; this.#draw(); } }), ` ${name}`));
    this.figures = el("div");
    const units = new Set(this.runs.map(({ state }) => unitOf(state.status.training)));
    put(this.place);
    this.place.replaceChildren(
      el("h1", {}, "Two runs"),
      el("p", { className: "lead" }, "Laid over each other; the second one is dashed."),
      el("section", { className: "card scroll", "aria-label": "Figures" }, this.figures),
      el("fieldset", { className: "asked" }, el("legend", {}, "Over"), radios),
      el("section", { "aria-label": "Curves" },
        this.charts.add("Loss, smoothed", [...both((step) => step?.mean ?? null, fixed), ...scores], { summary: between(fixed), height: 300 }),
        this.charts.add(`${[...units].join(" or ")} per second`, both((step) => step?.tokens_per_second ?? null, count), { least: 0, axis: short, summary: between(count) })));
  }

  #draw() {
    const rows = laid(this.runs, AXES[this.#axis].at);
    this.charts.draw(rows, []);
    this.charts.show(Math.min(this.#chosen ?? Infinity, rows.length - 1));
    const columns = [["Run"], ["State"], ["Steps", 1], ["Loss", 1], ["Best validation", 1], ["Samples", 1], ["Tokens", 1], ["Training time", 1], ["Workers", 1]];
    put(this.figures, table("Figures of both runs", columns, this.runs.map(({ run_id, state: { status }, records: { steps, validations, ledger } }, side) => [
      el("span", {}, el("i", { className: `key ${COLOURS[side]}`, "aria-hidden": "true" }), el("a", { href: `#/run/${encodeURIComponent(run_id)}` }, run_id)),
      badge(status.state), count(steps.at(-1)?.step), fixed(steps.at(-1)?.mean), validations.length ? fixed(Math.min(...validations.map(({ loss }) => loss ?? Infinity))) : "",
      count(ledger.counted), count(ledger.tokens), steps.length ? duration(steps.at(-1).time - steps[0].time) : "", count(status.processes.filter(({ role }) => role === "worker").length) ?? "",
    ])));
  }
}

/** Return the steps of two runs in the order of an axis, as {step: its value, now: [of each run], last, score, lastScore}. */
function laid(runs, at) {
  const rows = new Map();
  runs.forEach(({ records: { steps, validations } }, side) => {
    const scores = new Map(validations.map(({ step, loss }) => [step, loss]));
    for (const step of steps) {
      const x = at(step, steps[0]);
      if (!rows.has(x)) rows.set(x, { step: x, now: [null, null], score: [null, null] });
      rows.get(x).now[side] = step;
      if (scores.has(step.step)) rows.get(x).score[side] = scores.get(step.step);
    }
  });
  const found = [...rows.values()].sort((one, other) => one.step - other.step);
  found.forEach((row, index) => {
    const before = found[index - 1];
    row.last = row.now.map((step, side) => step ?? before?.last[side]);
    row.lastScore = row.score.map((score, side) => score ?? before?.lastScore[side]);
  });
  return found;
}
