import { amount } from "../format";
import type { Cell, Explored } from "./contract";

// A number of the picture, in the unit of its legend.
export function numberOf(explored: Explored, value: number): string {
  const { unit } = explored.value;
  return amount(value, unit === "tokens/s" ? "" : unit);
}

export function coordinates({ x, y }: Explored, row: number, column: number): string {
  const up = y && y.words.length > 1 ? `, ${y.label} ${y.words[row]}` : "";
  return `${x.label} ${x.words[column]}${up}`;
}

// A point as it is told to a reader: where it is, and its number or the reason why it has none.
export function cellWords(explored: Explored, row: number, column: number): string {
  const cell = explored.cells[row]![column]!;
  const best = explored.best?.[0] === row && explored.best[1] === column ? ", the best" : "";
  return `${coordinates(explored, row, column)}: ${outcome(explored, cell)}${best}`;
}

function outcome(explored: Explored, cell: Cell): string {
  if (cell.value !== null) return `${explored.value.label} ${numberOf(explored, cell.value)}`;
  return cell.why ? `set aside, ${cell.why}` : "not computed yet";
}
