// What a view that explores is told, beside the settings.

import type { Field } from "../contract";

export interface Along {
  name: string;
  label: string;
  at: number[];
  words: string[];
  log: boolean;
}

export interface Cell {
  value: number | null;
  why: string; // the reason why there is no number; empty while it is not read
}

export interface Explored {
  kind: "lines" | "map";
  value: { name: string; label: string; unit: string };
  values: Field[];
  x: Along;
  y: Along | null; // rows of the map, or lines
  axes: Field[];
  together: boolean; // the axes go along together
  cells: Cell[][];
  bounds: (number | null)[][]; // one for all lines, or one for each
  at: [number, number]; // row and column of the chosen point
  best: [number, number] | null;
  read: number;
  of: number;
  busy: boolean;
  problem: string;
}

export interface Point {
  title: string;
  numbers: [string, string][];
  sentences: string[];
  problem: string;
  busy: boolean;
}

export type ExploreMessage = { do: "x" | "y" | "value"; name: string } | { do: "choose"; row: number; column: number };
