import type { FigureRow } from "../contract";

// The row that a view is about: the chosen schedule's, simulated where there is such a one.
export function mainRow(rows: FigureRow[]): FigureRow | undefined {
  const known = rows.filter((row) => row.chosen && !row.why && !row.pending);
  return known.find((row) => row.source === "simulated") ?? known[0];
}
