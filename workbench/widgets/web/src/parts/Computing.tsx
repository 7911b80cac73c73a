import type { ReactNode } from "react";

import { useHeld } from "../hooks";

// Says that figures or curves are not complete; while a run goes on, its cores are not theirs.
export function Computing(): ReactNode {
  const held = useHeld();
  return <span className="wb-sample">{held ? "the rest is computed after the run" : "computing…"}</span>;
}
