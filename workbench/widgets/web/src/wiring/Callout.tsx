import type { Node, NodeProps } from "@xyflow/react";
import { memo, type ReactNode } from "react";

import type { Fault, Mend } from "../contract";
import { Problem } from "../parts/Problem";

export type CalloutNode = Node<{ fault: Fault; at: number; rise: number; onMend: (mend: Mend) => void }, "callout">;

// The sentence of a fault, at the card that causes it.
export const Callout = memo(function Callout({ data }: NodeProps<CalloutNode>): ReactNode {
  return (
    <div className="wb-callout nodrag nopan">
      <i style={{ left: data.at, top: -data.rise, height: data.rise }} aria-hidden="true" />
      <Problem text={data.fault.text} mends={data.fault.mends} hint={data.fault.unfinished} onMend={data.onMend} />
    </div>
  );
});
