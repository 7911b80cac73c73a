import { createContext, useContext, useEffect, useLayoutEffect, useRef, useState, useSyncExternalStore } from "react";
import type { RefObject } from "react";

import type { Message, Model, Traits } from "./contract";
import type { Samples } from "./samples";
import type { State, Talk } from "./talk";

// What every part of one view shares.
export interface Bench {
  model: Model;
  talk: Talk;
  samples: Samples;
  announce: (text: string) => void;
}

export const BenchContext = createContext<Bench | null>(null);

export function useBench(): Bench {
  const bench = useContext(BenchContext);
  if (!bench) throw new Error("a part is drawn outside the Builder");
  return bench;
}

export function useTrait<Name extends keyof Traits>(name: Name): Traits[Name] {
  const { model } = useBench();
  return useSyncExternalStore(useChanges(name), () => model.get(name));
}

// What is read from a trait; the part is drawn anew only where that has changed.
export function useOf<Name extends keyof Traits>(name: Name, read: (trait: Traits[Name]) => string): string {
  const { model } = useBench();
  return useSyncExternalStore(useChanges(name), () => read(model.get(name)));
}

function useChanges(name: keyof Traits): (listener: () => void) => () => void {
  const { model } = useBench();
  const [subscribe] = useState(() => (listener: () => void) => {
    model.on(`change:${name}`, listener);
    return () => model.off(`change:${name}`, listener);
  });
  return subscribe;
}

// What is read from the conversation; the part is drawn anew only where that is another value, or another object.
export function useTalk<Value>(read: (state: State) => Value): Value {
  const { talk } = useBench();
  return useSyncExternalStore(talk.subscribe, () => read(talk.snapshot()));
}

// True while a control's newest value is not answered.
export function useWaits(name: string): boolean {
  const { talk } = useBench();
  return useSyncExternalStore(talk.subscribe, () => talk.waits(name));
}

export function useSend(): (message: Message) => void {
  const { talk } = useBench();
  return (message) => void talk.send(message);
}

// True where the wiring cannot be, and says so itself.
export function useBroken(): boolean {
  const { fault } = useTrait("wiring");
  return useTrait("parts").includes("wiring") && Boolean(fault);
}

// The reason why settings and wiring stay as they are; a view without runs has none.
export function useHeld(): string | undefined {
  const live: Traits["live"] | undefined = useTrait("live");
  return live?.held;
}

// The width of an element, as it changes.
export function useWidth(element: RefObject<HTMLElement | null>): number {
  const [width, setWidth] = useState(0);
  useLayoutEffect(() => {
    const here = element.current;
    if (!here) return undefined;
    const read = (): void => setWidth(here.clientWidth);
    const observer = new ResizeObserver(read);
    observer.observe(here);
    read();
    return () => observer.disconnect();
  }, [element]);
  return width;
}

// Call `leave` when the pointer or the focus goes outside an element.
export function useLeave(element: RefObject<HTMLElement | null>, open: boolean, leave: () => void): void {
  const latest = useRef(leave);
  latest.current = leave;
  useEffect(() => {
    if (!open) return undefined;
    const outside = (event: Event): void => {
      const target = event.composedPath()[0];
      if (element.current && target instanceof Node && !element.current.contains(target)) latest.current();
    };
    document.addEventListener("pointerdown", outside, true);
    document.addEventListener("focusin", outside, true);
    return () => {
      document.removeEventListener("pointerdown", outside, true);
      document.removeEventListener("focusin", outside, true);
    };
  }, [element, open]);
}
