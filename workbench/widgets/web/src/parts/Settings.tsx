import type { ReactNode } from "react";

import type { Control, Live } from "../contract";
import { useBench, useHeld, useOf, useTrait } from "../hooks";
import { Choice } from "./Choice";
import { Panel } from "./Panel";
import { SliderField } from "./SliderField";

const ENDED: Live["state"][] = ["finished", "stopped", "failed"];

export function Settings(): ReactNode {
  const { groups } = useTrait("settings");
  const held = useHeld();
  const ended = useOf("live", (live: Live | undefined) => (live && ENDED.includes(live.state) && !live.stale ? "the run has ended" : ""));
  const calibrating = useOf("live", (live: Live | undefined) => String(live?.calibrating ?? false)) === "true";
  const beside = held ? `held until the ${calibrating ? "calibration" : "run"} ends` : ended;
  return (
    <Panel title="Settings" name="settings" beside={beside && <span className="wb-sample">{beside}</span>}>
      {groups.map(({ title, controls }) => (
        <fieldset key={title} className="wb-group" disabled={Boolean(held)} title={held}>
          <legend>{title}</legend>
          <div className="wb-controls">
            {controls.map((control) => (
              <Field key={control.name} control={control} />
            ))}
          </div>
        </fieldset>
      ))}
    </Panel>
  );
}

function Field({ control }: { control: Control }): ReactNode {
  const { talk } = useBench();
  const { name } = control;
  const set = (value: string | boolean): void => talk.newest(name, { do: "set", name, value, rest: true });
  if (control.kind === "slider") return <SliderField control={control} />;
  if (control.kind === "choice") return <Choice control={control} onChoose={set} />;
  return (
    <label className="wb-flag">
      <input type="checkbox" checked={control.value} onChange={(event) => set(event.target.checked)} />
      {control.label}
    </label>
  );
}
