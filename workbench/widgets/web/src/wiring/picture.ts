// The wiring as an SVG file: the same layout, in plain colours, with the code of the pipeline inside.

import type { Wiring } from "../contract";
import { bytes, flops, percent, seconds } from "../format";
import { ID } from "./kept";
import { type Box, CARD, layout, type Layout, wirePath } from "./layout";
import { storedWord } from "./words";

export interface Colours {
  ink: string;
  ink2: string;
  ink3: string;
  hair: string;
  tint: string;
  surface: string;
  raised: string;
  line: string;
  gpu: string;
  cpu: string;
}

const TITLE = 26;

export function escaped(text: string): string {
  return text.replace(/&/g, "&amp;").replace(/</g, "&lt;").replace(/>/g, "&gt;").replace(/"/g, "&quot;");
}

// What a picture says beside the wiring.
export interface Told {
  headline: string;
  code: string; // the file's description
  settings: Record<string, string>; // their values by their labels
  kept: string; // the scenario in base64
}

// Draw every range, one below the other.
export function picture(wiring: Wiring, { headline, code, settings, kept }: Told, colours: Colours): string {
  const widest = Math.max(...wiring.ranges.map((range) => layout(range, null).width));
  const drawn = wiring.ranges.map((range) => ({ title: range.title, picture: layout(range, null, widest) }));
  const width = widest + 24;
  let y = 12 + TITLE;
  const parts = drawn.map(({ title, picture: each }) => {
    const at = y;
    y += TITLE + each.height + 10;
    return `<g transform="translate(12 ${at})">${text(0, 14, title, colours.ink2, 13)}<g transform="translate(0 ${TITLE})">${one(each, colours)}</g></g>`;
  });
  const height = y + 2;
  return [
    `<svg xmlns="http://www.w3.org/2000/svg" width="${width}" height="${height}" viewBox="0 0 ${width} ${height}" font-family="system-ui, -apple-system, 'Segoe UI', 'DejaVu Sans', sans-serif">`,
    `<title>${escaped(headline)}</title>`,
    `<desc>${escaped(code)}</desc>`,
    `<metadata>${escaped(JSON.stringify({ code, settings }))}</metadata>`,
    ...(kept ? [`<metadata id="${ID}">${kept}</metadata>`] : []),
    rect({ x: 0, y: 0, width, height }, colours.surface, "none", 0),
    text(12, 26, headline, colours.ink, 13, "start", 650),
    ...parts,
    "</svg>\n",
  ].join("\n");
}

function one(picture: Layout, colours: Colours): string {
  return [
    ...lanes(picture, colours),
    ...picture.forks.flatMap((fork) => fork.boxes).map((box) => rect(box, colours.hair, colours.ink3, 10, ' fill-opacity="0.5" stroke-dasharray="3 3"')),
    ...picture.streams.map(({ x, top, bottom, label, bytes: size, chosen }) =>
      [
        `<path d="M${x} ${bottom}V${top + 7}" stroke="${colours.ink3}" stroke-width="1.5" stroke-dasharray="2 3"/>`,
        `<path d="M${x} ${top + 1}l-3.5 7h7Z" fill="${colours.ink3}"/>`,
        rect({ x: label.x - 37, y: label.y - 9, width: 74, height: 18 }, colours.surface, colours.hair, 9),
        text(label.x, label.y + 4, `${chosen ? "≤ " : ""}${size === null ? "weights" : bytes(size)}`, colours.ink2, 11, "middle"),
      ].join(""),
    ),
    ...wires(picture, colours),
    ...picture.ports.map(({ x, y }) =>
      `<circle cx="${x}" cy="${y}" r="7.5" fill="${colours.surface}" stroke="${colours.ink3}"/>${text(x, y + 3.5, "x", colours.ink2, 10, "middle")}`,
    ),
    ...picture.cards.map((card) => cardPicture(card, colours)),
  ].join("\n");
}

function lanes({ lanes: all, link }: Layout, colours: Colours): string[] {
  const lane = (box: Box, name: string, memory: string): string => {
    const middle = box.y + box.height / 2;
    const words = text(14, middle, name, colours.ink, 15, "start", 650) + text(14, middle + 17, memory, colours.ink2, 11.5);
    return rect(box, colours.tint, colours.hair, 8) + words;
  };
  return [lane(all.gpu, "GPU", "memory"), lane(all.cpu, "CPU", "memory"), text(14, link.y + link.height / 2 + 4, "link", colours.ink2, 11.5)];
}

function wires(picture: Layout, colours: Colours): string[] {
  const ends = new Map<string, { left: number; right: number; y: number }>();
  for (const { key, box } of picture.cards) ends.set(key, { left: box.x, right: box.x + box.width, y: box.y + box.height / 2 });
  for (const { key, x, y } of picture.ports) ends.set(key, { left: x - 8, right: x + 8, y });
  const lines = picture.wires.map((wire) => {
    const [from, to] = [ends.get(wire.from)!, ends.get(wire.to)!];
    const path = wirePath(wire, { x: from.right, y: from.y }, { x: to.left, y: to.y });
    const strong = wire.kind === "transfer";
    const colour = strong ? colours.ink2 : colours.ink3;
    const dashes = wire.kind === "missing" ? ' stroke-dasharray="5 4"' : "";
    const line = `<path d="${path}" fill="none" stroke="${colour}" stroke-width="${strong ? 2 : 1.25}"${dashes}/>`;
    return `${line}<path d="M${to.left} ${to.y}l-7 -3.5v7Z" fill="${colour}"/>`;
  });
  const labels = picture.wires.flatMap(({ move, label }) => {
    if (!move || !label) return [];
    const what = `${move.target === "gpu" ? "↑" : "↓"} ${move.carries}`;
    const cost = [move.bytes === null ? "" : bytes(move.bytes), move.seconds === null ? "" : seconds(move.seconds)];
    const rows = [...twoLines(what, 21), cost.filter(Boolean).join(" · ")];
    const width = Math.min(150, Math.max(70, 6.4 * Math.max(...rows.map((row) => row.length)) + 12));
    const height = 15 * rows.length + 6;
    const top = label.y - height / 2;
    const box = rect({ x: label.x - width / 2, y: top, width, height }, colours.raised, colours.ink3, 6);
    const said = rows.map((row, index) => {
      const last = index + 1 === rows.length;
      return text(label.x, top + 15 * (index + 1), row, last ? colours.ink2 : colours.ink, 11, "middle", last ? 400 : 600);
    });
    return [box, ...said];
  });
  return [...lines, ...labels];
}

function cardPicture({ element, box }: Layout["cards"][number], colours: Colours): string {
  const { x, y } = box;
  const device = colours[element.device];
  const share = Math.min(1, element.share ?? 0);
  const known = element.weights ? `${bytes(element.weights)} ${storedWord(element).split(" ")[0]}` : "no weights";
  const stored = element.weights === null ? "" : known;
  const rows = element.rows === "all" || element.name.includes(element.rows) ? "" : ` (${element.rows})`;
  const name = `${element.name}${rows}${element.shared ? " + shared" : ""}`;
  return [
    rect(box, colours.raised, colours.line, 7),
    `<path d="M${x + 3} ${y + 1}v${CARD.height - 2}" stroke="${device}" stroke-width="3"/>`,
    text(x + 10, y + 20, clipped(name, 20), colours.ink, 12, "start", 650),
    text(x + 10, y + 40, element.seconds === null ? "–" : seconds(element.seconds), colours.ink, 14, "start", 550),
    element.share === null ? "" : text(x + CARD.width - 10, y + 40, percent(element.share), colours.ink2, 11.5, "end"),
    rect({ x: x + 10, y: y + 46, width: CARD.width - 20, height: 3 }, colours.hair, "none", 1.5),
    rect({ x: x + 10, y: y + 46, width: (CARD.width - 20) * share, height: 3 }, device, "none", 1.5),
    text(x + 10, y + 66, stored, colours.ink2, 11),
    element.flops === null ? "" : text(x + 10, y + 81, flops(element.flops), colours.ink2, 11),
  ].join("");
}

// Words in one line, or in two where they are longer.
function twoLines(words: string, most: number): string[] {
  const space = words.lastIndexOf(" ", most);
  if (words.length <= most || space < 0) return [clipped(words, most)];
  return [words.slice(0, space), clipped(words.slice(space + 1), most)];
}

function clipped(words: string, most: number): string {
  return words.length > most ? `${words.slice(0, most - 1)}…` : words;
}

function rect({ x, y, width, height }: Box, fill: string, stroke: string, radius: number, more = ""): string {
  return `<rect x="${x}" y="${y}" width="${width}" height="${height}" rx="${radius}" fill="${fill}" stroke="${stroke}"${more}/>`;
}

function text(x: number, y: number, words: string, fill: string, size: number, anchor = "start", weight = 400): string {
  return `<text x="${x}" y="${y}" fill="${fill}" font-size="${size}" text-anchor="${anchor}" font-weight="${weight}">${escaped(words)}</text>`;
}
