// Quantities as people read them: three digits, or all before the point, and a unit.

const NARROW = "\u202f"; // between a number and its unit

function digits(value: number): string {
  const whole = Math.abs(value) >= 999.5;
  return whole ? Math.round(value).toLocaleString("en-US") : String(Number(value.toPrecision(3)));
}

function scaled(value: number, unit: string, prefixes: string[]): string {
  let size = value;
  let step = 0;
  while (size >= 999.5 && step + 1 < prefixes.length) {
    size /= 1000;
    step += 1;
  }
  return `${digits(size)}${NARROW}${prefixes[step]}${unit}`;
}

export function bytes(value: number): string {
  return scaled(value, "B", ["", "k", "M", "G", "T", "P"]);
}

export function flops(value: number): string {
  return scaled(value, "FLOP", ["", "k", "M", "G", "T", "P", "E"]);
}

export function seconds(value: number): string {
  if (value >= 3599.5) return `${digits(value / 3600)}${NARROW}h`;
  if (value >= 1 || value === 0) return `${digits(value)}${NARROW}s`;
  if (value >= 0.9995e-3) return `${digits(value * 1e3)}${NARROW}ms`;
  return `${digits(value * 1e6)}${NARROW}µs`;
}

// Time in whole seconds, minutes or hours.
export function roughly(value: number): string {
  if (value < 89.5) return `${Math.max(1, Math.round(value))}${NARROW}s`;
  if (value < 89.5 * 60) return `${Math.round(value / 60)}${NARROW}min`;
  return `${Math.round(value / 3600)}${NARROW}h`;
}

export function percent(share: number): string {
  const value = share * 100;
  return `${value > 0 && value < 1 ? "<1" : Math.round(value)}${NARROW}%`;
}

// A throughput as Python writes it: in four digits at most before the point.
export function rate(value: number): string {
  return digits(Math.abs(value) >= 1000 ? Number(value.toPrecision(4)) : value);
}

// A number on an axis or under the pointer, in the axis' unit.
export function amount(value: number, unit: string): string {
  if (unit === "B") return bytes(value);
  if (unit === "B/s") return `${bytes(value)}/s`;
  if (unit === "s") return seconds(value);
  const plain = Math.abs(value) >= 1e6 ? scaled(value, "", ["", "k", "M", "G", "T"]) : digits(value);
  return unit ? `${plain}${NARROW}${unit}` : plain;
}
