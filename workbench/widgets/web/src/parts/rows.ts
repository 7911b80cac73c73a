import type { FigureRow, Wiring } from "../contract";

// The row that a view is about: the chosen schedule's, simulated where there is such a one.
export function mainRow(rows: FigureRow[]): FigureRow | undefined {
  const known = rows.filter((row) => row.chosen && !row.why && !row.pending);
  return known.find((row) => row.source === "simulated") ?? known[0];
}

// "without out_proj": what a layer has no card of, and no figure counts.
export function uncounted({ lacks }: Wiring): string {
  const ops = [...new Set(lacks.flat().map(({ op }) => op))];
  return ops.length > 0 ? `without ${ops.join(", ")}` : "";
}
