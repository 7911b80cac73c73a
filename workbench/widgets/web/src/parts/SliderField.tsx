import { useEffect, useId, useRef, useState, type ReactNode } from "react";

import type { Slider } from "../contract";
import { useBench, useWaits } from "../hooks";

const REST = 250; // ms without a move until a slider moved by keys is said to rest

// A slider over given steps. While it moves its newest step is sent, and once more when it rests.
export function SliderField({ control }: { control: Slider }): ReactNode {
  const { talk } = useBench();
  const id = useId();
  const [held, setHeld] = useState<number | null>(null); // until Python has answered, who may refuse it
  const timer = useRef<ReturnType<typeof setTimeout>>(undefined);
  const pressed = useRef(false);
  const { name, label, at, steps, note } = control;
  const waits = useWaits(name);
  useEffect(() => {
    if (!waits && !pressed.current) setHeld(null);
  }, [waits, held]);
  useEffect(() => () => clearTimeout(timer.current), []);

  const send = (value: number, rest: boolean): void => talk.newest(name, { do: "set", name, value, rest });
  const slide = (value: number): void => {
    setHeld(value);
    send(value, false);
    clearTimeout(timer.current);
    if (!pressed.current) timer.current = setTimeout(() => send(value, true), REST);
  };
  const release = (): void => {
    pressed.current = false;
    if (held !== null) send(held, true);
  };
  const value = held ?? at;
  const words = steps[value] ?? "";
  const share = steps.length > 1 ? value / (steps.length - 1) : 0;
  return (
    <div className="wb-slider">
      <label className="wb-label" htmlFor={id}>
        {label}
      </label>
      <output htmlFor={id}>{words}</output>
      <input
        id={id}
        type="range"
        min={0}
        max={steps.length - 1}
        step={1}
        value={value}
        disabled={steps.length < 2}
        aria-valuetext={words}
        style={{ "--wb-at": `${100 * share}%` } as object}
        onPointerDown={() => (pressed.current = true)}
        onPointerUp={release}
        onPointerCancel={release}
        onChange={(event) => slide(event.target.valueAsNumber)}
      />
      {note && <small>{note}</small>}
    </div>
  );
}
