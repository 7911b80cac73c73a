// What a drop means: the lane under the pointer, and the slot that is nearest in the chain or arm under it.

import type { Device, LayerRange } from "../contract";
import { find, neighbour, type Slot, slotPath } from "./chain";
import { CARD, type Layout, type Scope } from "./layout";

export interface Drop {
  device: Device;
  slot: Slot;
  x: number; // where the slot is drawn
  top: number;
  bottom: number;
}

const ROW = CARD.height + 14;

export function laneAt(layout: Layout, y: number): Device {
  return y < layout.link.y + layout.link.height / 2 ? "gpu" : "cpu";
}

// The slot nearest to a point.
export function dropAt(layout: Layout, x: number, y: number): Drop {
  const device = laneAt(layout, y);
  const lane = layout.lanes[device];
  let scope = layout.scope;
  for (let fork = forkAt(scope, x); fork; fork = forkAt(scope, x)) {
    const row = (y - lane.y) / ROW - 0.5;
    scope = armAt(fork.arms, device, row);
  }
  const nearest = scope.slots.reduce((best, each) => (Math.abs(each.x - x) < Math.abs(best.x - x) ? each : best));
  const rows = scope.rows[device];
  const whole = scope.fork === null || rows.count === 0;
  const top = whole ? lane.y + 6 : lane.y + 10 + rows.first * ROW;
  const bottom = whole ? lane.y + lane.height - 6 : top + rows.count * ROW - 4;
  return { device, slot: nearest.slot, x: nearest.x, top, bottom };
}

function forkAt(scope: Scope, x: number): Scope["forks"][number] | undefined {
  return scope.forks.find(({ left, right }) => left + 8 < x && x < right - 8);
}

// The arm in whose rows of a lane a drop lies; in a lane that none uses, the arm that is nearest to it.
function armAt(arms: Scope[], device: Device, row: number): Scope {
  const used = arms.filter((arm) => arm.rows[device].count > 0);
  if (used.length === 0) return (device === "gpu" ? arms[0] : arms[arms.length - 1])!;
  const distance = ({ rows }: Scope): number => {
    const { first, count } = rows[device];
    return Math.max(0, first - row, row - (first + count - 1));
  };
  return used.reduce((best, arm) => (distance(arm) < distance(best) ? arm : best));
}

// The slot of a dragged card, or null where the card would stay in its order.
export function moved(range: LayerRange, key: string, slot: Slot): Slot | null {
  const found = find(range, key);
  const to = slotPath(range, slot);
  if (!found || !to) return null;
  const after = neighbour(found, 1);
  const next = after ? last(after.path) : found.chain.length;
  const sameChain = to.slice(0, -1).join() === found.element.path.slice(0, -1).join();
  return sameChain && (last(to) === found.index || last(to) === next) ? null : slot;
}

// Every slot of a range in the order of the data, the arms of a fork one after another.
export function slotsOf(scope: Scope): Slot[] {
  return scope.slots.flatMap(({ slot }) => {
    const fork = scope.forks.find(({ arms }) => arms[0]?.fork === slot.before);
    return fork ? [slot, ...fork.arms.flatMap(slotsOf)] : [slot];
  });
}

// The slot that a card comes to with one step in the order of the data, or null at its ends.
export function stepped(range: LayerRange, scope: Scope, key: string, step: 1 | -1): Slot | null {
  const slots = slotsOf(scope);
  const here = slots.findIndex((slot) => slot.before === key);
  for (let at = here + step; at >= 0 && at < slots.length; at += step) {
    const slot = moved(range, key, slots[at]!);
    if (slot) return slot;
  }
  return null;
}

function last(path: number[]): number {
  return path[path.length - 1]!;
}
