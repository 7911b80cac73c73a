// Elements of a range are found by path in what Python sent, and by key in what the user sees.
// A key stays the same while its card moves: the operation's name, and a number where it occurs again.

import type { CardElement, Device, Element, ForkElement, LayerRange, Path } from "../contract";

export type Place = CardElement | ForkElement;

// A slot by what surrounds it: before a card or fork of a chain, or at the chain's end.
export interface Slot {
  fork: string | null; // the fork in one of whose arms it lies
  arm: number;
  before: string | null;
}

export interface Found {
  element: Place;
  chain: Element[];
  index: number;
}

export function isPlace(element: Element): element is Place {
  return element.kind !== "move";
}

// Cards of a chain in the order of the data, the arms of a fork one after another.
export function cardsOf(chain: Element[]): CardElement[] {
  return chain.flatMap((element) => {
    if (element.kind === "fork") return element.arms.flatMap(cardsOf);
    return element.kind === "card" ? [element] : [];
  });
}

// The key of every card and fork of a chain. A fork's key is made of its first card's.
export function keysOf(chain: Element[]): Map<Place, string> {
  const keys = new Map<Place, string>();
  const seen = new Map<string, number>();
  const visit = (element: Element): void => {
    if (element.kind === "card") {
      const times = seen.get(element.name) ?? 0;
      seen.set(element.name, times + 1);
      keys.set(element, times ? `${element.name}#${times}` : element.name);
    } else if (element.kind === "fork") {
      element.arms.forEach((arm) => arm.forEach(visit));
      const [first] = cardsOf([element]);
      keys.set(element, `fork ${first ? keys.get(first) : ""}`);
    }
  };
  chain.forEach(visit);
  return keys;
}

function searched(chain: Element[], wanted: (element: Place) => boolean): Found | null {
  for (const [index, element] of chain.entries()) {
    if (!isPlace(element)) continue;
    if (wanted(element)) return { element, chain, index };
    if (element.kind === "card") continue;
    for (const arm of element.arms) {
      const found = searched(arm, wanted);
      if (found) return found;
    }
  }
  return null;
}

export function find(range: LayerRange, key: string): Found | null {
  const keys = keysOf(range.chain);
  return searched(range.chain, (element) => keys.get(element) === key);
}

// The chain that a path's last number counts in.
export function chainAt(chain: Element[], path: Path): Element[] {
  let here = chain;
  for (let at = 0; at + 1 < path.length; at += 2) {
    const fork = here[path[at]!];
    if (fork?.kind !== "fork") return [];
    here = fork.arms[path[at + 1]!] ?? [];
  }
  return here;
}

export function elementAt(chain: Element[], path: Path): Element | undefined {
  return chainAt(chain, path)[path[path.length - 1]!];
}

// The path of a slot, or null where its fork or its card is gone.
export function slotPath(range: LayerRange, slot: Slot): Path | null {
  let chain: Element[] | undefined = range.chain;
  let prefix: Path = [];
  if (slot.fork !== null) {
    const fork = find(range, slot.fork)?.element;
    if (fork?.kind !== "fork") return null;
    chain = fork.arms[slot.arm];
    prefix = [...fork.path, slot.arm];
  }
  if (!chain) return null;
  if (slot.before === null) return [...prefix, chain.length];
  const keys = keysOf(range.chain);
  const index = chain.findIndex((element) => isPlace(element) && keys.get(element) === slot.before);
  return index < 0 ? null : [...prefix, index];
}

// The neighbour of a card or fork in its own chain, transfers passed over.
export function neighbour(found: Found, step: 1 | -1): Place | null {
  for (let at = found.index + step; at >= 0 && at < found.chain.length; at += step) {
    const element = found.chain[at]!;
    if (isPlace(element)) return element;
  }
  return null;
}

export function other(device: Device): Device {
  return device === "gpu" ? "cpu" : "gpu";
}

export function renumber(chain: Element[], prefix: Path = []): void {
  chain.forEach((element, index) => {
    element.path = [...prefix, index];
    if (element.kind === "fork") element.arms.forEach((arm, number) => renumber(arm, [...element.path, number]));
  });
}
