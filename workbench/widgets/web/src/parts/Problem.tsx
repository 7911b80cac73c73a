import type { ReactNode } from "react";

import type { Mend } from "../contract";

interface Props {
  text: string;
  mends: Mend[];
  hint?: boolean;
  onMend: (mend: Mend) => void;
}

// One sentence on what cannot be, or as a hint on what is not there yet, and buttons that mend it.
export function Problem({ text, mends, hint = false, onMend }: Props): ReactNode {
  return (
    <div className={hint ? "wb-problem wb-problem-hint" : "wb-problem"}>
      <p>{text}</p>
      {mends.length > 0 && (
        <div className="wb-problem-mends">
          {mends.map((mend) => (
            <button key={mend.id} type="button" className="wb-button wb-button-strong" onClick={() => onMend(mend)}>
              {mend.label}
            </button>
          ))}
        </div>
      )}
    </div>
  );
}
