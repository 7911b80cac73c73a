import assert from "node:assert/strict";
import { mock, test } from "node:test";

import { Talk } from "../src/talk.ts";
import * as act from "../src/wiring/actions.ts";
import { cardsOf } from "../src/wiring/chain.ts";
import { expected } from "../src/wiring/expect.ts";
import { kept } from "../src/wiring/kept.ts";
import { card, forked, move, offloaded, range, wiring } from "./chains.mjs";

// Python as a test plays it: what was sent, and answers when the test says so.
class Python {
  constructor(first) {
    this.state = { wiring: first, answered: 0 };
    this.sent = [];
    this.listeners = {};
  }
  get(name) { return this.state[name]; }
  on(event, listener) { (this.listeners[event] ??= []).push(listener); }
  off(event, listener) { this.listeners[event] = this.listeners[event].filter((each) => each !== listener); }
  send(message) { this.sent.push(message); }
  put(values) {
    Object.assign(this.state, values);
    for (const name of Object.keys(values)) this.fire(`change:${name}`);
  }
  fire(event, ...given) { (this.listeners[event] ?? []).forEach((listener) => listener(...given)); }
}

const devices = (shown) => cardsOf(shown.ranges[0].chain).map((each) => `${each.name} ${each.device}`);

test("a change shows at once and settles with the answer", () => {
  const python = new Python(wiring(offloaded()));
  const talk = new Talk(python);
  talk.edit(act.place(0, "attention", "gpu"));
  assert.deepEqual(python.sent, [{ do: "place", range: 0, path: [2], device: "gpu", n: 1 }]);
  assert.deepEqual(devices(talk.snapshot().wiring), ["qkv gpu", "attention gpu", "experts gpu"]);
  assert.equal(talk.snapshot().wiring.ranges[0].chain.length, 3); // the transfers are gone with it
  const settled = wiring(range(card("qkv", "gpu"), card("attention", "gpu"), card("experts", "gpu")));
  python.put({ wiring: settled, answered: 1 });
  assert.equal(talk.snapshot().wiring, settled);
  assert.equal(talk.snapshot().waiting, false);
});

test("steps in the history are sent and counted", () => {
  const python = new Python(wiring(offloaded()));
  const talk = new Talk(python);
  talk.travel("undo");
  talk.travel("redo");
  assert.deepEqual(python.sent.map((message) => message.do), ["undo", "redo"]);
  assert.equal(talk.snapshot().travels, 2);
});

test("a second change waits, and is addressed in the wiring that the first one gave", () => {
  const python = new Python(wiring(offloaded()));
  const talk = new Talk(python);
  talk.edit(act.place(0, "attention", "gpu"));
  talk.edit(act.remove(0, "experts"));
  assert.equal(python.sent.length, 1);
  assert.deepEqual(devices(talk.snapshot().wiring), ["qkv gpu", "attention gpu"]);
  python.put({ wiring: wiring(range(card("qkv", "gpu"), card("attention", "gpu"), card("experts", "gpu"))), answered: 1 });
  assert.deepEqual(python.sent[1], { do: "remove", range: 0, path: [2], n: 2 });
});

test("a change about a card that is gone is dropped", () => {
  const python = new Python(wiring(offloaded()));
  const talk = new Talk(python);
  talk.edit(act.remove(0, "experts"));
  talk.edit(act.place(0, "experts", "cpu"));
  python.put({ wiring: wiring(range(card("qkv", "gpu"))), answered: 1 });
  assert.equal(python.sent.length, 1);
  assert.equal(talk.snapshot().waiting, false);
});

test("of a control the newest value is sent, one at a time, and the last one always", () => {
  const python = new Python(wiring(range()));
  const talk = new Talk(python);
  for (const value of [1, 2, 3]) talk.newest("kv", { do: "set", name: "kv", value, rest: false });
  talk.newest("kv", { do: "set", name: "kv", value: 3, rest: true });
  assert.deepEqual(python.sent.map((each) => each.value), [1]);
  python.put({ answered: 1 });
  assert.deepEqual(python.sent.map((each) => [each.value, each.rest]), [[1, false], [3, true]]);
  python.put({ answered: 2 });
  assert.equal(python.sent.length, 2);
});

test("a control waits from when its value is told to be sent until its answer is", () => {
  const python = new Python(wiring(range()));
  const talk = new Talk(python);
  const told = [];
  talk.subscribe(() => told.push(talk.waits("kv")));
  talk.newest("kv", { do: "set", name: "kv", value: 1, rest: true });
  python.put({ answered: 1 });
  assert.deepEqual(told, [true, false]);
});

test("controls do not wait for one another, nor for the wiring", () => {
  const python = new Python(wiring(offloaded()));
  const talk = new Talk(python);
  talk.edit(act.place(0, "attention", "gpu"));
  talk.newest("kv", { do: "set", name: "kv", value: 1, rest: true });
  talk.newest("link", { do: "set", name: "link", value: 1, rest: true });
  talk.send({ do: "stop" });
  assert.deepEqual(python.sent.map((each) => [each.do, each.n]), [["place", 1], ["set", 2], ["set", 3], ["stop", 4]]);
});

test("the kernel is busy after a while without an answer, and no longer once it answers", () => {
  mock.timers.enable({ apis: ["setTimeout", "Date"] });
  const python = new Python(wiring(range()));
  const talk = new Talk(python);
  talk.send({ do: "undo" });
  mock.timers.tick(1400);
  assert.equal(talk.snapshot().busy, false);
  mock.timers.tick(200);
  assert.equal(talk.snapshot().busy, true);
  python.put({ answered: 1 });
  assert.equal(talk.snapshot().busy, false);
  mock.timers.reset();
});

test("numbers go on from the last answer, so that a page that is loaded again is not taken for the old one", () => {
  const python = new Python(wiring(range()));
  python.state.answered = 41;
  new Talk(python).send({ do: "ready" });
  assert.equal(python.sent[0].n, 42);
});

test("a dead comm is told, and what was not answered is shown no longer", () => {
  const python = new Python(wiring(offloaded()));
  const talk = new Talk(python);
  talk.edit(act.place(0, "attention", "gpu"));
  python.fire("comm_live_update");
  assert.equal(talk.snapshot().gone, true);
  assert.equal(talk.snapshot().wiring, python.state.wiring);
  python.send = () => { throw new Error("comm is closed"); };
  talk.edit(act.place(0, "attention", "gpu"));
  assert.equal(talk.snapshot().gone, true);
  assert.equal(talk.snapshot().waiting, false);
});

const names = (shown) => {
  const spelled = (chain) => chain.map((each) => (each.kind === "fork" ? each.arms.map(spelled) : each.kind === "move" ? `to ${each.target}` : each.name));
  return spelled(shown.ranges[0].chain);
};

test("expected changes of order, arms and cards", () => {
  const line = () => wiring(range(card("a", "gpu"), card("b", "gpu"), card("c", "gpu")));
  assert.deepEqual(names(expected(line(), { do: "shift", range: 0, path: [0], to: [3] })), ["b", "c", "a"]);
  assert.deepEqual(names(expected(line(), { do: "shift", range: 0, path: [2], to: [0] })), ["c", "a", "b"]);
  assert.deepEqual(names(expected(line(), { do: "fork", range: 0, path: [1], with: [0] })), [[["a"], ["b"]], "c"]);
  assert.deepEqual(names(expected(line(), { do: "remove", range: 0, path: [1] })), ["a", "c"]);
  assert.deepEqual(names(expected(line(), { do: "add", range: 0, op: "experts", device: "cpu", to: [1] })), ["a", "experts", "b", "c"]);
  assert.deepEqual(names(expected(line(), { do: "clear" })), []);
  const both = wiring(forked());
  assert.deepEqual(names(expected(both, { do: "join", range: 0, path: [1] })), ["route", "shared", "to cpu", "experts", "to gpu", "combine"]);
  assert.deepEqual(names(expected(both, { do: "remove", range: 0, path: [1, 0, 0] })), ["route", "to cpu", "experts", "to gpu", "combine"]);
  assert.deepEqual(names(expected(both, { do: "shift", range: 0, path: [0], to: [1, 0, 1] })), [[["shared", "route"], ["to cpu", "experts", "to gpu"]], "combine"]);
});

test("a split shows two sets at once, one on each device", () => {
  const before = wiring(range(card("route", "gpu"), card("experts", "cpu", { split: ":4" }), card("combine", "gpu")));
  const after = expected(before, { do: "split", range: 0, path: [1] });
  assert.deepEqual(names(after), ["route", [["experts[:4]"], ["experts[~:4]"]], "combine"]);
  assert.deepEqual(devices(after), ["route gpu", "experts[:4] gpu", "experts[~:4] cpu", "combine gpu"]);
  assert.equal(act.split(0, "route")(before), null); // it cannot be split
  assert.deepEqual(act.split(0, "experts")(before), { do: "split", range: 0, path: [1] });
});

test("expected wirings are numbered anew and leave Python's untouched", () => {
  const before = wiring(range(card("a", "gpu"), move("cpu"), card("b", "cpu")));
  const copy = structuredClone(before);
  const after = expected(before, { do: "place", range: 0, path: [2], device: "gpu" });
  assert.deepEqual(before, copy);
  assert.deepEqual(after.ranges[0].chain.map((each) => each.path), [[0], [1]]);
});

test("the scenario is asked for, and awaited for 3 seconds", async () => {
  const python = new Python(wiring(offloaded()));
  const talk = new Talk(python);
  const first = kept(python, talk);
  assert.deepEqual(python.sent, [{ do: "keep", n: 1 }]);
  assert.ok(talk.snapshot().open);
  python.fire("msg:custom", { samples: [] });
  python.fire("msg:custom", { kept: "e30=" });
  python.put({ answered: 1 });
  assert.equal(await first, "e30=");
  assert.ok(!talk.snapshot().open);
  mock.timers.enable({ apis: ["setTimeout"] });
  const second = kept(python, talk);
  mock.timers.tick(3000);
  mock.timers.reset();
  assert.equal(await second, "");
  assert.deepEqual(python.listeners["msg:custom"], []);
});

test("of a kernel that is gone nothing is awaited", async () => {
  const python = new Python(wiring(offloaded()));
  python.send = () => { throw new Error("comm is closed"); };
  assert.equal(await kept(python, new Talk(python)), "");
});
