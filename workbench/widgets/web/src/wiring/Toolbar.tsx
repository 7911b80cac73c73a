import { useEffect, useRef, useState, type ReactNode } from "react";

import type { Wiring } from "../contract";
import { useBench, useLeave, useOf, useSend, useTrait } from "../hooks";
import { mainRow, uncounted } from "../parts/rows";
import { MOST } from "../parts/Variants";
import type { Kind } from "./save";

interface Props {
  wiring: Wiring;
  held: boolean; // settings and wiring stay as they are
  onFit: () => void;
  onSave: (kind: Kind) => void;
}

export function Toolbar({ wiring, held, onFit, onSave }: Props): ReactNode {
  const { talk } = useBench();
  const send = useSend();
  const pinned = useTrait("variants").length;
  const empty = wiring.ranges.every((range) => range.chain.length === 0);
  const saved: [string, () => void][] = [
    ["SVG picture", () => onSave("svg")],
    ["PNG picture", () => onSave("png")],
    ["HTML page", () => onSave("html")],
    ["Scenario, JSON", () => onSave("json")],
  ];
  return (
    <div className="wb-toolbar" role="toolbar" aria-label="Wiring">
      <span className="wb-sample">{!wiring.fault && <Rate wiring={wiring} held={held} />}</span>
      <button type="button" className="wb-button" disabled={held || !wiring.undo} title="Undo (Ctrl+Z)" onClick={() => talk.travel("undo")}>
        Undo
      </button>
      <button type="button" className="wb-button" disabled={held || !wiring.redo} title="Redo (Ctrl+Shift+Z)" onClick={() => talk.travel("redo")}>
        Redo
      </button>
      <button type="button" className="wb-button" disabled={held || empty} title="Remove every card" onClick={() => send({ do: "clear" })}>
        Clear
      </button>
      <Menu label="Open" entries={held ? [] : wiring.presets.map(({ name, label }) => [label, () => send({ do: "open", name })])} />
      <span className="wb-toolbar-gap" />
      <button
        type="button"
        className="wb-button"
        disabled={pinned >= MOST}
        title={pinned >= MOST ? `${MOST} are pinned: unpin one below to pin another` : "Keep this pipeline with its settings, to compare it below"}
        onClick={() => send({ do: "pin" })}
      >
        Pin{pinned > 0 && ` (${pinned})`}
      </button>
      <button type="button" className="wb-button" title="Show the whole range" onClick={onFit}>
        Fit
      </button>
      <Menu label="Save" entries={saved} />
    </div>
  );
}

// The throughput in words.
function Rate({ wiring, held }: Pick<Props, "wiring" | "held">): ReactNode {
  const how = useOf("settings", ({ uncalibrated }) => (uncalibrated ? "simulated without a calibration" : "simulated"));
  const without = uncounted(wiring);
  return useOf("figures", ({ rows, problem, sample, pending }) => {
    const known = mainRow(rows)?.gen_tok_s;
    if (!known) return problem && "no figures; Figures tells why";
    const of = sample && ` with ${sample}${pending && !held ? ", computing…" : ""}`;
    return `${known} output tokens/s ${how}${of}${without && ` ${without}`}`;
  });
}

// A button with a list of commands under it.
export function Menu({ label, entries }: { label: string; entries: [string, () => void][] }): ReactNode {
  const place = useRef<HTMLDivElement>(null);
  const [open, setOpen] = useState(false);
  useLeave(place, open, () => setOpen(false));
  const items = (): HTMLElement[] => [...(place.current?.querySelectorAll<HTMLElement>("[role=menuitem]") ?? [])];
  useEffect(() => {
    if (open) items()[0]?.focus();
  }, [open]);
  const step = (by: number): void => {
    const all = items();
    const at = all.indexOf(document.activeElement as HTMLElement);
    all[(at + by + all.length) % all.length]?.focus();
  };
  const close = (): void => {
    setOpen(false);
    place.current?.querySelector("button")?.focus();
  };
  return (
    <div
      ref={place}
      className="wb-menu-place"
      onKeyDown={(event) => {
        if (event.key === "ArrowDown" && !open) setOpen(true);
        else if (event.key === "ArrowDown") step(1);
        else if (event.key === "ArrowUp") step(-1);
        else if (event.key === "Escape" && open) close();
        else return;
        event.preventDefault();
      }}
    >
      <button
        type="button"
        className="wb-button wb-button-menu"
        aria-haspopup="menu"
        aria-expanded={open}
        disabled={entries.length === 0}
        onClick={() => setOpen(!open)}
      >
        {label}
      </button>
      {open && (
        <div className="wb-menu" role="menu" aria-label={label}>
          {entries.map(([words, act]) => (
            <button
              key={words}
              type="button"
              role="menuitem"
              tabIndex={-1}
              onClick={() => {
                close();
                act();
              }}
            >
              {words}
            </button>
          ))}
        </div>
      )}
    </div>
  );
}
