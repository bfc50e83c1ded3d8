// A run's data: one object with its state and its records, and a stream that adds to it.

/** What `metrics.jsonl` tells, with the steps removed that a resumed run took again. */
export class Records {
  steps = [];
  validations = [];
  events = [];

  /** Add records in the order of the file; return the events among them. */
  take(records) {
    const before = this.events.length;
    for (const record of records) {
      if (record.kind === "step") this.steps.push(record);
      else if (record.kind === "validation") this.validations.push(record);
      else {
        if (record.event === "resumed") {
          const kept = (other) => other.step <= record.step;
          this.steps = this.steps.filter(kept);
          this.validations = this.validations.filter(kept);
        }
        this.events.push(record);
      }
    }
    return this.events.slice(before);
  }

  /** Return the ranks that ever had a share, in order. */
  get ranks() {
    const found = new Set();
    for (const step of this.steps) for (const rank of Object.keys(step.shares)) found.add(Number(rank));
    return [...found].sort((a, b) => a - b);
  }

  /** Count the samples by the ledger: all of them, and those that are missing or were repeated. */
  get ledger() {
    let counted = 0, missing = 0, repeated = 0, before = null;
    for (const { epoch, counted: [first, behind, gaps, twice] } of this.steps) {
      counted += behind - first - gaps;
      missing += gaps;
      repeated += twice;
      if (before && before.epoch === epoch) {
        missing += Math.max(0, first - before.behind);
        repeated += Math.max(0, before.behind - first);
      }
      before = { epoch, behind };
    }
    return { counted, missing, repeated };
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
    if (this.#closed) return;
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
  const answer = await fetch(path);
  if (!answer.ok) throw new Error((await answer.json().catch(() => ({}))).error ?? `the server answered ${answer.status}`);
  return answer.json();
}
