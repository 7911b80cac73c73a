// The scenario that a saved picture holds, as Python tells it and reads it back with `scenario_in`.

import type { Model } from "../contract";
import type { Talk } from "../talk";

export const KEY = "moe-workbench scenario"; // of the text in a PNG
export const ID = "moe-workbench-scenario"; // of the element in an SVG and in a page
const PATIENCE = 3000; // ms without an answer until the picture is saved without it

// Ask Python for the scenario, in base64; "" where it cannot be, or where no answer comes.
export function kept(model: Model, talk: Talk): Promise<string> {
  return new Promise((resolve) => {
    const done = (told: string): void => {
      clearTimeout(timer);
      model.off("msg:custom", listen);
      resolve(told);
    };
    const listen = (message: { kept?: string }): void => {
      if (message.kept !== undefined) done(message.kept);
    };
    const timer = setTimeout(() => done(""), PATIENCE);
    model.on("msg:custom", listen);
    talk.send({ do: "keep" });
    if (talk.snapshot().gone) done("");
  });
}

// The text behind base64.
export function unpacked(told: string): string {
  return new TextDecoder().decode(Uint8Array.from(atob(told), (letter) => letter.charCodeAt(0)));
}
