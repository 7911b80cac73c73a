import type { Wiring } from "../contract";

export function save(_kind: "svg" | "png" | "html", _place: HTMLElement, _wiring: Wiring, _code: string): void {}
