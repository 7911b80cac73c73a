import { useEffect, useId, useLayoutEffect, useRef, useState } from "react";
import type { KeyboardEvent, PointerEvent, ReactNode } from "react";

import type { Choice as ChoiceControl } from "../contract";
import { useLeave } from "../hooks";

const GAP = 8; // between a list and the edge of what is seen [px]
const LEAST = 90; // least height of a list that does not show all [px]

// The focus stays on the button while an option is pressed.
function stay(event: PointerEvent): void {
  event.preventDefault();
}

// Open a list where its button has more room, and no higher than that.
function unfold(list: HTMLElement, button: Element): void {
  let [top, bottom] = [0, window.innerHeight];
  // Not the body's box: what the body cuts off is cut at the window.
  for (let around = button.parentElement; around && around !== document.body; around = around.parentElement) {
    if (getComputedStyle(around).overflowY === "visible") continue;
    const box = around.getBoundingClientRect();
    [top, bottom] = [Math.max(top, box.top), Math.min(bottom, box.bottom)];
  }
  const at = button.getBoundingClientRect();
  const [above, below] = [at.top - top - GAP, bottom - at.bottom - GAP];
  list.style.maxHeight = "";
  const up = list.offsetHeight > below && above > below;
  list.classList.toggle("wb-choice-up", up);
  const room = Math.max(LEAST, up ? above : below);
  if (list.offsetHeight > room) list.style.maxHeight = `${Math.floor(room)}px`;
}

// Scroll a list, and nothing around it, so that an entry is seen.
function reveal(list: HTMLElement, entry: HTMLElement): void {
  const end = entry.offsetTop + entry.offsetHeight;
  if (entry.offsetTop < list.scrollTop) list.scrollTop = entry.offsetTop;
  else if (end > list.scrollTop + list.clientHeight) list.scrollTop = end - list.clientHeight;
}

interface Props {
  control: Pick<ChoiceControl, "label" | "value" | "options" | "note">;
  onChoose: (value: string) => void;
  inline?: boolean; // the label beside the list
}

// A list to choose from, in which what cannot be chosen says its reason.
export function Choice({ control, onChoose, inline = false }: Props): ReactNode {
  const { label, value, options, note } = control;
  const id = useId();
  const place = useRef<HTMLDivElement>(null);
  const list = useRef<HTMLUListElement>(null);
  const typed = useRef({ text: "", at: 0 });
  const [open, setOpen] = useState(false);
  const [at, setAt] = useState(0);
  useLeave(place, open, () => setOpen(false));
  useLayoutEffect(() => {
    if (open) unfold(list.current!, place.current!);
  }, [open]);
  useEffect(() => {
    const entry = list.current?.children[at];
    if (open && entry instanceof HTMLElement) reveal(list.current!, entry);
  }, [open, at]);

  const current = options.findIndex((option) => option.value === value);
  const shown = options[current]?.label ?? value;
  const show = (): void => {
    setAt(Math.max(0, current));
    setOpen(true);
  };
  const choose = (index: number): void => {
    const option = options[index];
    if (!option || option.why) return;
    setOpen(false);
    if (option.value !== value) onChoose(option.value);
  };
  const search = (letter: string): void => {
    const now = Date.now();
    typed.current = { text: (now - typed.current.at < 800 ? typed.current.text : "") + letter.toLowerCase(), at: now };
    const found = options.findIndex((option) => option.label.toLowerCase().startsWith(typed.current.text));
    if (found < 0) return;
    if (open) setAt(found);
    else choose(found);
  };
  const key = (event: KeyboardEvent): void => {
    if (event.ctrlKey || event.metaKey) return;
    const step = event.key === "ArrowDown" ? 1 : event.key === "ArrowUp" ? -1 : 0;
    if (step && !open) show();
    else if (step) setAt(Math.min(options.length - 1, Math.max(0, at + step)));
    else if (event.key === "Home" && open) setAt(0);
    else if (event.key === "End" && open) setAt(options.length - 1);
    else if (event.key === "Enter" || event.key === " ") open ? choose(at) : show();
    else if (event.key === "Escape" && open) setOpen(false);
    else if (event.key.length === 1) search(event.key);
    else return;
    event.preventDefault();
  };
  return (
    <div className={inline ? "wb-choice wb-choice-inline" : "wb-choice"} ref={place}>
      <span className="wb-label" id={`${id}label`}>
        {label}
      </span>
      <button
        type="button"
        className="wb-choice-button"
        role="combobox"
        aria-haspopup="listbox"
        aria-expanded={open}
        aria-controls={`${id}list`}
        aria-labelledby={`${id}label`}
        aria-describedby={note ? `${id}note` : undefined}
        aria-activedescendant={open ? `${id}${at}` : undefined}
        onClick={() => (open ? setOpen(false) : show())}
        onKeyDown={key}
      >
        <span title={shown}>{shown}</span>
      </button>
      {note && (
        <small id={`${id}note`} role="status">
          {note}
        </small>
      )}
      <ul className="wb-choice-list" role="listbox" id={`${id}list`} aria-labelledby={`${id}label`} ref={list} hidden={!open} onPointerDown={stay}>
        {options.map((option, index) => (
          <li
            key={option.value}
            id={`${id}${index}`}
            role="option"
            aria-selected={option.value === value}
            aria-disabled={option.why !== ""}
            className={index === at ? "wb-choice-at" : ""}
            onPointerMove={() => setAt(index)}
            onClick={() => choose(index)}
          >
            {option.label}
            {(option.why || option.note) && <small>{option.why || option.note}</small>}
          </li>
        ))}
      </ul>
    </div>
  );
}
