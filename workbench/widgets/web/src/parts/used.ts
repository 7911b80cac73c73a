const BEGIN = "# Simulated; ";

// How the pipeline that some code names is simulated, as a comment behind it that holds for any name of the view.
export function used(text: string): string {
  const name = [...text.matchAll(/^(\w+) = /gm)].at(-1)?.[1];
  if (!name || text.includes(BEGIN)) return "";
  return `\n\n${BEGIN}VIEW stands for your variable of this view:\n# wb.simulate(VIEW.scenario.on(pipeline=${name}), VIEW.schedule)\n`;
}
