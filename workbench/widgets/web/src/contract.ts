// The traits that Python sends and the messages that it receives.

import type { Explored, ExploreMessage, Point } from "./explore/contract";

export type Device = "gpu" | "cpu";
export type Path = number[];

export interface Option {
  name: string;
  label?: string;
  value: number | string;
  most?: number;
  choices?: string[];
  free?: boolean; // anything may be typed, and the choices are offered
  why?: string; // why it cannot be changed now
}

export interface CardElement {
  kind: "card";
  path: Path;
  name: string;
  device: Device;
  about: string;
  rows: "all" | "prefill" | "decode";
  own: boolean;
  split: string; // the experts that a split leaves on the GPU; empty where a card cannot be split
  shared: boolean; // it has the shared experts as well, which have no card of their own
  weights: number | null;
  flops: number | null;
  seconds: number | null;
  share: number | null;
  stored: "resident" | "streamed" | "chosen" | "";
  options: Option[];
}

export interface MoveElement {
  kind: "move";
  path: Path;
  target: Device;
  carries: string;
  bytes: number | null;
  seconds: number | null;
}

export interface ForkElement {
  kind: "fork";
  path: Path;
  arms: Element[][];
}

export type Element = CardElement | MoveElement | ForkElement;

export interface Fetch {
  name: string;
  on: boolean;
  label: string;
  why: string;
  bytes?: number | null; // per layer
  seconds?: number | null;
}

export interface LayerRange {
  first: number;
  stop: number;
  title: string;
  chain: Element[];
  fetches: Fetch[];
}

export interface Mend {
  id: number;
  label: string;
}

// An operation that a layer has none of, and the mends that add it with what it needs, one for each device.
export interface Lack {
  op: string;
  mends: Mend[];
}

export interface Fault {
  range: number;
  path: Path | null;
  text: string;
  mends: Mend[];
  unfinished: boolean;
}

export interface PaletteEntry {
  name: string;
  label: string;
  about: string;
  own: boolean;
  placed: boolean;
}

export interface Wiring {
  ranges: LayerRange[];
  layers: number;
  fault: Fault | null;
  undo: number;
  redo: number;
  palette: PaletteEntry[];
  presets: { name: string; label: string; same?: boolean }[]; // same: the wiring is this system's
  stale: boolean;
  refused: string; // why the last value of an option was not taken
  times: string; // what times and bytes are of
  lacks: Lack[][]; // of each range of a whole wiring
  together: Record<string, string[]>; // words of code that stand for several operations in a row
}

export interface Code {
  text: string;
  error: string;
  line: number;
}

export interface Choice {
  name: string;
  label: string;
  kind: "choice";
  value: string;
  options: { value: string; label: string; why: string; note?: string }[];
  note?: string;
}

export interface Slider {
  name: string;
  label: string;
  kind: "slider";
  at: number;
  steps: string[];
  note: string;
}

export interface Flag {
  name: string;
  label: string;
  kind: "flag";
  value: boolean;
}

export type Control = Choice | Slider | Flag;

export interface Settings {
  groups: { title: string; controls: Control[] }[];
  memory?: Record<Device, string>; // size of the memory of each device
  shared?: boolean; // the lanes share the cores of the CPU
  uncalibrated?: boolean; // the operations were not timed on this computer, which the simulations are of
}

export interface FigureRow {
  name: string;
  source: string;
  chosen: boolean;
  gen_tok_s: string;
  of_bound: number | null;
  ttft: string;
  tbt: string;
  seconds: string;
  energy: string;
  limited: string;
  why: string;
  preemptions?: string;
  pending?: boolean;
}

export interface LedgerRow {
  name: string;
  capacity: string;
  over: boolean;
  parts: { name: string; size: string; share: number; note?: string }[];
  left: string;
}

export interface Figures {
  problem: string;
  mends: Mend[];
  searching?: boolean; // changes that mend the problem
  sample: string;
  rows: FigureRow[];
  ledger: LedgerRow[];
  explain: string[];
  prices: { what: string; gain: string; then: string }[];
  prices_of?: string; // "simulated" or "bound"
  pending?: boolean;
}

export interface Axis {
  label: string;
  unit?: string;
  log?: boolean;
}

export interface Line {
  name: string;
  kind: "bound" | "simulated" | "measured" | "sample";
  points: [number, number][];
  stale?: boolean; // of the settings before
  sampled?: number[]; // places of the points that are of a sample of the requests
}

export interface Field {
  value: string;
  label: string;
}

export interface Curves {
  x: Axis;
  y: Axis;
  at: number | null;
  unlimited?: number | null; // the place of no limit
  lines: Line[];
  busy: boolean;
  takes?: Record<string, number>; // mean seconds that a run of a sweep is expected to take, by schedule
  paced?: string; // words for what that rests on
  chosen?: string; // the name of the chosen schedule's line
  axis?: string; // what the curves are drawn over
  axes?: Field[];
}

export interface Lanes {
  tracks: unknown[];
  labels: Record<string, string>;
  colours: Record<string, string>;
  naming: string; // how names of tasks are read
}

export interface Variant {
  id: number;
  name: string;
  about: string;
  code: string;
  rows: Record<string, string>;
  notes?: Record<string, string>; // on values of some rows
  best: string[];
}

export interface Channel {
  label: string;
  top: number | null;
  unit: string; // of its values, where they have one
}

export interface Live {
  state: "none" | "loading" | "running" | "paused" | "stopping" | "finished" | "stopped" | "failed";
  can: boolean;
  why: string;
  text: string;
  share: number;
  ended?: number | null; // when it ended, in seconds since 1970
  here?: string; // words of a button that makes the settings run on this computer
  stale?: string; // words for what has changed since the run
  again?: boolean; // a run of this wiring has ended
  sweeping?: boolean; // the runs are those of a sweep
  swept?: string; // how the last sweep ended
  held?: string; // why settings and wiring stay as they are
  calibrate?: string; // words of a button that calibrates this computer for the model
  calibrating?: boolean; // what goes on is a calibration
  noted?: string; // how the last calibration went
  channels: Channel[];
}

export interface Traits {
  parts: string[];
  wiring: Wiring;
  code: Code;
  settings: Settings;
  figures: Figures;
  curves: Curves;
  lanes: Lanes;
  variants: Variant[];
  live: Live;
  explored: Explored;
  point: Point;
  answered: number;
}

export type Message =
  | { do: "place"; range: number; path: Path; device: Device; to?: Path }
  | { do: "shift"; range: number; path: Path; to: Path }
  | { do: "add"; range: number; op: string; device: Device; to: Path }
  | { do: "remove" | "split"; range: number; path: Path }
  | { do: "option"; range: number; path: Path; name: string; value: number | string }
  | { do: "fetch"; range: number; name: string; on: boolean }
  | { do: "fork"; range: number; path: Path; with: Path }
  | { do: "join"; range: number; path: Path }
  | { do: "cut"; range: number; layer: number }
  | { do: "merge"; range: number }
  | { do: "mend" | "fix" | "unpin" | "recall"; id: number }
  | { do: "undo" | "redo" | "clear" | "pin" | "here" | "calibrate" | "start" | "pause" | "resume" | "stop" | "ready" | "keep" }
  | { do: "open" | "axis"; name: string }
  | { do: "code"; text: string }
  | { do: "set"; name: string; value: string | number | boolean; rest: boolean }
  | { do: "sweep"; x: string; schedules: string[]; points: number }
  | ExploreMessage;

type Listener = (...given: never[]) => void;

// What anywidget hands to a module.
export interface Model {
  get<Name extends keyof Traits>(name: Name): Traits[Name];
  on(event: string, listener: Listener): void;
  off(event: string, listener?: Listener): void;
  send(content: object): void;
}
