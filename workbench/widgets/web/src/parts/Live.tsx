import { useEffect, useRef, type ReactNode } from "react";

import type { Live as LiveTrait } from "../contract";
import { useBench, useBroken, useSend, useTrait } from "../hooks";
import { Panel } from "./Panel";
import { runTitle } from "./runTitle";

const WORDS: Record<LiveTrait["state"], string> = {
  none: "Not started",
  loading: "Starting",
  running: "Running",
  paused: "Paused",
  stopping: "Stopping…",
  finished: "Finished",
  stopped: "Stopped",
  failed: "Failed",
};

export const ACTIVE: LiveTrait["state"][] = ["loading", "running", "paused", "stopping"];

// Runs the pipeline on this computer, and what it does meanwhile.
export function Live(): ReactNode {
  const live = useTrait("live");
  const { state, can, why, here, stale, again, text, share, channels, calibrate, calibrating, noted } = live;
  const send = useSend();
  const broken = useBroken();
  const active = ACTIVE.includes(state);
  const shorten = "Also shortens the requests, and makes them fewer, until a run is over soon";
  const closer = "Times the model's operations here, so that simulations come closer to runs; the settings then have the calibrated machine";
  const buttons = (
    <div className="wb-toolbar">
      {!active && calibrate && (
        <button type="button" className="wb-button" title={closer} onClick={() => send({ do: "calibrate" })}>
          {calibrate}
        </button>
      )}
      {!active && here && (
        <button type="button" className="wb-button" title={shorten} onClick={() => send({ do: "here" })}>
          {here}
        </button>
      )}
      <button type="button" className="wb-button wb-button-strong" disabled={active || !can} onClick={() => send({ do: "start" })}>
        {again ? "Start again" : "Start"}
      </button>
      <button
        type="button"
        className="wb-button"
        disabled={!active || state === "loading" || state === "stopping"}
        onClick={() => send({ do: state === "paused" ? "resume" : "pause" })}
      >
        {state === "paused" ? "Resume" : "Pause"}
      </button>
      <button type="button" className="wb-button" disabled={!active || state === "stopping"} onClick={() => send({ do: "stop" })}>
        Stop
      </button>
    </div>
  );
  return (
    <Panel title="Live run" name="live" beside={buttons}>
      <p className="wb-live-status">
        <b className={`wb-live-${state}`}>{calibrating && state !== "stopping" ? "Calibrating" : WORDS[state]}</b>
        {text && <span>{text}</span>}
        {!active && !can && why && <span className="wb-note">{broken ? "The pipeline that is shown cannot run." : why}</span>}
        {noted && <span className="wb-note">{noted}</span>}
      </p>
      {calibrating && <Progress label="Calibration" share={share} />}
      {!calibrating && state !== "none" && (
        <figure className={stale ? "wb-live-stale" : ""}>
          <figcaption className="wb-live-title">{runTitle(active, live)}</figcaption>
          <Progress label="Run: prompt and output tokens" share={share} />
          {channels.length > 0 && <Strip key={channels.map((channel) => channel.label).join()} />}
        </figure>
      )}
    </Panel>
  );
}

function Progress({ label, share }: { label: string; share: number }): ReactNode {
  return (
    <div className="wb-progress" role="progressbar" title={label} aria-label={label} aria-valuemin={0} aria-valuemax={100} aria-valuenow={Math.round(100 * share)}>
      <i style={{ width: `${100 * Math.min(1, share)}%` }} />
    </div>
  );
}

function Strip(): ReactNode {
  const { samples } = useBench();
  const place = useRef<HTMLDivElement>(null);
  useEffect(() => {
    const el = place.current!;
    const leave = samples.draw(el);
    return () => {
      leave();
      el.replaceChildren();
    };
  }, [samples]);
  return <div ref={place} />;
}
