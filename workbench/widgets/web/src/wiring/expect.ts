// The wiring as it will look once Python has answered: the change itself at once, transfers and times when they come.

import type { CardElement, Device, Element, ForkElement, LayerRange, Message, Path, Wiring } from "../contract";
import { chainAt, elementAt, renumber } from "./chain";

export function expected(wiring: Wiring, message: Message): Wiring {
  if (!("range" in message)) return message.do === "clear" ? cleared(wiring) : wiring;
  const next = structuredClone(wiring);
  const range = next.ranges[message.range];
  if (!range) return wiring;
  change(range, message, next);
  range.chain = tidy(range.chain, firstDevice(range.chain)).chain;
  renumber(range.chain);
  next.fault = null;
  return next;
}

function cleared(wiring: Wiring): Wiring {
  return { ...wiring, fault: null, ranges: wiring.ranges.map((range) => ({ ...range, chain: [] })) };
}

function change(range: LayerRange, message: Message, wiring: Wiring): void {
  switch (message.do) {
    case "place": {
      const card = elementAt(range.chain, message.path);
      if (card?.kind === "card") card.device = message.device;
      if (message.to) shift(range.chain, message.path, message.to);
      break;
    }
    case "shift":
      shift(range.chain, message.path, message.to);
      break;
    case "add":
      chainAt(range.chain, message.to).splice(last(message.to), 0, added(wiring, message.op, message.device));
      break;
    case "remove":
      chainAt(range.chain, message.path).splice(last(message.path), 1);
      break;
    case "split": {
      const card = elementAt(range.chain, message.path);
      if (card?.kind === "card") chainAt(range.chain, message.path).splice(last(message.path), 1, halves(card));
      break;
    }
    case "option": {
      const card = elementAt(range.chain, message.path);
      const option = card?.kind === "card" && card.options.find((each) => each.name === message.name);
      if (option) option.value = message.value;
      break;
    }
    case "fetch": {
      const fetch = range.fetches.find((each) => each.name === message.name);
      if (fetch) fetch.on = message.on;
      break;
    }
    case "fork":
      fork(range.chain, message.path, message.with);
      break;
    case "join": {
      const joined = elementAt(range.chain, message.path);
      if (joined?.kind !== "fork") break;
      chainAt(range.chain, message.path).splice(last(message.path), 1, ...joined.arms.flat());
      break;
    }
    default:
      break;
  }
}

function last(path: Path): number {
  return path[path.length - 1]!;
}

function added(wiring: Wiring, name: string, device: Device): Element {
  const entry = wiring.palette.find((each) => each.name === name);
  const unknown = { weights: null, flops: null, seconds: null, share: null };
  const [about, own] = [entry?.about ?? "", entry?.own ?? false];
  return { kind: "card", path: [], name, device, about, rows: "all", own, split: "", shared: false, ...unknown, stored: "", options: [] };
}

// Two sets of a card's experts side by side, one on each device.
function halves(card: CardElement): ForkElement {
  const arm = (device: Device, set: string): Element[] => [{ ...card, device, name: `${card.name}[${set}]`, split: "" }];
  return { kind: "fork", path: [], arms: [arm("gpu", card.split), arm("cpu", `~${card.split}`)] };
}

function shift(chain: Element[], path: Path, to: Path): void {
  const from = chainAt(chain, path);
  const moved = from[last(path)];
  if (!moved) return;
  const hole: ForkElement = { kind: "fork", path: [], arms: [] }; // keeps the old place until the new one is filled
  const target = chainAt(chain, to);
  from[last(path)] = hole;
  target.splice(last(to), 0, moved);
  from.splice(from.indexOf(hole), 1);
}

function fork(chain: Element[], path: Path, partner: Path): void {
  const siblings = chainAt(chain, path);
  const first = Math.min(last(path), last(partner));
  const second = Math.max(last(path), last(partner));
  const [one, two] = [siblings[first], siblings[second]];
  if (!one || !two) return;
  siblings.splice(first, second - first + 1, { kind: "fork", path: [], arms: [...armsOf(one), ...armsOf(two)] });
}

function armsOf(element: Element): Element[][] {
  return element.kind === "fork" ? element.arms : [[element]];
}

function firstDevice(chain: Element[]): Device {
  for (const element of chain) {
    if (element.kind === "card") return element.device;
    if (element.kind === "fork") return firstDevice(element.arms[0] ?? []);
  }
  return "gpu";
}

// Drop the transfers that no longer lead to the other side, and forks with fewer than two arms.
function tidy(chain: Element[], before: Device): { chain: Element[]; device: Device } {
  let device = before;
  const kept: Element[] = [];
  chain.forEach((element, index) => {
    if (element.kind === "card") {
      device = element.device;
      kept.push(element);
    } else if (element.kind === "move") {
      const following = chain.slice(index + 1).filter((each) => each.kind !== "move");
      const leads = following.length === 0 || following.some((each) => firstDevice([each]) === element.target);
      if (element.target !== device && leads) kept.push(element);
    } else {
      const arms = element.arms.map((arm) => tidy(arm, device)).filter((arm) => arm.chain.length > 0);
      if (arms.length > 1) kept.push({ ...element, arms: arms.map((arm) => arm.chain) });
      else kept.push(...(arms[0]?.chain ?? []));
      device = arms[0]?.device ?? device;
    }
  });
  return { chain: kept, device };
}
