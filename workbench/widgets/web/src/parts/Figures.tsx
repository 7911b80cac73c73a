import type { ReactNode } from "react";

import type { FigureRow } from "../contract";
import { useSend, useTrait } from "../hooks";
import { percent } from "../format";
import { Ledger } from "./Ledger";
import { Panel } from "./Panel";
import { Problem } from "./Problem";

type Column = "ttft" | "tbt" | "seconds" | "energy";

const COLUMNS: [Column, string, string][] = [
  ["ttft", "TTFT", "time to the first token"],
  ["tbt", "TBT", "time between tokens"],
  ["seconds", "Takes", "time until the last request is served"],
  ["energy", "Energy", "energy per output token"],
];

export function Figures(): ReactNode {
  const { problem, mends, sample, rows, ledger } = useTrait("figures");
  const send = useSend();
  const columns = COLUMNS.filter(([name]) => rows.some((row) => row[name]));
  const main = rows.find((row) => row.chosen && row.source === "simulated" && !row.why) ?? rows.find((row) => row.chosen && !row.why);
  return (
    <Panel title="Figures" name="figures" beside={sample && <span className="wb-sample">{sample}</span>}>
      {problem && <Problem text={problem} mends={mends} onMend={(mend) => send({ do: "fix", id: mend.id })} />}
      {!problem && rows.length === 0 && <p className="wb-note">No figures yet: the pipeline that is shown cannot run.</p>}
      {main && <Reading row={main} />}
      {rows.length > 0 && (
        <div className="wb-scroll" tabIndex={0} role="region" aria-label="Figures of every schedule">
          <table className="wb-table">
            <thead>
              <tr>
                <th scope="col">Schedule</th>
                <th scope="col">
                  <abbr title="output tokens per second">tokens/s</abbr>
                </th>
                <th scope="col">of bound</th>
                {columns.map(([name, label, title]) => (
                  <th key={name} scope="col">
                    <abbr title={title}>{label}</abbr>
                  </th>
                ))}
              </tr>
            </thead>
            {rows.map((row) => (
              <Row key={`${row.name} ${row.source}`} row={row} columns={columns} />
            ))}
          </table>
        </div>
      )}
      <Ledger rows={ledger} />
    </Panel>
  );
}

// The figure that this view is about, and how far it is from the most that is possible.
function Reading({ row }: { row: FigureRow }): ReactNode {
  return (
    <div className="wb-reading">
      <p className="wb-reading-main">
        <b>{row.gen_tok_s}</b> output tokens/s
      </p>
      <p className="wb-reading-of">
        {row.name}, {row.source}
        {row.of_bound !== null && `, ${percent(row.of_bound)} of the bound`}
      </p>
      {row.limited && <p className="wb-reading-why">Limited by {row.limited}</p>}
    </div>
  );
}

function Row({ row, columns }: { row: FigureRow; columns: typeof COLUMNS }): ReactNode {
  const words = [row.source, row.why || (row.limited && `limited by ${row.limited}`)].filter(Boolean).join(", ");
  const name = (
    <th scope="row">
      <span className={`wb-source wb-source-${row.source}`} aria-hidden="true" />
      {row.name}
    </th>
  );
  return (
    <tbody className={row.chosen ? "wb-chosen" : ""}>
      <tr className={row.why ? "wb-off" : ""}>
        {name}
        <td className="wb-main">{row.gen_tok_s || "–"}</td>
        <td>{row.of_bound === null ? "–" : <Share of={row.of_bound} />}</td>
        {columns.map(([column]) => (
          <td key={column}>{row[column] || "–"}</td>
        ))}
      </tr>
      <tr className="wb-row-words">
        <td colSpan={columns.length + 3}>{words}</td>
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
