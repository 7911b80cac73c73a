import { useRef, useState, type KeyboardEvent } from "react";

import { useBench } from "../hooks";
import type { Explored } from "./contract";
import { cellWords } from "./words";

const STEPS: Record<string, [number, number]> = { ArrowLeft: [0, -1], ArrowRight: [0, 1], ArrowUp: [1, 0], ArrowDown: [-1, 0] };

export interface Cells {
  shown: [number, number]; // under the pointer, in focus, or the chosen one
  told: boolean; // it is not just the chosen one
  point: (cell: [number, number] | null) => void;
  choose: (row: number, column: number) => void;
  onKeyDown: (event: KeyboardEvent) => void;
  cell: (row: number, column: number) => object; // attributes of a cell's element
}

// A grid of points that is walked with the arrow keys; Enter chooses. Row 0 is the lowest.
export function useCells(explored: Explored): Cells {
  const { talk, announce } = useBench();
  const { cells, at } = explored;
  const elements = useRef(new Map<string, Element>());
  const [focus, setFocus] = useState<[number, number] | null>(null);
  const [near, point] = useState<[number, number] | null>(null);
  const inside = (cell: [number, number] | null): [number, number] | null => (cell && cells[cell[0]]?.[cell[1]] ? cell : null);
  const home = inside(focus) ?? at;
  const choose = (row: number, column: number): void => {
    talk.newest("choose", { do: "choose", row, column });
    announce(`Chosen: ${cellWords(explored, row, column)}`);
  };
  const walk = (row: number, column: number): void => {
    const to: [number, number] = [Math.min(cells.length - 1, Math.max(0, row)), Math.min(cells[0]!.length - 1, Math.max(0, column))];
    setFocus(to);
    point(null);
    (elements.current.get(to.join()) as HTMLElement | undefined)?.focus();
  };
  const onKeyDown = (event: KeyboardEvent): void => {
    const step = STEPS[event.key];
    if (step) walk(home[0] + step[0], home[1] + step[1]);
    else if (event.key === "Home") walk(home[0], 0);
    else if (event.key === "End") walk(home[0], Infinity);
    else if (event.key === "Enter" || event.key === " ") choose(...home);
    else return;
    event.preventDefault();
  };
  const cell = (row: number, column: number): object => ({
    ref: (element: Element | null) => void (element ? elements.current.set(`${row},${column}`, element) : elements.current.delete(`${row},${column}`)),
    role: "gridcell",
    tabIndex: row === home[0] && column === home[1] ? 0 : -1,
    "aria-label": cellWords(explored, row, column),
    "aria-selected": row === at[0] && column === at[1],
    onFocus: () => setFocus([row, column]),
    onBlur: () => setFocus(null),
  });
  const told = inside(near) ?? inside(focus);
  return { shown: told ?? at, told: told !== null, point, choose, onKeyDown, cell };
}
