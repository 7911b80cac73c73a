import type { KeyboardEvent } from "react";

const TYPED = "textarea, input:not([type=range]):not([type=checkbox])"; // has an undo of its own

// The step in the history that a key asks for; null for any other key, and where text is typed.
export function travelOf(event: KeyboardEvent): "undo" | "redo" | null {
  if (!(event.ctrlKey || event.metaKey) || (event.target instanceof Element && event.target.matches(TYPED))) return null;
  const key = event.key.toLowerCase();
  if (key === "z") return event.shiftKey ? "redo" : "undo";
  return key === "y" ? "redo" : null;
}
