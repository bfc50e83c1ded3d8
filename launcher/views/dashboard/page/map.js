// The hosts and their links: a picture, and the rates as a table, which says the same.
import { el, table } from "./dom.js";

const SVG = "http://www.w3.org/2000/svg";
const [WIDTH, HEIGHT] = [360, 240];
const MOST_NAMED = 6; // rates beside lines: of more they would lie over each other

/** Return a map of hosts {name, rates, busy, reachable}; `rates` are bit/s to others. */
export function map(hosts) {
  const links = linksOf(hosts);
  const places = new Map(hosts.map(({ name }, at) => {
    const angle = (2 * Math.PI * at) / hosts.length - Math.PI / 2;
    return [name, [WIDTH / 2 + 120 * Math.cos(angle), HEIGHT / 2 + 85 * Math.sin(angle)]];
  }));
  const named = links.filter(({ used }) => used).length ? links.filter(({ used }) => used) : links;
  const lines = links.map(({ one, other, used, lost, forward, reverse }) => {
    const [[x1, y1], [x2, y2]] = [places.get(one), places.get(other)];
    const rate = Math.min(forward ?? Infinity, reverse ?? Infinity);
    const line = svg("line", { x1, y1, x2, y2, class: `link ${used ? "used" : ""} ${lost ? "lost" : ""}`, "stroke-width": thickness(rate) });
    if (!Number.isFinite(rate) || named.length > MOST_NAMED || !named.some((link) => link.one === one && link.other === other)) return [line];
    return [line, svg("text", { x: (x1 + x2) / 2, y: (y1 + y2) / 2 - 4, class: "rate" }, speed(rate))];
  });
  const dots = hosts.map(({ name, busy, reachable }) => {
    const [x, y] = places.get(name);
    return [svg("circle", { cx: x, cy: y, r: 8, class: !reachable ? "lost" : busy.length ? "busy" : "free" }, svg("title", {}, name)),
      svg("text", { x, y: y < HEIGHT / 2 ? y - 13 : y + 22, class: "host" }, name.length > 18 ? `${name.slice(0, 17)}…` : name)];
  });
  const rows = links.map(({ one, other, forward, reverse, used, lost }) => [`${one} – ${other}`, lost ? "unreachable" : used ? "in use by a run" : "", speed(forward), speed(reverse)]);
  return el("div", { className: "map" },
    svg("svg", { viewBox: `0 0 ${WIDTH} ${HEIGHT}`, "aria-hidden": "true" }, ...lines.flat(), ...dots.flat()),
    links.length ? table("Links between hosts", [["Link"], ["State"], ["Forth", 1], ["Back", 1]], rows)
      : el("p", { className: "quiet" }, "No rates are known; launch discover --write measures them."));
}

/** Return the links that were measured, or that a run uses: between its leader and its others. */
function linksOf(hosts) {
  const known = new Map(hosts.map((host) => [host.name, host]));
  const found = new Map();
  const link = (a, b) => {
    const [one, other] = [a, b].sort();
    const key = JSON.stringify([one, other]);
    if (!found.has(key)) {
      found.set(key, { one, other, forward: known.get(one).rates[other], reverse: known.get(other).rates[one],
        used: false, lost: !known.get(one).reachable || !known.get(other).reachable });
    }
    return found.get(key);
  };
  for (const { name, rates } of hosts) for (const other of Object.keys(rates)) if (known.has(other)) link(name, other);
  const works = hosts.flatMap(({ name, busy }) => busy.map((process) => [name, ...process.split("/")]));
  for (const [leader, run, role] of works) {
    if (role !== "coordinator" && role !== "student") continue;
    for (const [host, its] of works) if (its === run && host !== leader) link(leader, host).used = true;
  }
  return [...found.values()];
}

const thickness = (rate) => (Number.isFinite(rate) ? Math.min(6, Math.max(1, Math.log10(rate / 1e6) + 0.5)).toFixed(1) : 1);

/** Return bit/s in words. */
function speed(rate) {
  if (rate == null) return "";
  return rate >= 1e9 ? `${(rate / 1e9).toFixed(1)} Gbit/s` : `${(rate / 1e6).toFixed(0)} Mbit/s`;
}

function svg(tag, attributes, ...children) {
  const made = document.createElementNS(SVG, tag);
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  made.append(...children);
  return made;
}
