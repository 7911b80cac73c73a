import type { ReactNode } from "react";

import { useHeld } from "../hooks";

// What is told of a rate that is simulated with a sample of the requests.
export const SAMPLE =
  "Simulated with some of the requests; where these are few, the rate is too low. At the settings that are shown all requests follow, unless that takes long.";

// Says that figures or curves are not complete; while a run goes on, its cores are not theirs.
export function Computing(): ReactNode {
  const held = useHeld();
  return <span className="wb-sample">{held ? "the rest is computed after the run" : "computing…"}</span>;
}
