import { BaseEdge, EdgeLabelRenderer, type Edge, type EdgeProps } from "@xyflow/react";
import type { ReactNode } from "react";

import type { MoveElement } from "../contract";
import { bytes, seconds } from "../format";
import { type Wire, wirePath } from "./layout";
import { moveWords } from "./words";

export type WireEdge = Edge<{ wire: Wire; stale: boolean }, "wire">;

// The flow of data between two cards; where it crosses the link, with what it carries.
export function TransferEdge({ sourceX, sourceY, targetX, targetY, data }: EdgeProps<WireEdge>): ReactNode {
  const { wire, stale } = data!;
  const path = wirePath(wire, { x: sourceX, y: sourceY }, { x: targetX, y: targetY });
  const { move, label } = wire;
  return (
    <>
      <BaseEdge path={path} className={`wb-wire wb-wire-${wire.kind}`} interactionWidth={0} />
      <path className={`wb-head wb-head-${wire.kind}`} d={`M${targetX} ${targetY}l-7 -3.5v7Z`} />
      {move && label && (
        <EdgeLabelRenderer>
          <Label move={move} x={label.x} y={label.y} stale={stale} />
        </EdgeLabelRenderer>
      )}
    </>
  );
}

function Label({ move, x, y, stale }: { move: MoveElement; x: number; y: number; stale: boolean }): ReactNode {
  const numbers = [move.bytes === null ? "" : bytes(move.bytes), move.seconds === null ? "" : seconds(move.seconds)];
  return (
    <div
      className={`wb-transfer${stale ? " wb-stale" : ""}`}
      style={{ transform: `translate(-50%, -50%) translate(${x}px, ${y}px)` }}
      title={moveWords(move)}
    >
      <span className="wb-transfer-what">
        <span aria-hidden="true">{move.target === "gpu" ? "↑" : "↓"} </span>
        {move.carries}
        <span className="wb-unseen"> to the {move.target.toUpperCase()}</span>
      </span>
      <span className="wb-transfer-cost">{numbers.filter(Boolean).join(" · ")}</span>
    </div>
  );
}
