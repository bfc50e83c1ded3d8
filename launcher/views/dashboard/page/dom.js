// Elements and figures. Every text goes through textContent: what a host says is data.

/** Return an element; `props` are its properties, `data-…`, `aria-…` and `role` attributes. */
export function el(tag, props = {}, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(props)) {
    if (value == null) continue;
    if (/^(data|aria)-|^role$|^for$|^scope$|^colspan$/.test(name)) made.setAttribute(name, value);
    else made[name] = value;
  }
  for (const child of children.flat(3)) {
    if (child == null || child === false) continue;
    made.append(child instanceof Node ? child : document.createTextNode(bounded(String(child))));
  }
  return made;
}

const LONGEST = 400;
export const bounded = (text) => (text.length > LONGEST ? `${text.slice(0, LONGEST)} …` : text);

/** Return a text whose paths may be broken after a slash, and no name or option at its hyphens. */
export const breakable = (text) => bounded(String(text)).split(/(?<=\/)|(?<=\s)|(?=\s)/).map((part, at, all) => [
  at && all[at - 1].endsWith("/") ? el("wbr") : null, part.includes("-") ? el("span", { className: "whole" }, part) : part]);

/** Return lines as they stand; each is bounded by itself. */
export const code = (lines) => el("pre", { tabIndex: 0 }, lines.flatMap((line) => [breakable(line), "\n"]));

/** Replace what is in a place, unless it would look the same; what is open or has the focus stays so. */
export function put(place, ...children) {
  const fresh = el("div", {}, ...children);
  const open = new Map([...place.querySelectorAll("details > summary")].map((each) => [each.textContent, each.parentNode.open]));
  for (const summary of fresh.querySelectorAll("summary")) summary.parentNode.open = open.get(summary.textContent) ?? summary.parentNode.open;
  if (fresh.innerHTML === place.innerHTML) return;
  const active = place.contains(document.activeElement) ? document.activeElement : null;
  const same = active && [...fresh.querySelectorAll(active.tagName)].find((each) => each.id === active.id && each.textContent === active.textContent && each.href === active.href);
  place.replaceChildren(...fresh.childNodes);
  same?.focus({ preventScroll: true });
}

const whole = new Intl.NumberFormat("en", { maximumFractionDigits: 0 });
export const count = (value) => (value == null ? "–" : whole.format(value));
export const fixed = (value, digits = 4) => (value == null ? "–" : value.toFixed(digits));
export const percent = (part) => (part == null ? "–" : `${Math.round(100 * part)} %`);
export const rate = (value) => (value == null ? "–" : value.toExponential(2).replace("e-", "e−"));
/** Return the unit of a run's speed: a script's samples have no tokens. */
export const unitOf = (training) => (training?.unit === "samples" ? "Samples" : "Tokens");
export const gib = (bytes) => `${(bytes / 2 ** 30).toFixed(1)}`;

export function ms(value) {
  if (value == null) return "–";
  return value >= 1000 ? `${(value / 1000).toFixed(2)} s` : `${value.toFixed(value && value < 10 ? 1 : 0)} ms`;
}

export function duration(seconds) {
  if (seconds == null) return "–";
  const all = Math.max(0, Math.round(seconds));
  const [h, m, s] = [Math.floor(all / 3600), Math.floor(all / 60) % 60, all % 60];
  if (h > 47) return `${Math.floor(h / 24)} d ${h % 24} h`;
  return h ? `${h} h ${m} min` : m ? `${m} min ${s} s` : `${s} s`;
}

export function moment(seconds, onlyTime = false) {
  if (!seconds) return "–";
  const time = { hour: "2-digit", minute: "2-digit", hourCycle: "h23" };
  const day = onlyTime ? { second: "2-digit" } : { day: "numeric", month: "short" };
  return new Intl.DateTimeFormat("en-GB", { ...day, ...time }).format(new Date(1000 * seconds));
}

const GOOD = ["running", "active", "completed", "exited", "best"];
const BAD = ["failed", "lost", "unreachable", "unknown"];
const AMBER = ["idle", "backoff", "recovering"];
export function badge(state) {
  const name = GOOD.includes(state) ? "good" : BAD.includes(state) ? "bad" : AMBER.includes(state) ? "amber" : "calm";
  return el("span", { className: `badge ${name}` }, state);
}

/**
 * Return a table without the columns that are empty in every row. On a narrow screen each row
 * becomes a card, each cell with its column's name.
 */
export function table(caption, columns, rows) {
  const used = columns.map((_, at) => !rows.length || rows.some((row) => row[at] != null && row[at] !== ""));
  const only = (cells) => cells.filter((_, at) => used[at]);
  [columns, rows] = [only(columns), rows.map(only)];
  const head = columns.map(([name, right]) => el("th", { scope: "col", className: right ? "right" : "" }, name));
  const body = rows.map((row) => el("tr", {}, row.map((cell, at) => {
    const none = cell == null || cell === "";
    const className = `${columns[at][1] ? "right" : ""}${none ? " none" : ""}`;
    return el(at ? "td" : "th", { scope: at ? null : "row", "data-name": columns[at][0], className },
      none ? el("span", { className: "quiet" }, "–") : cell);
  })));
  return el("table", {}, el("caption", { className: "hidden" }, caption),
    el("thead", {}, el("tr", {}, head)), el("tbody", {}, body));
}

/** Return a bar of a part of 1, with its text beside it. */
export function bar(part, text, hot = false) {
  const fill = el("span", { className: hot ? "hot" : "" });
  fill.style.width = `${Math.min(100, Math.max(0, 100 * part))}%`;
  return el("span", { className: "meter" }, el("span", { className: "track", "aria-hidden": "true" }, fill), el("span", {}, text));
}

/** Return a figure with its name. */
export const tile = (name, value, more = "", kind = "") =>
  el("div", { className: `tile ${kind}` }, el("dt", {}, name), el("dd", {}, value, more ? el("small", {}, breakable(more)) : null));

/** Return a lane: a name, and spans [kind, from, to, words] of a whole. */
export function lane(name, spans, whole, said) {
  return el("div", { className: "lane" }, el("span", {}, name),
    el("div", { className: "track", role: "img", "aria-label": `${name}: ${said}` }, spans.map(([kind, from, to, words]) => {
      const spell = el("span", { className: `spell ${kind}`, title: words });
      spell.style.left = `${(100 * from) / whole}%`;
      spell.style.width = `${Math.max(0.4, (100 * (to - from)) / whole)}%`;
      return spell;
    })));
}

const COLOURS = ["blue", "orange", "green", "violet", "teal", "red", "olive", "pink"];
export const colourName = (rank) => COLOURS[rank % COLOURS.length];
export const css = (name) => getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();
