import type { Live } from "../contract";

// What the gauges are of: the run that goes on, or the last one.
export function runTitle(active: boolean, { ended, stale }: Pick<Live, "ended" | "stale">): string {
  if (active) return "This run";
  return ["Last run", ended && `ended at ${clock(ended)}`, stale].filter(Boolean).join(", ");
}

// "14:03", where the reader is.
function clock(seconds: number): string {
  return new Date(1000 * seconds).toLocaleTimeString("en-GB", { hour: "2-digit", minute: "2-digit" });
}
