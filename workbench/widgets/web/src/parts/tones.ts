import type { FigureRow } from "../contract";

const TONES = 9; // colours of schedules; one more is of what stands in no row

// The class of a schedule's colour, the same in the table of figures and in the chart, whichever is chosen.
export function toneOf(rows: FigureRow[], name: string): string {
  const names = [...new Set(rows.filter((row) => row.source !== "bound").map((row) => row.name))];
  const at = names.indexOf(name);
  return `wb-tone-${at < 0 ? TONES : at % TONES}`;
}
