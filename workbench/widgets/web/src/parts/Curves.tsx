import { useRef, useState, type PointerEvent, type ReactNode } from "react";

import type { Curves as CurvesTrait, Line } from "../contract";
import { amount, rate } from "../format";
import { useBench, useOf, useTrait, useWidth } from "../hooks";
import { capital } from "../wiring/words";
import { apart } from "./apart";
import { Choice } from "./Choice";
import { Computing, SAMPLE } from "./Computing";
import { ACTIVE } from "./Live";
import { Panel } from "./Panel";
import { type Scale, scale } from "./scale";
import { sweepTime } from "./sweepTime";
import { schedulesOf, toneOf } from "./tones";

const POINTS = 5; // of a sweep, under each schedule
const HEIGHT = 250;
const EDGE = { right: 16, top: 12, bottom: 42 };
const NAME = 28; // for the name of the vertical axis
const LETTER = 6.8; // of its numbers
const VALUE = { beside: 10, gap: 13, room: 60 }; // of a label: pixels to its point, to the next one, and for its text
const CATCH = 10; // pixels within which the pointer is at a measured point, however near others are

// Throughput over one setting: the bound, what is simulated, and what was measured.
export function Curves(): ReactNode {
  const curves = useTrait("curves");
  const empty = curves.lines.every((line) => line.points.length === 0);
  return (
    <Panel title={capital(curves.y.label)} name="curves" beside={<Over curves={curves} />}>
      {!empty && <Chart curves={curves} />}
      {empty && <p className="wb-note">{curves.busy ? "Computing…" : "No curve: the pipeline that is shown has no figures."}</p>}
      <Sweep />
    </Panel>
  );
}

// What the curves are drawn over.
function Over({ curves }: { curves: CurvesTrait }): ReactNode {
  const { talk } = useBench();
  const { axis, axes, x, busy } = curves;
  const options = (axes ?? []).map((field) => ({ ...field, why: "" }));
  const choose = (name: string): void => talk.newest("axis", { do: "axis", name });
  return (
    <div className="wb-over">
      {busy && <Computing />}
      {axis !== undefined && options.length > 1 ? (
        <Choice inline control={{ label: "over", value: axis, options }} onChoose={choose} />
      ) : (
        <span className="wb-sample">over {x.label}</span>
      )}
    </div>
  );
}

function Chart({ curves }: { curves: CurvesTrait }): ReactNode {
  const { x, y, at, lines } = curves;
  const schedules = useOf("figures", schedulesOf);
  const place = useRef<HTMLDivElement>(null);
  const width = useWidth(place);
  const [near, setNear] = useState<number | null>(null); // x of the point under the pointer
  const points = lines.flatMap((line) => line.points);
  const ys = scale(points.map((point) => point[1]), y.log ?? false, HEIGHT - EDGE.bottom, EDGE.top, 5);
  const left = NAME + LETTER * Math.max(...ys.ticks.map((tick) => amount(tick, y.unit ?? "").length));
  const xs = scale([...points.map((point) => point[0]), ...(at === null ? [] : [at])], x.log ?? false, left, width - EDGE.right, Math.max(3, width / 90));
  const unit = x.unit ?? "";
  const hover = (event: PointerEvent): void => {
    const pixel = event.clientX - place.current!.getBoundingClientRect().left;
    const away = (x: number): number => Math.abs(xs.at(x) - pixel);
    const nearest = (all: [number, number][]): number => all.reduce((best, [x]) => (away(x) < away(best) ? x : best), Infinity);
    const measured = nearest(lines.filter(({ kind }) => kind === "measured").flatMap((line) => line.points));
    setNear(away(measured) <= CATCH ? measured : nearest(points));
  };
  const shown = near ?? at;
  return (
    <div className="wb-chart" ref={place} onPointerMove={hover} onPointerLeave={() => setNear(null)}>
      <Legend curves={curves} at={shown} words={shown === null ? "" : shown === curves.unlimited ? "no limit" : amount(shown, unit)} />
      {width > 0 && (
        <svg width={width} height={HEIGHT} role="img" aria-label={spoken(curves)}>
          {ys.ticks.map((tick) => (
            <g key={tick}>
              <line className="wb-grid" x1={left} x2={width - EDGE.right} y1={ys.at(tick)} y2={ys.at(tick)} />
              <text x={left - 8} y={ys.at(tick) + 4} textAnchor="end">
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
          <line className="wb-axis" x1={left} x2={width - EDGE.right} y1={HEIGHT - EDGE.bottom} y2={HEIGHT - EDGE.bottom} />
          <text className="wb-axis-name" x={(left + width - EDGE.right) / 2} y={HEIGHT - 6} textAnchor="middle">
            {x.label}
          </text>
          <text className="wb-axis-name" transform={`translate(12 ${(HEIGHT - EDGE.bottom + EDGE.top) / 2}) rotate(-90)`} textAnchor="middle">
            {y.label}
          </text>
          {shown !== null && <line className="wb-at" x1={xs.at(shown)} x2={xs.at(shown)} y1={EDGE.top} y2={HEIGHT - EDGE.bottom} />}
          {lines.map((line) => (
            <Drawn key={keyOf(line)} curves={curves} line={line} classes={classesOf(curves, schedules, line)} xs={xs} ys={ys} at={shown} />
          ))}
          {shown !== null && <Values curves={curves} at={shown} x={xs.at(shown)} right={width - EDGE.right} ys={ys} />}
        </svg>
      )}
    </div>
  );
}

function classesOf(curves: CurvesTrait, schedules: string, line: Line): string {
  const chosen = curves.chosen ?? curves.lines.find((each) => each.kind === "simulated")?.name;
  const classes = ["wb-line", `wb-line-${line.kind}`, toneOf(schedules, line.name)];
  if (line.name === chosen) classes.push("wb-line-chosen");
  if (line.stale) classes.push("wb-line-stale");
  return classes.join(" ");
}

// The values of all lines at one place, beside their points.
function Values({ curves, at, x, right, ys }: { curves: CurvesTrait; at: number; x: number; right: number; ys: Scale }): ReactNode {
  const schedules = useOf("figures", schedulesOf);
  const found = freshOf(curves).flatMap((line) => line.points.filter((point) => point[0] === at).map(([, value]) => ({ line, value })));
  const heights = apart(found.map(({ value }) => ys.at(value)), VALUE.gap, HEIGHT - EDGE.bottom - 6);
  const side = x + VALUE.beside + VALUE.room < right ? 1 : -1;
  return found.map(({ line, value }, index) => (
    <g key={`${keyOf(line)} ${value}`} className={classesOf(curves, schedules, line)}>
      <path className="wb-value-line" d={`M${x} ${ys.at(value)}L${x + side * (VALUE.beside - 2)} ${heights[index]}`} />
      <text className="wb-value" x={x + side * VALUE.beside} y={heights[index]! + 4} textAnchor={side > 0 ? "start" : "end"}>
        {rate(value)}
      </text>
    </g>
  ));
}

// The lines of the present settings; those of the settings before while there are none.
function freshOf({ lines }: CurvesTrait): Line[] {
  const fresh = lines.filter((line) => !line.stale);
  return fresh.length ? fresh : lines;
}

interface Curve {
  curves: CurvesTrait;
  line: Line;
  classes: string;
  xs: Scale;
  ys: Scale;
  at: number | null;
}

function Drawn({ curves, line, classes, xs, ys, at }: Curve): ReactNode {
  const sorted = [...line.points].sort((a, b) => a[0] - b[0]);
  const path = sorted.map(([x, y], index) => `${index ? "L" : "M"}${xs.at(x).toFixed(1)} ${ys.at(y).toFixed(1)}`).join("");
  const marked = line.kind === "measured" ? sorted : sorted.filter(([x]) => x === at);
  return (
    <g className={classes}>
      <path d={path} />
      {marked.map(([x, y]) => (
        <circle key={`${x} ${y}`} cx={xs.at(x)} cy={ys.at(y)} r={line.kind === "measured" ? 4 : 3}>
          <title>{pointWords(curves, line, [x, y])}</title>
        </circle>
      ))}
    </g>
  );
}

function keyOf(line: Line): string {
  return `${line.name} ${line.kind} ${line.stale ?? false}`;
}

function Legend({ curves, at, words }: { curves: CurvesTrait; at: number | null; words: string }): ReactNode {
  const schedules = useOf("figures", schedulesOf);
  return (
    <ul className="wb-legend">
      {freshOf(curves).map((line) => {
        const value = at === null ? undefined : line.points.filter((point) => point[0] === at).at(-1)?.[1];
        return (
          <li key={keyOf(line)} title={isSample(line, at) ? SAMPLE : undefined}>
            <svg width={22} height={10} aria-hidden="true" className={classesOf(curves, schedules, line)}>
              <path d="M1 5H21" />
              {line.kind === "measured" && <circle cx={11} cy={5} r={4} />}
            </svg>
            {lineWords(line, at)}
            {value !== undefined && <b>{rate(value)}</b>}
          </li>
        );
      })}
      {words && <li className="wb-legend-at">at {words}</li>}
    </ul>
  );
}

function lineWords(line: Line, at: number | null): string {
  const { name, kind } = line;
  if (isSample(line, at)) return `${name}, a sample`;
  return kind === "measured" && kind !== name ? `${name}, ${kind}` : name;
}

// True where a point is simulated with a sample of the requests; without a place, where any point is.
function isSample({ kind, sampled }: Line, at: number | null): boolean {
  return kind === "sample" && (at === null || (sampled?.includes(at) ?? true));
}

// "VSLPipe, measured: 330 output tokens/s at KV capacity 70 GB".
function pointWords({ x, y }: CurvesTrait, line: Line, [place, value]: [number, number]): string {
  return `${lineWords(line, place)}: ${rate(value)} ${y.label} at ${x.label} ${amount(place, x.unit ?? "")}`;
}

function spoken({ x, y, at, lines }: CurvesTrait): string {
  const said = lines.map((line) => {
    const best = line.points.reduce((top, point) => (point[1] > top[1] ? point : top), [0, 0] as [number, number]);
    const now = line.points.filter((point) => point[0] === at).map((point) => `, ${rate(point[1])} at the present value`);
    return `${line.name}, ${line.kind}: at most ${rate(best[1])} at ${amount(best[0], x.unit ?? "")}${now.join("")}`;
  });
  return `${capital(y.label)} over ${x.label}. ${said.join("; ")}`;
}

// Runs this computer along the axis of the curves, under each schedule that is marked.
function Sweep(): ReactNode {
  const { talk } = useBench();
  const { axis, x, takes = {}, paced = "" } = useTrait("curves");
  const { state, can, text, sweeping, swept, calibrating } = useTrait("live");
  const control = useTrait("settings").groups.flatMap((group) => group.controls).find((each) => each.name === "schedule");
  const running = ACTIVE.includes(state);
  const [marked, setMarked] = useState<string[] | null>(null);
  if (axis === undefined || control?.kind !== "choice") return null;
  if (!can && !running) return <p className="wb-note">Points can be measured here, under several schedules, once a run can start.</p>;
  const offered = control.options.filter((option) => !option.why);
  const schedules = offered.map((option) => option.value).filter((name) => (marked ?? [control.value]).includes(name));
  const mark = (name: string): void => setMarked(schedules.includes(name) ? schedules.filter((each) => each !== name) : [...schedules, name]);
  const start = (): void => void talk.send({ do: "sweep", x: axis, schedules, points: POINTS });
  return (
    <fieldset className="wb-sweep">
      <legend>
        Measure {POINTS} points over {x.label}, around the present value, with
      </legend>
      {offered.map((option) => (
        <label key={option.value} className="wb-flag">
          <input type="checkbox" checked={schedules.includes(option.value)} disabled={running} onChange={() => mark(option.value)} />
          {option.label}
        </label>
      ))}
      <button type="button" className="wb-button" disabled={running || schedules.length === 0} onClick={start}>
        Measure
      </button>
      {running && (
        <button type="button" className="wb-button" disabled={state === "stopping"} onClick={() => talk.send({ do: "stop" })}>
          Stop the {sweeping ? "sweep" : calibrating ? "calibration" : "run"}
        </button>
      )}
      {swept && <p className="wb-note wb-swept">The last sweep {swept}.</p>}
      <p className="wb-note wb-sweep-time">{running ? text : sweepTime(takes, schedules, POINTS, paced)}</p>
    </fieldset>
  );
}
