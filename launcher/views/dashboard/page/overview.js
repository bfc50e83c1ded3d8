// The overview: runs, hosts, what is idle, and what was spent.
import { map } from "./map.js";
import { Stream, get } from "./data.js";
import { badge, bar, count, duration, el, fixed, gib, moment, percent, put, table, unitOf } from "./dom.js";

export class OverviewPage {
  #chosen = new Set(); // of the runs, two of which can be laid over each other

  constructor(place, onLink) {
    Object.assign(this, { place, onLink });
  }

  async open() {
    this.#draw(await get("api/overview"));
    this.stream = new Stream("api/overview/events", { overview: (fresh) => requestAnimationFrame(() => this.#draw(fresh)) }, this.onLink);
    this.stream.open();
  }

  close() {
    this.stream?.close();
  }

  #draw({ runs = [], hosts = [], idle = [], spend = [], remarks = [], error }) {
    const live = runs.filter((run) => run.live).length, free = hosts.filter((host) => host.reachable && !host.busy.length).length;
    put(this.place,
      el("h1", {}, "Cluster"),
      el("p", { className: "lead" }, `${count(live)} of ${count(runs.length)} runs active, ${count(free)} of ${count(hosts.length)} hosts idle`),
      [error, ...remarks].filter(Boolean).map((line) => el("p", { className: "remark" }, line)),
      el("section", { className: "card scroll", "aria-labelledby": "runs" }, el("div", { className: "caption" }, el("h2", { id: "runs" }, "Runs"), runs.length > 1 ? this.#compared() : null), runs.length ? this.#runs(runs) :
        el("p", { className: "quiet" }, "No run has been started here; start one with: launch cluster up")),
      el("section", { className: "card scroll", "aria-labelledby": "hosts" }, el("h2", { id: "hosts" }, "Hosts"), this.#hosts(hosts, idle)),
      hosts.length > 1 ? el("section", { className: "card scroll", "aria-labelledby": "links" }, el("h2", { id: "links" }, "Links"), map(hosts)) : null,
      spend.length ? el("section", { className: "card scroll", "aria-labelledby": "spend" }, el("h2", { id: "spend" }, "Spend"), this.#spend(spend)) : null);
  }

  #runs(runs) {
    const choice = (run_id) => el("input", { type: "checkbox", id: `choose-${run_id}`, "aria-label": `choose ${run_id}`, checked: this.#chosen.has(run_id), onchange: ({ target }) => {
      if (target.checked) this.#chosen.add(run_id);
      else this.#chosen.delete(run_id);
      this.place.querySelector("#compared").replaceWith(this.#compared());
    } });
    const columns = [["Run"], ["State"], ["Progress"], ["Loss", 1], ["Validation", 1], ["Speed", 1], ["Workers", 1], ["Started", 1], ["Took", 1]];
    return table("Runs, the newest first", columns, runs.map((run) => [
      el("span", {}, runs.length > 1 ? choice(run.run_id) : null, el("a", { href: `#/run/${encodeURIComponent(run.run_id)}` }, run.run_id)), badge(run.state),
      run.total_steps ? bar(run.step / run.total_steps, `${count(run.step)} / ${count(run.total_steps)}`) : "",
      run.loss == null ? "" : fixed(run.loss), run.validation?.loss == null ? "" : fixed(run.validation.loss),
      run.live && run.tokens_per_second != null ? `${count(run.tokens_per_second)} ${unitOf(run).toLowerCase()}/s` : "",
      run.live ? `${run.joined} / ${run.workers}` : String(run.workers),
      run.started ? moment(run.started) : "", run.started && run.updated ? duration(run.updated - run.started) : "",
    ]));
  }

  #compared() {
    const ids = [...this.#chosen].map(encodeURIComponent);
    return ids.length === 2 ? el("a", { id: "compared", href: `#/runs/${ids.join("/")}` }, "Lay the two over each other")
      : el("span", { id: "compared", className: "quiet" }, "choose two to compare them");
  }

  #hosts(hosts, idle) {
    const columns = [["Host"], ["Doing"], ["Devices"], ["Use", 1], ["Memory (GiB)", 1], ["Watts", 1], ["°C", 1], ["Idle cost", 1]];
    const each = (host, read) => {
      const shown = devicesOf(host).map(([id]) => host.gauges[id]).filter(Boolean).map(read);
      return shown.some((cell) => cell !== "") ? shown.map((cell) => el("div", {}, cell || "–")) : "";
    };
    return table("Hosts", columns, hosts.map((host) => {
      const cost = idle.find(({ name }) => name === host.name);
      const runs = [...new Set(host.busy.map((process) => process.split("/")[0]))];
      return [
        host.name,
        !host.reachable ? badge("unreachable") : runs.length ? runs.map((run) => el("a", { href: `#/run/${encodeURIComponent(run)}` }, run)) : badge("idle"),
        devicesOf(host).map(([, name]) => el("div", {}, name)),
        each(host, ({ load }) => (load == null ? "" : `${load} %`)),
        each(host, ({ memory_used: used, memory_total: total }) => (used == null ? "" : total ? bar(used / total, `${gib(used)} / ${gib(total)}`, used > 0.95 * total) : gib(used))),
        each(host, ({ power }) => (power == null ? "" : count(power))),
        each(host, ({ temperature }) => (temperature == null ? "" : count(temperature))),
        cost ? `${fixed(cost.hourly_cost, 2)} ${cost.currency ?? ""} an hour` : "",
      ];
    }));
  }

  #spend(spend) {
    const columns = [["Run"], ["Host hours", 1], ["kWh", 1], ["Power"], ["Cost", 1]];
    return table("What each run has cost", columns, spend.toReversed().map((total) => [
      total.name, fixed(total.seconds / 3600, 2), total.kwh ? fixed(total.kwh, 3) : "",
      !total.kwh ? "" : total.measured_fraction > 0.999 ? "measured" : total.measured_fraction ? `${percent(total.measured_fraction)} measured` : "planned",
      `${fixed(total.cost, 2)} ${total.currency ?? ""}`,
    ]));
  }
}

/** Return a host's devices as [id of its readings, name]. */
function devicesOf(host) {
  const named = host.devices.filter(({ backend }) => backend !== "cpu").map(({ id, name }) => [(id ?? "").toLowerCase(), name || id]);
  const cpu = host.devices.find(({ backend }) => backend === "cpu");
  return [...named, ["cpu", cpu?.name || "cpu"]];
}
