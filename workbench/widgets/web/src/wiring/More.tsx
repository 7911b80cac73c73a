import type { ReactNode } from "react";

interface Props {
  side: "before" | "after";
  cards: number; // that are cut off or hidden on this side
  top: number;
  onPress: () => void;
}

// A button at the edge of the canvas behind which the picture goes on. The arrow keys go there by themselves.
export function More({ side, cards, top, onPress }: Props): ReactNode {
  const words = cards > 0 ? `${cards} more` : "";
  return (
    <button
      type="button"
      tabIndex={-1}
      className={`wb-more wb-more-${side}`}
      style={{ top }}
      aria-label={`Show ${cards} more operations on the ${side === "before" ? "left" : "right"}`}
      onClick={onPress}
    >
      {side === "before" ? `‹ ${words}` : `${words} ›`}
    </button>
  );
}
