// A run's data: one object with its state and its records, and a stream that adds to it. A report
// has them inside, where the page of a server asks for them.

const element = document.getElementById("data");
const inside = element && JSON.parse(element.textContent);
export const home = inside ? inside.home : "#/"; // the page without an address of its own

const MOST_STEPS = 200000;
const KEEP = 0.9;

/** What `metrics.jsonl` tells, with the steps removed that a resumed run took again. */
export class Records {
  steps = []; // only added to, or replaced as a whole
  validations = [];
  answers = [];
  events = [];
  #ranks = new Set();

  /** Add records in the order of the file; return the events among them. */
  take(records) {
    const before = this.events.length;
    for (const record of records) {
      if (record.kind === "step") this.#add(record);
      else if (record.kind === "validation") this.validations.push(record);
      else if (record.kind === "answer") this.answers.push(record);
      else {
        if (record.event === "resumed") {
          const kept = (other) => other.step <= record.step;
          this.steps = this.steps.filter(kept);
          this.validations = this.validations.filter(kept);
          this.answers = this.answers.filter(kept);
        }
        this.events.push(record);
      }
    }
    if (this.steps.length > MOST_STEPS) this.steps = this.steps.filter((_, at) => at % 2 || at > MOST_STEPS / 2);
    return this.events.slice(before);
  }

  /** Add a step, with its samples (`all`) and the smoothed loss (`mean`, of a `weight`). */
  #add(step) {
    const { mean = null, weight = 0 } = this.steps.at(-1) ?? {};
    step.weight = step.loss == null ? weight : KEEP * weight + (1 - KEEP);
    step.mean = step.loss == null ? mean : (KEEP * weight * mean + (1 - KEEP) * step.loss) / step.weight;
    step.all = 0;
    for (const rank in step.worker_samples) {
      step.all += step.worker_samples[rank];
      this.#ranks.add(Number(rank));
    }
    this.steps.push(step);
  }

  /** Return by a prompt's number its text and its answers, by step. */
  get prompts() {
    const found = new Map();
    for (const { number, prompt, ...answer } of this.answers) {
      if (!found.has(number)) found.set(number, { prompt, said: new Map() });
      found.get(number).said.set(answer.step, answer);
    }
    return found;
  }

  /** Return the ranks that ever had a share, in order. */
  get ranks() {
    return [...this.#ranks].sort((a, b) => a - b);
  }

  /** Return by the ledger: counted samples, those that are missing or were repeated; tokens, and bytes of the exchange. */
  get ledger() {
    const [counted, missing, repeated, tokens, bytes] = this.steps.at(-1)?.totals ?? [0, 0, 0, 0, 0];
    return { counted, missing, repeated, tokens, bytes };
  }

  /** Return a rank's spells as [state, first step, last step]. */
  spells(rank) {
    const words = { joined: "active", rejoined: "active", active: "active", lost: "lost", idle: "idle" };
    const last = this.steps.at(-1)?.step ?? 0;
    const found = [];
    for (const { event, step, rank: of } of this.events) {
      const state = words[event];
      if (of !== rank || !state) continue;
      while (found.at(-1)?.[1] > step) found.pop(); // of steps that a resumed run took again
      if (found.length) found.at(-1)[2] = step;
      found.push([state, step, last]);
    }
    return found.filter(([, from, to]) => to > from || from === last);
  }
}

/** Follow a stream of events until it is closed; a lost connection is opened again. */
export class Stream {
  #source = null;
  #closed = false;

  constructor(path, handlers, onLink) {
    Object.assign(this, { path, handlers, onLink, cursor: null });
  }

  open() {
    if (inside) this.onLink("report");
    if (inside || this.#closed) return;
    this.#source = new EventSource(this.cursor == null ? this.path : `${this.path}?after=${this.cursor}`);
    this.#source.onopen = () => this.onLink("live");
    this.#source.onerror = () => {
      this.onLink("reconnecting");
      if (this.#source.readyState === EventSource.CLOSED) setTimeout(() => this.open(), 3000);
    };
    for (const [name, handle] of Object.entries(this.handlers)) {
      this.#source.addEventListener(name, (event) => {
        if (event.lastEventId) this.cursor = event.lastEventId;
        handle(JSON.parse(event.data));
      });
    }
  }

  close() {
    this.#closed = true;
    this.#source?.close();
  }
}

export async function get(path) {
  if (inside) return inside[path] ?? Promise.reject(new Error("it is not in this report"));
  const answer = await fetch(path);
  if (!answer.ok) throw new Error((await answer.json().catch(() => ({}))).error ?? `the server answered ${answer.status}`);
  return answer.json();
}
