// The log of one process: its newest lines, or those from the second of the chosen step on. The
// time of a line leads to the step of its second; the lines of the chosen step's second are marked.
import { get } from "./data.js";
import { bounded, el } from "./dom.js";

const MOST_LINES = 500;
const EVERY = 2000; // milliseconds

export class LogView {
  #place = null; // behind the last line
  #turn = 0; // of the question whose answer counts
  #asking = false;
  #moment = null;
  #marked = null; // the second whose lines are marked
  #waiting = null;

  constructor(path, names) {
    this.path = path;
    const again = () => this.#ask(true);
    this.process = el("select", { id: "process", onchange: again }, names.map((name) => el("option", {}, name)));
    this.words = el("input", { type: "search", id: "words", maxLength: 200, oninput: () => this.#soon() });
    this.since = el("input", { type: "checkbox", id: "since", onchange: again });
    this.said = el("p", { className: "quiet", role: "status" });
    this.text = el("pre", { className: "lines", tabIndex: 0, role: "region", "aria-label": "Lines of the log; arrow keys go from time to time", onkeydown: (event) => this.#go(event) });
    this.section = el("details", { className: "card", ontoggle: again }, el("summary", {}, el("h2", {}, "Log")),
      el("div", { className: "asked" }, el("label", {}, "Process ", this.process), el("label", {}, "Lines with ", this.words),
        el("label", {}, this.since, " from the chosen step on")),
      this.said, this.text);
    this.timer = setInterval(() => this.#follow(), EVERY);
  }

  close() {
    clearInterval(this.timer);
  }

  /** Take the moment of the chosen step, in Unix seconds; the newest step chooses itself. */
  at(moment, newest) {
    const same = moment === this.#moment;
    this.#moment = moment;
    this.#mark(newest && !this.since.checked ? null : Math.floor(moment));
    if (!same && this.since.checked) this.#soon();
  }

  /** Go to the time of the line above or below, by the arrow keys. */
  #go(event) {
    const by = { ArrowUp: -1, ArrowDown: 1 }[event.key];
    const times = [...this.text.querySelectorAll("button")];
    if (!by || !times.length) return;
    event.preventDefault();
    const now = times.indexOf(document.activeElement);
    times.at(now < 0 ? Math.min(0, by) : Math.min(Math.max(0, now + by), times.length - 1)).focus();
  }

  #mark(second = this.#marked) {
    this.#marked = second;
    for (const time of this.text.querySelectorAll("button")) {
      const now = Number(time.dataset.moment) === second;
      time.parentNode.className = now ? "now" : "";
      time.ariaCurrent = now ? "time" : null;
    }
  }

  /** Ask once nothing has been typed or pointed at for a moment. */
  #soon() {
    clearTimeout(this.#waiting);
    this.#waiting = setTimeout(() => this.#ask(true), 300);
  }

  #follow() {
    if (!this.#asking && !this.since.checked && !document.hidden) this.#ask(false);
  }

  async #ask(fresh) {
    if (!this.section.open) return;
    const turn = fresh ? ++this.#turn : this.#turn;
    const since = this.since.checked ? this.#moment : null;
    const asked = new URLSearchParams({ find: this.words.value });
    if (fresh && since != null) asked.set("since", since.toFixed(3));
    if (!fresh && this.#place) asked.set("after", this.#place);
    this.#asking = true;
    try {
      const { lines, timestamps, attempt, end } = await get(`${this.path}/logs/${encodeURIComponent(this.process.value)}?${asked}`);
      if (turn !== this.#turn) return;
      this.#place = `${attempt}.${end}`;
      if (fresh || lines.length) this.#draw(lines.map((line, at) => this.#line(line, timestamps[at])), fresh, since);
      this.said.textContent = `attempt ${attempt}, ${this.text.children.length} lines${since == null ? ", the newest at the end" : ", those of the step's second are marked"}`;
    } catch (error) {
      if (turn === this.#turn) this.said.textContent = bounded(error.message);
    } finally {
      this.#asking = false;
    }
  }

  /** Return a line, whose time is a button if its second is known. */
  #line(line, moment) {
    if (moment == null) return el("span", {}, line);
    const time = /^\S*/.exec(line)[0];
    return el("span", {}, el("button", { type: "button", className: "step", tabIndex: -1, "data-moment": moment, title: "show this second in the curves" }, time), line.slice(time.length));
  }

  #draw(lines, fresh, since) {
    const follows = this.text.scrollTop + this.text.clientHeight >= this.text.scrollHeight - 4;
    const held = document.activeElement?.parentNode;
    if (fresh) this.text.replaceChildren(...lines);
    else this.text.append(...lines);
    while (this.text.children.length > MOST_LINES) this.text.firstChild.remove();
    this.#mark();
    const now = since != null && this.text.querySelector(".now");
    if (now) this.text.scrollTop = now.offsetTop - this.text.offsetTop;
    else if (since != null) this.text.scrollTop = 0;
    else if (follows || !this.text.scrollTop) this.text.scrollTop = this.text.scrollHeight;
    // The time that had the focus is drawn anew.
    if (fresh && held?.isConnected === false) lines.find((line) => line.textContent === held.textContent)?.firstChild.focus?.({ preventScroll: true });
  }
}
