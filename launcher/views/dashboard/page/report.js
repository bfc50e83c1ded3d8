// What a report has besides the page of its run: in words, and how to repeat it.
import { breakable, code, count, duration, el, table } from "./dom.js";

/** Return sections of facts, faults, commands and hashes; what nothing recorded is listed. */
export function about({ created_at, version, facts, results, costs, faults, classes, confusion, hashes, commands, settings, missing }) {
  return [
    card("Result", pairs(results), confusion ? matrix(classes, ...confusion) : null),
    card("What was trained", pairs(facts)),
    faults.length ? card("Faults and recovery", table("Faults and recovery", [["Step"], ["What"], ["Next step after", 1], ["Back after", 1]],
      faults.map(({ step, event, delay_seconds, rejoin_seconds }) => [el("button", { type: "button", className: "step", "data-step": step }, `step ${count(step)}`), event, after(delay_seconds), after(rejoin_seconds)]))) : null,
    costs.length ? card("Bytes and cost", pairs(costs)) : null,
    hashes.length ? card("Hashes (BLAKE3)", pairs(hashes)) : null,
    commands.length ? card("Repeat it", el("p", { className: "quiet" }, "With the settings below as run.yaml:"), code(commands),
      el("details", {}, el("summary", {}, "run.yaml"), code(settings.split("\n")))) : null,
    card("Not in this report", el("ul", {}, missing.map((line) => el("li", {}, line)))),
    el("p", { className: "quiet" }, `Made by Motley ${version} at ${new Date(1000 * created_at).toISOString().slice(0, 16).replace("T", " ")} UTC.`),
  ];
}

const card = (name, ...content) => el("section", { className: "card scroll" }, el("h2", {}, name), content);
const pairs = (rows) => el("dl", { className: "facts" }, rows.map(([name, value]) => [el("dt", {}, name), el("dd", {}, breakable(value))]));
const after = (seconds) => (seconds == null ? "" : seconds < 10 ? `${seconds.toFixed(1)} s` : duration(seconds));

function matrix(classes, step, counts) {
  const names = classes.length === counts.length ? classes : counts.map((_, at) => String(at));
  const title = `Predictions (columns) by label (rows) at step ${count(step)}`;
  return [el("p", { className: "quiet" }, title), table(title, [["Label"], ...names.map((name) => [name, 1])],
    counts.map((row, at) => [names[at], ...row.map((cell, to) => (to === at ? el("b", {}, count(cell)) : count(cell)))]))];
}
