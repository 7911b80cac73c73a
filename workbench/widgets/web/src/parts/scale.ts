// Axes: where a value stands, and which ticks are worth a number.

export interface Scale {
  at: (value: number) => number;
  ticks: number[];
  low: number;
  high: number;
}

// A scale over these values from pixel `from` to pixel `to`; `most` ticks or fewer.
export function scale(values: number[], log: boolean, from: number, to: number, most: number): Scale {
  const known = values.filter((value) => Number.isFinite(value) && (!log || value > 0));
  const least = known.length ? Math.min(...known) : 1;
  const top = known.length ? Math.max(...known) : 10;
  return log ? logarithmic(least, top, from, to, most) : linear(top, from, to, most);
}

function linear(top: number, from: number, to: number, most: number): Scale {
  const step = round((top || 1) / most);
  const high = Math.ceil((top || 1) / step - 1e-9) * step;
  const ticks: number[] = [];
  for (let tick = 0; tick <= high + step / 1e6; tick += step) ticks.push(Number(tick.toPrecision(12)));
  return { at: (value) => from + (value / high) * (to - from), ticks, low: 0, high };
}

// The least of 1, 2 and 5 times a power of ten that is not below.
function round(rough: number): number {
  const power = 10 ** Math.floor(Math.log10(rough));
  return [1, 2, 5, 10].map((factor) => factor * power).find((step) => step >= rough * (1 - 1e-9))!;
}

function logarithmic(least: number, top: number, from: number, to: number, most: number): Scale {
  const [low, high] = least < top ? [least / 1.08, top * 1.08] : [least / 2, least * 2];
  const position = (value: number): number =>
    from + (Math.log(Math.max(value, low) / low) / Math.log(high / low)) * (to - from);
  const factors = [[1, 2, 3, 5, 7], [1, 2, 5], [1, 3], [1]];
  const found = factors.map((each) => ticksOf(low, high, each)).find((ticks) => ticks.length <= most);
  return { at: position, ticks: found ?? thinned(ticksOf(low, high, [1]), most), low, high };
}

function ticksOf(low: number, high: number, factors: number[]): number[] {
  const ticks: number[] = [];
  for (let power = Math.floor(Math.log10(low)); power <= Math.ceil(Math.log10(high)); power += 1) {
    for (const factor of factors) {
      const tick = Number((factor * 10 ** power).toPrecision(6));
      if (tick >= low && tick <= high) ticks.push(tick);
    }
  }
  return ticks;
}

function thinned(ticks: number[], most: number): number[] {
  const step = Math.ceil(ticks.length / most);
  return ticks.filter((_, index) => index % step === 0);
}
