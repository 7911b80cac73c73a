// The conversation with Python. Every message carries a number; `answered` is the number of the last one handled.
// Changes of the wiring go one by one, each addressed once the one before is answered: paths change with every answer.
// A control sends its newest value only, and not before its last one is answered.

import type { Message, Model, Wiring } from "./contract";
import { expected } from "./wiring/expect";

export type Change = (wiring: Wiring) => Message | null;

const PATIENCE = 1500; // ms without an answer until the kernel is called busy

interface Edit {
  change: Change;
  sent: { n: number; message: Message } | null;
  settled: boolean; // Python's wiring has it
}

interface Channel {
  n: number;
  next: Message | null;
}

export interface State {
  wiring: Wiring;
  waiting: boolean; // a change of the wiring is not answered yet
  open: boolean; // a message is not answered yet
  busy: boolean;
  gone: boolean;
  travels: number; // steps made in the history
}

export class Talk {
  private n: number;
  private edits: Edit[] = [];
  private channels = new Map<string, Channel>();
  private open: { n: number; since: number }[] = [];
  private gone = false;
  private travels = 0;
  private timer: ReturnType<typeof setTimeout> | undefined;
  private listeners = new Set<() => void>();
  private state: State;

  constructor(private readonly model: Model) {
    this.n = model.get("answered") ?? 0;
    this.state = this.current();
    model.on("change:wiring", () => this.arrived());
    model.on("change:answered", () => this.settle());
    model.on("comm_live_update", () => this.lost());
    model.on("destroy", () => this.lost());
  }

  readonly subscribe = (listener: () => void): (() => void) => {
    this.listeners.add(listener);
    return () => this.listeners.delete(listener);
  };

  readonly snapshot = (): State => this.state;

  // Send at once.
  send(message: Message): number {
    this.n += 1;
    try {
      this.model.send({ ...message, n: this.n });
      if (message.do !== "ready") this.open.push({ n: this.n, since: Date.now() });
    } catch {
      this.lost();
    }
    this.changed();
    return this.n;
  }

  // Make a step in the history.
  travel(where: "undo" | "redo"): void {
    this.travels += 1;
    this.send({ do: where });
  }

  // True while a control's newest value is not answered.
  waits(name: string): boolean {
    return this.channels.has(name);
  }

  // Change the wiring: shown at once, sent after the changes before it.
  edit(change: Change): void {
    this.edits.push({ change, sent: null, settled: false });
    this.next();
    this.changed();
  }

  // Send the newest value of a control.
  newest(name: string, message: Message): void {
    const channel = this.channels.get(name);
    if (channel && channel.n > this.model.get("answered")) {
      channel.next = message;
      return;
    }
    this.begin(name, message);
  }

  // Send a value of a control, which waits from now on.
  private begin(name: string, message: Message): void {
    this.channels.set(name, { n: this.n + 1, next: null });
    this.send(message);
  }

  private next(): void {
    while (this.edits.length > 0) {
      const [edit] = this.edits;
      if (edit!.sent) return;
      const message = edit!.change(this.model.get("wiring"));
      if (message) {
        edit!.sent = { n: this.send(message), message };
        return;
      }
      this.edits.shift(); // what it was about is gone
    }
  }

  private arrived(): void {
    const [edit] = this.edits;
    if (edit?.sent) edit.settled = true;
    this.gone = false;
    this.changed();
  }

  private settle(): void {
    const answered = this.model.get("answered");
    this.gone = false;
    this.open = this.open.filter((each) => each.n > answered);
    if (this.edits[0]?.sent && this.edits[0].sent.n <= answered) {
      this.edits.shift();
      this.next();
    }
    for (const [name, channel] of this.channels) {
      if (channel.n > answered) continue;
      if (channel.next) this.begin(name, channel.next);
      else this.channels.delete(name);
    }
    this.changed();
  }

  private lost(): void {
    this.gone = true;
    this.edits = [];
    this.channels.clear();
    this.open = [];
    this.changed();
  }

  private current(): State {
    let wiring = this.model.get("wiring");
    for (const edit of this.edits) {
      if (edit.settled) continue;
      const message = edit.sent?.message ?? edit.change(wiring);
      if (message) wiring = expected(wiring, message);
    }
    const oldest = this.open[0];
    const busy = oldest !== undefined && Date.now() - oldest.since >= PATIENCE;
    const waiting = this.edits.length > 0;
    return { wiring, waiting, open: waiting || oldest !== undefined, busy, gone: this.gone, travels: this.travels };
  }

  private changed(): void {
    this.state = this.current();
    clearTimeout(this.timer);
    const oldest = this.open[0];
    if (oldest && !this.state.busy) {
      this.timer = setTimeout(() => this.changed(), Math.max(10, oldest.since + PATIENCE - Date.now()));
    }
    this.listeners.forEach((listener) => listener());
  }
}
