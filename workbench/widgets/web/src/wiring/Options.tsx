import { useEffect, useId, useRef, useState, type ReactNode } from "react";

import type { CardElement, Device, Option } from "../contract";
import { useLeave } from "../hooks";
import { other, type Place } from "./chain";
import { deviceName } from "./words";

interface Props {
  card: CardElement;
  next: Place | null; // its neighbour, with which it could lie side by side
  refused: string; // why the last value was not taken
  at: { left: number; top: number };
  onOption: (name: string, value: number | string) => void;
  onPlace: (device: Device) => void;
  onStep: (step: 1 | -1) => void;
  onFork: () => void;
  onSplit: () => void;
  onRemove: () => void;
  onClose: (back: boolean) => void;
}

const LABELS: Record<string, string> = { defer: "defer experts", skip: "skip experts", fetch: "weights", experts: "experts", rows: "rows" };

// What can be done with one card.
export function Options({ card, next, refused, at, onOption, onPlace, onStep, onFork, onSplit, onRemove, onClose }: Props): ReactNode {
  const id = useId();
  const place = useRef<HTMLDivElement>(null);
  const last = card.options.map(({ why }, place) => card.options[place + 1]?.why !== why); // of those with one reason
  useLeave(place, true, () => onClose(false));
  useEffect(() => place.current?.querySelector<HTMLElement>("input:enabled, select:enabled, button:enabled")?.focus(), []);
  const across = other(card.device);
  const acts: [string, string, () => void][] = [
    [`Move to the ${deviceName(across)}`, across === "cpu" ? "↓" : "↑", () => onPlace(across)],
    ["Earlier", "Alt ←", () => onStep(-1)],
    ["Later", "Alt →", () => onStep(1)],
  ];
  if (card.split) acts.splice(1, 0, ["Split over both devices", "S", onSplit]);
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
      {card.options.map((option, place) => (
        <div key={option.name}>
          <OptionField option={option} reason={option.why ? `${id}${last.indexOf(true, place)}` : undefined} refused={refused} onOption={onOption} />
          {option.why && last[place] && (
            <p id={`${id}${place}`} className="wb-note wb-option-why">
              {option.why}
            </p>
          )}
        </div>
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

interface FieldProps {
  option: Option;
  reason: string | undefined; // id of the words that say why it cannot be set
  refused: string;
  onOption: Props["onOption"];
}

// A text that is taken when Enter is pressed or the field is left, with some that are offered.
function FreeText({ option, reason, refused, onOption }: FieldProps): ReactNode {
  const id = useId();
  const [typed, setTyped] = useState(String(option.value));
  const [asked, setAsked] = useState(false); // nothing was typed since the last text was sent
  useEffect(() => setTyped(String(option.value)), [option.value]);
  const take = (text: string): void => {
    if (text === String(option.value)) return;
    setAsked(true);
    onOption(option.name, text);
  };
  const wrong = asked ? refused : "";
  return (
    <div>
      <label className="wb-option">
        <span>{labelOf(option)}</span>
        <input
          type="text"
          spellCheck={false}
          value={typed}
          disabled={Boolean(option.why)}
          aria-invalid={wrong !== ""}
          aria-describedby={reason ?? id}
          onChange={(event) => {
            setTyped(event.target.value);
            setAsked(false);
          }}
          onBlur={() => take(typed.trim())}
          onKeyDown={(event) => event.key === "Enter" && take(typed.trim())}
        />
      </label>
      <div className="wb-option-offers" role="group" aria-label={`Offered for ${labelOf(option)}`}>
        {option.choices?.map((choice) => (
          <button key={choice} type="button" disabled={Boolean(option.why)} aria-pressed={choice === String(option.value)} onClick={() => take(choice)}>
            {choice}
          </button>
        ))}
      </div>
      <p id={id} className={wrong && "wb-wrong"} role="alert">
        {wrong}
      </p>
    </div>
  );
}

function labelOf(option: Option): string {
  return option.label ?? LABELS[option.name] ?? option.name;
}

function OptionField(props: FieldProps): ReactNode {
  const { option, reason, onOption } = props;
  if (option.free) return <FreeText {...props} />;
  return (
    <label className="wb-option">
      <span>{labelOf(option)}</span>
      {option.choices ? (
        <select value={option.value} disabled={Boolean(option.why)} aria-describedby={reason} onChange={(event) => onOption(option.name, event.target.value)}>
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
          disabled={Boolean(option.why)}
          aria-describedby={reason}
          onChange={(event) => {
            const value = event.target.valueAsNumber;
            if (Number.isInteger(value) && value >= 0 && value <= (option.most ?? value)) onOption(option.name, value);
          }}
        />
      )}
    </label>
  );
}
