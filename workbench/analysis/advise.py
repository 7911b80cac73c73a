"""A first answer to what a computer does with a model: the placements that people use, their speed, and the best."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace

from workbench.analysis.placements import Placement, placements
from workbench.analysis.shadow_prices import RESOURCES
from workbench.core.display import escaped, html_table
from workbench.core.errors import ScenarioError
from workbench.core.result import Result
from workbench.core.units import DTYPE_BYTES, format_bytes, format_seconds, is_whole
from workbench.hardware import Machine
from workbench.models import ModelConfig
from workbench.perfmodels import bound
from workbench.scenario import Memory, Scenario
from workbench.scheduler.base import Scheduler
from workbench.scheduler.resource_aware import ResourceAware
from workbench.scheduler.static import StaticBatching
from workbench.schedules import Schedule
from workbench.serving import fits
from workbench.serving.capacity import ledger, roomy
from workbench.serving.ledger import Account, Ledger
from workbench.serving.prepared import price
from workbench.simulate import simulate
from workbench.workload import Workload

GPU_RESERVE = 2.0**30
"""GPU memory that is kept free, at most a tenth of it: the margin of llama.cpp's ``--fit`` [B]."""
HOST_RESERVE = 4 * 2.0**30
"""Host memory that is kept free for the operating system, at most a tenth of it: assumed [B]."""
PROMPT_TOKENS = 2048
"""Prompt tokens that are computed at once: the default of llama.cpp's ``-b``; more where weights stream meanwhile."""
FACTOR = 2.0
"""Factor on each resource whose worth is told."""
_BLOCK = 16
_HEADINGS = (
    *("", "placement", "known as", "memory", "bound tok/s", "simulated tok/s"),
    *("first token", "then tok/s each"),
)
_OTHER_RESOURCES = {"CPU": "CPU and DRAM speed", "link": "link speed", "GPU": "GPU speed"}
"""Resources that have a shadow price and matter here, in words."""


@dataclass(frozen=True)
class Row:
    """One placement for one load.

    Attributes
    ----------
    placement, known_as : str
        The placement in words, and the systems or options that place a model so.
    requests : int
        Requests of the load.
    scenario, schedule
        The same as a scenario and a schedule, from which one can go on. The scenario has as many of the requests as the
        KV cache holds at a time: all, or else a part of them, behind which the next parts are served alike.
    ledger : Ledger
        The needs in both memories.
    bound, simulated : Result or None
        The most that this hardware allows, and the simulation; None if it does not fit.
    """

    placement: str
    known_as: str
    requests: int
    scenario: Scenario
    schedule: Schedule
    ledger: Ledger
    bound: Result | None = None
    simulated: Result | None = None

    @property
    def fits(self) -> bool:
        """True if it fits both memories."""
        return bool(self.ledger)

    @property
    def at_once(self) -> int:
        """Requests that are served at a time."""
        return len(self.scenario.workload)

    @property
    def tightest(self) -> Account:
        """The memory of which the smallest share is left, or the largest is missing."""
        return min((self.ledger.gpu, self.ledger.host), key=lambda account: account.left / account.capacity)

    @property
    def tok_s(self) -> float:
        """Simulated output tokens per second, with the time of the prompts; 0 if it does not fit."""
        return self.simulated.gen_tok_s if self.simulated else 0.0

    def cells(self) -> tuple[str, ...]:
        """Cells of the table behind the mark of the best."""
        fewer = f", {self.at_once} at a time" if self.at_once < self.requests else ""
        left = self.tightest.left
        room = f"{self.tightest.name} {format_bytes(abs(left))} {'short' if left < 0 else 'left'}"
        words = (self.placement + fewer, self.known_as, room)
        if self.bound is None or self.simulated is None:
            return (*words, "", "", "", "")
        later = _digits(1 / self.simulated.tbt) if self.simulated.tbt > 0 else ""
        first = format_seconds(self.simulated.ttft)
        return (*words, _digits(self.bound.gen_tok_s), _digits(self.tok_s), first, later)


@dataclass(frozen=True)
class Worth:
    """The worth of more of one resource.

    Attributes
    ----------
    resource : str
    gain : float
        Simulated output tokens/s of the best placement with `FACTOR` times as much, over those without. Memory that
        faster devices need for larger batches counts as given.
    placement : str
        The best placement then. Only more GPU memory is tried with other placements.
    """

    resource: str
    gain: float
    placement: str


@dataclass(frozen=True, repr=False)
class Advice:
    """Placements of a model on a machine, for one request and for a batch.

    Attributes
    ----------
    model : ModelConfig
    machine : Machine
    rows : tuple of Row
        Every placement that was tried, first for one request, then for the batch.
    worth_single, worth_batch : tuple of Worth
        The worth of more hardware for one request and for the batch; empty if nothing fits.
    refused : tuple of (str, str)
        Each placement that could not be priced, and the reason.
    """

    model: ModelConfig
    machine: Machine
    rows: tuple[Row, ...]
    worth_single: tuple[Worth, ...] = ()
    worth_batch: tuple[Worth, ...] = ()
    refused: tuple[tuple[str, str], ...] = ()

    @property
    def best_single(self) -> Row | None:
        """The placement that is fastest for one request, simulated, of those that fit; None if none fits."""
        return best(self._of(1))

    @property
    def best_batch(self) -> Row | None:
        """The placement that is fastest for the batch, simulated, of those that fit; None if none fits."""
        return best(self._of(self.rows[-1].requests))

    def _of(self, requests: int) -> list[Row]:
        return [row for row in self.rows if row.requests == requests]

    @property
    def weight_bytes(self) -> float:
        """Size of the model's weights [B]."""
        ledger = self.rows[0].ledger
        return ledger.gpu["weights"] + ledger.host["weights"]

    @property
    def title(self) -> str:
        """The model with the size of its weights, and the machine."""
        formats = self.rows[0].scenario.weight_formats
        return f"{self.model.name}, {format_bytes(self.weight_bytes)} of weights in {formats}, on {self.machine}"

    def tables(self) -> Iterator[tuple[str, list[tuple[str, ...]], list[str]]]:
        """For one request and for the batch a title, the rows of the table, and sentences below it."""
        loads = {1: self.worth_single} | {self.rows[-1].requests: self.worth_batch}
        for requests, worth in loads.items():
            rows = self._of(requests)
            chosen = best(rows)
            prompt, output = _lengths(rows[0].scenario.workload)
            each = "One request" if requests == 1 else f"{requests} requests, each"
            title = f"{each} with a prompt of {prompt} and an output of {output} tokens"
            cells = [("*" if row is chosen else "", *row.cells()) for row in rows]
            yield title, cells, _nearest_changes(rows) if chosen is None else _about(chosen, worth)

    @property
    def notes(self) -> list[str]:
        """Sentences on what the numbers are."""
        kept = (
            f"{format_bytes(_gpu_reserve(self.machine))} of the GPU's and {format_bytes(_host_reserve(self.machine))}"
        )
        return [
            "*: the fastest of those that fit. bound: output tok/s that no order of the work can exceed on this "
            "hardware. simulated: output tok/s, with the time of the prompts. first token: mean wait of the requests "
            "that are served at a time, simulated. then: tok/s of each of them after its first token, simulated.",
            f"memory: the one with the smallest share left, where {kept} of the host's are kept free. Embedding and "
            "head are always on the GPU.",
            "A machine of the catalogue has the rates of data sheets, derated. It counts no launches of kernels and no "
            "waits between devices: small models, and experts on the CPU, are slower in practice; public runs with "
            "experts on the CPU decode at half of what is simulated, in the median (python -m workbench reproduce "
            "offload_runs).",
            *(
                f"Not priced: {', '.join(self._refused_for(why))}. {why}"
                for why in dict.fromkeys(dict(self.refused).values())
            ),
        ]

    def _refused_for(self, reason: str) -> list[str]:
        return [what for what, why in self.refused if why == reason]

    def __str__(self) -> str:
        blocks = [self.title]
        for title, cells, below in self.tables():
            blocks += ["\n".join([title, *_aligned([_HEADINGS, *cells])]), "\n".join(below)]
        return "\n\n".join([*blocks, "\n".join(self.notes)])

    __repr__ = __str__

    def _repr_html_(self) -> str:
        parts = [_paragraph(self.title)]
        for title, cells, below in self.tables():
            parts += [_paragraph(title), html_table(cells, _HEADINGS), *map(_paragraph, below)]
        return "".join([*parts, *map(_paragraph, self.notes)])


def advise(
    model: ModelConfig,
    machine: Machine,
    *,
    prompt: int = 512,
    output: int = 128,
    batch: int = 32,
    weights: str | None = None,
) -> Advice:
    """Try the placements that people use for a model on a machine: what fits, how fast it is, what hardware is worth.

    All requests are there at the start. Each placement gets the KV cache of all of them, or of as many as fit at a
    time, and then the largest share of the weights on the GPU that fits. It takes seconds, in proportion to `output`.

    Parameters
    ----------
    model : ModelConfig
        The model, as from `models`, `model` or `checkpoint`.
    machine : Machine
        The machine, as from `machines`, `machine` or `Machine.load`.
    prompt, output : int
        Tokens of each prompt, and output tokens of each request.
    batch : int
        Requests of the batch.
    weights : str, optional
        Format of the weights, as `Memory` takes it; by default the model's own.

    Raises
    ------
    ScenarioError
        If these are no model and machine, the batch is no whole number from 1 on, a request is longer than the model
        takes, or no placement can be priced.
    WorkloadError
        If a length is no whole number from 1 on.
    CapacityError
        If the format is unknown.

    Examples
    --------
    >>> wb.advise(wb.models["mixtral-8x7b"], wb.machines["a40"])  # doctest: +SKIP
    """
    for given, kind, source in ((model, ModelConfig, "wb.models"), (machine, Machine, "wb.machines")):
        if not isinstance(given, kind):
            raise ScenarioError(f"advise takes a {kind.__name__}, not {given!r}; give one such as of {source}.")
    if not is_whole(batch) or batch < 1:
        raise ScenarioError(f"batch={batch!r} is no number of requests; give a whole number from 1 on.")
    sizes = dict.fromkeys((1, int(batch)))
    loads = [_Load(model, machine, Workload.lengths(prompt, output, requests), weights) for requests in sizes]
    tables = [load.rows() for load in loads]
    worths = [load.worth(rows) for load, rows in zip(loads, tables, strict=True)]
    rows = tuple(row for table in tables for row in table)
    return Advice(model, machine, rows, worths[0], worths[-1], tuple(loads[-1].refused.items()))


def best(rows: Iterable[Row]) -> Row | None:
    """The row with most simulated output tokens per second of those that fit; the first of equal ones."""
    return max((row for row in rows if row.fits), key=lambda row: row.tok_s, default=None)


_ONE_MEMORY = "GPU and CPU of this chip read one memory, whose bandwidth would count twice."


class _Load:
    """One or several equal requests for a model on a machine."""

    def __init__(self, model: ModelConfig, machine: Machine, workload: Workload, weights: str | None) -> None:
        self._model = model
        self._machine = machine
        self._workload = workload
        self._weights = weights
        self.refused: dict[str, str] = {}

    def rows(self) -> list[Row]:
        """A row with its bound and simulation for every placement.

        Raises
        ------
        ScenarioError
            If no placement can be priced.
        """
        several = len(self._workload) > 1
        rows = self._placed(each for each in placements(self._model) if several or not each.of_batches)
        if not rows:
            raise ScenarioError(next(iter(self.refused.values())))
        return [_simulated(replace(row, bound=bound(row.scenario, row.schedule)) if row.fits else row) for row in rows]

    def worth(self, rows: Sequence[Row]) -> tuple[Worth, ...]:
        """The worth of `FACTOR` times as much of each resource for the best of these rows."""
        chosen = best(rows)
        if chosen is None:
            return ()
        found = [self._of_memory(chosen)]
        if self._machine.one_memory:
            return tuple(found)
        for resource, words in _OTHER_RESOURCES.items():
            with suppress(ScenarioError):  # an operation that runs on both devices was measured once
                richer = RESOURCES[resource](chosen.scenario, FACTOR)
                richer = richer.on(machine=roomy(richer.machine, fits(richer, chosen.schedule)))
                gain = simulate(richer, chosen.schedule).gen_tok_s / chosen.tok_s
                found.append(Worth(words, gain, chosen.placement))
        return tuple(found)

    def _of_memory(self, chosen: Row) -> Worth:
        """The worth of more GPU memory, in which more of the weights lie."""
        gpu = replace(self._machine.gpu, memory=FACTOR * self._machine.gpu.memory)
        richer = _Load(self._model, replace(self._machine, gpu=gpu), self._workload, self._weights)
        everything, *others = placements(self._model)
        gaining = [each for each in others if _gains(each, chosen)]
        rows = [_simulated(row) for row in richer._placed([everything, *gaining])]
        more = best([chosen, *rows]) or chosen
        return Worth("GPU memory", more.tok_s / chosen.tok_s, more.placement)

    def _placed(self, tried: Iterable[Placement]) -> list[Row]:
        """A row without its speed for every placement that can be priced.

        The first is everything on the GPU: if that fits, there are no rows for parts of it.
        """
        rows = list[Row]()
        whole = False
        for number, placement in enumerate(tried):
            if placement.partial and whole:
                continue
            first = placement.layout(placement.steps[0])
            if self._machine.one_memory and first.on_both:
                self.refused[first.what] = _ONE_MEMORY
                continue
            try:
                rows.append(self._row(placement))
            except ScenarioError as error:
                self.refused[first.what] = str(error)
                continue
            if number == 0:
                whole = rows[0].fits and rows[0].at_once == rows[0].requests
        return rows

    def _row(self, placement: Placement) -> Row:
        """A placement at the highest step that fits the GPU, with less KV cache if it does not fit otherwise.

        Behind the last step all weights would be on the GPU, and no slots for them: a step takes its share of that, but
        for whole tensors.
        """
        first = placement.steps[0]
        last = placement.steps[-1]
        row = self._at(placement, first)
        each = (row.ledger.host["weights"] - row.ledger.gpu["weight slots"]) / (last + 1 - first)
        step = first
        ahead = min(_steps(row, each), last - step)
        while ahead > 0:
            further = self._at(placement, step + ahead)
            if further.ledger.gpu.left < 0:
                ahead -= 1
                continue
            row = further
            step += ahead
            ahead = min(_steps(row, each), last - step)
        return row if row.fits else _with_less_cache(row)

    def _at(self, placement: Placement, step: int) -> Row:
        """A placement at one step, with the KV cache of all requests."""
        layout = placement.layout(step)
        schedule = placement.schedule
        kv = self._weights if self._weights in DTYPE_BYTES else None
        per_block = _BLOCK * self._model.kv_bytes_per_token(kv or self._model.dtype)
        memory = Memory(
            kv_capacity=len(self._workload) * _blocks(self._workload) * per_block,
            kv_block=_BLOCK,
            weights=self._weights,
            kv=kv,
            gpu_reserve=_gpu_reserve(self._machine),
            host_reserve=_host_reserve(self._machine),
            weights_on_gpu=layout.kept,
        )
        few = max(PROMPT_TOKENS, len(self._workload))
        scheduler = _scheduler(schedule, None if placement.streams else few)
        scenario = Scenario(layout.pipeline, self._model, self._machine, memory, self._workload, scheduler)
        prepared = price(scenario, schedule)
        if prepared.token_budget < few:
            scenario = scenario.on(scheduler=_scheduler(schedule, few))
            prepared = price(scenario, schedule)
        return Row(layout.what, layout.known_as, len(self._workload), scenario, schedule, ledger(prepared))


def _steps(row: Row, each: float) -> int:
    """Steps that may fit the GPU memory that a row leaves; one more where it is nearly enough for it."""
    return int(row.ledger.gpu.left / each + 0.1) if each > 0 else 0


def _scheduler(schedule: Schedule, token_budget: float | None) -> Scheduler:
    """MoE-Lens' scheduler for its schedule, static batches for the others."""
    if isinstance(schedule.scheduler, ResourceAware):
        return ResourceAware(token_budget)
    return StaticBatching(schedule.parts, token_budget=token_budget)


def _gains(placement: Placement, chosen: Row) -> bool:
    """True if a placement may become the best with more GPU memory."""
    if placement.partial:
        return not placement.streams or placement.schedule == chosen.schedule
    return placement.layout(placement.steps[0]).what == chosen.placement


def _with_less_cache(row: Row) -> Row:
    """The row with as many requests at a time as fit, or as it is if not even one does."""
    prompt, output = _lengths(row.scenario.workload)
    for change in row.ledger.changes:
        if change.scenario.kv_blocks < row.scenario.kv_blocks:
            held = change.scenario.kv_blocks // _blocks(row.scenario.workload)
            fewer = change.scenario.on(workload=Workload.lengths(prompt, output, held))
            return replace(row, scenario=fewer, ledger=fits(fewer, row.schedule))
    return row


def _simulated(row: Row) -> Row:
    return replace(row, simulated=simulate(row.scenario, row.schedule)) if row.fits else row


def _lengths(workload: Workload) -> tuple[int, int]:
    """Prompt and output length of each of the equal requests."""
    return int(workload.prompt_len[0]), int(workload.output_len[0])


def _blocks(workload: Workload) -> int:
    """KV blocks that each of the equal requests has at its end."""
    prompt, output = _lengths(workload)
    return -(-(prompt + output - 1) // _BLOCK)


def _gpu_reserve(machine: Machine) -> float:
    return min(GPU_RESERVE, machine.gpu.memory / 10)


def _host_reserve(machine: Machine) -> float:
    return min(HOST_RESERVE, machine.cpu.memory / 10)


# ---------------------------------------------------------------------------------------------------------- in words


def _about(chosen: Row, worth: Sequence[Worth]) -> list[str]:
    """The best placement in this project's words, and the worth of more hardware."""
    told = [f"{FACTOR:g}x {one.resource} gives {one.gain:.2f}x{_then(one, chosen)}" for one in worth]
    return [
        f"Best: {chosen.scenario.pipeline} under {chosen.schedule.name}",
        f"Worth of more hardware, simulated: {', '.join(told)}.",
    ]


def _then(one: Worth, chosen: Row) -> str:
    return f" ({one.placement})" if one.placement != chosen.placement else ""


def _nearest_changes(rows: Sequence[Row]) -> list[str]:
    """The nearest change with which something fits, and the nearest change of the weights' format."""
    changes = [(change, row) for row in rows for change in row.ledger.changes]
    changes.sort(key=lambda pair: pair[0].factor)
    formats = [pair for pair in changes if pair[0].scenario.memory.weights != pair[1].scenario.memory.weights]
    nearest = dict.fromkeys(pair[0] for pair in (changes[:1], formats[:1]) if pair)
    told = [f"{change} with {row.placement}" for change, row in nearest]
    return [f"Nothing fits. Nearest change: {', or '.join(told)}." if told else "Nothing fits."]


def _digits(rate: float) -> str:
    """A rate in three digits, or in all before the point."""
    return f"{rate:.0f}" if rate >= 100 else f"{rate:.3g}"


def _aligned(table: Sequence[Sequence[str]]) -> list[str]:
    """Lines of a table, its columns aligned."""
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    return ["  ".join(map(str.ljust, row, widths)).rstrip() for row in table]


def _paragraph(text: str) -> str:
    return f"<p>{escaped(text)}</p>"
