import type { Pace } from "../contract";
import { roughly } from "../format";

// How long so many runs under each of some schedules take: as simulated, or at the pace of the last run.
export function sweepTime(takes: Record<string, number>, schedules: string[], points: number, pace: Pace | null): string {
  const runs = points * schedules.length;
  const known = schedules.flatMap((name) => takes[name] ?? []);
  if (runs === 0) return "";
  if (known.length === 0) return `${runs} runs; the first tells how long they take`;
  const usual = known.reduce((sum, seconds) => sum + seconds, 0) / known.length;
  if (pace === null) return `about ${roughly(runs * usual)} for ${runs} runs, as simulated`;
  const times = pace.slower < 10 ? pace.slower.toFixed(1) : pace.slower.toFixed(0);
  const whole = runs * (pace.start + pace.slower * usual);
  return `about ${roughly(whole)} for ${runs} runs, at the pace of the last one: ${roughly(pace.start)} to start, then ${times} times as long as simulated`;
}
