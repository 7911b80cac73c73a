import { createRoot } from "react-dom/client";

import { Builder } from "./Builder";
import type { Model } from "./contract";
import { Samples } from "./samples";
import { Talk } from "./talk";
import "./styles/index.css";

interface Given {
  model: Model;
  el: HTMLElement;
}

// One conversation and one history of samples per widget; a root per view.
export default () => {
  let shared: { talk: Talk; samples: Samples } | undefined;
  return {
    initialize({ model }: { model: Model }) {
      shared = { talk: new Talk(model), samples: new Samples(model) };
      shared.talk.send({ do: "ready" });
    },
    render({ model, el }: Given) {
      const { talk, samples } = shared!;
      const root = createRoot(el, { identifierPrefix: `wb${crypto.getRandomValues(new Uint32Array(1))[0]}` });
      root.render(<Builder model={model} talk={talk} samples={samples} />);
      return () => root.unmount();
    },
  };
};
