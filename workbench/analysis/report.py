"""Report of the main job without a browser: a page of pictures and text, results as JSON, and timelines as a trace."""

from __future__ import annotations

import base64
import io
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from string import Template
from typing import Any

import matplotlib as mpl
import matplotlib.pyplot as plt

from workbench.analysis.compare import Comparison, compare
from workbench.core.catalogue import data_path
from workbench.core.display import escaped
from workbench.core.errors import EngineError
from workbench.core.result import Result, Source
from workbench.core.units import four_digits
from workbench.engine import calibrate, run
from workbench.hardware.assembly import machine
from workbench.models import checkpoint, models
from workbench.perfmodels import bound
from workbench.pipeline import cpu, fetch, gpu, load, offload
from workbench.plots import plot_iterations, plot_lanes, plot_throughput
from workbench.scenario import Memory, Scenario
from workbench.scheduler.resource_aware import ResourceAware
from workbench.schedules import Schedule, contenders
from workbench.simulate import Detail, simulate
from workbench.stages import decode_attention, moe, out_proj, prefill_attention, qkv, weights
from workbench.workload import Workload, workloads
from workbench.workload.exam import Exam, make_exam
from workbench.workload.tokenizer import load_tokenizer

LINK = 0.2e9  # bytes per second: streaming this model then takes about as long as computing a batch on two cores
QUESTIONS = 96
RUNS = 3
"""Most runs of a schedule: one, and two more if it was outside the interval of its simulation."""
WARM = 8
"""Requests of the warm-up run, which does not count."""
SHOWN = (4, 6)  # iterations drawn in the lane charts

_PAGE = Template("""<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>MoE Workbench report</title>
<style>
body { font: 15px/1.5 system-ui, sans-serif; max-width: 1080px; margin: 2em auto; padding: 0 1em; color: #111; }
table { border-collapse: collapse; margin: 1em 0; font-size: 13px; display: block; overflow-x: auto; }
th, td { text-align: left; padding: 3px 10px 3px 0; border-bottom: 1px solid #ddd; white-space: nowrap; }
img { max-width: 100%; } pre { background: #f6f6f6; padding: 1em; overflow-x: auto; font-size: 12px; }
</style></head><body>
<h1>One pipeline, read three ways</h1>
<p><code>$pipeline</code></p>
<p>The same description was bounded, simulated and, where there are weights, executed. On this computer $best generated
the most, <b>$rate output tokens/s</b>: $gain. All schedules generated the same tokens.</p>
<h2>Predicted: $server_name</h2>
<pre>$server</pre>
<p>This scenario was looked for: link, GPU and CPU have about equally much to do, so it is the order of tasks that
decides. Mostly the link takes longer than all else, and $slow, which only fetches the next layer's weights ahead, is
as good as any: <code>python -m workbench bench schedules</code> draws others. The workload's lengths are synthetic:
drawn to the published mean and maximum.</p>
$predicted_bars $predicted
<h2>Measured: this computer</h2>
<pre>$local</pre>
<p>No GPU is used here: the gpu lane computes on the CPU. The link is a real copy paced to $link. Where it gains by
it, a task of $slow has all cores. The model is the small one
that ships with the workbench, trained on exercises with exact answers; $marks.</p>
<pre>$live</pre>
$measured_bars $measured
<h2>Lane by lane, iterations $shown</h2>
$lanes
<h2>Every iteration, measured</h2>
<h3>$slow</h3>
$slow_iterations
<h3>$fast</h3>
$fast_iterations
<h2>Made with</h2>
<pre>$made_with</pre>
</body></html>
""")


def server_scenario() -> Scenario:
    """Mixtral-8x7B and long prompts on a workstation with an RTX 5090, where the order of tasks matters most."""
    layer = fetch(weights) | gpu(qkv, prefill_attention) >> offload >> cpu(decode_attention) >> load >> gpu(
        out_proj, moe
    )
    return Scenario(
        layer,
        model=models["mixtral-8x7b"],
        machine=machine("rtx-5090", "xeon-8380", memory="256GB"),
        memory=Memory(kv_capacity="150GB", kv_block=16),
        workload=workloads["rag"].sample(requests=20_000, output_len=128, seed=0),
        scheduler=ResourceAware(),
    )


def local_scenario() -> tuple[Scenario, Exam]:
    """The same pipeline on this computer: the trained model that ships, held-out exercises, and a throttled link."""
    model = checkpoint(data_path("models/tiny-moe"))
    here = calibrate(model, weights="fp32", kv="fp32")
    exam = make_exam(QUESTIONS, load_tokenizer(model), prompt_len=(0, 200))
    memory = Memory(kv_capacity=4000 * model.kv_bytes_per_token("fp32"), kv_block=16, weights="fp32", kv="fp32")
    here = here.limit(link=min(LINK, here.link.h2d, here.link.d2h))
    return server_scenario().on(model=model, machine=here, memory=memory, workload=exam.workload), exam


@dataclass(frozen=True)
class Live:
    """A schedule simulated and run on this computer; a run outside the simulation's interval is followed by more."""

    schedule: Schedule
    simulated: Result
    runs: tuple[Result, ...]

    @classmethod
    def of(cls, scenario: Scenario, schedule: Schedule) -> Live:
        """Simulate, then run until the median run is within the interval or `RUNS` runs were made."""
        live = cls(schedule, simulate(scenario, schedule, detail=Detail.TASK), (run(scenario, schedule),))
        while not live.foreseen and len(live.runs) < RUNS:
            live = replace(live, runs=(*live.runs, *(run(scenario, schedule) for _ in range(2))))
        return live

    @property
    def median(self) -> Result:
        """The run of median throughput; of an even number of runs, the slower of the two in the middle."""
        return sorted(self.runs, key=lambda result: result.gen_tok_s)[(len(self.runs) - 1) // 2]

    @property
    def foreseen(self) -> bool:
        """True if the median run lies in the interval, or there is no interval."""
        low, high = self.simulated.interval or (0.0, float("inf"))
        return low <= self.median.gen_tok_s <= high

    def __str__(self) -> str:
        seen = ", ".join(four_digits(result.gen_tok_s) for result in self.runs)
        within = (
            ""
            if self.simulated.interval is None
            else ", 90 % within {} to {}".format(*map(four_digits, self.simulated.interval))
        )
        return (
            f"{self.schedule.name}: simulated {four_digits(self.simulated.gen_tok_s)} output tok/s{within}; measured "
            f"{four_digits(self.median.gen_tok_s)}, the median of {seen}"
        )


def warm_up(local: Scenario, schedules: Sequence[Schedule]) -> None:
    """Run a few of the requests and drop the result: the first run of a process reads and maps memory for all others.

    A first run of all requests was 5 to 9 % slower than the next (Zen 4).
    """
    few = Workload.of(local.workload.requests[:WARM], name="warm up")
    for schedule in (schedules[0], schedules[-1]):
        run(local.on(workload=few), schedule)


def write_report(out: Path, say: Callable[[str], None] = print) -> Path:
    """Do the main job and write ``report.html``, ``results.json`` and ``timeline.json.gz`` into `out`.

    Raises
    ------
    WorkbenchError
        If a step fails, or the schedules generate different tokens.
    """
    mpl.use("Agg")
    out.mkdir(parents=True, exist_ok=True)
    server = server_scenario()
    say(f"[1/4] {server.model.name} on {server.machine.name}: bound and simulate, {len(server.workload)} requests")
    schedules = contenders(server.stack)
    predicted = compare(read(server, schedule) for schedule in schedules for read in (bound, simulate))
    say(f"{predicted}\n[2/4] this computer: measure it and the shipped model's operations (kept for the next time)")
    local, exam = local_scenario()
    say(f"{local}\n[3/4] bound, simulate and run")
    warm_up(local, schedules)
    live = [Live.of(local, schedule) for schedule in schedules]
    measured = compare(result for one in live for result in (bound(local, one.schedule), one.simulated, one.median))
    say("\n".join((str(measured), *map(str, live), "[4/4] write")))
    runs = [result for one in live for result in one.runs]
    _check_tokens(runs)
    page = _page(server, predicted, local, measured, marks(exam, measured), live)
    (out / "report.html").write_text(page, encoding="utf-8")
    foreseen = [result for result in measured.results if result.source is not Source.MEASURED]
    results = [result.to_dict(timeline=False) for result in (*predicted.results, *foreseen, *runs)]
    (out / "results.json").write_text(json.dumps(results, indent=1), encoding="utf-8")
    measured.to_perfetto(out / "timeline.json.gz")
    say(f"wrote {out / 'report.html'}, results.json and timeline.json.gz (open it in ui.perfetto.dev)")
    return out / "report.html"


def _check_tokens(runs: Sequence[Result]) -> None:
    if len({result.tokens for result in runs}) != 1:
        schedules = dict.fromkeys(result.schedule for result in runs)
        raise EngineError(
            f"{' and '.join(schedules)} generated different tokens; a schedule must never change the answer."
        )


def marks(exam: Exam, comparison: Comparison) -> str:
    """Count of right answers by kind of exercise; all measured runs give the same answers.

    Raises
    ------
    EngineError
        If fewer than nine in ten answers are right: the shipped model answers nearly all exercises.
    """
    answered = next(result for result in comparison.results if result.source is Source.MEASURED)
    by_kind = exam.marks(answered)
    right = sum(mark.right for mark in by_kind.values())
    count = sum(mark.count for mark in by_kind.values())
    if right < 0.9 * count:
        raise EngineError(f"only {right} of {count} exercises were answered right; the engine computes wrongly.")
    kinds = ", ".join(f"{kind} {mark.right} of {mark.count}" for kind, mark in by_kind.items())
    return f"{right} of {count} held-out exercises were answered exactly ({kinds})"


def _page(
    server: Scenario, predicted: Comparison, local: Scenario, measured: Comparison, marks: str, live: Sequence[Live]
) -> str:
    runs = [result for result in measured.results if result.source is Source.MEASURED]
    slow = runs[0]
    fast = runs[-1]
    best = max(runs, key=lambda result: result.gen_tok_s)
    others = [result for result in runs if result is not best]
    lanes = []
    for one in runs:
        of_schedule = [result for result in measured.results if result.schedule == one.schedule]
        lanes.append(_lanes(of_schedule))
    return _PAGE.substitute(
        pipeline=escaped(str(server.pipeline)),
        slow=escaped(slow.schedule),
        fast=escaped(fast.schedule),
        best=escaped(best.schedule),
        rate=f"{best.gen_tok_s:.3g}",
        gain=escaped(", ".join(f"{best.gen_tok_s / r.gen_tok_s:.2f} times {r.schedule}" for r in others)),
        server=escaped(str(server)),
        server_name=escaped(f"{server.model.name} on {server.machine.name}"),
        predicted_bars=_picture(lambda: plot_throughput(predicted.results)),
        predicted=predicted._repr_html_(),
        local=escaped(str(local)),
        marks=escaped(marks),
        live=escaped("\n".join(map(str, live))),
        link=f"{local.machine.link.h2d / 1e9:.3g} GB/s",
        measured_bars=_picture(lambda: plot_throughput(measured.results)),
        measured=measured._repr_html_(),
        shown=f"{SHOWN[0]} to {SHOWN[1] - 1}",
        lanes="".join(lanes),
        slow_iterations=_picture(lambda: plot_iterations(slow)),
        fast_iterations=_picture(lambda: plot_iterations(fast)),
        made_with=escaped(json.dumps({**fast.versions, "machine": fast.machine, "date": fast.date}, indent=1)),
    )


def _lanes(results: Sequence[Result]) -> str:
    """Lane charts of one schedule, simulated and measured on one time axis."""
    return _picture(lambda: plot_lanes([result for result in results if len(result.timeline)], SHOWN)[0])


def _picture(draw: Callable[[], Any]) -> str:
    figure = draw().figure
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=110)
    plt.close(figure)
    return f"<p><img alt='' src='data:image/png;base64,{base64.b64encode(buffer.getvalue()).decode()}'></p>"
