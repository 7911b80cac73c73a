"""Shadow prices: the gain from twice as much of one resource: link, GPU, CPU with its DRAM, or KV cache."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from workbench.analysis.wording import GAIN, capital, in_words, lane_of, listed, times
from workbench.core.display import escaped, html_table
from workbench.core.errors import ScenarioError
from workbench.core.result import Result, Source
from workbench.core.units import format_bytes, four_digits, parse_bytes
from workbench.hardware import Device, Machine
from workbench.perfmodels import bound
from workbench.perfmodels.bound import total_rows
from workbench.perfmodels.loads import DRAM
from workbench.pipeline.layer_graph import NodeKind
from workbench.scenario import Scenario
from workbench.schedules import Schedule
from workbench.serving import fits
from workbench.serving.capacity import roomy
from workbench.serving.prepared import price
from workbench.serving.task_cost import profile_shape
from workbench.stages import Place

if TYPE_CHECKING:
    import pandas
    from matplotlib.axes import Axes

_ENDS = ("embed", "head")
_DEVICES = {"link": "a link", "GPU": "a GPU", "CPU": "a CPU with its memory"}
_FEWER = 0.98
"""Batches differ where the iterations of one are fewer than this share of those of the other."""
_RATES = ("bandwidth", "flops", "h2d", "d2h")


@dataclass(frozen=True)
class Price:
    """The gain from more of one resource.

    Attributes
    ----------
    resource : str
        "link", "GPU", "CPU" or "KV capacity".
    gain : float
        Output tokens/s with more of it, over those without.
    result : Result
        Result with more of it.
    heaviest : str
        Largest load on the lane that then binds; empty if the reader names no lane.
    note : str
        Other conditions of the gain, such as more memory.
    """

    resource: str
    gain: float
    result: Result
    heaviest: str = ""
    note: str = ""


@dataclass(frozen=True)
class ShadowPrices:
    """The gains from `factor` times as much of each resource, one at a time."""

    base: Result
    factor: float
    prices: tuple[Price, ...]

    def __getitem__(self, resource: str) -> Price:
        """The price of a resource."""
        return next(price for price in self.prices if price.resource == resource)

    def rows(self) -> list[tuple[str, str, str]]:
        """Rows of resource, gain, and what then limits."""
        return [(f"{self.factor:g}x {p.resource}", f"{p.gain:.2f}x", self._then(p)) for p in self.prices]

    def _then(self, price: Price) -> str:
        words = in_words(price.result.binding)
        limits = f"{words} still limits" if price.result.binding == self.base.binding else f"then {words} limits"
        of = f", mostly with {price.heaviest}" if price.heaviest else ""
        note = f"; {price.note}" if price.note else ""
        return f"{limits}{of}{self._batches(price)}{note}"

    def _batches(self, price: Price) -> str:
        """The change of the number of iterations, which are fewer where batches are fuller, if it matters."""
        if price.result.source is not Source.SIMULATED:
            return ""
        now, before = price.result.iterations, self.base.iterations
        if price.gain >= GAIN and now < _FEWER * before:
            return f"; fuller batches: {now:,} iterations instead of {before:,}"
        if before < _FEWER * now:
            return f"; more iterations: {now:,} instead of {before:,}"
        return ""

    @property
    def title(self) -> str:
        """The sentence that matters most: what limits the scenario under its schedule, and what would help most."""
        base = self.base
        most = "at most " if base.source is Source.BOUND else f"{base.origin} "
        rate = f"{most}{four_digits(base.gen_tok_s)} output tok/s"
        limit = f"{capital(in_words(base.binding))} limits {base.schedule} ({rate})"
        helping = [price for price in self.prices if price.gain >= GAIN]
        if not helping:
            return f"{limit}; {self._factor} any one resource gives hardly more."
        told = [self._gain(max(helping, key=lambda price: price.gain))]
        ready = [price for price in helping if not price.note]
        if ready:
            told.append(self._gain(max(ready, key=lambda price: price.gain)))
        return f"{limit}; {listed(list(dict.fromkeys(told)))}."

    @property
    def _factor(self) -> str:
        return "twice" if self.factor == 2 else f"{self.factor:g} times"

    def _gain(self, price: Price) -> str:
        more = f"{_DEVICES[price.resource]} {self._factor} as fast" if price.resource in _DEVICES else ""
        needs = f" ({price.note})" if price.note else ""
        return f"{more or f'{self._factor} the {price.resource}'} gives {times(price.gain)} this throughput{needs}"

    def to_pandas(self) -> pandas.DataFrame:
        """One row per resource."""
        import pandas

        keys = ("resource", "gain", "heaviest", "note")
        rows = []
        for one in self.prices:
            row = {key: getattr(one, key) for key in keys}
            row["binding"] = one.result.binding
            rows.append(row)
        return pandas.DataFrame(rows)

    def plot(self, ax: Axes | None = None) -> Axes:
        """One bar per resource."""
        from workbench.plots import plot_gains

        return plot_gains([(name, price.gain) for (name, *_), price in zip(self.rows(), self.prices, strict=True)], ax)

    def __str__(self) -> str:
        wide = max(len(row[0]) for row in self.rows())
        return "\n".join([self.title, *(f"{name:{wide}}  {gain:>6}  {then}" for name, gain, then in self.rows())])

    __repr__ = __str__

    def _repr_html_(self) -> str:
        return f"<p>{escaped(self.title)}</p>" + html_table(self.rows(), ("resource", "gain", "what limits then"))


def shadow_prices(
    scenario: Scenario,
    schedule: Schedule,
    reader: Callable[[Scenario, Schedule], Result] = bound,
    *,
    factor: float = 2.0,
) -> ShadowPrices:
    """Compute the gain from `factor` times the link, the GPU, the CPU or the KV cache, all else unchanged.

    A faster device has higher rates and memory bandwidth; where the machine was calibrated for this model, the measured
    times of the operations that the pipeline places there shrink. Fixed times of launches and transfers, and the time
    between iterations, stay. A scheduler without a token budget of its own adapts. If a resource needs more memory than
    there is, the machine is given that memory, and the note says so.

    Parameters
    ----------
    scenario : Scenario
    schedule : Schedule
    reader : callable
        `bound`, in closed form, or `simulate` or a paper's `predict`.
    factor : float
        Factor on each resource.

    Raises
    ------
    ValueError
        If the factor is not above one.
    WorkbenchError
        As the reader does.

    Examples
    --------
    >>> shadow_prices(scenario, VSLPipe())  # doctest: +SKIP
    """
    if not 1 < factor < float("inf"):
        raise ValueError(f"factor={factor} gives no more of a resource; give a number above 1.")
    base = reader(scenario, schedule)
    prices = (_price(name, more(scenario, factor), schedule, reader, base) for name, more in RESOURCES.items())
    return ShadowPrices(base, factor, tuple(prices))


def _price(
    resource: str,
    richer: Scenario,
    schedule: Schedule,
    reader: Callable[[Scenario, Schedule], Result],
    base: Result,
) -> Price:
    ledger = fits(richer, schedule)
    note = ""
    if not ledger:
        note = " and ".join(
            f"needs {format_bytes(account.total)} of {account.name} memory, there are {format_bytes(account.capacity)}"
            for account in (ledger.gpu, ledger.host)
            if account.left < 0
        )
        richer = richer.on(machine=roomy(richer.machine, ledger))
    result = reader(richer, schedule)
    return Price(resource, result.gen_tok_s / base.gen_tok_s, result, _heaviest(richer, schedule, result), note)


def _heaviest(scenario: Scenario, schedule: Schedule, result: Result) -> str:
    """Name the largest load on the binding resource over all requests: an operation, a transfer, or the weights.

    Loads are seconds of a lane, or bytes if the host's memory binds: everything on the host and both directions of the
    link share it.
    """
    prepared = price(scenario, schedule)
    cost = prepared.cost
    stack = prepared.lowering.stack
    rows = cost.by_kind(lambda model: total_rows(scenario.workload, model))
    lane = lane_of(result.binding)
    cores = scenario.machine.cores
    of_dram = result.binding == DRAM
    threads = 0 if cores is None else cores.gpu if lane == "gpu" else cores.cpu
    taken = defaultdict[str, float](float)
    for layer, count in stack.alike:
        total = rows.at(layer)
        for node in (node for node in stack.at(layer) if node is not None):
            if of_dram:
                taken[node.describe()] += count * cost.host_bytes(node, total, layer)
            elif node.lane == lane and node.kind is NodeKind.SEGMENT:
                for stage in node.stages:
                    least, _ = cost.least(replace(stage, defer=0), threads, layer)(total)
                    taken[stage.op.name] += count * least
            elif node.lane == lane and node.kind is not NodeKind.DEFERRED:
                taken[node.describe()] += count * cost.node(node, total, layer=layer)
        if of_dram or lane == "h2d":
            weights = cost.layer_weights(layer)
            taken["weights"] += count * (weights if of_dram else cost.fetch(weights)) * result.iterations
    for place in range(1, stack.layers):
        move = stack.before(place)
        if move is not None and (of_dram or move.lane == lane):
            load = cost.host_bytes if of_dram else cost.node
            taken[move.describe()] += load(move, rows.at(place))
    return max(taken, key=lambda name: taken[name], default="")


def _more_link(scenario: Scenario, factor: float) -> Scenario:
    machine = scenario.machine
    link = scenario.machine.link
    faster = replace(link, h2d=link.h2d * factor, d2h=link.d2h * factor)
    return scenario.on(machine=replace(machine, link=faster, sources=_sources(machine, "link.", factor)))


def _more_gpu(scenario: Scenario, factor: float) -> Scenario:
    machine = scenario.machine
    more = replace(machine, gpu=_faster(machine.gpu, factor), sources=_sources(machine, "gpu.", factor))
    return scenario.on(machine=_as_measured(more, scenario, Place.GPU, factor))


def _more_cpu(scenario: Scenario, factor: float) -> Scenario:
    machine = scenario.machine
    more = replace(machine, cpu=_faster(machine.cpu, factor), sources=_sources(machine, "cpu.", factor))
    return scenario.on(machine=_as_measured(more, scenario, Place.CPU, factor))


def _more_kv(scenario: Scenario, factor: float) -> Scenario:
    memory = scenario.memory
    return scenario.on(memory=replace(memory, kv_capacity=parse_bytes(memory.kv_capacity) * factor))


RESOURCES: dict[str, Callable[[Scenario, float], Scenario]] = {
    "link": _more_link,
    "GPU": _more_gpu,
    "CPU": _more_cpu,
    "KV capacity": _more_kv,
}
"""Every resource that has a price, with the function that gives a scenario `factor` times as much of it."""


def _sources(machine: Machine, resource: str, factor: float) -> dict[str, str]:
    """Sources of the rates that were multiplied, which say so."""
    rates = [name for name in machine.sources if name.startswith(resource) and name.split(".")[1] in _RATES]
    return machine.sources_with(dict.fromkeys(rates, f"{factor:g} times"))


def _faster(device: Device, factor: float) -> Device:
    rates = tuple((dtype, rate * factor) for dtype, rate in device.flops)
    return replace(device, flops=rates, bandwidth=device.bandwidth * factor)


def _as_measured(machine: Machine, scenario: Scenario, place: Place, factor: float) -> Machine:
    """The machine with the measured times of the operations on a device, as the pipeline places them, over `factor`."""
    shape = profile_shape(scenario.model, scenario.precision)
    profile = machine.profile(shape)
    if profile is None:
        return machine
    stages = scenario.stages
    on_gpu = {stage.op.name for stage in stages if stage.device is Place.GPU}
    on_cpu = {stage.op.name for stage in stages if stage.device is Place.CPU}
    both = on_gpu & on_cpu
    if both:
        raise ScenarioError(
            f"{' and '.join(sorted(both))} was measured once and runs on both devices, so that neither can be made "
            "faster alone; give a machine that is not calibrated for this model."
        )
    there = on_gpu | set(_ENDS) if place is Place.GPU else on_cpu
    ops = tuple(time.times(1 / factor) if time.op in there else time for time in profile.ops)
    others = tuple(one for one in machine.profiles if one.shape != shape)
    return replace(machine, profiles=(replace(profile, ops=ops), *others))
