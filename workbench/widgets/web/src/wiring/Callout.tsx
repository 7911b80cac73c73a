import type { Node, NodeProps } from "@xyflow/react";
import { memo, type ReactNode } from "react";

import type { Fault, Mend } from "../contract";
import { Problem } from "../parts/Problem";

export type CalloutNode = Node<{ fault: Fault; at: number; below: boolean; onMend: (mend: Mend) => void }, "callout">;

// The sentence of a fault, at the card that causes it.
export const Callout = memo(function Callout({ data }: NodeProps<CalloutNode>): ReactNode {
  return (
    <div className={`wb-callout nodrag nopan${data.below ? " wb-callout-below" : ""}`}>
      <i style={{ left: data.at }} aria-hidden="true" />
      <Problem text={data.fault.text} mends={data.fault.mends} hint={data.fault.unfinished} onMend={data.onMend} />
    </div>
  );
});
