// Where everything of a layer range stands: a pure function of what Python sent. Lengths are pixels at zoom 1.
// Cards go from left to right in the order of the data. Each lane is as high as the arms of forks that lie side by side.

import type { CardElement, Device, Element, Fault, ForkElement, LayerRange, MoveElement } from "../contract";
import { cardsOf, isPlace, keysOf, other, type Place, type Slot } from "./chain";

export const CARD = { width: 134, height: 92 };
export const GAP = 22; // between cards, a bus of transfers in its middle
const ROW = CARD.height + 14;
const LANE_PAD = 14;
const FORK_PAD = 24;
const FORK_EDGE = 9; // above and below its cards
const LINK = 92; // the strip between the lanes
const GUTTER = 70; // names of the lanes
const PORT = 30;
const MARGIN = 6;
const LABEL = 140; // most that the words of a transfer take
export const CALLOUT = { width: 560, height: 122, gap: 8 };

export interface Box {
  x: number;
  y: number;
  width: number;
  height: number;
}

export interface PlacedCard {
  key: string;
  element: CardElement;
  box: Box;
}

// A fork has one outline, or one per lane where cards of other arms lie between its own.
export interface PlacedFork {
  key: string;
  element: ForkElement;
  boxes: Box[];
}

export interface Port {
  key: "in" | "out";
  device: Device;
  x: number;
  y: number;
}

// A line from one card or port to another. `move` is what crosses the link on it; `label` is where its words stand.
export interface Wire {
  key: string;
  from: string;
  to: string;
  kind: "flow" | "transfer" | "missing";
  buses: [number, number]; // x of its vertical parts, beside the source and beside the target
  link: number; // y at which it goes from one to the other
  move: MoveElement | null;
  label: { x: number; y: number } | null;
}

// Weights that come from the CPU's memory to a card on the GPU.
export interface Stream {
  key: string;
  x: number;
  top: number;
  bottom: number;
  label: { x: number; y: number };
  bytes: number | null;
  chosen: boolean;
}

interface Rows {
  gpu: number;
  cpu: number;
}

// A chain as a target of drops: its slots from left to right, and the forks inside.
export interface Scope {
  fork: string | null;
  arm: number;
  slots: { slot: Slot; x: number }[];
  rows: Record<Device, { first: number; count: number }>;
  forks: { left: number; right: number; arms: Scope[] }[];
}

export interface Layout {
  width: number;
  height: number;
  lanes: Record<Device, Box>;
  link: Box;
  cards: PlacedCard[];
  forks: PlacedFork[];
  ports: Port[];
  wires: Wire[];
  streams: Stream[];
  scope: Scope;
  callout: { box: Box; at: number; rise: number } | null;
}

function rowsOf(chain: Element[]): Rows {
  const rows = { gpu: 0, cpu: 0 };
  for (const element of chain) {
    const own = rowsOfOne(element);
    rows.gpu = Math.max(rows.gpu, own.gpu);
    rows.cpu = Math.max(rows.cpu, own.cpu);
  }
  return rows;
}

function rowsOfOne(element: Element): Rows {
  if (element.kind === "move") return { gpu: 0, cpu: 0 };
  if (element.kind === "card") return element.device === "gpu" ? { gpu: 1, cpu: 0 } : { gpu: 0, cpu: 1 };
  const arms = element.arms.map(rowsOf);
  return { gpu: arms.reduce((sum, arm) => sum + arm.gpu, 0), cpu: arms.reduce((sum, arm) => sum + arm.cpu, 0) };
}

class Placing {
  readonly cards: PlacedCard[] = [];
  private readonly placed: { key: string; element: ForkElement; x: number; right: number; cards: PlacedCard[] }[] = [];
  private readonly keys: Map<Place, string>;

  constructor(chain: Element[], private readonly tops: Record<Device, number>) {
    this.keys = keysOf(chain);
  }

  // Place a chain from `x` on in these rows of the lanes; where it ends, and its slots.
  chain(chain: Element[], x: number, rows: Scope["rows"], fork: string | null, arm: number): [number, Scope] {
    const scope: Scope = { fork, arm, slots: [], rows, forks: [] };
    let right = x;
    let first = true;
    for (const element of chain) {
      if (!isPlace(element)) continue;
      const left = first ? x : right + GAP;
      first = false;
      const key = this.keys.get(element)!;
      scope.slots.push({ slot: { fork, arm, before: key }, x: left - GAP / 2 });
      right = element.kind === "card" ? this.card(element, key, left, rows) : this.fork(element, key, left, rows, scope);
    }
    scope.slots.push({ slot: { fork, arm, before: null }, x: first ? x + CARD.width / 2 : right + GAP / 2 });
    return [first ? x : right, scope];
  }

  private card(element: CardElement, key: string, x: number, rows: Scope["rows"]): number {
    const { first, count } = rows[element.device];
    const y = this.tops[element.device] + (first + (Math.max(count, 1) - 1) / 2) * ROW;
    this.cards.push({ key, element, box: { x, y, ...CARD } });
    return x + CARD.width;
  }

  private fork(element: ForkElement, key: string, x: number, rows: Scope["rows"], scope: Scope): number {
    const own = rowsOfOne(element);
    const next = {
      gpu: rows.gpu.first + (rows.gpu.count - own.gpu) / 2,
      cpu: rows.cpu.first + (rows.cpu.count - own.cpu) / 2,
    };
    const begun = this.cards.length;
    const arms: Scope[] = [];
    let right = x + 2 * FORK_PAD + CARD.width;
    element.arms.forEach((arm, number) => {
      const count = rowsOf(arm);
      const given = { gpu: { first: next.gpu, count: count.gpu }, cpu: { first: next.cpu, count: count.cpu } };
      const [end, inner] = this.chain(arm, x + FORK_PAD, given, key, number);
      right = Math.max(right, end + FORK_PAD);
      next.gpu += count.gpu;
      next.cpu += count.cpu;
      arms.push(inner);
    });
    this.placed.push({ key, element, x, right, cards: this.cards.slice(begun) });
    scope.forks.push({ left: x, right, arms });
    return right;
  }

  // The forks' outlines, once every card is placed.
  forks(): PlacedFork[] {
    return this.placed.map(({ key, element, x, right, cards }) => {
      const whole = outline(x, right, cards);
      const others = this.cards.filter((card) => !cards.includes(card));
      if (!others.some((card) => overlap(card.box, whole))) return { key, element, boxes: [whole] };
      const lanes = (["gpu", "cpu"] as const).map((device) => cards.filter((card) => card.element.device === device));
      return { key, element, boxes: lanes.filter((lane) => lane.length).map((lane) => outline(x, right, lane)) };
    });
  }
}

function outline(left: number, right: number, cards: PlacedCard[]): Box {
  const top = Math.min(...cards.map(({ box }) => box.y)) - FORK_EDGE;
  const bottom = Math.max(...cards.map(({ box }) => box.y + box.height)) + FORK_EDGE;
  return { x: left, y: top, width: right - left, height: bottom - top };
}

function overlap(one: Box, two: Box): boolean {
  const across = one.x < two.x + two.width && two.x < one.x + one.width;
  return across && one.y < two.y + two.height && two.y < one.y + one.height;
}

interface End {
  key: string;
  device: Device;
  moves: MoveElement[]; // met since
  late: { move: MoveElement; from: string }[]; // not yet arrived on the other side
}

interface Anchor {
  left: number;
  right: number;
  y: number;
  device: Device;
}

class Wiring {
  readonly wires: Wire[] = [];
  private readonly labelled = new Set<MoveElement>();

  constructor(
    private readonly anchors: Map<string, Anchor>,
    private readonly keys: Map<Place, string>,
    private readonly link: number,
    private readonly right: number,
  ) {}

  walk(chain: Element[], ends: End[]): End[] {
    let open = ends;
    for (const element of chain) {
      if (element.kind === "move") {
        open = open.map((end) => ({ ...end, moves: [...end.moves, element] }));
      } else if (element.kind === "card") {
        open = [this.reach(open, this.keys.get(element)!, element.device)];
      } else {
        open = element.arms.flatMap((arm) => this.walk(arm, open));
      }
    }
    return open;
  }

  reach(open: End[], key: string, device: Device): End {
    const late: End["late"] = [];
    for (const end of open) {
      const crossing = end.moves.filter((move) => move.target === device);
      if (end.device !== device) this.wire(end.key, key, crossing[0] ? "transfer" : "missing", crossing[0] ?? null);
      else this.wire(end.key, key, "flow", null);
      const used = end.device === device ? [] : crossing;
      const waiting = end.moves.filter((move) => !used.includes(move)).map((move) => ({ move, from: end.key }));
      for (const each of [...end.late, ...waiting]) {
        if (each.move.target !== device) late.push(each);
        else if (!this.labelled.has(each.move)) this.wire(each.from, key, "transfer", each.move);
      }
    }
    return { key, device, moves: [], late };
  }

  private wire(from: string, to: string, kind: Wire["kind"], move: MoveElement | null): void {
    const [source, target] = [this.anchors.get(from)!, this.anchors.get(to)!];
    const near: [number, number] = [source.right + GAP / 2, target.left - GAP / 2];
    const adjacent = near[1] - near[0] < 2 * FORK_PAD + GAP;
    const buses: [number, number] = adjacent || source.device === target.device ? [near[1], near[1]] : near;
    const says = move && !this.labelled.has(move);
    if (move) this.labelled.add(move);
    const label = says ? { x: Math.min((buses[0] + buses[1]) / 2, this.right - LABEL / 2), y: this.link } : null;
    this.wires.push({ key: `${from} ${to}${move ? " moved" : ""}`, from, to, kind, buses, link: this.link, move, label });
  }
}

function entryDevice(chain: Element[]): Device {
  const [first] = chain;
  if (!first) return "gpu";
  if (first.kind === "move") return other(first.target);
  return cardsOf([first])[0]?.device ?? "gpu";
}

function exitDevice(chain: Element[]): Device {
  const last = chain[chain.length - 1];
  if (!last) return "gpu";
  if (last.kind === "move") return last.target;
  if (last.kind === "fork") return exitDevice(last.arms[0] ?? []);
  return last.device;
}

function faultBox(fault: Fault | null, chain: Element[], cards: PlacedCard[]): Box | null {
  if (!fault?.path) return null;
  const wanted = fault.path.join();
  const inside = cardsOf(chain).filter((card) => card.path.join() === wanted || card.path.join().startsWith(`${wanted},`));
  return cards.find((card) => inside.includes(card.element))?.box ?? null;
}

// Lay out a range, at least this wide. `fault` is the one of this range, if there is one.
export function layout(range: LayerRange, fault: Fault | null, least = 0): Layout {
  const { chain } = range;
  const rows = rowsOf(chain);
  const counts = { gpu: Math.max(1, rows.gpu), cpu: Math.max(1, rows.cpu) };
  const gpuTop = MARGIN;
  const height = (count: number): number => count * ROW - (ROW - CARD.height) + 2 * LANE_PAD;
  const linkTop = gpuTop + height(counts.gpu);
  const cpuTop = linkTop + LINK;

  const placing = new Placing(chain, { gpu: gpuTop + LANE_PAD, cpu: cpuTop + LANE_PAD });
  const given = { gpu: { first: 0, count: counts.gpu }, cpu: { first: 0, count: counts.cpu } };
  const begin = GUTTER + PORT;
  const [end, scope] = placing.chain(chain, begin, given, null, 0);
  const right = Math.max(end + PORT, begin + 3 * CARD.width, least);
  const lane = (y: number, count: number): Box => ({ x: 0, y, width: right, height: height(count) });
  const lanes = { gpu: lane(gpuTop, counts.gpu), cpu: lane(cpuTop, counts.cpu) };
  const middle = (device: Device): number => lanes[device].y + lanes[device].height / 2;

  const ports: Port[] = chain.length
    ? [
        { key: "in", device: entryDevice(chain), x: GUTTER + 10, y: middle(entryDevice(chain)) },
        { key: "out", device: exitDevice(chain), x: end + PORT - 12, y: middle(exitDevice(chain)) },
      ]
    : [];
  const anchors = new Map<string, Anchor>();
  for (const { key, box, element } of placing.cards) {
    anchors.set(key, { left: box.x, right: box.x + box.width, y: box.y + box.height / 2, device: element.device });
  }
  for (const port of ports) anchors.set(port.key, { left: port.x, right: port.x, y: port.y, device: port.device });

  const labels = linkTop + LINK - 32;
  const wiring = new Wiring(anchors, keysOf(chain), labels, right);
  const [entry, exit] = ports;
  if (entry && exit) {
    const open = wiring.walk(chain, [{ key: entry.key, device: entry.device, moves: [], late: [] }]);
    wiring.reach(open, exit.key, exit.device);
  }

  const cause = faultBox(fault, chain, placing.cards);
  const callout = cause && calloutOf(cause, lanes.cpu.y + lanes.cpu.height + CALLOUT.gap, right);
  const bottom = callout ? callout.box.y + callout.box.height : lanes.cpu.y + lanes.cpu.height;
  return {
    width: right,
    height: bottom + MARGIN,
    lanes,
    link: { x: 0, y: linkTop, width: right, height: LINK },
    cards: placing.cards,
    forks: placing.forks(),
    ports,
    wires: wiring.wires,
    streams: streamsOf(placing.cards, linkTop, cpuTop),
    scope,
    callout,
  };
}

// It stands below both lanes, so that no card moves under the pointer; a line rises from it to the card.
function calloutOf(cause: Box, y: number, width: number): Layout["callout"] {
  const own = Math.min(CALLOUT.width, width - 2 * MARGIN);
  const middle = cause.x + cause.width / 2;
  const x = Math.max(MARGIN, Math.min(middle - own / 2, width - own - MARGIN));
  return { box: { x, y, width: own, height: CALLOUT.height }, at: middle - x, rise: y - cause.y - cause.height };
}

function streamsOf(cards: PlacedCard[], linkTop: number, cpuTop: number): Stream[] {
  return cards
    .filter(({ element }) => element.device === "gpu" && ["streamed", "chosen"].includes(element.stored))
    .map(({ key, element, box }) => {
      const x = box.x + box.width / 2;
      const label = { x, y: linkTop + 16 };
      const chosen = element.stored === "chosen";
      return { key, x, top: box.y + box.height, bottom: cpuTop, label, bytes: element.weights, chosen };
    });
}

// The path of a wire, with round corners: across at the source's height, along its buses, across at the target's.
export function wirePath(wire: Wire, from: { x: number; y: number }, to: { x: number; y: number }): string {
  const [one, two] = wire.buses;
  const points =
    one === two
      ? [from, { x: one, y: from.y }, { x: one, y: to.y }, to]
      : [from, { x: one, y: from.y }, { x: one, y: wire.link }, { x: two, y: wire.link }, { x: two, y: to.y }, to];
  return rounded(points, 9);
}

function rounded(points: { x: number; y: number }[], radius: number): string {
  const [begin] = points;
  let path = `M${begin!.x} ${begin!.y}`;
  for (let i = 1; i + 1 < points.length; i += 1) {
    const [before, corner, after] = [points[i - 1]!, points[i]!, points[i + 1]!];
    const enter = toward(corner, before, radius);
    const leave = toward(corner, after, radius);
    path += `L${enter.x} ${enter.y}Q${corner.x} ${corner.y} ${leave.x} ${leave.y}`;
  }
  const end = points[points.length - 1]!;
  return `${path}L${end.x} ${end.y}`;
}

function toward(from: { x: number; y: number }, to: { x: number; y: number }, most: number): { x: number; y: number } {
  const length = Math.hypot(to.x - from.x, to.y - from.y);
  const share = length ? Math.min(most, length / 2) / length : 0;
  return { x: from.x + (to.x - from.x) * share, y: from.y + (to.y - from.y) * share };
}
