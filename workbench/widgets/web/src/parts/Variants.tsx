import type { ReactNode } from "react";

import { useSend, useTrait } from "../hooks";
import { Panel } from "./Panel";

export const MOST = 4;

// Pipelines that were pinned, side by side.
export function Variants(): ReactNode {
  const variants = useTrait("variants");
  const send = useSend();
  const full = variants.length >= MOST;
  const rows = [...new Set(variants.flatMap((variant) => Object.keys(variant.rows)))];
  const pin = (
    <div className="wb-toolbar">
      {full && <span className="wb-sample">{MOST} are pinned: unpin one to pin another</span>}
      <button
        type="button"
        className="wb-button"
        disabled={full}
        title="Keep the pipeline that is shown, with its settings, to compare it"
        onClick={() => send({ do: "pin" })}
      >
        Pin this one
      </button>
    </div>
  );
  return (
    <Panel title="Compare" name="variants" beside={pin}>
      {variants.length === 0 ? (
        <p className="wb-note">Nothing is pinned. Pin up to {MOST} pipelines to see them side by side.</p>
      ) : (
        <div className="wb-scroll" tabIndex={0} role="region" aria-label="Pinned pipelines">
          <table className="wb-table wb-variants">
            <thead>
              <tr>
                <td />
                {variants.map(({ id, name, about }) => (
                  <th key={id} scope="col">
                    <b>{name}</b>
                    <span>{about}</span>
                    <span className="wb-variant-acts">
                      <button type="button" className="wb-link" aria-label={`Show ${name} again`} onClick={() => send({ do: "recall", id })}>
                        Show
                      </button>
                      <button type="button" className="wb-link" aria-label={`Unpin ${name}`} onClick={() => send({ do: "unpin", id })}>
                        Unpin
                      </button>
                    </span>
                  </th>
                ))}
              </tr>
            </thead>
            <tbody>
              {rows.map((row) => (
                <tr key={row}>
                  <th scope="row">{row}</th>
                  {variants.map(({ id, rows: values, notes, best }) => (
                    <td key={id}>
                      <span className={best.includes(row) ? "wb-best" : ""}>
                        {values[row] ?? "–"}
                        {best.includes(row) && <span className="wb-unseen"> (best)</span>}
                      </span>
                      {notes?.[row] && <small>{notes[row]}</small>}
                    </td>
                  ))}
                </tr>
              ))}
            </tbody>
          </table>
          {variants.some(({ best }) => best.length > 0) && <p className="wb-note">◂ marks the best.</p>}
        </div>
      )}
    </Panel>
  );
}
