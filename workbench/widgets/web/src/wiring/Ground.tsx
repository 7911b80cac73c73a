import type { Node, NodeProps } from "@xyflow/react";
import { memo, type ReactNode } from "react";

import type { Device } from "../contract";
import { bytes } from "../format";
import type { Layout, Stream } from "./layout";

// What stands at the lanes: the capacities of both memories, the speed of the link between them, and whether the lanes
// share the cores of the CPU.
export interface Sizes extends Record<Device, string> {
  link: string;
  shared: boolean;
}

export type GroundNode = Node<{ layout: Layout; sizes: Sizes; stale: boolean }, "ground">;
export type PortNode = Node<{ words: string }, "port">;
export type ForkNode = Node<{ arms: number; onJoin: () => void }, "fork">;

export const FORK = { width: 88, height: 18 }; // its button, in pixels

const LANES: { device: Device; name: string; memory: string }[] = [
  { device: "gpu", name: "GPU", memory: "GPU memory" },
  { device: "cpu", name: "CPU", memory: "host memory" },
];

const COMPUTED = ["computed by", "the CPU"]; // below the name of the gpu lane, where there is no GPU

// What lies beneath the cards: the two lanes, the link, the forks' outlines and the weights that are streamed.
export const Ground = memo(function Ground({ data }: NodeProps<GroundNode>): ReactNode {
  const { layout, sizes, stale } = data;
  const { lanes, link } = layout;
  return (
    <svg className="wb-ground" width={layout.width} height={layout.height} aria-hidden="true">
      {LANES.map(({ device, name, memory }) => {
        const { x, y, width, height } = lanes[device];
        const computed = device === "gpu" && sizes.shared ? COMPUTED : [];
        const top = y + height / 2 - 12 - 10 * computed.length; // where the name stands
        const below = top + 18 + 14 * computed.length;
        return (
          <g key={device} className={`wb-lane wb-lane-${device}`}>
            <rect x={x} y={y} width={width} height={height} rx={8} />
            <text x={14} y={top} className="wb-lane-name">
              {name}
            </text>
            {computed.map((line, index) => (
              <text key={line} x={14} y={top + 15 + 13 * index} className="wb-lane-computed">
                {line}
              </text>
            ))}
            <text x={14} y={below} className="wb-lane-memory">
              {memory.split(" ")[0]}
            </text>
            <text x={14} y={below + 14} className="wb-lane-memory">
              {memory.split(" ")[1]}
            </text>
            <text x={14} y={below + 30} className="wb-lane-memory wb-lane-size">
              {sizes[device]}
            </text>
          </g>
        );
      })}
      <text x={14} y={link.y + link.height / 2 - 4} className="wb-lane-memory">
        link
      </text>
      <text x={14} y={link.y + link.height / 2 + 12} className="wb-lane-memory wb-lane-size">
        {sizes.link}
      </text>
      {layout.forks.flatMap(({ key, boxes }) =>
        boxes.map((box) => (
          <rect key={`${key} ${box.y}`} className="wb-fork" x={box.x} y={box.y} width={box.width} height={box.height} rx={10} />
        )),
      )}
      {layout.streams.map((stream) => (
        <Streamed key={stream.key} stream={stream} stale={stale} />
      ))}
    </svg>
  );
});

function Streamed({ stream, stale }: { stream: Stream; stale: boolean }): ReactNode {
  const { x, top, bottom, label } = stream;
  const words = stream.bytes === null ? "weights" : bytes(stream.bytes);
  return (
    <g className={`wb-stream${stale ? " wb-stale" : ""}`}>
      <path d={`M${x} ${bottom}V${top + 7}`} />
      <path className="wb-stream-head" d={`M${x} ${top + 1}l-3.5 7h7Z`} />
      <circle cx={x} cy={bottom} r={3} />
      <rect x={label.x - 37} y={label.y - 9} width={74} height={18} rx={9} />
      <text x={label.x} y={label.y + 4} textAnchor="middle">
        {stream.chosen ? `≤ ${words}` : words}
      </text>
    </g>
  );
}

export const PortDot = memo(function PortDot({ data }: NodeProps<PortNode>): ReactNode {
  return (
    <div className="wb-port" role="img" aria-label={data.words} title={data.words}>
      <span aria-hidden="true">x</span>
    </div>
  );
});

export const ForkHead = memo(function ForkHead({ data }: NodeProps<ForkNode>): ReactNode {
  return (
    <button
      type="button"
      className="wb-fork-head nodrag nopan"
      title="Make the arms follow one another"
      aria-label={`Fork of ${data.arms} arms side by side. Press to make them follow one another`}
      onClick={data.onJoin}
    >
      side by side <span aria-hidden="true">×</span>
    </button>
  );
});
