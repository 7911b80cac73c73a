// The picture as a file, made and kept in the browser.

import type { Control, Figures, Settings, Traits, Wiring } from "../contract";
import { mainRow } from "../parts/rows";
import { ID, KEY, unpacked } from "./kept";
import { type Colours, escaped, picture } from "./picture";
import { withText } from "./png";

const SCALE = 2; // pixels of a PNG per pixel of the picture
const TOKENS: Record<keyof Colours, string> = {
  ink: "--wb-ink",
  ink2: "--wb-ink-2",
  ink3: "--wb-ink-3",
  hair: "--wb-hair",
  tint: "--wb-tint",
  surface: "--wb-surface",
  raised: "--wb-raised",
  line: "--wb-line",
  gpu: "--wb-gpu",
  cpu: "--wb-cpu",
};

export type Kind = "svg" | "png" | "html" | "json";
type Drawn = Pick<Traits, "code" | "settings" | "figures"> & { wiring: Wiring; kept: string };

export async function save(kind: Kind, near: HTMLElement, drawn: Drawn): Promise<void> {
  if (kind === "json") {
    if (!drawn.kept) throw new Error("the settings make no scenario that a file can hold, or the kernel does not answer");
    return download(new Blob([unpacked(drawn.kept)], { type: "application/json" }), "pipeline.json");
  }
  const told = { headline: headline(drawn), code: drawn.code.text, settings: Object.fromEntries(valuesOf(drawn.settings)) };
  const colours = coloursOf(near);
  if (kind === "svg") {
    const svg = picture(drawn.wiring, { ...told, kept: drawn.kept }, colours);
    return download(new Blob([svg], { type: "image/svg+xml" }), "pipeline.svg");
  }
  const svg = picture(drawn.wiring, { ...told, kept: "" }, colours);
  if (kind === "html") return download(new Blob([page(svg, drawn)], { type: "text/html" }), "pipeline.html");
  const described = withText(await rastered(svg), "Description", `${told.code}\n\n${JSON.stringify({ settings: told.settings })}\n`);
  const png = drawn.kept ? withText(described, KEY, unpacked(drawn.kept)) : described;
  return download(new Blob([png as BlobPart], { type: "image/png" }), "pipeline.png");
}

// What the names of the theme's colours stand for now.
function coloursOf(near: HTMLElement): Colours {
  const probe = document.createElement("i");
  near.append(probe);
  const read = (token: string): string => {
    probe.style.color = `var(${token})`;
    return plain(getComputedStyle(probe).color);
  };
  const colours = Object.fromEntries(Object.entries(TOKENS).map(([name, token]) => [name, read(token)]));
  probe.remove();
  return colours as unknown as Colours;
}

// A mixed colour as #rrggbb, which every reader of SVG knows.
function plain(colour: string): string {
  const canvas = document.createElement("canvas");
  canvas.width = canvas.height = 1;
  const pen = canvas.getContext("2d")!;
  pen.fillStyle = "#fff";
  pen.fillRect(0, 0, 1, 1);
  pen.fillStyle = colour;
  pen.fillRect(0, 0, 1, 1);
  const [red, green, blue] = pen.getImageData(0, 0, 1, 1).data;
  return `#${[red, green, blue].map((part) => part!.toString(16).padStart(2, "0")).join("")}`;
}

async function rastered(svg: string): Promise<Uint8Array> {
  const image = new Image();
  image.src = `data:image/svg+xml;charset=utf-8,${encodeURIComponent(svg)}`;
  await image.decode();
  const canvas = document.createElement("canvas");
  canvas.width = image.naturalWidth * SCALE;
  canvas.height = image.naturalHeight * SCALE;
  canvas.getContext("2d")!.drawImage(image, 0, 0, canvas.width, canvas.height);
  const blob = await new Promise<Blob>((resolve, reject) =>
    canvas.toBlob((made) => (made ? resolve(made) : reject(new Error("the picture is too large for a PNG"))), "image/png"),
  );
  return new Uint8Array(await blob.arrayBuffer());
}

// "mixtral-8x7b on A40, 16 GB of it, VSLPipe: 631 output tokens/s (simulated)".
function headline({ settings, figures }: Drawn): string {
  const controls = settings.groups.flatMap((group) => group.controls);
  const [model, machine, schedule] = ["model", "machine", "schedule"].map((name) => {
    const control = controls.find((each) => each.name === name);
    return control ? valueOf(control) : "";
  });
  const row = mainRow(figures.rows);
  const rate = row ? `: ${row.gen_tok_s} output tokens/s (${[row.source, figures.sample].filter(Boolean).join(", ")})` : "";
  return `${model} on ${machine}, ${schedule}${rate}`;
}

function valuesOf({ groups }: Settings): [string, string][] {
  return groups.flatMap(({ controls }) => controls.map((control): [string, string] => [control.label, valueOf(control)]));
}

function valueOf(control: Control): string {
  if (control.kind === "slider") return control.steps[control.at] ?? "";
  if (control.kind === "flag") return control.value ? "yes" : "no";
  return control.options.find((option) => option.value === control.value)?.label ?? control.value;
}

const STYLE = "body{font:14px/1.5 system-ui,sans-serif;max-width:1200px;margin:24px auto;padding:0 16px;color:#1b1f24;background:#fff}svg{max-width:100%;height:auto}pre{background:#f4f5f6;padding:12px;overflow:auto}table{border-collapse:collapse}td,th{padding:3px 12px 3px 0;text-align:left;font-weight:400}";

function page(svg: string, drawn: Drawn): string {
  const rows = (cells: string[][]): string =>
    cells.map((row) => `<tr>${row.map((cell) => `<td>${escaped(cell)}</td>`).join("")}</tr>`).join("\n");
  return [
    `<!doctype html><html lang="en"><meta charset="utf-8"><title>${escaped(headline(drawn))}</title><style>${STYLE}</style>`,
    svg,
    `<pre>${escaped(drawn.code.text)}</pre>`,
    `<h2>Figures</h2><table>${rows(figureRows(drawn.figures))}</table>`,
    `<h2>Settings</h2><table>${rows(valuesOf(drawn.settings))}</table>`,
    `<script type="text/plain" id="${ID}">${drawn.kept}</script></html>\n`,
  ].join("\n");
}

function figureRows({ rows }: Figures): string[][] {
  const known = rows.filter((row) => !row.why);
  return known.map((row) => [row.name, row.source, `${row.gen_tok_s} output tokens/s`, row.limited && `limited by ${row.limited}`]);
}

function download(blob: Blob, name: string): void {
  const link = document.createElement("a");
  link.href = URL.createObjectURL(blob);
  link.download = name;
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 10_000);
}
