import assert from "node:assert/strict";
import { test } from "node:test";

import { cardsOf, find, keysOf, slotPath } from "../src/wiring/chain.ts";
import { dropAt, moved, slotsOf, stepped } from "../src/wiring/drop.ts";
import { CARD, layout } from "../src/wiring/layout.ts";
import { card, fork, forked, move, offloaded, random, range } from "./chains.mjs";

const RANDOM = Array.from({ length: 300 }, (_, seed) => random(seed));
const inside = (outer, inner) =>
  outer.x <= inner.x && outer.y <= inner.y && inner.x + inner.width <= outer.x + outer.width && inner.y + inner.height <= outer.y + outer.height;
const overlap = (a, b) => a.x < b.x + b.width && b.x < a.x + a.width && a.y < b.y + b.height && b.y < a.y + a.height;
const named = (picture, key) => picture.cards.find((each) => each.key === key);

test("every card stands in the lane of its device, and none over another", () => {
  for (const each of RANDOM) {
    const picture = layout(each, null);
    assert.equal(picture.cards.length, cardsOf(each.chain).length);
    for (const { element, box } of picture.cards) assert.ok(inside(picture.lanes[element.device], box));
    picture.cards.forEach(({ box }, i) => picture.cards.slice(i + 1).forEach((other) => assert.ok(!overlap(box, other.box))));
  }
});

test("cards go from left to right in the order of the data", () => {
  const { cards } = layout(offloaded(), null);
  const left = cards.map(({ box }) => box.x);
  assert.deepEqual(left, [...left].sort((a, b) => a - b));
  assert.equal(new Set(left).size, 3);
});

test("a fork encloses the cards of its arms and no other", () => {
  for (const each of RANDOM) {
    const picture = layout(each, null);
    for (const { element, boxes } of picture.forks) {
      const own = new Set(cardsOf([element]));
      for (const placed of picture.cards) {
        assert.equal(boxes.some((box) => inside(box, placed.box)), own.has(placed.element));
        assert.equal(boxes.some((box) => overlap(box, placed.box)), own.has(placed.element));
      }
    }
  }
});

test("every transfer is labelled once, in the strip between the lanes, and labels beside one another do not touch", () => {
  const widest = 150;
  for (const each of [offloaded(), forked()]) {
    const picture = layout(each, null);
    const labels = picture.wires.filter((wire) => wire.label);
    const moves = new Set(labels.map((wire) => wire.move));
    assert.equal(labels.length, 2);
    assert.equal(moves.size, 2);
    for (const { label } of labels) assert.ok(picture.link.y < label.y && label.y < picture.link.y + picture.link.height);
    assert.ok(Math.abs(labels[0].label.x - labels[1].label.x) >= widest);
  }
});

test("a wire between the lanes without a transfer is marked as missing", () => {
  const { wires } = layout(range(card("qkv", "gpu"), card("attention", "cpu"), move("gpu"), card("experts", "gpu")), null);
  const kinds = Object.fromEntries(wires.map((wire) => [`${wire.from} ${wire.to}`, wire.kind]));
  assert.deepEqual(kinds, { "in qkv": "flow", "qkv attention": "missing", "attention experts": "transfer", "experts out": "flow" });
});

test("a transfer that stands before a card of the same side is drawn to the first card on the other", () => {
  const { wires } = layout(range(card("a", "gpu"), move("cpu", "q"), card("b", "gpu"), card("c", "cpu"), move("gpu")), null);
  const carried = wires.filter((wire) => wire.move?.carries === "q").map((wire) => [wire.from, wire.to]);
  assert.deepEqual(carried, [["a", "c"]]);
});

test("a fork's arms meet again at the card behind it", () => {
  const ends = layout(forked(), null).wires.map((wire) => `${wire.from} ${wire.to}`);
  for (const wire of ["route shared", "route experts", "shared combine", "experts combine"]) assert.ok(ends.includes(wire));
});

test("only cards on the GPU stream their weights", () => {
  const both = range(card("a", "gpu", { stored: "streamed", weights: 5 }), card("b", "cpu", { stored: "streamed" }), card("c", "gpu", { stored: "resident" }));
  assert.deepEqual(layout(both, null).streams.map((stream) => [stream.key, stream.bytes]), [["a", 5]]);
});

test("a fault's sentence stands below the lanes, moves no card, and a line rises from it to the card", () => {
  const without = layout(offloaded(), null);
  for (const path of [[2], [0]]) {
    const picture = layout(offloaded(), { range: 0, path, text: "", mends: [] });
    const { box, at, rise } = picture.callout;
    const cause = picture.cards.find(({ element }) => element.path.join() === path.join());
    assert.deepEqual(picture.cards, without.cards);
    assert.equal(box.y - rise, cause.box.y + cause.box.height);
    assert.equal(box.x + at, cause.box.x + cause.box.width / 2);
    for (const lane of Object.values(picture.lanes)) assert.ok(!overlap(box, lane));
    assert.ok(inside({ x: 0, y: 0, width: picture.width, height: picture.height }, box));
  }
  assert.equal(layout(offloaded(), { range: 0, path: null, text: "", mends: [] }).callout, null);
});

test("an empty range has both lanes and one slot", () => {
  const picture = layout(range(), null, 900);
  assert.ok(picture.width >= 900);
  assert.deepEqual(dropAt(picture, 400, picture.lanes.cpu.y + 10).slot, { fork: null, arm: 0, before: null });
});

test("the same range gives the same picture", () => {
  for (const seed of [1, 2, 3]) assert.deepEqual(layout(random(seed), null), layout(random(seed), null));
});

test("a card dropped where it is keeps its lane and its order", () => {
  for (const each of RANDOM) {
    const picture = layout(each, null);
    for (const { key, element, box } of picture.cards) {
      const drop = dropAt(picture, box.x + CARD.width / 2, box.y + CARD.height / 2);
      assert.equal(drop.device, element.device);
      assert.equal(moved(each, key, drop.slot), null);
    }
  }
});

test("a drop between two cards is the slot between them", () => {
  const each = offloaded();
  const picture = layout(each, null);
  const between = (named(picture, "attention").box.x + named(picture, "experts").box.x + CARD.width) / 2;
  const drop = dropAt(picture, between, picture.lanes.gpu.y + 30);
  assert.deepEqual(slotPath(each, drop.slot), [4]);
  assert.equal(moved(each, "experts", drop.slot), null);
  assert.deepEqual(moved(each, "qkv", drop.slot), drop.slot);
});

test("a drop into a fork goes to the arm that lies under it", () => {
  const each = range(card("a", "gpu"), fork([card("b", "gpu")], [card("c", "gpu")]), card("d", "gpu"));
  const picture = layout(each, null);
  const { box } = named(picture, "c");
  assert.deepEqual(slotPath(each, dropAt(picture, box.x + CARD.width, box.y + 40).slot), [1, 1, 1]);
  assert.deepEqual(slotPath(each, dropAt(picture, box.x - 2, named(picture, "b").box.y + 40).slot), [1, 0, 0]);
});

test("every slot has a path, and steps lead through all of them", () => {
  const each = forked();
  const { scope } = layout(each, null);
  assert.ok(slotsOf(scope).every((slot) => slotPath(each, slot)));
  assert.deepEqual(slotPath(each, stepped(each, scope, "route", 1)), [1, 0, 0]);
  assert.deepEqual(slotPath(each, stepped(each, scope, "combine", -1)), [1, 1, 3]);
  assert.equal(stepped(each, scope, "route", -1), null);
  assert.equal(stepped(each, scope, "combine", 1), null);
});

test("keys tell cards of one name apart", () => {
  const each = range(card("a", "gpu"), card("a", "cpu"), card("a", "gpu", { rows: "decode" }));
  assert.deepEqual([...keysOf(each.chain).values()], ["a", "a#1", "a#2"]);
  assert.equal(find(each, "a#1").element.device, "cpu");
});
