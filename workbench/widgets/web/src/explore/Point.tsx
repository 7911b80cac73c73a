import type { ReactNode } from "react";

import { useTrait } from "../hooks";
import { Panel } from "../parts/Panel";
import { capital } from "../wiring/words";

// The chosen point: its numbers, and what limits it or why it was set aside.
export function Point(): ReactNode {
  const { title, numbers, sentences, problem, busy } = useTrait("point");
  return (
    <Panel title="The chosen point" name="point" beside={busy && <span className="wb-sample">computing…</span>}>
      <p className="wb-point-title">{title}</p>
      {problem && <p className="wb-point-why">{problem}</p>}
      <ul className="wb-sentences">
        {sentences.map((sentence) => (
          <li key={sentence}>{sentence}</li>
        ))}
      </ul>
      <dl className="wb-numbers">
        {numbers.map(([meaning, text]) => (
          <div key={meaning}>
            <dt>{capital(meaning)}</dt>
            <dd>{text}</dd>
          </div>
        ))}
      </dl>
    </Panel>
  );
}
