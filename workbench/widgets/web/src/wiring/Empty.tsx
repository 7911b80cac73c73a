import type { ReactNode } from "react";

import type { Mend, Wiring } from "../contract";

interface Props {
  presets: Wiring["presets"];
  mends: Mend[];
  onOpen: (name: string) => void;
  onMend: (mend: Mend) => void;
}

// An empty canvas: how to begin.
export function Empty({ presets, mends, onOpen, onMend }: Props): ReactNode {
  return (
    <div className="wb-empty">
      <div>
        <p>
          <b>Nothing is wired yet.</b> Drag operations from the list below onto the lane of the GPU or of the CPU, in the order
          of the data. Transfers follow by themselves.
        </p>
        <Row label="Begin">
          {mends.map((mend) => (
            <button key={mend.id} type="button" className="wb-button wb-button-strong" onClick={() => onMend(mend)}>
              {mend.label}
            </button>
          ))}
        </Row>
        <Row label="Open">
          {presets.map(({ name, label }) => (
            <button key={name} type="button" className="wb-button" onClick={() => onOpen(name)}>
              {label}
            </button>
          ))}
        </Row>
      </div>
    </div>
  );
}

function Row({ label, children }: { label: string; children: ReactNode[] }): ReactNode {
  if (children.length === 0) return null;
  return (
    <div className="wb-empty-row">
      <span>{label}</span>
      <div>{children}</div>
    </div>
  );
}
