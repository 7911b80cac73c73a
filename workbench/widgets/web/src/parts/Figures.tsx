import type { ReactNode } from "react";

import type { FigureRow } from "../contract";
import { useBench, useBroken, useHeld, useOf, useSend, useTrait } from "../hooks";
import { percent } from "../format";
import { Computing, SAMPLE } from "./Computing";
import { Ledger } from "./Ledger";
import { Panel } from "./Panel";
import { Problem } from "./Problem";
import { mainRow, uncounted } from "./rows";
import { schedulesOf, toneOf } from "./tones";

type Column = "ttft" | "tbt" | "seconds" | "energy" | "preemptions";

const COLUMNS: [Column, string, string][] = [
  ["ttft", "Mean TTFT", "mean time to the first token of a request; the gauges of a run tell the median"],
  ["tbt", "Mean TBT", "mean time between the tokens of a request; the gauges of a run tell the median"],
  ["seconds", "Takes", "time until the last request is served"],
  ["energy", "Energy", "energy per output token"],
  ["preemptions", "Preempted", "sequences that lost their KV cache and were computed again"],
];

export function Figures(): ReactNode {
  const { problem: said, mends, searching, sample, rows, ledger, pending } = useTrait("figures");
  const broken = useBroken();
  const problem = broken ? "" : said;
  const send = useSend();
  const refused = broken ? [] : rows.filter((row) => row.why && !row.chosen);
  const shown = broken ? [] : rows.filter((row) => !refused.includes(row) && (!row.why || row.why !== problem));
  const columns = COLUMNS.filter(([name]) => rows.some((row) => row[name]));
  const main = mainRow(rows);
  const schedules = schedulesOf({ rows });
  return (
    <Panel title="Figures" name="figures" beside={pending && <Computing />}>
      {problem && <Problem text={problem} mends={mends} onMend={(mend) => send({ do: "fix", id: mend.id })} />}
      {problem && searching && <p className="wb-note">Looking for what would fit …</p>}
      {!problem && (broken || (!pending && rows.length === 0)) && <p className="wb-note">No figures yet: the pipeline that is shown cannot run.</p>}
      {main && <Reading row={main} measured={rows.find((row) => row.source === "measured" && row.name === main.name)} sample={sample} />}
      {shown.length > 0 && (
        <div className="wb-scroll" tabIndex={0} role="region" aria-label="Figures of every schedule">
          <table className="wb-table">
            <thead>
              <tr>
                <th scope="col">Schedule</th>
                <th scope="col">
                  <abbr title="output tokens per second">tokens/s</abbr>
                </th>
                <th scope="col">
                  <abbr title="share of the most that any schedule could reach with these settings">of bound</abbr>
                </th>
                {columns.map(([name, label, title]) => (
                  <th key={name} scope="col" className={`wb-col-${name}`}>
                    <abbr title={title}>{label}</abbr>
                  </th>
                ))}
              </tr>
            </thead>
            {shown.map((row) => (
              <Row key={`${row.name} ${row.source}`} row={row} columns={columns} tone={toneOf(schedules, row.name)} />
            ))}
          </table>
        </div>
      )}
      {refused.length > 0 && (
        <details className="wb-refused">
          <summary>
            No figures for {refused.length === 1 ? "1 schedule" : `${refused.length} schedules`}
          </summary>
          <dl>
            {refused.map((row) => (
              <div key={row.name}>
                <dt>{row.name}</dt>
                <dd>{row.why}</dd>
              </div>
            ))}
          </dl>
        </details>
      )}
      <Ledger rows={ledger} />
    </Panel>
  );
}

// The figure that this view is about, and how far it is from the most that is possible.
function Reading({ row, measured, sample }: { row: FigureRow; measured: FigureRow | undefined; sample: string }): ReactNode {
  const without = useOf("wiring", uncounted);
  const uncalibrated = useOf("settings", (settings) => String(settings.uncalibrated ?? false)) === "true";
  return (
    <div className="wb-reading">
      <p className="wb-reading-main">
        <b>{row.gen_tok_s}</b> output tokens/s
        {sample && (
          <span className="wb-reading-sample" title={SAMPLE}>
            {sample}
          </span>
        )}
        {without && <span className="wb-reading-sample">{without}</span>}
      </p>
      <p className="wb-reading-of">
        {row.name}, {row.source}
        {uncalibrated && row.source === "simulated" && " without a calibration"}
        {typeof row.of_bound === "number" && `, ${percent(row.of_bound)} of the bound`}
      </p>
      {measured && (
        <p className="wb-reading-of">
          <b>{measured.gen_tok_s}</b> measured on this computer{!sample && "; Why tells the difference"}
        </p>
      )}
      {row.limited && <p className="wb-reading-why">Limited by {row.limited}</p>}
    </div>
  );
}

function Row({ row, columns, tone }: { row: FigureRow; columns: typeof COLUMNS; tone: string }): ReactNode {
  const { talk } = useBench();
  const source = row.source === row.name ? "" : row.source;
  const held = useHeld();
  const offered = !held && !row.chosen && !row.why && row.source === "simulated";
  const choose = (): void => {
    if (getSelection()?.isCollapsed === false) return; // text of the row was marked
    talk.newest("schedule", { do: "set", name: "schedule", value: row.name, rest: true });
  };
  const none = row.pending ? "…" : "–";
  const about = row.pending ? (held ? "is computed after the run" : "is being computed") : row.why || (row.limited && `limited by ${row.limited}`);
  return (
    <tbody className={row.chosen ? "wb-chosen" : offered ? "wb-offered" : ""} onClick={offered ? choose : undefined}>
      <tr className={row.why ? "wb-off" : ""}>
        <th scope="row">
          <span className={`wb-source wb-source-${row.source} ${tone}`} aria-hidden="true" />
          {offered ? (
            <button type="button" className="wb-choose" title={`Choose ${row.name}`}>
              {row.name}
            </button>
          ) : (
            row.name
          )}
        </th>
        <td className="wb-main">{row.gen_tok_s || none}</td>
        <td>{typeof row.of_bound === "number" ? <Share of={row.of_bound} /> : none}</td>
        {columns.map(([column]) => (
          <td key={column} className={`wb-col-${column}`}>{row[column] || none}</td>
        ))}
      </tr>
      <tr className="wb-row-words">
        <td colSpan={columns.length + 3}>{[source, about].filter(Boolean).join(", ")}</td>
      </tr>
    </tbody>
  );
}

function Share({ of }: { of: number }): ReactNode {
  return (
    <span className="wb-of">
      {percent(of)}
      <span className="wb-bar" aria-hidden="true">
        <i style={{ width: `${100 * Math.min(1, of)}%` }} />
      </span>
    </span>
  );
}
