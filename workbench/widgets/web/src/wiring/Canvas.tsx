import { applyNodeChanges, Position, ReactFlow, ReactFlowProvider, useReactFlow, ViewportPortal } from "@xyflow/react";
import type { Node, NodeChange, NodeHandle, Viewport } from "@xyflow/react";
import { useEffect, useId, useImperativeHandle, useLayoutEffect, useMemo, useRef, useState } from "react";
import type { KeyboardEvent, ReactNode, Ref, RefObject } from "react";

import type { Fault, LayerRange, Mend } from "../contract";
import { useWidth } from "../hooks";
import { Callout, type CalloutNode } from "./Callout";
import { Card, type CardNode } from "./Card";
import { type Drop, dropAt } from "./drop";
import { FORK, ForkHead, type ForkNode, Ground, type GroundNode, PortDot, type PortNode, type Sizes } from "./Ground";
import { type Box, CARD, type Layout } from "./layout";
import { More } from "./More";
import { TransferEdge, type WireEdge } from "./TransferEdge";

type AnyNode = CardNode | GroundNode | PortNode | ForkNode | CalloutNode;

const NODES = { card: Card, ground: Ground, port: PortDot, fork: ForkHead, callout: Callout };
const EDGES = { wire: TransferEdge };
const PORT = 16; // pixels across
const EDGE = 84; // pixels at an edge, where a button shows what is beyond
const LEAST_ZOOM = 0.8; // of a picture that is fitted by itself; smaller words are not read

// What the canvas does for the parts around it.
export interface CanvasHandle {
  fit: () => void;
  focus: (key: string) => void;
  at: (clientX: number, clientY: number) => { x: number; y: number } | null;
  hint: (drop: Drop | null) => void;
  boxOf: (key: string) => DOMRect | null;
}

interface Props {
  ref: Ref<CanvasHandle>;
  range: LayerRange;
  picture: Layout;
  fault: Fault | null;
  stale: boolean;
  active: string | null;
  sizes: Sizes;
  label: string;
  onActive: (key: string) => void;
  onDrop: (key: string, drop: Drop) => void;
  onOptions: (key: string) => void;
  onJoin: (key: string) => void;
  onMend: (mend: Mend) => void;
  onKey: (event: KeyboardEvent, key: string | null) => void;
}

export function Canvas(props: Props): ReactNode {
  return (
    <ReactFlowProvider>
      <Flow {...props} />
    </ReactFlowProvider>
  );
}

// A node whose size and ends of edges are known: React Flow need not measure them, and draws edges at once.
function sized<Kind extends AnyNode>(node: Kind, width: number, height: number): Kind {
  const y = height / 2;
  const end = { y, width: 0, height: 0 };
  const handles: NodeHandle[] = [
    { ...end, type: "target", position: Position.Left, x: 0 },
    { ...end, type: "source", position: Position.Right, x: width },
  ];
  return { ...node, width, height, measured: { width, height }, handles };
}

function fixed<Kind extends AnyNode>(node: Kind): Kind {
  return { ...node, draggable: false, selectable: false, focusable: false };
}

function nodesOf(props: Props): AnyNode[] {
  const { picture, fault, stale, active, sizes } = props;
  const { width, height, ports, callout } = picture;
  const cause = fault?.path?.join();
  const nodes: AnyNode[] = [
    sized(fixed({ id: " ground", type: "ground", position: { x: 0, y: 0 }, zIndex: -1, data: { layout: picture, sizes, stale } }), width, height),
  ];
  for (const { key, element, boxes } of picture.forks) {
    const position = { x: boxes[0]!.x + 12, y: boxes[0]!.y - 9 };
    const data = { arms: element.arms.length, onJoin: () => props.onJoin(key) };
    nodes.push(sized(fixed({ id: ` ${key}`, type: "fork", position, zIndex: 1, data }), FORK.width, FORK.height));
  }
  for (const { key, x, y } of ports) {
    const words = key === "in" ? "x, the hidden rows of the layer before" : "x, the hidden rows for the next layer";
    const position = { x: x - PORT / 2, y: y - PORT / 2 };
    nodes.push(sized(fixed({ id: key, type: "port", position, data: { words } }), PORT, PORT));
  }
  for (const { key, element, box } of picture.cards) {
    const faulty = cause !== undefined && (element.path.join() === cause || element.path.join().startsWith(`${cause},`));
    const data = { element, active: key === active, faulty, stale, onOptions: props.onOptions };
    nodes.push(sized({ id: key, type: "card", position: { x: box.x, y: box.y }, zIndex: 1, data }, CARD.width, CARD.height));
  }
  if (fault && callout) {
    const { box, at, rise } = callout;
    const data = { fault, at, rise, onMend: props.onMend };
    nodes.push(sized(fixed({ id: " fault", type: "callout", position: { x: box.x, y: box.y }, zIndex: 2, data }), box.width, box.height));
  }
  return nodes;
}

function edgesOf({ picture, stale }: Props): WireEdge[] {
  return picture.wires.map((wire) => {
    const unseen = { focusable: false, selectable: false, domAttributes: { "aria-hidden": true } as const };
    return { id: wire.key, type: "wire", source: wire.from, target: wire.to, data: { wire, stale }, ...unseen };
  });
}

function Flow(props: Props): ReactNode {
  const { picture, ref, onKey, onActive, onDrop } = props;
  const id = useId();
  const place = useRef<HTMLDivElement>(null);
  const width = useWidth(place);
  const flow = useReactFlow<AnyNode, WireEdge>();
  const [viewport, setViewport] = useState<Viewport>({ x: 0, y: 0, zoom: 1 });
  const [fitted, setFitted] = useState(true);
  const [drop, setDrop] = useState<Drop | null>(null);
  const [held, setHeld] = useState<string | null>(null); // the card that is dragged
  const wanted = useMemo(() => nodesOf(props), [picture, props.fault, props.stale, props.active, props.sizes]);
  const [changed, setChanged] = useState({ of: wanted, nodes: wanted }); // as they were dragged and measured
  const nodes = changed.of === wanted ? changed.nodes : wanted;
  const edges = useMemo(() => edgesOf(props), [picture, props.stale]);

  const zoom = fitted ? Math.min(1, Math.max(LEAST_ZOOM, width / picture.width)) : viewport.zoom;
  const height = Math.ceil(picture.height * (fitted ? zoom : Math.max(zoom, LEAST_ZOOM)));
  const extent = useMemo((): [[number, number], [number, number]] => [[0, 0], [picture.width, picture.height]], [picture]);
  const clamped = (x: number, at: number): number => Math.min(0, Math.max(x, width - picture.width * at));
  useLayoutEffect(() => {
    if (fitted && width) setViewport((old) => ({ x: clamped(old.x, zoom), y: 0, zoom }));
  }, [fitted, width, picture.width, picture.height, zoom]);

  const show = (key: string): void => {
    const card = picture.cards.find((each) => each.key === key);
    if (!card) return;
    const left = card.box.x * viewport.zoom + viewport.x;
    const right = left + CARD.width * viewport.zoom;
    const by = left < 8 ? 24 - left : right > width - 8 ? width - 24 - right : 0;
    if (by) setViewport({ ...viewport, x: viewport.x + by });
  };
  const cardNode = (key: string): HTMLElement | null =>
    place.current?.querySelector<HTMLElement>(`[data-card="${CSS.escape(key)}"]`) ?? null;
  useImperativeHandle(ref, () => ({
    fit: () => setFitted(true),
    focus: (key) => cardNode(key)?.focus({ preventScroll: true }),
    at: (clientX, clientY) => {
      const box = place.current?.getBoundingClientRect();
      if (!box || clientX < box.left || clientX > box.right || clientY < box.top || clientY > box.bottom) return null;
      return flow.screenToFlowPosition({ x: clientX, y: clientY });
    },
    hint: setDrop,
    boxOf: (key) => cardNode(key)?.getBoundingClientRect() ?? null,
  }));

  const over = picture.width * viewport.zoom + viewport.x - width;
  const [before, after] = [viewport.x < -4, over > 4];
  const free = (left: number): number => {
    const lane = freeLane(picture, (left - viewport.x) / viewport.zoom, EDGE / viewport.zoom);
    return (lane.y + lane.height / 2) * viewport.zoom + viewport.y;
  };
  const hidden = (outside: (left: number, right: number) => boolean): number =>
    picture.cards.filter(({ box }) => outside(box.x * viewport.zoom + viewport.x, (box.x + box.width) * viewport.zoom + viewport.x)).length;
  const pan = (by: number): void => setViewport((old) => ({ ...old, x: clamped(old.x + by, old.zoom) }));
  useWheel(place, (by) => pan(-by));

  const dropOf = (node: Node): Drop => dropAt(picture, node.position.x + CARD.width / 2, node.position.y + CARD.height / 2);
  return (
    <>
      <div
        ref={place}
        className={["wb-canvas", before ? "wb-canvas-before" : "", after ? "wb-canvas-after" : ""].join(" ")}
        role="application"
        aria-label={props.label}
        style={{ height }}
        onKeyDown={(event) => onKey(event, keyOf(event.target))}
        onFocus={(event) => {
          const key = keyOf(event.target);
          if (!key) return;
          onActive(key);
          show(key);
        }}
      >
        <ReactFlow<AnyNode, WireEdge>
          id={id}
          ref={plain}
          nodes={nodes}
          edges={held === null ? edges : edges.filter((edge) => edge.source !== held && edge.target !== held)}
          nodeTypes={NODES}
          edgeTypes={EDGES}
          viewport={viewport}
          onViewportChange={(next) => {
            const still = fitted && Math.abs(next.zoom - viewport.zoom) < 1e-6; // it pans sideways and no further
            setViewport(still ? { ...viewport, x: clamped(next.x, viewport.zoom) } : next);
            if (!still) setFitted(false);
          }}
          onNodesChange={(changes: NodeChange<AnyNode>[]) =>
            setChanged((old) => ({ of: wanted, nodes: applyNodeChanges(changes, old.of === wanted ? old.nodes : wanted) }))
          }
          onNodeDragStart={(_, node) => cardNode(node.id)?.focus({ preventScroll: true })}
          onNodeDrag={(_, node) => {
            setHeld(node.id);
            setDrop(dropOf(node));
          }}
          onNodeDragStop={(_, node) => {
            setDrop(null);
            setHeld(null);
            setChanged({ of: wanted, nodes: wanted });
            onDrop(node.id, dropOf(node));
          }}
          onNodeClick={(_, node) => cardNode(node.id)?.focus({ preventScroll: true })}
          nodesConnectable={false}
          nodesFocusable={false}
          edgesFocusable={false}
          elementsSelectable={false}
          disableKeyboardA11y
          deleteKeyCode={null}
          selectionKeyCode={null}
          multiSelectionKeyCode={null}
          panActivationKeyCode={null}
          zoomActivationKeyCode="Control"
          zoomOnScroll={false}
          zoomOnDoubleClick={false}
          preventScrolling={false}
          nodeDragThreshold={0}
          translateExtent={extent}
          minZoom={0.4}
          maxZoom={2}
          proOptions={{ hideAttribution: true }}
        >
          {drop && <DropHint drop={drop} picture={picture} />}
        </ReactFlow>
      </div>
      {before && <More side="before" cards={hidden((left) => left < 0)} top={free(0)} onPress={() => pan(width * 0.6)} />}
      {after && <More side="after" cards={hidden((_, right) => right > width)} top={free(width - EDGE)} onPress={() => pan(-width * 0.6)} />}
    </>
  );
}

// The lane whose edge no card takes, from `left` on over this width; the GPU's where both are taken.
function freeLane({ cards, lanes }: Layout, left: number, width: number): Box {
  const taken = cards.filter(({ box }) => box.x < left + width && left < box.x + box.width).map(({ element }) => element.device);
  return taken.includes("cpu") || !taken.includes("gpu") ? lanes.gpu : lanes.cpu;
}

// React Flow's own element is no second application within the canvas.
function plain(element: HTMLElement | null): void {
  element?.setAttribute("role", "none");
}

function keyOf(target: EventTarget): string | null {
  return target instanceof Element ? (target.closest<HTMLElement>("[data-card]")?.dataset.card ?? null) : null;
}

// A wheel that goes sideways, or with Shift, pans; one that goes up and down scrolls the page.
function useWheel(place: RefObject<HTMLDivElement | null>, pan: (by: number) => void): void {
  const latest = useRef(pan);
  latest.current = pan;
  useEffect(() => {
    const here = place.current;
    if (!here) return undefined;
    const wheel = (event: WheelEvent): void => {
      const by = event.shiftKey && !event.deltaX ? event.deltaY : event.deltaX;
      if (event.ctrlKey || (!event.shiftKey && Math.abs(event.deltaX) <= Math.abs(event.deltaY))) return;
      event.preventDefault();
      latest.current(by);
    };
    here.addEventListener("wheel", wheel, { passive: false });
    return () => here.removeEventListener("wheel", wheel);
  }, [place]);
}

function DropHint({ drop, picture }: { drop: Drop; picture: Layout }): ReactNode {
  const { x, y, width, height } = picture.lanes[drop.device];
  return (
    <ViewportPortal>
      <div className="wb-drop-lane" style={{ left: x, top: y, width, height }} />
      <div className="wb-drop-slot" style={{ left: drop.x - 1.5, top: drop.top, height: drop.bottom - drop.top }} />
    </ViewportPortal>
  );
}
