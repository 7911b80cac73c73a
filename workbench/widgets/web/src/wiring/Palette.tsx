import { useImperativeHandle, useRef, useState } from "react";
import type { KeyboardEvent, PointerEvent, ReactNode, Ref } from "react";

import type { PaletteEntry } from "../contract";

export interface PaletteHandle {
  focus: () => void;
}

interface Props {
  ref: Ref<PaletteHandle>;
  entries: PaletteEntry[];
  placed: (entry: PaletteEntry) => boolean;
  onAdd: (entry: PaletteEntry) => void;
  onDrag: (entry: PaletteEntry, clientX: number, clientY: number, done: boolean) => void;
  onLeave: () => void;
}

interface Held {
  entry: PaletteEntry;
  x: number;
  y: number;
  at: { x: number; y: number } | null; // of the entry that follows the pointer, once it does
}

// The operations that can be placed: dragged onto a lane, or added by click or Enter behind the chosen card, or at the end without one.
export function Palette({ ref, entries, placed, onAdd, onDrag, onLeave }: Props): ReactNode {
  const place = useRef<HTMLDivElement>(null);
  const [at, setAt] = useState(0);
  const [held, setHeld] = useState<Held | null>(null);
  const current = Math.min(at, entries.length - 1);
  const buttons = (): HTMLElement[] => [...(place.current?.querySelectorAll<HTMLElement>("button") ?? [])];
  const focus = (index: number): void => {
    setAt(index);
    buttons()[index]?.focus();
  };
  useImperativeHandle(ref, () => ({
    focus: () => {
      const open = entries.findIndex((entry) => !placed(entry));
      focus(open < 0 ? current : open);
    },
  }));
  const key = (event: KeyboardEvent): void => {
    const step = { ArrowLeft: -1, ArrowUp: -1, ArrowRight: 1, ArrowDown: 1 }[event.key];
    if (step) focus((current + step + entries.length) % entries.length);
    else if (event.key === "Escape") onLeave();
    else return;
    event.preventDefault();
  };
  const move = (event: PointerEvent): void => {
    if (!held) return;
    if (!held.at && Math.hypot(event.clientX - held.x, event.clientY - held.y) < 5) return;
    const root = place.current!.closest(".wb-builder")!.getBoundingClientRect();
    setHeld({ ...held, at: { x: event.clientX - root.left, y: event.clientY - root.top } });
    onDrag(held.entry, event.clientX, event.clientY, false);
  };
  const release = (event: PointerEvent): void => {
    if (held?.at) onDrag(held.entry, event.clientX, event.clientY, true);
    else if (held) onAdd(held.entry);
    setHeld(null);
  };
  return (
    <div className="wb-palette" role="toolbar" aria-label="Operations to add" ref={place} onKeyDown={key}>
      <span className="wb-label">Add</span>
      {entries.map((entry, index) => (
        <button
          key={entry.name}
          type="button"
          data-op={entry.name}
          tabIndex={index === current ? 0 : -1}
          className={`wb-op${placed(entry) ? " wb-op-placed" : ""}`}
          title={`${entry.about}. Drag it onto a lane, or press to add it behind the chosen card, or at the end`}
          aria-label={`Add ${entry.label}${entry.own ? " own" : ""}${placed(entry) ? ", already placed" : ""}`}
          onFocus={() => setAt(index)}
          onPointerDown={(event) => {
            if (event.button !== 0) return;
            event.currentTarget.setPointerCapture(event.pointerId);
            setHeld({ entry, x: event.clientX, y: event.clientY, at: null });
          }}
          onPointerMove={move}
          onPointerUp={release}
          onPointerCancel={() => setHeld(null)}
          onClick={(event) => event.detail === 0 && onAdd(entry)} // by a key; the pointer is handled above
        >
          {entry.label}{" "}
          {entry.own && <span className="wb-mark">own</span>}
        </button>
      ))}
      {held?.at && (
        <div className="wb-op wb-op-held" style={{ left: held.at.x, top: held.at.y }} aria-hidden="true">
          {held.entry.label}
        </div>
      )}
    </div>
  );
}
