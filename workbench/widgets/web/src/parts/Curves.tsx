import { useId, useRef, useState, type PointerEvent, type ReactNode } from "react";

import type { Curves as CurvesTrait, Line } from "../contract";
import { amount } from "../format";
import { useSend, useTrait, useWidth } from "../hooks";
import { Choice } from "./Choice";
import { Panel } from "./Panel";
import { type Scale, scale } from "./scale";

const HEIGHT = 250;
const EDGE = { left: 58, right: 16, top: 12, bottom: 42 };

// Throughput over one setting: the bound, what is simulated, and what was measured.
export function Curves(): ReactNode {
  const curves = useTrait("curves");
  const empty = curves.lines.every((line) => line.points.length === 0);
  return (
    <Panel title={`${capital(curves.y.label)} by ${curves.x.label}`} name="curves" beside={curves.busy && <span className="wb-sample">computing…</span>}>
      {empty ? <p className="wb-note">No curve yet: the pipeline that is shown has no figures.</p> : <Chart curves={curves} />}
      {curves.sweep && <SweepBar sweep={curves.sweep} />}
    </Panel>
  );
}

function capital(words: string): string {
  return words.charAt(0).toUpperCase() + words.slice(1);
}

function Chart({ curves }: { curves: CurvesTrait }): ReactNode {
  const { x, y, at, lines } = curves;
  const place = useRef<HTMLDivElement>(null);
  const width = useWidth(place);
  const [near, setNear] = useState<number | null>(null); // x of the point under the pointer
  const points = lines.flatMap((line) => line.points);
  const xs = scale([...points.map((point) => point[0]), ...(at === null ? [] : [at])], x.log ?? false, EDGE.left, width - EDGE.right, Math.max(3, width / 90));
  const ys = scale(points.map((point) => point[1]), y.log ?? false, HEIGHT - EDGE.bottom, EDGE.top, 5);
  const unit = x.unit ?? "";
  const hover = (event: PointerEvent): void => {
    const pixel = event.clientX - place.current!.getBoundingClientRect().left;
    const all = [...new Set(points.map((point) => point[0]))];
    setNear(all.reduce((best, each) => (Math.abs(xs.at(each) - pixel) < Math.abs(xs.at(best) - pixel) ? each : best), all[0]!));
  };
  const shown = near ?? at;
  return (
    <div className="wb-chart" ref={place} onPointerMove={hover} onPointerLeave={() => setNear(null)}>
      <Legend lines={lines} at={shown} words={shown === null ? "" : amount(shown, unit)} />
      {width > 0 && (
        <svg width={width} height={HEIGHT} role="img" aria-label={spoken(curves)}>
          {ys.ticks.map((tick) => (
            <g key={tick}>
              <line className="wb-grid" x1={EDGE.left} x2={width - EDGE.right} y1={ys.at(tick)} y2={ys.at(tick)} />
              <text x={EDGE.left - 8} y={ys.at(tick) + 4} textAnchor="end">
                {amount(tick, y.unit ?? "")}
              </text>
            </g>
          ))}
          {xs.ticks.map((tick) => (
            <g key={tick}>
              <line className="wb-tick" x1={xs.at(tick)} x2={xs.at(tick)} y1={HEIGHT - EDGE.bottom} y2={HEIGHT - EDGE.bottom + 4} />
              <text x={xs.at(tick)} y={HEIGHT - EDGE.bottom + 17} textAnchor="middle">
                {amount(tick, unit)}
              </text>
            </g>
          ))}
          <line className="wb-axis" x1={EDGE.left} x2={width - EDGE.right} y1={HEIGHT - EDGE.bottom} y2={HEIGHT - EDGE.bottom} />
          <text className="wb-axis-name" x={(EDGE.left + width - EDGE.right) / 2} y={HEIGHT - 6} textAnchor="middle">
            {x.label}
          </text>
          <text className="wb-axis-name" transform={`translate(12 ${(HEIGHT - EDGE.bottom + EDGE.top) / 2}) rotate(-90)`} textAnchor="middle">
            {y.label}
          </text>
          {shown !== null && <line className="wb-at" x1={xs.at(shown)} x2={xs.at(shown)} y1={EDGE.top} y2={HEIGHT - EDGE.bottom} />}
          {lines.map((line, index) => (
            <Drawn key={`${line.name} ${line.kind}`} line={line} tone={tone(lines, index)} xs={xs} ys={ys} at={shown} />
          ))}
        </svg>
      )}
    </div>
  );
}

// Which of its kind a line is: the first simulated one has the strongest colour.
function tone(lines: Line[], index: number): number {
  const kind = (line: Line): string => (line.kind === "sample" ? "simulated" : line.kind);
  return lines.slice(0, index).filter((line) => kind(line) === kind(lines[index]!)).length % 3;
}

function Drawn({ line, tone: number, xs, ys, at }: { line: Line; tone: number; xs: Scale; ys: Scale; at: number | null }): ReactNode {
  const classes = `wb-line wb-line-${line.kind} wb-tone-${number}`;
  const sorted = [...line.points].sort((a, b) => a[0] - b[0]);
  const path = sorted.map(([x, y], index) => `${index ? "L" : "M"}${xs.at(x).toFixed(1)} ${ys.at(y).toFixed(1)}`).join("");
  const marked = line.kind === "measured" ? sorted : sorted.filter(([x]) => x === at);
  return (
    <g className={classes}>
      <path d={path} />
      {marked.map(([x, y]) => (
        <circle key={x} cx={xs.at(x)} cy={ys.at(y)} r={line.kind === "measured" ? 4 : 3} />
      ))}
    </g>
  );
}

function Legend({ lines, at, words }: { lines: Line[]; at: number | null; words: string }): ReactNode {
  return (
    <ul className="wb-legend">
      {lines.map((line, index) => {
        const value = at === null ? undefined : line.points.find((point) => point[0] === at)?.[1];
        return (
          <li key={`${line.name} ${line.kind}`}>
            <svg width={22} height={10} aria-hidden="true" className={`wb-line wb-line-${line.kind} wb-tone-${tone(lines, index)}`}>
              <path d="M1 5H21" />
              {line.kind === "measured" && <circle cx={11} cy={5} r={4} />}
            </svg>
            {line.name === line.kind ? line.name : `${line.name}, ${line.kind === "sample" ? "a sample" : line.kind}`}
            {value !== undefined && <b>{amount(value, "")}</b>}
          </li>
        );
      })}
      {words && <li className="wb-legend-at">at {words}</li>}
    </ul>
  );
}

function spoken({ x, y, lines }: CurvesTrait): string {
  const said = lines.map((line) => {
    const best = line.points.reduce((top, point) => (point[1] > top[1] ? point : top), [0, 0] as [number, number]);
    return `${line.name}, ${line.kind}: at most ${amount(best[1], "")} at ${amount(best[0], x.unit ?? "")}`;
  });
  return `${capital(y.label)} over ${x.label}. ${said.join("; ")}`;
}

function SweepBar({ sweep }: { sweep: NonNullable<CurvesTrait["sweep"]> }): ReactNode {
  const send = useSend();
  const id = useId();
  const [x, setX] = useState(sweep.x[0]?.value ?? "");
  const [y, setY] = useState(sweep.y[0]?.value ?? "");
  const options = (fields: typeof sweep.x): { value: string; label: string; why: string }[] => fields.map((field) => ({ ...field, why: "" }));
  return (
    <div className="wb-sweep" role="group" aria-labelledby={id}>
      <p id={id} className="wb-note">
        Measure points on this computer
      </p>
      <Choice control={{ label: "along", value: x, options: options(sweep.x) }} onChoose={setX} />
      <Choice control={{ label: "for each", value: y, options: options(sweep.y) }} onChoose={setY} />
      {sweep.running ? (
        <button type="button" className="wb-button" onClick={() => send({ do: "sweep_stop" })}>
          Stop the sweep
        </button>
      ) : (
        <button type="button" className="wb-button" disabled={sweep.why !== ""} onClick={() => send({ do: "sweep", x, y })}>
          Sweep
        </button>
      )}
      {sweep.why && <p className="wb-note">{sweep.why}</p>}
    </div>
  );
}
