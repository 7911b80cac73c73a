import assert from "node:assert/strict";
import { test } from "node:test";
import { crc32 } from "node:zlib";

import { amount, bytes, flops, percent, rate, roughly, seconds } from "../src/format.ts";
import { apart } from "../src/parts/apart.ts";
import { runTitle } from "../src/parts/runTitle.ts";
import { scale } from "../src/parts/scale.ts";
import { sweepTime } from "../src/parts/sweepTime.ts";
import { used } from "../src/parts/used.ts";
import { unpacked } from "../src/wiring/kept.ts";
import { picture } from "../src/wiring/picture.ts";
import { withText } from "../src/wiring/png.ts";
import { cardWords, moveWords } from "../src/wiring/words.ts";
import { card, forked, move, offloaded, range, wiring } from "./chains.mjs";

const plain = (text) => text.replaceAll("\u202f", " ");

test("quantities have three digits, or all before the point, and a unit", () => {
  const said = [bytes(0), bytes(999), bytes(999.7), bytes(2.8177e9), bytes(70e9), flops(11.42e12), seconds(0.0012), seconds(0), seconds(80e-6), seconds(61), percent(0.34), percent(0.004), percent(0)];
  assert.deepEqual(said.map(plain), ["0 B", "999 B", "1 kB", "2.82 GB", "70 GB", "11.4 TFLOP", "1.2 ms", "0 s", "80 µs", "61 s", "34 %", "<1 %", "0 %"]);
  assert.equal(plain(amount(70e9, "B")), "70 GB");
  assert.equal(plain(amount(1234, "")), "1,234");
  assert.deepEqual([296.3, 8083.4, 10_715.2, 31_994].map(rate), ["296", "8,083", "10,720", "31,990"]);
});

test("cards and transfers read as a sentence", () => {
  const said = cardWords(card("decode_attention", "cpu", { seconds: 1.2e-3, share: 0.34 }));
  assert.equal(plain(said), "decode_attention on the CPU, 1.2 ms, 34 % of the CPU's time");
  assert.equal(plain(moveWords(move("gpu", "attn"))), "attn to the GPU, 1 MB, 1 ms");
  assert.match(cardWords(card("experts", "gpu", { shared: true })), /with the shared experts, which have no card/);
});

test("scales: ends, order, and ticks within", () => {
  for (const [values, log] of [[[4e9, 7e10, 1.28e11], true], [[0, 631], false], [[5], true], [[5], false], [[], true], [[], false], [[1e-3, 1e6], true]]) {
    const made = scale(values, log, 50, 450, 5);
    assert.ok(made.ticks.length >= 1 && made.ticks.length <= 7, String(made.ticks));
    for (const tick of made.ticks) assert.ok(made.at(tick) >= 49.9 && made.at(tick) <= 450.1);
    const at = [...values].sort((a, b) => a - b).map(made.at);
    assert.deepEqual(at, [...at].sort((a, b) => a - b));
  }
  const octave = scale([1, 100], true, 0, 100, 5);
  assert.ok(Math.abs(octave.at(10) - 50) < 1e-9);
});

const COLOURS = Object.fromEntries(["ink", "ink2", "ink3", "hair", "tint", "surface", "raised", "line", "gpu", "cpu"].map((name) => [name, "#123456"]));
const TOLD = { headline: "", code: "", settings: { KV: "70 GB" }, kept: "" };

test("the picture carries the code, escaped, and every card", () => {
  const code = 'layer = gpu(a) >> cpu(b) | "x & y"';
  const svg = picture(wiring(offloaded(), forked()), { ...TOLD, headline: "a & b: 631", code }, COLOURS);
  const escaped = code.replaceAll("&", "&amp;").replaceAll(">", "&gt;").replaceAll('"', "&quot;");
  assert.ok(svg.includes(`<desc>${escaped}</desc>`));
  assert.equal(svg.split(">a &amp; b: 631<").length, 3);
  for (const name of ["qkv", "attention", "experts", "route", "shared", "combine"]) assert.ok(svg.includes(`>${name}<`));
  assert.ok(!/NaN|undefined|Infinity/.test(svg));
  assert.ok(!/href|url\(/.test(svg));
});

test("the picture holds the scenario where it is given", () => {
  const element = '<metadata id="moe-workbench-scenario">';
  assert.ok(picture(wiring(offloaded()), { ...TOLD, kept: "aGk=" }, COLOURS).includes(`${element}aGk=</metadata>`));
  assert.ok(!picture(wiring(offloaded()), TOLD, COLOURS).includes(element));
  assert.equal(unpacked(Buffer.from("é >> cpu").toString("base64")), "é >> cpu");
});

test("what a transfer carries is written whole, in two lines where it is long", () => {
  const carries = "k v, q of decode rows";
  const svg = picture(wiring(range(card("a", "gpu"), move("cpu", carries), card("b", "cpu"), move("gpu"))), TOLD, COLOURS);
  for (const line of ["↓ k v, q of decode", "rows"]) assert.ok(svg.includes(`>${line}<`));
});

test("weights that are not known are not called none", () => {
  const drawn = (weights) => picture(wiring(range(card("a", "gpu", { weights }))), TOLD, COLOURS).includes("no weights");
  assert.deepEqual([drawn(null), drawn(0), drawn(5)], [false, true, false]);
});

test("a text goes into a PNG as a chunk with its checksum", () => {
  const png = new Uint8Array(Buffer.from("iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk+M9QDwADhgGAWjR9awAAAABJRU5ErkJggg==", "base64"));
  const made = Buffer.from(withText(png, "Description", "é >> cpu"));
  const chunks = [];
  for (let at = 8; at < made.length; at += 12 + made.readUInt32BE(at)) {
    const body = made.subarray(at + 4, at + 8 + made.readUInt32BE(at));
    assert.equal(crc32(body), made.readUInt32BE(at + 4 + body.length));
    chunks.push(body.toString("utf8"));
  }
  assert.deepEqual(chunks.map((each) => each.slice(0, 4)), ["IHDR", "IDAT", "iTXt", "IEND"]);
  assert.equal(chunks[2], "iTXtDescription\0\0\0\0\0é >> cpu");
});

test("the comment behind copied code names the pipeline, holds for any name of the view, and comes once", () => {
  const code = "few = 2\nlayer = gpu(qkv)";
  const comment = used(code);
  assert.equal(comment, "\n\n# Simulated; VIEW stands for your variable of this view:\n# wb.simulate(VIEW.scenario.on(pipeline=layer), VIEW.schedule)\n");
  assert.equal(used(code + comment), "");
  assert.equal(used("gpu(qkv)"), "");
});

test("gauges are titled as those of the run that goes on, or of the last one, when it ended and whether the settings have changed", () => {
  const ended = new Date(2026, 10, 28, 14, 3).getTime() / 1000;
  assert.equal(runTitle(true, { ended: null, stale: "" }), "This run");
  assert.equal(runTitle(false, { ended, stale: "" }), "Last run, ended at 14:03");
  assert.equal(runTitle(false, { ended, stale: "of another wiring" }), "Last run, ended at 14:03, of another wiring");
  assert.equal(runTitle(false, { ended: null, stale: "" }), "Last run");
});

test("before runs begin, the time that they take together is told as far as it is known", () => {
  const takes = { a: 3, b: 5 };
  assert.equal(plain(sweepTime(takes, ["a", "b"], 5, "as simulated")), "about 40 s for 10 runs, as simulated");
  assert.equal(plain(sweepTime(takes, ["a"], 5, "as simulated")), "about 15 s for 5 runs, as simulated");
  assert.equal(sweepTime({}, ["a"], 5, "as simulated"), "5 runs; the first tells how long they take");
  assert.equal(sweepTime(takes, [], 5, "as simulated"), "");
  assert.deepEqual([0.2, 89, 90, 5000, 7000].map(roughly).map(plain), ["1 s", "89 s", "2 min", "83 min", "2 h"]);
});

test("labels of values stand apart, in the order of their points and above the axis", () => {
  assert.deepEqual(apart([100, 40], 13, 200), [100, 40]);
  assert.deepEqual(apart([50, 48, 52], 13, 200), [61, 48, 74]);
  assert.deepEqual(apart([199, 198], 13, 200), [200, 187]);
  assert.deepEqual(apart([], 13, 200), []);
});
