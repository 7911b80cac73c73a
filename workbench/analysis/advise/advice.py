"""A first answer to what a computer does with a model: the placements that people use, their speed, and the best."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from workbench.analysis.advise.loads import Load, gpu_reserve, host_reserve
from workbench.analysis.advise.rows import FACTOR, Row, Worth, best, lengths
from workbench.core.display import aligned, escaped, html_table
from workbench.core.errors import ScenarioError
from workbench.core.units import format_bytes, is_whole
from workbench.hardware import Machine
from workbench.models import ModelConfig
from workbench.workload import Workload

_HEADINGS = (
    *("", "placement", "known as", "memory", "bound tok/s", "simulated tok/s"),
    *("first token", "then tok/s each"),
)


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
            prompt, output = lengths(rows[0].scenario.workload)
            each = "One request" if requests == 1 else f"{requests} requests, each"
            title = f"{each} with a prompt of {prompt} and an output of {output} tokens"
            cells = [("*" if row is chosen else "", *row.cells()) for row in rows]
            yield title, cells, _nearest_changes(rows) if chosen is None else _about(chosen, worth)

    @property
    def notes(self) -> list[str]:
        """Sentences on what the numbers are."""
        kept = f"{format_bytes(gpu_reserve(self.machine))} of the GPU's and {format_bytes(host_reserve(self.machine))}"
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
            "wb.optimize(row.scenario) searches beyond these placements: schedules, schedulers, budgets and KV caches.",
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
            blocks += ["\n".join([title, *aligned([_HEADINGS, *cells])]), "\n".join(below)]
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
    loads = [Load(model, machine, Workload.lengths(prompt, output, requests), weights) for requests in sizes]
    tables = [load.rows() for load in loads]
    worths = [load.worth(rows) for load, rows in zip(loads, tables, strict=True)]
    rows = tuple(row for table in tables for row in table)
    return Advice(model, machine, rows, worths[0], worths[-1], tuple(loads[-1].refused.items()))


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


def _paragraph(text: str) -> str:
    return f"<p>{escaped(text)}</p>"
