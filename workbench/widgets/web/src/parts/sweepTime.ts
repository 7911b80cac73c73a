import { roughly } from "../format";

// Words for how long so many runs under each of some schedules take together; what a run takes, and by what it is
// expected to, is Python's.
export function sweepTime(takes: Record<string, number>, schedules: string[], points: number, paced: string): string {
  const runs = points * schedules.length;
  const whole = points * schedules.reduce((sum, name) => sum + (takes[name] ?? NaN), 0);
  if (runs === 0) return "";
  return Number.isNaN(whole) ? `${runs} runs; the first tells how long they take` : `about ${roughly(whole)} for ${runs} runs, ${paced}`;
}
