import type { ReactNode } from "react";

import type { Field } from "../contract";
import { useBench, useTrait } from "../hooks";
import { Choice } from "../parts/Choice";
import { Panel } from "../parts/Panel";
import { capital } from "../wiring/words";
import type { Explored as ExploredTrait } from "./contract";
import { Colours, HeatMap } from "./HeatMap";
import { Lines, Names } from "./Lines";
import { useCells } from "./useCells";
import { cellWords } from "./words";

const HINT = "Point at a value to read it. A click chooses it; so do the arrow keys and Enter.";
const NONE = { value: "", label: "nothing (curves)", why: "" };

// Curves over one axis, or a heat map over two.
export function Explored(): ReactNode {
  const explored = useTrait("explored");
  const cells = useCells(explored);
  const { kind, value, best, problem } = explored;
  const { shown, told } = cells;
  return (
    <Panel title={capital(value.label)} name="explored" beside={<Progress explored={explored} />}>
      <Axes explored={explored} />
      {kind === "map" ? <Colours explored={explored} /> : <Names explored={explored} column={shown[1]} />}
      {kind === "map" ? <HeatMap explored={explored} cells={cells} /> : <Lines explored={explored} cells={cells} />}
      <p className="wb-reading-at">{told ? cellWords(explored, ...shown) : HINT}</p>
      {problem && <p className="wb-wrong">{problem}</p>}
      {best && (
        <button type="button" className="wb-button" onClick={() => cells.choose(...best)}>
          Choose the best
        </button>
      )}
    </Panel>
  );
}

function Progress({ explored: { busy, read, of } }: { explored: ExploredTrait }): ReactNode {
  if (!busy) return <span className="wb-sample">{of} points</span>;
  return (
    <span className="wb-sample">
      computing, {read} of {of} points…
    </span>
  );
}

// Choosers of what is drawn, and over which axes.
function Axes({ explored }: { explored: ExploredTrait }): ReactNode {
  const { talk } = useBench();
  const { kind, value, values, x, y, axes, together } = explored;
  const send = (name: "x" | "y" | "value") => (chosen: string) => talk.newest(name, { do: name, name: chosen });
  const options = (fields: Field[]) => fields.map((field) => ({ ...field, why: "" }));
  return (
    <div className="wb-axes">
      <Choice inline control={{ label: "Show", value: value.name, options: options(values) }} onChoose={send("value")} />
      <Choice inline control={{ label: "over", value: x.name, options: options(axes) }} onChoose={send("x")} />
      {!together && axes.length > 1 && (
        <Choice inline control={{ label: "and", value: kind === "map" ? y!.name : "", options: [NONE, ...options(axes)] }} onChoose={send("y")} />
      )}
    </div>
  );
}
