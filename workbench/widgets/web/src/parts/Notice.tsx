import type { ReactNode } from "react";

import { useTalk } from "../hooks";

// What stands between the user and an answer.
export function Notice(): ReactNode {
  const busy = useTalk((state) => state.busy);
  const gone = useTalk((state) => state.gone);
  const text = gone
    ? "The kernel was restarted or has ended: run the cell again. What is shown is the last state."
    : busy
      ? "The kernel is busy, with a running cell perhaps. What you changed follows as soon as it answers."
      : "";
  return (
    <div role="status" aria-live="polite" className="wb-notice-place">
      {text && <p className={`wb-notice${gone ? " wb-notice-gone" : ""}`}>{text}</p>}
    </div>
  );
}
