// The samples of the live strip, kept while its views come and go. They are messages, not a trait, so that each is
// sent once.

import type { Model } from "./contract";
import strip from "../../parts/strip.js";

export class Samples {
  private readonly strip = strip();

  constructor(private readonly model: Model) {
    const on = (event: string, listener: (message: object) => void): void => {
      model.on(event, (message: object) => "samples" in message && listener(message));
    };
    const messages = { on, send: () => undefined }; // the history is sent on `ready`
    this.strip.initialize({ model: messages });
  }

  // Draw the strip of these channels into an element; the function that takes it away again.
  draw(el: HTMLElement): () => void {
    const channels = { get: () => this.model.get("live").channels };
    return this.strip.render({ model: channels, el });
  }
}
