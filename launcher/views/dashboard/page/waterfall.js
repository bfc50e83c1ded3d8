// One step as a waterfall: how each worker spent it.
import { colourName, count, el, ms } from "./dom.js";

/** Return the legend, and a lane for each worker. */
export function waterfall(record) {
  if (!record?.worker_seconds || !record.seconds) return [el("span", { className: "quiet" }, "no times of single workers are recorded here")];
  const rows = Object.entries(record.worker_seconds).map(([rank, seconds]) => ({ rank: Number(rank), seconds, overlap: Math.min(seconds, record.worker_overlap_seconds?.[rank] ?? 0) }));
  const slowest = Math.max(...rows.map(({ seconds }) => seconds));
  const whole = Math.max(record.seconds, slowest);
  const part = (kind, from, to, name, colour = "") => {
    if (to - from <= 0) return null;
    const piece = el("span", { className: `piece ${kind} ${colour}`, title: `${name}: ${ms(1000 * (to - from))}` });
    piece.style.left = `${(100 * from) / whole}%`;
    piece.style.width = `${(100 * (to - from)) / whole}%`;
    return piece;
  };
  const keys = [["compute", "computes"], ["leaving", "computes, blocks leave"], ["waiting", "waits for the slowest"], ["exposed", "exchange exposed, commit"]];
  return [
    el("div", { className: "legend" }, keys.map(([kind, name]) => el("span", {}, el("i", { className: `key ${kind}`, "aria-hidden": "true" }), name))),
    el("div", { className: "lanes" }, rows.map(({ rank, seconds, overlap }) => el("div", { className: "lane" },
      el("span", {}, `worker ${rank}`),
      el("div", { className: "track", role: "img", "aria-label": `worker ${rank}: ${count(record.worker_samples[rank])} samples, computes ${ms(1000 * seconds)}, of which blocks leave for ${ms(1000 * overlap)}; waits ${ms(1000 * (slowest - seconds))}; exchange and commit ${ms(1000 * Math.max(0, whole - slowest))}` },
        part("compute", 0, seconds - overlap, "computes", colourName(rank)), part("leaving", seconds - overlap, seconds, "computes, blocks leave", colourName(rank)),
        part("waiting", seconds, slowest, "waits for the slowest"), part("exposed", slowest, whole, "exchange exposed, commit")),
      el("span", { className: "right" }, `${count(record.worker_samples[rank])} samples, ${ms(1000 * seconds)}`)))),
    el("div", { className: "lane scale", "aria-hidden": "true" }, el("span", {}), el("div", {}, el("span", {}, "0"), el("span", {}, ms(500 * whole)), el("span", {}, ms(1000 * whole))), el("span", {})),
  ];
}
