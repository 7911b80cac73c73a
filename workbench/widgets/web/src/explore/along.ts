import type { Along } from "./contract";

export interface Placed {
  pixels: number[];
  ticks: number[]; // numbers of the values that are named
}

// Where the values of an axis stand from pixel `from` to pixel `to`, and which have room for their names.
export function placed(axis: Along, from: number, to: number, letter = 6.5): Placed {
  const scaled = axis.log ? axis.at.map(Math.log) : axis.at;
  const low = Math.min(...scaled);
  const span = Math.max(...scaled) - low;
  const pixels = scaled.map((value) => (span ? from + ((value - low) / span) * (to - from) : (from + to) / 2));
  const ticks: number[] = [];
  let free = -Infinity;
  axis.words.forEach((words, index) => {
    const half = (words.length * letter) / 2;
    if (pixels[index]! - half < free) return;
    ticks.push(index);
    free = pixels[index]! + half + 8;
  });
  return { pixels, ticks };
}
