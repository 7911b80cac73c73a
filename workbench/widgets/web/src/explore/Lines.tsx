import { useRef, type PointerEvent, type ReactNode } from "react";

import { amount } from "../format";
import { useWidth } from "../hooks";
import { scale } from "../parts/scale";
import { placed } from "./along";
import type { Explored } from "./contract";
import type { Cells } from "./useCells";
import { numberOf } from "./words";

const HEIGHT = 290;
const EDGE = { left: 66, right: 22, top: 14, bottom: 46 };
const TONES = 6;

type Dot = [number, number];

// One number over one axis, a line for each schedule, with the bounds dashed. What was set aside has a cross on the axis.
export function Lines({ explored, cells }: { explored: Explored; cells: Cells }): ReactNode {
  const { x, y, cells: rows, bounds, at, best, value } = explored;
  const place = useRef<HTMLDivElement>(null);
  const width = useWidth(place);
  const { pixels, ticks } = placed(x, EDGE.left + 12, width - EDGE.right - 12);
  const known = [...rows.flat().map((cell) => cell.value), ...bounds.flat()].flatMap((each) => (each === null ? [] : [each]));
  const ys = scale(known, false, HEIGHT - EDGE.bottom, EDGE.top, 5);
  const floor = HEIGHT - EDGE.bottom;
  const dot = (row: number, column: number): Dot => {
    const found = rows[row]![column]!.value;
    return [pixels[column]!, found === null ? floor : ys.at(found)];
  };
  const nearest = (event: PointerEvent): [number, number] => {
    const box = place.current!.getBoundingClientRect();
    const far = ([row, column]: [number, number]): number => Math.hypot(dot(row, column)[0] - event.clientX + box.left, dot(row, column)[1] - event.clientY + box.top);
    const all = rows.flatMap((cellsOf, row) => cellsOf.map((_, column): [number, number] => [row, column]));
    return all.reduce((one, other) => (far(other) < far(one) ? other : one));
  };
  const [row, column] = cells.shown;
  return (
    <div className="wb-chart wb-explored-lines" ref={place}>
      {width > 0 && (
        <svg
          width={width}
          height={HEIGHT}
          role="grid"
          aria-label={`${value.label} over ${x.label}`}
          onKeyDown={cells.onKeyDown}
          onPointerMove={(event) => cells.point(nearest(event))}
          onPointerLeave={() => cells.point(null)}
          onClick={(event) => cells.choose(...nearest(event as unknown as PointerEvent))}
        >
          <g aria-hidden="true">
            {ys.ticks.map((tick) => (
              <g key={tick}>
                <line className="wb-grid" x1={EDGE.left} x2={width - EDGE.right} y1={ys.at(tick)} y2={ys.at(tick)} />
                <text x={EDGE.left - 8} y={ys.at(tick) + 4} textAnchor="end">
                  {numberOf(explored, tick)}
                </text>
              </g>
            ))}
            {ticks.map((index) => (
              <g key={index}>
                <line className="wb-tick" x1={pixels[index]} x2={pixels[index]} y1={floor} y2={floor + 4} />
                <text x={pixels[index]} y={floor + 18} textAnchor="middle">
                  {x.words[index]}
                </text>
              </g>
            ))}
            <line className="wb-axis" x1={EDGE.left} x2={width - EDGE.right} y1={floor} y2={floor} />
            <text className="wb-axis-name" x={(EDGE.left + width - EDGE.right) / 2} y={HEIGHT - 8} textAnchor="middle">
              {x.label}
              {x.log && " (logarithmic)"}
            </text>
            <line className="wb-at" x1={pixels[column]} x2={pixels[column]} y1={EDGE.top} y2={floor} />
            {bounds.map((line, index) => (
              <g key={index} className={bounds.length === 1 ? "wb-line wb-line-bound" : `wb-line wb-line-most wb-tone-${index % TONES}`}>
                <path d={path(line.map((each, at) => (each === null ? null : [pixels[at]!, ys.at(each)])))} />
              </g>
            ))}
          </g>
          {rows.map((line, index) => (
            <g key={y?.words[index] ?? ""} role="row" aria-label={y?.words[index] ?? value.label} className={classesOf(index, at[0])}>
              <path aria-hidden="true" d={path(line.map((cell, at) => (cell.value === null ? null : dot(index, at))))} />
              {line.map((cell, at) => {
                const [px, py] = dot(index, at);
                const here = index === row && at === column;
                return (
                  <g key={at} {...cells.cell(index, at)} className={`wb-dot${here ? " wb-dot-here" : ""}`}>
                    {cell.value !== null && <circle cx={px} cy={py} r={here ? 5 : 3.2} />}
                    {cell.value === null && cell.why && <path d={`M${px - 4} ${py - 4}l8 8m0 -8l-8 8`} />}
                    {cell.value === null && !cell.why && <circle className="wb-dot-open" cx={px} cy={py} r={2} />}
                  </g>
                );
              })}
            </g>
          ))}
          <Ring at={dot(...at)} />
          {best && (
            <text className="wb-star" aria-hidden="true" x={dot(...best)[0]} y={dot(...best)[1] - 8} textAnchor="middle">
              ★
            </text>
          )}
        </svg>
      )}
    </div>
  );
}

// The chosen point.
function Ring({ at: [x, y] }: { at: Dot }): ReactNode {
  return <circle className="wb-ring" aria-hidden="true" cx={x} cy={y} r={8} />;
}

function classesOf(index: number, chosen: number): string {
  return `wb-line wb-tone-${index % TONES}${index === chosen ? " wb-line-chosen" : ""}`;
}

// A line through its points, broken where one is missing.
function path(dots: (Dot | null)[]): string {
  let drawing = false;
  return dots
    .map((dot) => {
      const step = dot ? `${drawing ? "L" : "M"}${dot[0].toFixed(1)} ${dot[1].toFixed(1)}` : "";
      drawing = dot !== null;
      return step;
    })
    .join("");
}

// The names of the lines, with their numbers at one place.
export function Names({ explored, column }: { explored: Explored; column: number }): ReactNode {
  const { y, cells, bounds, at, best } = explored;
  const all = cells.flat();
  const most = bounds.length === 1 ? bounds[0]![column] : null;
  return (
    <ul className="wb-legend">
      {y !== null &&
        cells.map((line, index) => {
          const value = line[column]?.value;
          return (
            <li key={y.words[index]}>
              <svg width={22} height={10} aria-hidden="true" className={classesOf(index, at[0])}>
                <path d="M1 5H21" />
              </svg>
              {y.words[index]}
              {typeof value === "number" && <b>{numberOf(explored, value)}</b>}
            </li>
          );
        })}
      {bounds.length > 0 && (
        <li>
          <svg width={22} height={10} aria-hidden="true" className="wb-line wb-line-bound">
            <path d="M1 5H21" />
          </svg>
          bound
          {typeof most === "number" && <b>{amount(most, "")}</b>}
        </li>
      )}
      {best && (
        <li>
          <span aria-hidden="true">★</span> best
        </li>
      )}
      {all.some((cell) => cell.why) && (
        <li>
          <span aria-hidden="true">×</span> set aside
        </li>
      )}
      <li className="wb-legend-at">
        at {explored.x.words[column]}
      </li>
    </ul>
  );
}
