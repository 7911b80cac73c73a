import { useEffect, useRef, useState, type ReactNode } from "react";

import type { CardElement, Device, Option } from "../contract";
import { useLeave } from "../hooks";
import { other, type Place } from "./chain";
import { deviceName } from "./words";

interface Props {
  card: CardElement;
  next: Place | null; // its neighbour, with which it could lie side by side
  at: { left: number; top: number };
  onOption: (name: string, value: number | string) => void;
  onPlace: (device: Device) => void;
  onStep: (step: 1 | -1) => void;
  onFork: () => void;
  onRemove: () => void;
  onClose: (back: boolean) => void;
}

const LABELS: Record<string, string> = { defer: "defer experts", skip: "skip experts", fetch: "weights", experts: "experts", rows: "rows" };

// What can be done with one card.
export function Options({ card, next, at, onOption, onPlace, onStep, onFork, onRemove, onClose }: Props): ReactNode {
  const place = useRef<HTMLDivElement>(null);
  useLeave(place, true, () => onClose(false));
  useEffect(() => place.current?.querySelector<HTMLElement>("input, select, button")?.focus(), []);
  const across = other(card.device);
  const acts: [string, string, () => void][] = [
    [`Move to the ${deviceName(across)}`, across === "cpu" ? "↓" : "↑", () => onPlace(across)],
    ["Earlier", "Alt ←", () => onStep(-1)],
    ["Later", "Alt →", () => onStep(1)],
  ];
  if (next) acts.push([`Side by side with ${next.kind === "card" ? next.name : "the fork"}`, "F", onFork]);
  acts.push(["Remove", "Del", onRemove]);
  return (
    <div
      ref={place}
      className="wb-pop wb-options"
      role="dialog"
      aria-label={`Options of ${card.name}`}
      style={at}
      onKeyDown={(event) => {
        if (event.key !== "Escape") return;
        onClose(true);
        event.preventDefault();
      }}
    >
      <p className="wb-options-about">
        <b>{card.name}</b> {card.about}
      </p>
      {card.options.map((option) => (
        <OptionField key={option.name} option={option} onOption={onOption} />
      ))}
      <div className="wb-options-acts">
        {acts.map(([words, keys, act]) => (
          <button
            key={words}
            type="button"
            onClick={() => {
              onClose(true);
              act();
            }}
          >
            {words} <kbd aria-hidden="true">{keys}</kbd>
          </button>
        ))}
      </div>
    </div>
  );
}

// A text that is taken when Enter is pressed or the field is left.
function FreeText({ option, onOption }: { option: Option; onOption: Props["onOption"] }): ReactNode {
  const [typed, setTyped] = useState(String(option.value));
  useEffect(() => setTyped(String(option.value)), [option.value]);
  const take = (): void => {
    if (typed.trim() && typed !== String(option.value)) onOption(option.name, typed.trim());
  };
  return (
    <input
      type="text"
      spellCheck={false}
      value={typed}
      placeholder="all, :32 or ~:32"
      onChange={(event) => setTyped(event.target.value)}
      onBlur={take}
      onKeyDown={(event) => event.key === "Enter" && take()}
    />
  );
}

function OptionField({ option, onOption }: { option: Option; onOption: Props["onOption"] }): ReactNode {
  const label = option.label ?? LABELS[option.name] ?? option.name;
  return (
    <label className="wb-option">
      <span>{label}</span>
      {option.free ? (
        <FreeText option={option} onOption={onOption} />
      ) : option.choices ? (
        <select value={option.value} onChange={(event) => onOption(option.name, event.target.value)}>
          {option.choices.map((choice) => (
            <option key={choice} value={choice}>
              {choice}
            </option>
          ))}
        </select>
      ) : (
        <input
          type="number"
          min={0}
          max={option.most}
          value={option.value}
          onChange={(event) => {
            const value = event.target.valueAsNumber;
            if (Number.isInteger(value) && value >= 0 && value <= (option.most ?? value)) onOption(option.name, value);
          }}
        />
      )}
    </label>
  );
}
