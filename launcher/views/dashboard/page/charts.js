// Curves over the steps, by uPlot; all of a page share one cursor: the chosen step.
import { css, el } from "./dom.js";

const WHOLE = Array.from({ length: 10 }, (_, power) => [1, 2, 5].map((part) => part * 10 ** power)).flat(); // no step is half done

/** Curves of one quantity each; `choose` is called with the step under the pointer. */
export class Charts {
  #made = [];
  #events = [];
  #steps = null;
  #xs = [];
  #observer = new ResizeObserver((seen) => {
    for (const { target } of seen) {
      const chart = this.#made.find((each) => each.box === target);
      if (chart?.plot && target.clientWidth) chart.plot.setSize({ width: target.clientWidth, height: chart.height });
    }
  });

  constructor(choose, xAxis = null) {
    Object.assign(this, { choose, xAxis });
    this.dark = matchMedia("(prefers-color-scheme: dark)");
    this.dark.addEventListener("change", this.recolour);
  }

  recolour = () => {
    for (const chart of this.#made) {
      chart.plot?.destroy();
      chart.plot = null;
    }
    this.again?.();
  };

  /**
   * Return a figure. `series` are {name, colour, value, text} with more of how to draw: value(step
   * record) gives a number or null, once a step unless it may come `late`; `stacked` adds them up,
   * as areas; `summary` gets the values of the first.
   */
  add(title, series, { height = 180, stacked = false, least, summary, axis, axisSize = 52 } = {}) {
    const box = el("div", { className: "plot", role: "img" });
    const legend = el("div", { className: "legend" });
    const chart = { box, legend, series, height, stacked, least, summary, axis, axisSize, title, plot: null, steps: [], columns: [] };
    this.#made.push(chart);
    this.#observer.observe(box);
    return el("figure", { className: "card chart" }, el("figcaption", {}, el("h2", {}, title), legend), box);
  }

  setSeries(title, series) {
    const chart = this.#made.find((each) => each.title === title);
    if (chart.series.map((s) => s.name).join() === series.map((s) => s.name).join()) return;
    Object.assign(chart, { series, columns: [] });
    chart.plot?.destroy();
    chart.plot = null;
  }

  /** Draw steps, and marks at the events. */
  draw(steps, events) {
    const loud = ["calm", "good", "amber", "bad"]; // the worst is drawn last
    this.#events = [...events].sort((a, b) => loud.indexOf(a.kind) - loud.indexOf(b.kind));
    if (steps !== this.#steps) {
      this.#steps = steps;
      this.#xs = [];
      for (const chart of this.#made) chart.columns = [];
    }
    for (let at = this.#xs.length; at < steps.length; at++) this.#xs.push(steps[at].step);
    for (const chart of this.#made) {
      chart.steps = steps;
      chart.series.forEach(({ value, late }, number) => {
        const column = (chart.columns[number] ??= []);
        const below = chart.stacked && number ? chart.columns[number - 1] : null;
        for (let at = late ? 0 : column.length; at < steps.length; at++) {
          const found = value(steps[at]);
          column[at] = below ? (found ?? 0) + (below[at] ?? 0) : found;
        }
      });
      const data = [this.#xs, ...chart.columns];
      if (chart.plot) chart.plot.setData(data);
      else if (steps.length && chart.box.clientWidth) {
        chart.plot = new uPlot(this.#options(chart), data, chart.box);
      }
      const said = chart.summary?.(chart.columns[0] ?? []);
      chart.box.setAttribute("aria-label", said ? `${chart.title}: ${said}` : chart.title);
    }
  }

  /** Move the cursor of all curves to a step, and show their values there. */
  show(index, from = null) {
    for (const { plot, steps, legend, series } of this.#made) {
      const record = steps[index];
      if (!record) continue;
      if (plot && plot !== from) plot.setCursor({ left: plot.valToPos(record.step, "x"), top: -10 }, false);
      const shown = series.filter((each) => !each.faint).map((each) => el("span", {},
        el("i", { className: `key ${each.colour}`, "aria-hidden": "true" }), `${each.name} `,
        el("b", {}, each.text(each.value(record), record))));
      legend.replaceChildren(...shown);
    }
  }

  close() {
    this.#observer.disconnect();
    this.dark.removeEventListener("change", this.recolour);
    for (const { plot } of this.#made) plot?.destroy();
  }

  #options({ box, series, height, stacked, least, axis, axisSize }) {
    const quiet = css("quiet"), line = css("line");
    const axes = { stroke: quiet, font: "11px system-ui, sans-serif", grid: { stroke: line, width: 1 }, ticks: { show: false } };
    return {
      width: box.clientWidth, height,
      legend: { show: false },
      padding: [8, 20, 0, 0], // half of the last step's number
      cursor: { y: false, drag: { x: true, y: false }, points: { size: (_, at) => (series[at - 1].faint ? 0 : 7) } },
      scales: { x: { time: false }, y: { range: (_, low, high) => scale(low, high, least) } },
      axes: [{ ...axes, size: 24, space: 60, incrs: this.xAxis ? undefined : WHOLE, values: this.xAxis && ((_, all) => all.map(this.xAxis)) }, { ...axes, size: axisSize, space: 34, values: axis && ((_, all) => all.map(axis)) }],
      series: [{}, ...series.map(({ colour, points, faint, gaps, dash }) => ({
        stroke: faint ? `${css(colour)}55` : css(colour), width: stacked ? 1 : faint ? 1 : 1.75, dash,
        fill: stacked ? `${css(colour)}b0` : undefined,
        spanGaps: Boolean(points || gaps), points: { show: Boolean(points), size: 6, fill: css(colour) },
      }))],
      bands: stacked ? series.slice(1).map((_, at) => ({ series: [at + 2, at + 1] })) : [],
      hooks: {
        draw: [(plot) => this.#mark(plot)],
        setCursor: [(plot) => {
          const { idx, event } = plot.cursor;
          if (idx != null && event) this.choose(idx, plot);
        }],
      },
    };
  }

  /** Draw a line at each event, in the colour of its kind. */
  #mark(plot) {
    const { ctx, bbox } = plot;
    ctx.save();
    ctx.lineWidth = devicePixelRatio;
    ctx.setLineDash([3 * devicePixelRatio, 3 * devicePixelRatio]);
    for (const { step, kind } of this.#events) {
      const x = Math.round(plot.valToPos(step, "x", true)) + 0.5;
      if (x < bbox.left || x > bbox.left + bbox.width) continue;
      ctx.strokeStyle = css(kind);
      ctx.beginPath();
      ctx.moveTo(x, bbox.top);
      ctx.lineTo(x, bbox.top + bbox.height);
      ctx.stroke();
    }
    ctx.restore();
  }
}

function scale(low, high, least) {
  if (low == null) return [0, 1];
  if (least != null) return [least, high > least ? high * 1.05 : least + 1];
  const room = 0.06 * (high - low || Math.abs(high) || 1);
  return [low - room, high + room];
}

/** Return values in words: the first, the last, the least and the greatest. */
export const between = (text) => (values) => {
  let first = null, last = null, low = Infinity, high = -Infinity;
  for (const value of values) {
    if (value == null) continue;
    first ??= value;
    last = value;
    if (value < low) low = value;
    if (value > high) high = value;
  }
  return first == null ? "no values yet" : `${text(first)} at first, ${text(last)} now, between ${text(low)} and ${text(high)}`;
};

export const short = (value) => (value >= 1e6 ? `${value / 1e6}M` : value >= 10000 ? `${value / 1000}k` : String(value));
