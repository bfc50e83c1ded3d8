// The log of one process: its newest lines, or those from the second of the chosen step on.
import { get } from "./data.js";
import { bounded, el } from "./dom.js";

const MOST_LINES = 500;
const EVERY = 2000; // milliseconds

export class LogView {
  #lines = [];
  #place = null; // behind the last line
  #turn = 0; // of the question whose answer counts
  #asking = false;
  #moment = null;
  #waiting = null;

  constructor(path, names) {
    this.path = path;
    const again = () => this.#ask(true);
    this.process = el("select", { id: "process", onchange: again }, names.map((name) => el("option", {}, name)));
    this.words = el("input", { type: "search", id: "words", maxLength: 200, oninput: () => this.#soon() });
    this.since = el("input", { type: "checkbox", id: "since", onchange: again });
    this.said = el("p", { className: "quiet", role: "status" });
    this.text = el("pre", { className: "lines", tabIndex: 0, role: "region", "aria-label": "Lines of the log" });
    this.section = el("details", { className: "card", ontoggle: again }, el("summary", {}, el("h2", {}, "Log")),
      el("div", { className: "asked" }, el("label", {}, "Process ", this.process), el("label", {}, "Lines with ", this.words),
        el("label", {}, this.since, " from the chosen step on")),
      this.said, this.text);
    this.timer = setInterval(() => this.#follow(), EVERY);
  }

  close() {
    clearInterval(this.timer);
  }

  /** Take the moment of the chosen step, in Unix seconds. */
  at(moment) {
    const same = moment === this.#moment;
    this.#moment = moment;
    if (!same && this.since.checked) this.#soon();
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
      const { lines, attempt, end } = await get(`${this.path}/logs/${encodeURIComponent(this.process.value)}?${asked}`);
      if (turn !== this.#turn) return;
      this.#place = `${attempt}.${end}`;
      this.#lines = fresh ? lines : [...this.#lines, ...lines].slice(-MOST_LINES);
      this.said.textContent = `attempt ${attempt}, ${this.#lines.length} lines${since == null ? ", the newest at the end" : ", those of the step's second are marked"}`;
      if (fresh || lines.length) this.#draw(since);
    } catch (error) {
      if (turn === this.#turn) this.said.textContent = bounded(error.message);
    } finally {
      this.#asking = false;
    }
  }

  #draw(since) {
    const second = since == null ? null : Math.floor(since) % QUARTER;
    const drawn = this.#lines.map((line) => el("span", { className: second != null && secondOf(line) === second ? "now" : "" }, line));
    const follows = this.text.scrollTop + this.text.clientHeight >= this.text.scrollHeight - 4;
    this.text.replaceChildren(...drawn);
    const now = drawn.find((each) => each.className);
    if (now) this.text.scrollTop = now.offsetTop - this.text.offsetTop;
    else if (since != null) this.text.scrollTop = 0;
    else if (follows || !this.text.scrollTop) this.text.scrollTop = this.text.scrollHeight;
  }
}

const QUARTER = 900; // seconds: time zones are multiples of a quarter of an hour apart

/** Return the second within a quarter of an hour at which a line was written, null if it has no time. */
function secondOf(line) {
  const [, minutes, seconds] = /^\d\d:(\d\d):(\d\d)\b/.exec(line) ?? [];
  return minutes == null ? null : (60 * minutes + Number(seconds)) % QUARTER;
}
