import { memo, useMemo, useRef, useState, type KeyboardEvent, type ReactNode } from "react";

import type { Model } from "./contract";
import { Explored } from "./explore/Explored";
import { Point } from "./explore/Point";
import { BenchContext, useBench, useHeld, useTalk, useTrait, useWidth } from "./hooks";
import { Code } from "./parts/Code";
import { Curves } from "./parts/Curves";
import { Explain } from "./parts/Explain";
import { Figures } from "./parts/Figures";
import { Lanes } from "./parts/Lanes";
import { Live } from "./parts/Live";
import { Notice } from "./parts/Notice";
import { Settings } from "./parts/Settings";
import { Variants } from "./parts/Variants";
import type { Samples } from "./samples";
import type { Talk } from "./talk";
import { travelOf } from "./wiring/travel";
import { Wiring } from "./wiring/Wiring";

const PARTS: Record<string, () => ReactNode> = {
  wiring: Wiring,
  code: Code,
  settings: Settings,
  figures: Figures,
  curves: Curves,
  lanes: Lanes,
  explain: Explain,
  variants: Variants,
  live: Live,
  explored: Explored,
  point: Point,
};
const WIDE = ["wiring", "variants", "lanes", "live"]; // as wide as the view; the others stand in two columns
const SIDE = ["code", "settings", "explain", "point"];
const ROOM = 900; // pixels from which on there are two columns

interface Props {
  model: Model;
  talk: Talk;
  samples: Samples;
}

export function Builder({ model, talk, samples }: Props): ReactNode {
  const [said, setSaid] = useState("");
  const times = useRef(0);
  const bench = useMemo(() => {
    const announce = (text: string): void => {
      times.current += 1;
      setSaid(times.current % 2 ? text : `${text}\u00a0`); // the same words twice are said twice
    };
    return { model, talk, samples, announce };
  }, [model, talk, samples]);
  return (
    <BenchContext value={bench}>
      <View said={said} />
    </BenchContext>
  );
}

function View({ said }: { said: string }): ReactNode {
  const { talk } = useBench();
  const open = useTalk((state) => state.open);
  const held = useHeld();
  const wired = useTrait("parts").includes("wiring");
  const key = (event: KeyboardEvent): void => {
    event.stopPropagation(); // keys that are pressed here mean nothing to the notebook around
    const where = held || !wired ? null : travelOf(event);
    if (!where) return;
    talk.travel(where);
    event.preventDefault();
  };
  return (
    <div className="wb-builder" data-lm-suppress-shortcuts="true" aria-busy={open} onKeyDown={key}>
      <Notice />
      <Parts />
      <div className="wb-unseen" role="status" aria-live="polite">
        {said}
      </div>
    </div>
  );
}

// The narrow parts stand together where the first of them is named. What the view around says draws none of them anew.
const Parts = memo(function Parts(): ReactNode {
  const names = useTrait("parts").filter((name) => name in PARTS);
  const narrow = names.filter((name) => !WIDE.includes(name));
  const first = narrow[0] === undefined ? names.length : names.indexOf(narrow[0]);
  const wide = names.filter((name) => WIDE.includes(name));
  return (
    <>
      {wide.filter((name) => names.indexOf(name) < first).map((name) => (
        <Part key={name} name={name} />
      ))}
      {narrow.length > 0 && <Columns names={narrow} />}
      {wide.filter((name) => names.indexOf(name) > first).map((name) => (
        <Part key={name} name={name} />
      ))}
    </>
  );
});

// Two columns where there is room; else the parts in their order.
function Columns({ names }: { names: string[] }): ReactNode {
  const place = useRef<HTMLDivElement>(null);
  const width = useWidth(place);
  const side = names.filter((name) => SIDE.includes(name));
  const main = names.filter((name) => !SIDE.includes(name));
  const two = width >= ROOM && side.length > 0 && main.length > 0;
  return (
    <div ref={place} className={two ? "wb-columns wb-columns-two" : "wb-columns"}>
      {(two ? [side, main] : [names]).map((column) => (
        <div className="wb-column" key={column.join()}>
          {column.map((name) => (
            <Part key={name} name={name} />
          ))}
        </div>
      ))}
    </div>
  );
}

function Part({ name }: { name: string }): ReactNode {
  const Drawn = PARTS[name]!;
  return <Drawn />;
}
