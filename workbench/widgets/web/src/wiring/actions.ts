// Changes of the wiring, each by the keys of what it is about. See `Talk.edit`.

import type { Device, Wiring } from "../contract";
import type { Change } from "../talk";
import { find, slotPath, type Found, type Slot } from "./chain";

function about(range: number, key: string, change: (found: Found, wiring: Wiring) => ReturnType<Change>): Change {
  return (wiring) => {
    const here = wiring.ranges[range];
    const found = here && find(here, key);
    return found ? change(found, wiring) : null;
  };
}

// To another device, and with a slot to another place in the order as well.
export function place(range: number, key: string, device: Device, slot: Slot | null = null): Change {
  return about(range, key, ({ element }, wiring) => {
    const to = slot && slotPath(wiring.ranges[range]!, slot);
    return { do: "place", range, path: element.path, device, ...(to && { to }) };
  });
}

export function shift(range: number, key: string, slot: Slot): Change {
  return about(range, key, ({ element }, wiring) => {
    const to = slotPath(wiring.ranges[range]!, slot);
    return to && { do: "shift", range, path: element.path, to };
  });
}

export function add(range: number, op: string, device: Device, slot: Slot): Change {
  return (wiring) => {
    const here = wiring.ranges[range];
    const to = here && (slotPath(here, slot) ?? [here.chain.length]);
    return to ? { do: "add", range, op, device, to } : null;
  };
}

export function remove(range: number, key: string): Change {
  return about(range, key, ({ element }) => ({ do: "remove", range, path: element.path }));
}

export function split(range: number, key: string): Change {
  return about(range, key, ({ element }) => (element.kind === "card" && element.split ? { do: "split", range, path: element.path } : null));
}

export function option(range: number, key: string, name: string, value: number | string): Change {
  return about(range, key, ({ element }) => ({ do: "option", range, path: element.path, name, value }));
}

export function fork(range: number, key: string, partner: string): Change {
  return about(range, key, ({ element }, wiring) => {
    const second = find(wiring.ranges[range]!, partner);
    return second && { do: "fork", range, path: element.path, with: second.element.path };
  });
}

export function join(range: number, key: string): Change {
  return about(range, key, ({ element }) => ({ do: "join", range, path: element.path }));
}

export function fetch(range: number, name: string, on: boolean): Change {
  return () => ({ do: "fetch", range, name, on });
}
