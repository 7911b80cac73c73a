// The wiring in words, for readers of screens and for tips.

import type { CardElement, Device, MoveElement } from "../contract";
import { bytes, flops, percent, seconds } from "../format";

const NAMES = { gpu: "GPU", cpu: "CPU" };

export function deviceName(device: Device): string {
  return NAMES[device];
}

export function capital(words: string): string {
  return words.charAt(0).toUpperCase() + words.slice(1);
}

export function storedWord(card: CardElement): string {
  if (card.stored === "streamed") return "streamed to the GPU";
  if (card.stored === "chosen") return "chosen experts fetched";
  return card.stored;
}

// "decode_attention on the CPU, 1.2 ms, 34 % of the CPU's time".
export function cardWords(card: CardElement): string {
  const on = NAMES[card.device];
  const said = [`${card.name} on the ${on}`];
  if (card.shared) said.push("with the shared experts, which have no card of their own");
  if (card.rows !== "all" && !card.name.includes(card.rows)) said.push(`${card.rows} rows`);
  if (card.seconds !== null) said.push(seconds(card.seconds));
  if (card.share !== null) said.push(`${percent(card.share)} of the ${on}'s time`);
  if (card.weights) said.push(`weights ${bytes(card.weights)}${card.stored && ` ${storedWord(card)}`}`);
  if (card.flops) said.push(flops(card.flops));
  return said.join(", ");
}

export function moveWords(move: MoveElement): string {
  const size = move.bytes === null ? "" : `, ${bytes(move.bytes)}`;
  const time = move.seconds === null ? "" : `, ${seconds(move.seconds)}`;
  return `${move.carries || "transfer"} to the ${NAMES[move.target]}${size}${time}`;
}
