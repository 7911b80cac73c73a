import type { ReactNode } from "react";

import type { LedgerRow } from "../contract";

// Where the bytes of each memory go.
export function Ledger({ rows }: { rows: LedgerRow[] }): ReactNode {
  return (
    <div className="wb-ledger">
      {rows.map((row) => (
        <Memory key={row.name} row={row} />
      ))}
    </div>
  );
}

function Memory({ row }: { row: LedgerRow }): ReactNode {
  const { name, capacity, over, parts, left } = row;
  const total = Math.max(1, parts.reduce((sum, part) => sum + part.share, 0));
  return (
    <figure className={over ? "wb-memory wb-memory-over" : "wb-memory"}>
      <figcaption>
        <b>{name}</b> <span>{capacity}</span>
        <em>{left}</em>
      </figcaption>
      <div className="wb-memory-bar" aria-hidden="true">
        {parts.map((part, index) => (
          <i key={part.name} className={`wb-shade-${index % 6}`} style={{ width: `${(100 * part.share) / total}%` }} />
        ))}
      </div>
      <ul>
        {parts.map((part, index) => (
          <li key={part.name} title={part.note}>
            <i className={`wb-shade-${index % 6}`} aria-hidden="true" />
            {part.name} <b>{part.size}</b>
          </li>
        ))}
      </ul>
    </figure>
  );
}
