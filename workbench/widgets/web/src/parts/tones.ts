import type { FigureRow } from "../contract";

const TONES = 10; // colours that there are

// The class of a schedule's colour, the same in the table of figures and in the chart, whichever is chosen.
export function toneOf(rows: FigureRow[], name: string): string {
  const names = [...new Set(rows.filter((row) => row.source !== "bound").map((row) => row.name))];
  return `wb-tone-${Math.max(0, names.indexOf(name)) % TONES}`;
}
