import type { FigureRow } from "../contract";

const TONES = 9; // colours of schedules; one more is of what stands in no row

// The schedules of the table of figures, one a line.
export function schedulesOf({ rows }: { rows: FigureRow[] }): string {
  return [...new Set(rows.filter((row) => row.source !== "bound").map((row) => row.name))].join("\n");
}

// The class of a schedule's colour, the same in the table of figures and in the chart, whichever is chosen.
export function toneOf(schedules: string, name: string): string {
  const at = schedules.split("\n").indexOf(name);
  return `wb-tone-${at < 0 ? TONES : at % TONES}`;
}
