import assert from "node:assert/strict";
import { test } from "node:test";

import { placed } from "../src/explore/along.ts";
import { shade } from "../src/explore/colours.ts";
import { cellWords } from "../src/explore/words.ts";

const plain = (text) => text.replaceAll("\u202f", " ");
const channels = (css) => css.match(/\d+/g).map(Number);

function luminance(rgb) {
  const [red, green, blue] = rgb.map((channel) => (channel / 255 <= 0.04045 ? channel / 255 / 12.92 : ((channel / 255 + 0.055) / 1.055) ** 2.4));
  return 0.2126 * red + 0.7152 * green + 0.0722 * blue;
}

test("every colour of the scale is lighter than the one before, and its text is legible", () => {
  let before = -1;
  for (let share = 0; share <= 1.0001; share += 0.01) {
    const { background, color } = shade(share);
    const light = luminance(channels(background));
    assert.ok(light > before, `${share}`);
    before = light;
    const contrast = color === "#fff" ? 1.05 / (light + 0.05) : (light + 0.05) / 0.05;
    assert.ok(contrast >= 4.5, `${share}: ${contrast}`);
  }
});

test("values stand in proportion, and names that have no room are left out", () => {
  const axis = { name: "kv", label: "KV", at: [1, 10, 100], words: ["1 GB", "10 GB", "100 GB"], log: true };
  assert.deepEqual(placed(axis, 0, 200).pixels, [0, 100, 200]);
  assert.deepEqual(placed(axis, 0, 200).ticks, [0, 1, 2]);
  const linear = placed({ ...axis, log: false }, 0, 200);
  assert.ok(Math.abs(linear.pixels[1] - (200 * 9) / 99) < 1e-9);
  assert.deepEqual(linear.ticks, [0, 2]);
  assert.deepEqual(placed({ ...axis, at: [5], words: ["5 GB"] }, 0, 200).pixels, [100]);
});

test("a point is told with its coordinates, its number or its reason", () => {
  const explored = {
    value: { name: "ttft", label: "time to the first token", unit: "s" },
    x: { label: "KV capacity", words: ["4 GB", "8 GB"] },
    y: { label: "link", words: ["1 GB/s", "2 GB/s"] },
    cells: [
      [{ value: 0.25, why: "" }, { value: null, why: "too small." }],
      [{ value: null, why: "" }, { value: 2, why: "" }],
    ],
    best: [0, 0],
  };
  assert.equal(plain(cellWords(explored, 0, 0)), "KV capacity 4 GB, link 1 GB/s: time to the first token 250 ms, the best");
  assert.equal(cellWords(explored, 0, 1), "KV capacity 8 GB, link 1 GB/s: set aside, too small.");
  assert.equal(cellWords(explored, 1, 0), "KV capacity 4 GB, link 2 GB/s: not computed yet");
  assert.equal(plain(cellWords({ ...explored, value: { label: "output tokens per second", unit: "tokens/s" }, y: null }, 1, 1)), "KV capacity 8 GB: output tokens per second 2");
});
