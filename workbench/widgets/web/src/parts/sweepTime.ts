import { roughly } from "../format";

// How long so many runs under each of some schedules take: as simulated, as far as that is known.
export function sweepTime(takes: Record<string, number>, schedules: string[], points: number): string {
  const runs = points * schedules.length;
  const known = schedules.flatMap((name) => takes[name] ?? []);
  if (runs === 0) return "";
  if (known.length === 0) return `${runs} runs; the first tells how long they take`;
  const usual = known.reduce((sum, seconds) => sum + seconds, 0) / known.length;
  return `about ${roughly(runs * usual)} for ${runs} runs, as simulated`;
}
