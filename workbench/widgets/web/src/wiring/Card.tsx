import type { Node, NodeProps } from "@xyflow/react";
import { memo, type ReactNode } from "react";

import type { CardElement, Option } from "../contract";
import { bytes, flops, percent, seconds } from "../format";
import { capital, cardWords, storedWord } from "./words";

export type CardNode = Node<
  { element: CardElement; active: boolean; faulty: boolean; stale: boolean; onOptions: (key: string) => void },
  "card"
>;

const PLAIN = new Set<unknown>([0, "all", "resident", ""]);

// "defer 3": options that are not as they are by themselves, and that the name does not tell.
function chosen(options: Option[]): string[] {
  return options
    .filter((option) => !PLAIN.has(option.value) && !["fetch", "rows", "experts"].includes(option.name))
    .map((option) => `${option.name} ${option.value}`);
}

export const Card = memo(function Card({ id, data, dragging }: NodeProps<CardNode>): ReactNode {
  const { element, active, faulty, stale } = data;
  const rows = element.rows === "all" || element.name.includes(element.rows) ? [] : [element.rows];
  const marks = [...rows, ...chosen(element.options), ...(element.shared ? ["+ shared"] : [])];
  const classes = ["wb-card", `wb-card-${element.device}`];
  if (faulty) classes.push("wb-card-faulty");
  if (dragging) classes.push("wb-card-dragged");
  if (stale) classes.push("wb-stale");
  return (
    <div
      className={classes.join(" ")}
      data-card={id}
      role="group"
      aria-roledescription="operation"
      aria-label={`${cardWords(element)}${faulty ? ", cannot stand here" : ""}`}
      tabIndex={active ? 0 : -1}
      title={`${capital(element.about)}\n${cardWords(element)}`}
    >
      <div className="wb-card-name">
        <b>{element.name}</b>
        {element.own && <span className="wb-mark">own</span>}
        {marks.map((mark) => (
          <span key={mark} className="wb-mark">
            {mark}
          </span>
        ))}
      </div>
      <div className="wb-card-time">
        <span>{element.seconds === null ? "–" : seconds(element.seconds)}</span>
        {element.share !== null && <small>{percent(element.share)}</small>}
      </div>
      <div className="wb-bar" aria-hidden="true">
        <i style={{ width: `${100 * Math.min(1, element.share ?? 0)}%` }} />
      </div>
      <div className="wb-card-fine">
        <span>{weightsOf(element)}</span>
        <span>{element.flops === null ? "" : flops(element.flops)}</span>
      </div>
      <button
        type="button"
        className="wb-card-more nodrag nopan"
        tabIndex={-1}
        aria-label={`Options of ${element.name}`}
        onClick={() => data.onOptions(id)}
      >
        ⋯
      </button>
    </div>
  );
});

function weightsOf(element: CardElement): string {
  if (element.weights === null) return "";
  if (element.weights === 0) return "no weights";
  return `${bytes(element.weights)} ${element.stored === "chosen" ? "chosen" : storedWord(element).split(" ")[0]}`;
}
