"""Prediction against measurement: settings are drawn at random after calibration, then simulated and run."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from workbench.analysis.explain import residual
from workbench.bench import record
from workbench.core.display import short_name
from workbench.core.errors import ScenarioError, WorkbenchError
from workbench.core.quiet import Noise
from workbench.core.result import Result
from workbench.engine import calibrate, make_checkpoint, run
from workbench.hardware import Machine
from workbench.models import ModelConfig, checkpoint
from workbench.perfmodels import bound
from workbench.pipeline import Pipeline, cpu, fetch, gpu, load, offload
from workbench.reproductions.moe_lens import VSL as LAYER
from workbench.scenario import Memory, Scenario
from workbench.scheduler.base import Scheduler
from workbench.scheduler.chunked_prefill import ChunkedPrefill
from workbench.scheduler.continuous import ContinuousBatching
from workbench.scheduler.layered_prefill import LayeredPrefill
from workbench.scheduler.registry import every_scheduler
from workbench.scheduler.resource_aware import Admission, ResourceAware
from workbench.scheduler.static import StaticBatching
from workbench.schedules import (
    CGOPipe,
    FastDecode,
    Fiddler,
    FlexGenS3,
    FlexGenS4,
    KTransformers,
    LayerStreaming,
    Schedule,
    Sequential,
    VSLPipe,
)
from workbench.schedules.registry import every_schedule
from workbench.simulate import Detail, simulate
from workbench.stages import attention, combine, experts, kv, moe, out_proj, qkv, route, weights
from workbench.workload import Request, Workload

ON_GPU = gpu(qkv, attention, out_proj, moe)
EXPERTS_STREAMED = fetch(experts.weights) | Pipeline(LAYER.chain)
"""Pipeline whose attention weights stay on the GPU, as in MoE-Lightning.

If they were streamed, the first segment would wait for the last page of all.
"""


def _experts_on_cpu(defer: int = 0) -> Pipeline:
    return gpu(qkv, attention, out_proj, route) >> offload >> cpu(experts, defer=defer) >> load >> gpu(combine)


_CHOSEN: tuple[tuple[Pipeline, Schedule], ...] = (
    (LAYER, Sequential()),
    (LAYER, Sequential(prefetch=True)),
    (LAYER, VSLPipe()),
    (LAYER, VSLPipe(weight_slots=3)),
    (LAYER, FlexGenS3()),
    (LAYER, FastDecode()),
    (LAYER, CGOPipe()),
    (EXPERTS_STREAMED, CGOPipe()),
    (fetch(weights) | ON_GPU, LayerStreaming()),
    (fetch(weights, kv) | ON_GPU, FlexGenS4()),
    (ON_GPU, Sequential()),
    (_experts_on_cpu(), KTransformers()),
    (_experts_on_cpu(defer=1), KTransformers()),
    (_experts_on_cpu(), Fiddler()),
)
_KINDS = {type(schedule) for _, schedule in _CHOSEN}
_FOUND = {kind: kind.example for kind in every_schedule() if kind not in _KINDS}
WAYS = (*_CHOSEN, *((layer, kind()) for kind, layer in _FOUND.items() if layer is not None))
"""Every schedule, with a pipeline that it takes: those with chosen settings first, then each other one's example."""
_POLICIES: tuple[Scheduler, ...] = (
    ResourceAware(),
    ResourceAware(admission=Admission.PACED),
    StaticBatching(),
    ContinuousBatching(),
    ChunkedPrefill(128),
    LayeredPrefill(128),
)
SCHEDULERS = (*_POLICIES, *(one for one in every_scheduler() if type(one) not in map(type, _POLICIES)))
"""Every scheduler: those with chosen settings first, then each other one's example."""
SECONDS = (1.5, 8.0)
"""Least and most simulated seconds of a run; other settings are drawn again."""
LINKS = (0.1e9, 6e9)
"""Slowest and fastest link [B/s]."""
ONLINE = 0.25
"""Share of the settings whose requests arrive one by one, spread over about the duration of a run."""
FEWEST = 4
BLOCK = 16
MODELS = ("odd-mixtral", "odd-deep", "odd-qwen2", "odd-qwen3")
"""Models: Mixtral's layers, many thin layers in fp32, Qwen2-MoE's shared experts, Qwen3's small experts in fp32."""
EXTRA = 5
"""Additional rounds, in which disturbed runs are repeated."""
BOTTLENECK = 1.5
"""A lane is the bottleneck if it is simulated as busy so many times as long as any other, and for `LIMITING`."""
LIMITING = 0.95
"""Share of the time that a bottleneck is busy."""


@dataclass
class Setting:
    """One scenario under one schedule, with its predictions and its measured runs."""

    scenario: Scenario
    schedule: Schedule
    simulated: Result
    bound: Result
    runs: list[Result] = field(default_factory=list)
    dropped: int = 0
    failure: str | None = None

    @property
    def name(self) -> str:
        """Description of all that was drawn."""
        link = self.scenario.machine.link.h2d
        tokens = self.scenario.kv_blocks * self.scenario.memory.kv_block
        who = short_name(self.scenario.scheduler)
        what = f"{self.scenario.model.name}, {self.way}, {who}, {requests_in_words(self.scenario.workload)}"
        return f"{what}, KV {tokens}, {link / 1e9:.2f} GB/s"

    @property
    def way(self) -> str:
        """Name of the schedule, with the properties of the pipeline that it does not imply."""
        fetches = self.scenario.layer.fetches
        told = [] if fetches else ["resident"]
        told += [f"defer {stage.defer}" for stage in self.scenario.stages if stage.defer]
        told += ["experts streamed" for fetched in fetches if fetched == experts.weights]
        return " ".join([self.schedule.name, *told])

    @property
    def width(self) -> float:
        """Width of the simulation's 90 % interval, relative to the simulated rate [1]."""
        low, high = self.simulated.interval or (0.0, 0.0)
        return (high - low) / self.simulated.gen_tok_s

    @property
    def bottleneck(self) -> str | None:
        """The lane that alone decides the simulated time, if there is one."""
        (_, second), (lane, first) = sorted(self.simulated.utilisation.items(), key=lambda item: item[1])[-2:]
        return lane if first >= max(BOTTLENECK * second, LIMITING) else None

    @property
    def measured(self) -> Result:
        """The run of median throughput."""
        return sorted(self.runs, key=lambda result: result.gen_tok_s)[len(self.runs) // 2]

    @property
    def rate(self) -> float:
        """Median throughput of the runs [output tokens/s]."""
        return median(result.gen_tok_s for result in self.runs)

    @property
    def error(self) -> float:
        """Measured over simulated throughput, less one: negative if the run was slower than predicted."""
        return self.rate / self.simulated.gen_tok_s - 1

    @property
    def deviations(self) -> list[float]:
        """Distance of each repetition from their median, relative [1]; none of a single run."""
        if len(self.runs) < 2:
            return []
        return [abs(result.gen_tok_s / self.rate - 1) for result in self.runs]

    @property
    def foreseen(self) -> bool:
        """True if the median run lies in the simulation's 90 % interval."""
        low, high = self.simulated.interval or (0.0, 0.0)
        return low <= self.rate <= high

    def row(self) -> dict[str, Any]:
        """Row for the record."""
        return {
            "setting": self.name,
            "model": self.scenario.model.name,
            "way": self.way,
            "bound": self.bound.gen_tok_s,
            "simulated": self.simulated.gen_tok_s,
            "interval": self.simulated.interval,
            "measured": self.rate,
            "runs": [result.gen_tok_s for result in self.runs],
            "others": [result.others for result in self.runs],
            "dropped": self.dropped,
            "error": self.error,
            "residual": residual(self.measured, self.simulated),
            "bottleneck": self.bottleneck,
            "utilisation": self.measured.utilisation,
        }


def requests_in_words(workload: Workload) -> str:
    """Number and mean lengths of requests: ``40 x 96+12 arriving``."""
    lengths = f"{workload.prompt_len.mean():.0f}+{workload.output_len.mean():.0f}"
    return f"{len(workload)} x {lengths}{' arriving' if len(workload.arrival) else ''}"


def draw(models: Sequence[tuple[ModelConfig, Machine]], count: int, seed: int) -> list[Setting]:
    """Draw settings at random; calibrated models and schedules take turns, so that each is drawn equally often.

    Scheduler, requests, their lengths and arrivals, KV capacity and link are random.
    """
    random = np.random.default_rng(seed)
    settings = list[Setting]()
    while len(settings) < count:
        number = len(settings) % len(models)
        turn = len(settings) // len(models)
        layer, schedule = WAYS[(turn + number * len(WAYS) // len(models)) % len(WAYS)]
        setting = _shortened(_drawn(random, layer, *models[number]), schedule)
        if setting is not None:
            settings.append(setting)
    return settings


def _shortened(scenario: Scenario, schedule: Schedule) -> Setting | None:
    """A setting with as many of the requests as a run has time for; None if there is no such number.

    A scheduler that cuts prompts into chunks gives None if the schedule's pipeline does not support chunks.
    """
    while len(scenario.workload) >= FEWEST:
        try:
            simulated = simulate(scenario, schedule, detail=Detail.TASK)
        except ScenarioError:
            return None
        if simulated.seconds < SECONDS[0]:
            return None
        if simulated.seconds <= SECONDS[1]:
            return Setting(scenario, schedule, simulated, bound(scenario, schedule))
        scenario = _halved(scenario)
    return None


def _halved(scenario: Scenario) -> Scenario:
    """The scenario with every other request, and with half of the KV capacity if one request still fits."""
    workload = scenario.workload
    half = Workload.of(workload.requests[::2], name=workload.name)
    if len(workload.arrival):
        half = half.arriving(at=workload.arrival[::2])
    least = float((half.prompt_len + half.output_len).max() + BLOCK)
    least *= scenario.model.kv_bytes_per_token(scenario.precision.kv)
    capacity = scenario.kv_blocks * scenario.memory.kv_block * scenario.model.kv_bytes_per_token(scenario.precision.kv)
    return scenario.on(workload=half, memory=replace(scenario.memory, kv_capacity=max(least, capacity / 2)))


def _drawn(random: np.random.Generator, layer: Pipeline, model: ModelConfig, machine: Machine) -> Scenario:
    requests = _spread(random, 8, 160)
    prompt = _spread(random, 8, 200)
    output = _spread(random, 4, 48)
    prompts = random.integers(max(1, prompt // 2), prompt * 3 // 2 + 1, requests)
    outputs = random.integers(max(1, output // 2), output * 3 // 2 + 1, requests)
    held = (prompts + outputs).astype(float)
    tokens = max(held.max() + BLOCK, held.sum() * random.uniform(0.1, 1.0))
    drawn = [
        Request(tuple(random.integers(0, model.vocab_size, p).tolist()), int(g))
        for p, g in zip(prompts, outputs, strict=True)
    ]
    workload = Workload.of(drawn, name="random")
    if random.random() < ONLINE:
        workload = workload.arriving(at=np.sort(random.uniform(0, random.uniform(*SECONDS), requests)))
    low, high = np.log(LINKS)
    link = min(float(np.exp(random.uniform(low, high))), machine.link.h2d, machine.link.d2h)
    return Scenario(
        layer,
        model=model,
        machine=machine.limit(link=link),
        memory=Memory(tokens * model.kv_bytes_per_token(model.dtype), BLOCK),
        workload=workload,
        scheduler=SCHEDULERS[random.integers(len(SCHEDULERS))],
    )


def _spread(random: np.random.Generator, low: int, high: int) -> int:
    return round(float(np.exp(random.uniform(np.log(low), np.log(high)))))


def bench_sim(
    names: Sequence[str],
    *,
    settings: int,
    repeats: int,
    seed: int,
    json: Path | None,
    say: Callable[[str], None] = record.say,
) -> list[Setting]:
    """Calibrate, draw, run and compare; print a table with the residual of each setting by cause.

    Settings without an undisturbed run are listed and left out of the errors.

    Raises
    ------
    WorkbenchError
        If no setting had an undisturbed run; or if a run failed, after all others are reported and recorded.
    """
    models = calibrated(names, say)
    drawn = draw(models, settings, seed)
    say(f"frozen before {settings} settings were drawn (seed {seed})")
    warm_up(models)
    try:
        repeat_all(drawn, repeats, say)
    except KeyboardInterrupt:
        say("stopped: what follows is what was measured until now")
    seen = [setting for setting in drawn if setting.runs]
    if not seen:
        raise WorkbenchError("no run succeeded undisturbed; close other programs and try again.")
    _print(seen, say)
    failed = [f"{setting.name}: {setting.failure}" for setting in drawn if setting.failure]
    for setting in drawn:
        if not (setting.runs or setting.failure):
            say(f"no undisturbed run: {setting.name}")
    say(f"runs dropped as disturbed: {sum(setting.dropped for setting in drawn)}")
    if json is not None:
        errors = record.ratio([setting.error + 1 for setting in seen])
        record.write(json, models[-1][1], {"measured / simulated": errors}, [setting.row() for setting in seen])
    if failed:
        raise WorkbenchError(f"runs failed, each a defect of the engine: {'; '.join(failed)}.")
    return drawn


def calibrated(names: Sequence[str], say: Callable[[str], None]) -> list[tuple[ModelConfig, Machine]]:
    """Models of these names, each with this computer as calibrated for it now."""
    found = list[tuple[ModelConfig, Machine]]()
    for model in [checkpoint(make_checkpoint(name)) for name in names]:
        machine = calibrate(model, device="cpu", refresh=not found)
        say(f"{model.name}: {machine.name}, calibrated {machine.measured}")
        found.append((model, machine))
    return found


def warm_up(models: Sequence[tuple[ModelConfig, Machine]]) -> None:
    """Run each model once."""
    for model, _ in models:
        run(*smallest(model))


def smallest(model: ModelConfig) -> tuple[Scenario, Schedule]:
    """A small run as warm-up: it reads files, compiles kernels and maps memory."""
    workload = Workload.of([Request((1,) * 64, 4)] * 8)
    memory = Memory(1024 * model.kv_bytes_per_token(model.dtype), 16)
    return Scenario(LAYER, model, Machine.local(device="cpu"), memory, workload, ResourceAware()), VSLPipe()


def repeat_all(drawn: Sequence[Setting], repeats: int, say: Callable[[str], None]) -> None:
    """Run interleaved rounds until every setting has `repeats` undisturbed runs or the rounds are over."""
    for turn in range(repeats + EXTRA):
        missing = [setting for setting in drawn if len(setting.runs) < repeats and not setting.failure]
        if not missing:
            return
        for number in np.random.default_rng(turn).permutation(len(missing)).tolist():
            _repeat(missing[number], say)
        done = sum(len(setting.runs) for setting in drawn)
        say(f"round {turn + 1} of at most {repeats + EXTRA}: {done} of {repeats * len(drawn)} undisturbed runs")


def _repeat(setting: Setting, say: Callable[[str], None]) -> None:
    try:
        result = run(setting.scenario, setting.schedule)
    except Exception as error:  # the others are not lost for one that fails
        setting.failure = f"{type(error).__name__}: {error}"
        say(f"failed: {setting.name}: {setting.failure}")
        return
    noise = Noise(result.others)
    if noise.quiet:
        setting.runs.append(result)
    else:
        setting.dropped += 1
        say(f"dropped a run of {setting.name}: {noise}")


def _print(settings: list[Setting], say: Callable[[str], None]) -> None:
    wide = max(len(setting.name) for setting in settings)
    say(f"{'setting':{wide}}   bound  simulated  measured   error  runs  residual [s] by cause")
    for setting in settings:
        causes = ", ".join(
            f"{cause} {seconds:+.2f}" for cause, seconds in residual(setting.measured, setting.simulated).items()
        )
        say(
            f"{setting.name:{wide}}  {setting.bound.gen_tok_s:6.1f}  {setting.simulated.gen_tok_s:9.1f}  "
            f"{setting.measured.gen_tok_s:8.1f}  {setting.error:+6.1%}  {len(setting.runs):4}  {causes}"
        )
    errors = [abs(setting.error) for setting in settings]
    with_interval = [setting for setting in settings if setting.simulated.interval]
    if with_interval:
        inside = sum(s.foreseen for s in with_interval)
        width = median(s.width for s in with_interval)
        say(
            f"measured within the simulation's 90 % interval: {inside} of {len(with_interval)}; "
            f"median width {width:.1%}"
        )
    repeated = [deviation for setting in settings for deviation in setting.deviations]
    if repeated:
        say(
            "repetitions of a setting are off their median by "
            f"{np.percentile(repeated, 90):.1%} in 90 % of the runs, {max(repeated):.1%} at most: "
            "no prediction of a single run is closer than this computer is to itself"
        )
    most = ", ".join(f"{share} % within {np.percentile(errors, share):.1%}" for share in (90, 95))
    say(f"absolute error: median {median(errors):.1%}, mean {np.mean(errors):.1%}, {most}, largest {max(errors):.1%}")
    _print_by("model", [(setting.scenario.model.name, setting.error) for setting in settings], say)
    _print_by("way", [(setting.way, setting.error) for setting in settings], say)
    busy = [setting.measured.utilisation[setting.bottleneck] for setting in settings if setting.bottleneck]
    if busy:
        say(
            f"{len(busy)} settings have a lane that is simulated as busy at least {LIMITING:.0%} of the time and "
            f"{BOTTLENECK} times as long as any other; measured, it is busy {median(busy):.0%} (median), "
            f"{min(busy):.0%} at least"
        )


def _print_by(what: str, errors: Sequence[tuple[str, float]], say: Callable[[str], None]) -> None:
    """Report median errors by group: `errors` holds pairs of a group's name and a setting's error."""
    for name in dict.fromkeys(name for name, _ in errors):
        mine = [error for other, error in errors if other == name]
        absolute = median(map(abs, mine))
        signed = median(mine)
        say(f"{what} {name}: median absolute error {absolute:.1%}, median error {signed:+.1%}, of {len(mine)}")
