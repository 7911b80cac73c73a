import { useRef, type ReactNode } from "react";

import { useWidth } from "../hooks";
import { placed } from "./along";
import { GRADIENT, shade } from "./colours";
import type { Explored } from "./contract";
import type { Cells } from "./useCells";
import { numberOf } from "./words";

const LETTER = 6.6; // pixels
const ROOMY = 48; // pixels of a cell that has room for its number
const HEIGHT = 300; // pixels that the cells take at most, where they are many

// One number over two axes as colour. What was set aside is hatched, the best point has a star.
export function HeatMap({ explored, cells }: { explored: Explored; cells: Cells }): ReactNode {
  const { x, y, cells: rows, at, best } = explored;
  const place = useRef<HTMLDivElement>(null);
  const width = useWidth(place);
  const [low, high] = ends(explored);
  const names = Math.min(150, Math.max(...y!.words.map((words) => words.length)) * LETTER + 10);
  const across = (width - names - 24) / x.words.length;
  const tall = Math.max(14, Math.min(40, HEIGHT / rows.length));
  const { ticks } = placed({ ...x, log: false, at: x.words.map((_, index) => index) }, across / 2, across * (x.words.length - 0.5), LETTER);
  const grid = { gridTemplateColumns: `${names}px repeat(${x.words.length}, minmax(0, 1fr))` };
  return (
    <div className="wb-map" ref={place}>
      <div className="wb-map-up" aria-hidden="true">
        {y!.label}
      </div>
      <div>
        <div role="grid" aria-label={`${explored.value.label} over ${x.label} and ${y!.label}`} onKeyDown={cells.onKeyDown} onPointerLeave={() => cells.point(null)}>
          {rows.map((_, index) => {
            const row = rows.length - 1 - index; // upward
            return (
              <div role="row" className="wb-map-row" style={{ ...grid, height: tall }} key={y!.words[row]}>
                <span role="rowheader" className="wb-map-name" title={y!.words[row]}>
                  {tall >= 14 && y!.words[row]}
                </span>
                {rows[row]!.map((cell, column) => {
                  const share = cell.value === null ? null : high > low ? (cell.value - low) / (high - low) : 0.5;
                  const classes = ["wb-map-cell"];
                  if (share === null) classes.push(cell.why ? "wb-map-aside" : "wb-map-open");
                  if (row === at[0] && column === at[1]) classes.push("wb-map-at");
                  const star = best?.[0] === row && best[1] === column ? "★" : "";
                  return (
                    <div
                      {...cells.cell(row, column)}
                      key={x.words[column]}
                      className={classes.join(" ")}
                      style={share === null ? undefined : shade(share)}
                      onPointerMove={() => cells.point([row, column])}
                      onClick={() => cells.choose(row, column)}
                    >
                      {star}
                      {cell.value !== null && across >= ROOMY && tall >= 18 && ` ${numberOf(explored, cell.value)}`}
                    </div>
                  );
                })}
              </div>
            );
          })}
        </div>
        <div className="wb-map-row wb-map-columns" style={grid} aria-hidden="true">
          <span />
          {x.words.map((words, index) => (
            <span key={words}>{ticks.includes(index) && words}</span>
          ))}
        </div>
        <div className="wb-map-right" style={{ paddingLeft: names }} aria-hidden="true">
          {x.label}
        </div>
      </div>
    </div>
  );
}

// The colours with their numbers, and the marks.
export function Colours({ explored }: { explored: Explored }): ReactNode {
  const [low, high] = ends(explored);
  const { value, best } = explored;
  const all = explored.cells.flat();
  const unit = value.unit === "tokens/s" || value.unit === "" ? "" : ` [${value.unit}]`;
  return (
    <ul className="wb-legend">
      {low <= high && (
        <li>
          {numberOf(explored, low)}
          <i className="wb-map-scale" style={{ background: GRADIENT }} aria-hidden="true" />
          {numberOf(explored, high)}
          <span>
            {value.label}
            {unit}
          </span>
        </li>
      )}
      {best && (
        <li>
          <span aria-hidden="true">★</span> best
        </li>
      )}
      {all.some((cell) => cell.why) && (
        <li>
          <i className="wb-map-swatch wb-map-aside" aria-hidden="true" /> set aside
        </li>
      )}
      {all.some((cell) => cell.value === null && !cell.why) && (
        <li>
          <i className="wb-map-swatch wb-map-open" aria-hidden="true" /> not computed yet
        </li>
      )}
    </ul>
  );
}

function ends({ cells }: Explored): [number, number] {
  const known = cells.flat().flatMap((cell) => (cell.value === null ? [] : [cell.value]));
  return [Math.min(...known), Math.max(...known)];
}
