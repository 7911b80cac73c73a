import { useEffect, useRef, type ReactNode } from "react";

import gantt from "../../../parts/gantt.js";
import type { Lanes as LanesTrait } from "../contract";
import { useTrait } from "../hooks";
import { Panel } from "./Panel";

// The lane charts, drawn by the same code as the Gantt widget's.
export function Lanes(): ReactNode {
  const lanes = useTrait("lanes");
  const place = useRef<HTMLDivElement>(null);
  const latest = useRef(lanes);
  const redraw = useRef<(() => void) | null>(null);
  latest.current = lanes;
  useEffect(() => {
    const el = place.current!;
    const model = {
      get: (name: keyof LanesTrait) => latest.current[name],
      on: (_: string, listener: () => void) => (redraw.current = listener),
      off: () => (redraw.current = null),
    };
    const leave = gantt.render({ model, el });
    return () => {
      leave();
      el.replaceChildren();
    };
  }, []);
  useEffect(() => redraw.current?.(), [lanes]);
  return (
    <Panel title="Lanes" name="lanes">
      {lanes.tracks.length === 0 && <p className="wb-note">No timeline yet: the pipeline that is shown has not been simulated.</p>}
      <div ref={place} />
    </Panel>
  );
}
