// Parts that draw themselves with plain JavaScript, shared with the other widgets.

declare module "*/strip.js" {
  interface Strip {
    initialize(given: { model: object }): void;
    render(given: { model: object; el: HTMLElement }): () => void;
  }
  export default function strip(): Strip;
}

declare module "*/gantt.js" {
  const gantt: { render(given: { model: object; el: HTMLElement }): () => void };
  export default gantt;
}

declare module "*.css";
