import { useRef, useState, type ReactNode } from "react";

import type { LayerRange, Wiring } from "../contract";
import { bytes as formatted, seconds as took } from "../format";
import { useBench, useHeld, useLeave, useSend } from "../hooks";
import { fetch } from "./actions";
import { layout } from "./layout";

interface Props {
  wiring: Wiring;
  shown: number;
  onShow: (range: number) => void;
}

// The layers of the model, cut into ranges, and the tensors that are streamed in the range that is shown.
export function RangeBar({ wiring, shown, onShow }: Props): ReactNode {
  const { ranges, layers } = wiring;
  const range = ranges[shown]!;
  const choose = (index: number): void => onShow((index + ranges.length) % ranges.length);
  const cut = <Cut key={`${range.first} ${range.stop}`} range={range} index={shown} last={shown + 1 >= ranges.length} layers={layers} />;
  if (ranges.length === 1) {
    return (
      <div className="wb-range-line wb-range-one">
        <span className="wb-range-title">{range.title}</span>
        <Fetches range={range} index={shown} />
        {cut}
      </div>
    );
  }
  return (
    <div className="wb-range">
      <div className="wb-range-line">
        <div
          className="wb-range-tabs"
          role="tablist"
          aria-label="Ranges of layers"
          onKeyDown={(event) => {
            if (event.key !== "ArrowLeft" && event.key !== "ArrowRight") return;
            choose(shown + (event.key === "ArrowLeft" ? -1 : 1));
            (event.currentTarget.children[shown] as HTMLElement | undefined)?.focus();
            event.preventDefault();
          }}
        >
          {ranges.map((each, index) => (
            <button
              key={each.first}
              type="button"
              role="tab"
              aria-selected={index === shown}
              tabIndex={index === shown ? 0 : -1}
              className="wb-range-tab"
              style={{ flexGrow: each.stop - each.first }}
              onClick={() => onShow(index)}
            >
              <span>
                {each.title}
                {wiring.fault?.range === index && <b className="wb-range-fault"> · to mend</b>}
              </span>
              <Miniature range={each} />
            </button>
          ))}
        </div>
        {cut}
      </div>
      <Fetches range={range} index={shown} />
    </div>
  );
}

// The lanes of a range at a glance.
function Miniature({ range }: { range: LayerRange }): ReactNode {
  const { cards, width, lanes } = layout(range, null);
  const top = lanes.gpu.y;
  const height = lanes.cpu.y + lanes.cpu.height - top;
  return (
    <svg className="wb-miniature" viewBox={`0 ${top} ${width} ${height}`} preserveAspectRatio="none" aria-hidden="true">
      {cards.map(({ key, element, box }) => (
        <rect key={key} className={`wb-miniature-${element.device}`} x={box.x} y={box.y} width={box.width} height={box.height} />
      ))}
    </svg>
  );
}

function Cut({ range, index, last, layers }: { range: LayerRange; index: number; last: boolean; layers: number }): ReactNode {
  const send = useSend();
  const held = Boolean(useHeld());
  const place = useRef<HTMLDivElement>(null);
  const [open, setOpen] = useState(false);
  const [layer, setLayer] = useState(Math.floor((range.first + range.stop) / 2));
  useLeave(place, open, () => setOpen(false));
  const valid = layer > range.first && layer < range.stop;
  const cut = (): void => {
    if (!valid) return;
    send({ do: "cut", range: index, layer });
    setOpen(false);
  };
  return (
    <div className="wb-range-cut" ref={place}>
      {range.stop - range.first > 1 && layers > 1 && (
        <button type="button" className="wb-button" disabled={held} aria-expanded={open} onClick={() => setOpen(!open)}>
          Split layers
        </button>
      )}
      {!last && (
        <button type="button" className="wb-button" disabled={held} title="One wiring for this range and the next: this one's" onClick={() => send({ do: "merge", range: index })}>
          Merge with next
        </button>
      )}
      {open && (
        <form
          className="wb-pop wb-pop-cut"
          onKeyDown={(event) => event.key === "Escape" && setOpen(false)}
          onSubmit={(event) => {
            event.preventDefault();
            cut();
          }}
        >
          <label>
            The second range begins at layer{" "}
            <input
              type="number"
              autoFocus
              min={range.first + 1}
              max={range.stop - 1}
              value={layer}
              onChange={(event) => setLayer(event.target.valueAsNumber)}
            />
          </label>
          <button type="submit" className="wb-button wb-button-strong" disabled={!valid}>
            Split
          </button>
        </form>
      )}
    </div>
  );
}

function Fetches({ range, index }: { range: LayerRange; index: number }): ReactNode {
  const { talk } = useBench();
  const held = Boolean(useHeld());
  if (range.fetches.length === 0) return null;
  return (
    <fieldset className="wb-fetches" disabled={held}>
      <legend>Streamed to the GPU</legend>
      {range.fetches.map(({ name, on, label, why, bytes, seconds }) => (
        <label key={name} className={why && !on ? "wb-off" : ""} title={why}>
          <input
            type="checkbox"
            aria-label={why && !on ? `${label}, not possible: ${why}` : label}
            checked={on}
            disabled={Boolean(why) && !on}
            onChange={() => talk.edit(fetch(index, name, !on))}
          />
          {label}
          {on && bytes != null && <small>{[formatted(bytes), ...(seconds == null ? [] : [took(seconds)])].join(" and ")} per layer</small>}
        </label>
      ))}
    </fieldset>
  );
}
