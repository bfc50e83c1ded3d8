// A distillation: shards as a strip, and the scored checkpoints.
import { badge, count, el, fixed, lane, table } from "./dom.js";

/** Return which shards are written, damaged and read. */
export function strip({ shards, written, damaged, read, epoch }) {
  if (!shards) return el("p", { className: "quiet" }, "No teacher has begun.");
  const many = (spans) => spans.reduce((sum, [first, last]) => sum + last - first + 1, 0);
  const at = (kind) => ([first, last]) => [kind, first, last + 1, first === last ? `shard ${first}` : `shards ${first} to ${last}`];
  const bad = many(damaged) ? `, ${count(many(damaged))} damaged` : "";
  const read_to = `${count(Math.floor(read))} of ${count(shards)}${epoch ? `, now in epoch ${epoch + 1}` : ""}`;
  return el("div", { className: "lanes" },
    lane("written", [...written.map(at("active violet")), ...damaged.map(at("lost"))], shards, `${count(many(written))} of ${count(shards)} shards${bad}`),
    lane("read", [["active teal", 0, read, read_to]], shards, read_to),
    el("p", { className: "quiet" }, `The teacher has written ${count(many(written))} of ${count(shards)} shards${bad}; the student has read ${read_to}.`));
}

/** Return the checkpoints that were scored, the newest first. */
export function checkpoints({ scores }) {
  if (!scores.length) return el("p", { className: "quiet" }, "No checkpoint has been scored yet.");
  const names = [...new Set(scores.flatMap(({ figures }) => Object.keys(figures)))].slice(0, 6);
  return table("Scored checkpoints, the newest first", [["Checkpoint"], ["Best"], ...names.map((name) => [name.replace(/^(\S+) \1$/, "$1"), 1]), ["Remark"]], scores.toReversed().map(({ step, best, figures, reason }) => [
    el("button", { type: "button", className: "step", "data-step": step }, `step ${count(step)}`), best ? badge("best") : "",
    ...names.map((name) => (figures[name] == null ? "" : fixed(figures[name]))), reason ?? "",
  ]));
}
