// Ranges to lay out and change.

import { renumber } from "../src/wiring/chain.ts";

export function card(name, device, more = {}) {
  const unknown = { weights: null, flops: null, seconds: null, share: null };
  return { kind: "card", path: [], name, device, about: "", rows: "all", own: false, split: "", shared: false, ...unknown, stored: "", options: [], ...more };
}

export function move(target, carries = "x") {
  return { kind: "move", path: [], target, carries, bytes: 1e6, seconds: 1e-3 };
}

export function fork(...arms) {
  return { kind: "fork", path: [], arms };
}

export function range(...chain) {
  renumber(chain);
  return { first: 0, stop: 32, title: "layers 0 to 31", chain, fetches: [] };
}

export function wiring(...ranges) {
  const palette = [{ name: "experts", label: "experts", about: "", own: false, placed: false }];
  return { ranges, layers: 32, fault: null, undo: 0, redo: 0, palette, presets: [], stale: false, refused: "", times: "", lacks: [], together: {} };
}

export const offloaded = () =>
  range(card("qkv", "gpu"), move("cpu", "q k v"), card("attention", "cpu"), move("gpu", "attn"), card("experts", "gpu"));

export const forked = () =>
  range(card("route", "gpu"), fork([card("shared", "gpu")], [move("cpu", "h"), card("experts", "cpu"), move("gpu", "routed")]), card("combine", "gpu"));

// Chains of random shape, the same for the same seed: cards on both sides, forks within forks, transfers anywhere.
export function random(seed) {
  let state = seed * 2654435761 + 1;
  const next = (most) => {
    state = (state * 1103515245 + 12345) % 2147483648;
    return Math.floor((state / 2147483648) * most);
  };
  let named = 0;
  const chain = (length, depth) =>
    Array.from({ length }, () => {
      const kind = next(10);
      if (kind < 2) return move(next(2) ? "gpu" : "cpu");
      if (kind < 4 && depth > 0) return fork(...Array.from({ length: 2 + next(2) }, () => chain(1 + next(3), depth - 1).concat(card(`op${(named += 1)}`, "cpu"))));
      return card(`op${(named += 1)}`, next(2) ? "gpu" : "cpu", { stored: next(3) ? "streamed" : "resident", weights: 1e6 });
    });
  return range(...chain(next(9), 2));
}
