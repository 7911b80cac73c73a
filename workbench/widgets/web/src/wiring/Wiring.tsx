import { useEffect, useMemo, useRef, useState, type KeyboardEvent, type ReactNode, type RefObject } from "react";

import type { Device, Fault, Lack, Mend, Message, PaletteEntry, Settings } from "../contract";
import { useBench, useHeld, useOf, useTalk, useWidth } from "../hooks";
import { Panel } from "../parts/Panel";
import { Problem } from "../parts/Problem";
import type { Change } from "../talk";
import * as act from "./actions";
import { Canvas, type CanvasHandle } from "./Canvas";
import { cardsOf, find, keysOf, neighbour, type Slot } from "./chain";
import { type Drop, dropAt, moved, stepped } from "./drop";
import { Empty } from "./Empty";
import { kept } from "./kept";
import { layout } from "./layout";
import { Options } from "./Options";
import { Palette, type PaletteHandle } from "./Palette";
import { RangeBar } from "./RangeBar";
import { type Kind, save } from "./save";
import { Toolbar } from "./Toolbar";
import { deviceName } from "./words";

const END: Slot = { fork: null, arm: 0, before: null };

export function Wiring(): ReactNode {
  const { model, talk, announce } = useBench();
  const wiring = useTalk((state) => state.wiring);
  const waiting = useTalk((state) => state.waiting);
  const travels = useTalk((state) => state.travels);
  const held = useHeld();
  const [asked, setShown] = useState(0);
  const mended = useRef<Fault | null>(null); // the fault whose mend was pressed last
  const [saved, setSaved] = useState<Saved | null>(null);
  const [focused, setFocused] = useState<string | null>(null);
  const [added, setAdded] = useState<string | null>(null); // a card that gets the focus once it is drawn
  const [open, setOpen] = useState<{ key: string; at: { left: number; top: number } } | null>(null);
  const canvas = useRef<CanvasHandle>(null);
  const palette = useRef<PaletteHandle>(null);
  const place = useRef<HTMLDivElement>(null);

  const shown = Math.min(asked, wiring.ranges.length - 1);
  const range = wiring.ranges[shown]!;
  const fault = wiring.fault?.range === shown ? wiring.fault : null;
  const width = useWidth(place);
  const picture = useMemo(() => layout(range, fault, width), [range, fault, width]);
  const keys = useMemo(() => [...picture.cards].sort((a, b) => a.box.x - b.box.x || a.box.y - b.box.y).map((card) => card.key), [picture]);
  const chosen = focused !== null && keys.includes(focused) ? focused : null;
  const active = chosen ?? keys[0] ?? null;
  const gpu = useOf("settings", ({ memory }) => memory?.gpu ?? "");
  const cpu = useOf("settings", ({ memory }) => memory?.cpu ?? "");
  const link = useOf("settings", linkSpeed);
  const shared = useOf("settings", (settings) => String(settings.shared ?? false)) === "true";
  const sizes = useMemo(() => ({ gpu, cpu, link, shared }), [gpu, cpu, link, shared]);
  const here = JSON.stringify(range.chain.map((element) => element.path)); // settles with Python's answer

  useEffect(() => {
    if (added === null) return undefined;
    if (!keys.includes(added)) {
      if (!waiting) setAdded(null); // it was not added
      return undefined;
    }
    const frame = requestAnimationFrame(() => {
      canvas.current?.focus(added);
      setAdded(null);
    });
    return () => cancelAnimationFrame(frame);
  }, [added, keys, waiting]);
  useEffect(() => setFocused(null), [travels]); // what is added next follows no card that was chosen before
  useEffect(() => setSaved(null), [here]);
  useEffect(() => {
    if (open && !keys.includes(open.key)) setOpen(null);
  }, [open, keys]);
  useRefocus(place, canvas, active, `${keys.join()} ${here}`);
  useEffect(() => {
    if (wiring.fault && !waiting) announce(wiring.fault.text);
  }, [wiring.fault?.text, waiting, announce]);

  const edit = (change: Change, words = ""): void => {
    if (held) return announce(held);
    talk.edit(change);
    if (words) announce(words);
  };
  const name = (key: string): string => {
    const element = find(range, key)?.element;
    return element?.kind === "card" ? element.name : "the fork";
  };
  const toDevice = (key: string, device: Device, slot: Slot | null = null): void => {
    const element = find(range, key)?.element;
    if (element?.kind !== "card") return;
    if (element.device === device) return announce(`${element.name} is on the ${deviceName(device)} already.`);
    edit(act.place(shown, key, device, slot), `${element.name} moved to the ${deviceName(device)}.`);
  };
  const toSlot = (key: string, slot: Slot | null): void => {
    if (!slot) return announce(`${name(key)} stays where it is in the order.`);
    edit(act.shift(shown, key, slot), slot.before ? `${name(key)} moved before ${name(slot.before)}.` : `${name(key)} moved to the end.`);
  };
  const remove = (key: string): void => {
    if (held) return announce(held);
    const at = keys.indexOf(key);
    const next = keys[at + 1] ?? keys[at - 1] ?? null;
    edit(act.remove(shown, key), `${name(key)} removed.`);
    setFocused(next);
    if (next !== null) canvas.current?.focus(next);
    else palette.current?.focus();
  };
  const forkNext = (key: string): void => {
    const found = find(range, key);
    const next = found && neighbour(found, 1);
    const partner = next && keysOf(range.chain).get(next);
    if (!partner) return announce(`Nothing follows ${name(key)} here.`);
    edit(act.fork(shown, key, partner), `${name(key)} and ${name(partner)} are side by side.`);
  };
  const option = (key: string, option: string, value: number | string): void => {
    if (option === "experts") setAdded(value === "all" ? "experts" : `experts[${value}]`); // its name changes
    edit(act.option(shown, key, option, value));
  };
  const split = (key: string): void => {
    const element = find(range, key)?.element;
    if (element?.kind !== "card") return;
    if (!element.split) return announce(`${element.name} cannot be split over both devices.`);
    setAdded(`${element.name}[${element.split}]`);
    edit(act.split(shown, key), `${element.name} split: ${element.split} on the GPU, all others on the CPU.`);
  };
  const join = (key: string): void => {
    edit(act.join(shown, key), "The arms follow one another.");
  };
  const add = (entry: PaletteEntry, device: Device, slot: Slot): void => {
    edit(act.add(shown, entry.name, device, slot), `${entry.label} added on the ${deviceName(device)}.`);
    setFocused(nextKey(range.chain, entry.name));
  };
  const addAfter = (entry: PaletteEntry): void => {
    const found = chosen === null ? null : find(range, chosen);
    const next = found && neighbour(found, 1);
    const device = found?.element.kind === "card" ? found.element.device : "gpu";
    add(entry, device, found ? slotBehind(chosen!, next && (keysOf(range.chain).get(next) ?? null)) : END);
  };
  const slotBehind = (key: string, before: string | null): Slot => {
    const path = find(range, key)!.element.path;
    const inner = picture.forks.find(({ element }) => element.path.join() === path.slice(0, -2).join());
    return { fork: inner?.key ?? null, arm: path[path.length - 2] ?? 0, before };
  };
  const addLacking = ({ op }: Lack, { label }: Mend): void => {
    setFocused(null);
    setAdded(nextKey(range.chain, op));
    edit((now) => mending(now.lacks[shown]?.flatMap(({ mends }) => mends).find((each) => each.label === label)));
  };
  const drop = (key: string, at: Drop): void => {
    const element = find(range, key)?.element;
    if (element?.kind !== "card") return;
    const slot = moved(range, key, at.slot);
    if (element.device !== at.device) toDevice(key, at.device, slot);
    else if (slot) toSlot(key, slot);
  };
  const options = (key: string): void => {
    const card = canvas.current?.boxOf(key);
    const around = place.current?.getBoundingClientRect();
    if (!card || !around) return;
    const left = Math.max(4, Math.min(card.left - around.left, around.width - 268));
    setOpen({ key, at: { left, top: card.bottom - around.top + 6 } });
  };
  const dragged = (entry: PaletteEntry, clientX: number, clientY: number, done: boolean): void => {
    const at = canvas.current?.at(clientX, clientY);
    const target = at && dropAt(picture, at.x, at.y);
    canvas.current?.hint(done ? null : (target ?? null));
    if (done && target) add(entry, target.device, target.slot);
  };
  const key = (event: KeyboardEvent, card: string | null): void => {
    if (card !== null && ownKey(event) && pressed(event, card)) event.preventDefault();
  };
  const pressed = (event: KeyboardEvent, card: string): boolean => {
    const step = event.key === "ArrowLeft" ? -1 : event.key === "ArrowRight" ? 1 : 0;
    if (step && event.altKey) toSlot(card, stepped(range, picture.scope, card, step));
    else if (step) canvas.current?.focus(keys[keys.indexOf(card) + step] ?? card);
    else if (event.key === "ArrowUp") toDevice(card, "gpu");
    else if (event.key === "ArrowDown") toDevice(card, "cpu");
    else if (event.key === "Home") canvas.current?.focus(keys[0]!);
    else if (event.key === "End") canvas.current?.focus(keys[keys.length - 1]!);
    else if (event.key === "Delete" || event.key === "Backspace") remove(card);
    else if (event.key === "Enter" || event.key === " ") options(card);
    else if (event.key === "a") palette.current?.focus();
    else if (event.key === "f") forkNext(card);
    else if (event.key === "j") joinAround(card);
    else if (event.key === "s") split(card);
    else return false;
    return true;
  };
  const joinAround = (card: string): void => {
    const path = find(range, card)?.element.path ?? [];
    const around = picture.forks.find(({ element }) => element.path.join() === path.slice(0, -2).join());
    if (around) join(around.key);
    else announce(`${name(card)} is in no fork.`);
  };

  const keep = async (kind: Kind): Promise<void> => {
    setSaved(null);
    const told = await kept(model, talk);
    try {
      const [code, settings, figures] = [model.get("code"), model.get("settings"), model.get("figures")];
      await save(kind, place.current!, { wiring, code, settings, figures, kept: told });
      const note = savedNote(kind, told !== "", chosenSchedule(settings));
      setSaved({ note });
      announce(note);
    } catch (error) {
      setSaved({ trouble: `It cannot be saved: ${(error as Error).message}.` });
    }
  };
  const empty = keys.length === 0;
  const mend = ({ label }: Mend): void => {
    if (mended.current === wiring.fault) return; // pressed twice, before the answer to the first
    mended.current = wiring.fault;
    setFocused(null); // what is added next follows no card that was chosen before
    edit((now) => mending(now.fault?.mends.find((each) => each.label === label)));
  };
  const opened = open && find(range, open.key);
  const inside = new Set(cardsOf(range.chain).map((card) => card.name));
  const one = wiring.ranges.length === 1;
  const aside = !fault || (!picture.callout && !empty) ? wiring.fault : null; // a fault that no card causes
  const systems = wiring.presets.filter(({ same }) => same).map(({ label }) => label);
  const lacks = empty ? [] : (wiring.lacks[shown] ?? []);
  return (
    <Panel title="Pipeline" name="wiring" beside={<Toolbar wiring={wiring} held={Boolean(held)} onFit={() => canvas.current?.fit()} onSave={(kind) => void keep(kind)} />}>
      <div className="wb-lead">
        {aside ? (
          <Problem text={aside.text} mends={aside.mends} hint={aside.unfinished} onMend={mend} />
        ) : (
          <Lead held={held} faulty={fault !== null && !empty} lacks={lacks} systems={waiting ? [] : systems} onAdd={addLacking} />
        )}
      </div>
      {saved && <SavedNote saved={saved} />}
      <RangeBar wiring={wiring} shown={shown} onShow={setShown} />
      <div className="wb-wiring-place" ref={place}>
        <Canvas
          ref={canvas}
          range={range}
          picture={picture}
          fault={fault}
          stale={wiring.stale}
          active={active}
          sizes={sizes}
          label={`Pipeline of ${range.title}, ${keys.length} operations. Arrow keys left and right go from card to card, up and down move a card to the other device, Enter opens its options`}
          onActive={setFocused}
          onDrop={drop}
          onOptions={options}
          onJoin={join}
          onMend={mend}
          onKey={key}
        />
        {empty && (
          <Empty presets={wiring.presets} mends={fault?.mends ?? []} onOpen={(preset) => talk.send({ do: "open", name: preset })} onMend={mend} />
        )}
        {open && opened?.element.kind === "card" && (
          <Options
            card={opened.element}
            next={neighbour(opened, 1)}
            refused={waiting ? "" : wiring.refused}
            at={open.at}
            onOption={(name, value) => option(open.key, name, value)}
            onPlace={(device) => toDevice(open.key, device)}
            onStep={(step) => toSlot(open.key, stepped(range, picture.scope, open.key, step))}
            onFork={() => forkNext(open.key)}
            onSplit={() => split(open.key)}
            onRemove={() => remove(open.key)}
            onClose={(back) => {
              setOpen(null);
              if (back) canvas.current?.focus(open.key);
            }}
          />
        )}
      </div>
      <p className="wb-note wb-times">{wiring.stale ? "Bytes and times are those of the last pipeline that could run." : wiring.times}</p>
      <div inert={Boolean(held)} className={held ? "wb-held" : ""}>
        <Palette
          ref={palette}
          entries={wiring.palette}
          placed={(entry) => inside.has(entry.name) || (one && entry.placed && keys.length > 0)}
          onAdd={addAfter}
          onDrag={dragged}
          onLeave={() => active !== null && canvas.current?.focus(active)}
        />
      </div>
      <p className="wb-keys">
        Keys: <kbd>← →</kbd> choose a card, <kbd>↑ ↓</kbd> GPU or CPU, <kbd>Alt ← →</kbd> order, <kbd>Enter</kbd> options,{" "}
        <kbd>F</kbd> side by side, <kbd>J</kbd> in a row, <kbd>S</kbd> over both devices, <kbd>A</kbd> add, <kbd>Del</kbd> remove, <kbd>Ctrl Z</kbd> undo
      </p>
    </Panel>
  );
}

// Every answer gives mends new numbers: the message names the one that is offered when it is sent.
function mending(offered: Mend | undefined): Message | null {
  return offered ? { do: "mend", id: offered.id } : null;
}

// Words on what was saved last, or on why it was not.
interface Saved {
  note?: string;
  trouble?: string;
}

function SavedNote({ saved: { note, trouble } }: { saved: Saved }): ReactNode {
  if (note !== undefined) return <p className="wb-note">{note}</p>;
  return (
    <p className="wb-wrong" role="alert">
      {trouble}
    </p>
  );
}

function savedNote(kind: Kind, held: boolean, schedule: string): string {
  if (!held) return `Saved as pipeline.${kind}, without its scenario.`;
  const reader = kind === "json" ? 'wb.Scenario.load("pipeline.json")' : `scenario_in("pipeline.${kind}") of workbench.widgets`;
  return `Saved as pipeline.${kind}. In Python, ${reader} reads its scenario; the schedule, ${schedule}, is not in it.`;
}

function chosenSchedule({ groups }: Settings): string {
  const schedule = groups.flatMap(({ controls }) => controls).find(({ name }) => name === "schedule");
  return schedule?.kind === "choice" ? schedule.value : "";
}

interface LeadProps {
  held: string | undefined;
  faulty: boolean;
  lacks: Lack[];
  systems: string[];
  onAdd: (lack: Lack, mend: Mend) => void;
}

// What stands above the cards: why they are held, what is wrong with them, what they lack, or what they are.
function Lead({ held, faulty, lacks, systems, onAdd }: LeadProps): ReactNode {
  if (held) return <p className="wb-lead-held" role="status">{held}</p>;
  if (faulty) return <p className="wb-lead-fault">What is red cannot stand like this. The reason, and what mends it, stand below the lanes.</p>;
  if (lacks.length === 0) {
    return (
      <p>
        {systems.length > 0 && <b>The wiring of {systems.join("; ")}. </b>}
        One card per stage of a layer, an operation on its device: its time, and its share of that device's time. Drag cards between the lanes; transfers follow.
      </p>
    );
  }
  return (
    <p>
      Not in this layer: {lacks.map(({ op }) => op).join(", ")}; no figure counts {lacks.length > 1 ? "them" : "it"}.{" "}
      {lacks.map((lack) =>
        lack.mends.map((mend) => (
          <button key={mend.label} type="button" className="wb-button" onClick={() => onAdd(lack, mend)}>
            {mend.label}
          </button>
        )),
      )}
    </p>
  );
}

function linkSpeed({ groups }: Settings): string {
  const link = groups.flatMap(({ controls }) => controls).find(({ name }) => name === "link");
  return link?.kind === "slider" ? (link.steps[link.at] ?? "") : "";
}

// The key that the next card of this name will have.
function nextKey(chain: Parameters<typeof cardsOf>[0], name: string): string {
  const times = cardsOf(chain).filter((card) => card.name === name).length;
  return times ? `${name}#${times}` : name;
}

// A card that had the focus keeps it where the picture is drawn anew; where it is gone, the active one gets it.
function useRefocus(
  place: RefObject<HTMLDivElement | null>,
  canvas: RefObject<CanvasHandle | null>,
  active: string | null,
  drawn: string,
): void {
  const had = useRef(false);
  useEffect(() => {
    const here = place.current;
    if (!here) return undefined;
    const note = (event: FocusEvent): void => {
      const target = event.target;
      had.current = target instanceof Element && target.closest("[data-card]") !== null;
    };
    const leave = (event: FocusEvent): void => {
      if (event.relatedTarget) had.current = false;
    };
    here.addEventListener("focusin", note);
    here.addEventListener("focusout", leave);
    return () => {
      here.removeEventListener("focusin", note);
      here.removeEventListener("focusout", leave);
    };
  }, [place]);
  useEffect(() => {
    const frame = requestAnimationFrame(() => {
      const lost = document.activeElement === document.body || document.activeElement === null;
      if (had.current && lost && active !== null) canvas.current?.focus(active);
    });
    return () => cancelAnimationFrame(frame);
  }, [drawn, active, canvas]);
}

function ownKey(event: KeyboardEvent): boolean {
  return event.target instanceof Element && event.target.matches("[data-card]") && !event.ctrlKey && !event.metaKey;
}
