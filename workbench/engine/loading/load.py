"""Reads the weights of a pipeline's operations from a checkpoint, on several threads, each into its final place."""

from __future__ import annotations

import math
import threading
from collections import deque
from collections.abc import Callable, Collection, Iterable, Sequence
from functools import partial
from typing import Any

import torch
from tqdm.auto import tqdm

from workbench.core.errors import StoppedError
from workbench.core.units import PACKED
from workbench.engine.lanes.control import Control
from workbench.engine.lanes.process import give_back, take
from workbench.engine.loading.checkpoint import TORCH_DTYPES, Checkpoint
from workbench.engine.loading.stored import Stored, divided, host_memory, pack, packed
from workbench.engine.loading.tensors import Source, Tensors, operands, tables
from workbench.hardware import usable_cores
from workbench.models import ModelConfig
from workbench.stages import Op, Precision, experts

Held = dict[tuple[int, Op], list[Stored]]
"""Stored tensors by layer and operation."""

MOST_THREADS = 8
"""Most threads that read; each holds one expert in rows beside the packed ones."""
_PATIENCE = 0.5
"""Seconds of reading before its progress is shown."""


def load(
    model: ModelConfig,
    precision: Precision,
    wanted: Sequence[tuple[int, Op]],
    control: Control,
    *,
    unpacked: Collection[tuple[int, Op]] = (),
    by_node: Collection[tuple[int, Op]] = (),
) -> tuple[Tensors, Held]:
    """Read the tensors that belong to no layer, by name, and those of operations of layers.

    Routed experts are packed for Numba's kernel where it has one for them, except those in fp32 and bf16 that are to be
    `unpacked`. Those `by_node` are divided among NUMA nodes, if there are several. A bar shows the progress, in bytes
    held. `control` may end the reading.

    Raises
    ------
    CheckpointError
        If a file is missing, truncated or damaged, tensors are not the model's, or experts cannot be rounded.
    StoppedError
        If the reading was ended.
    """
    taken = [(layer, op) for layer, op in dict.fromkeys(wanted) if op.has_weights]
    with tqdm(unit="B", unit_scale=True, desc=f"load {model.name}", delay=_PATIENCE, leave=False) as bar:
        reading = _Reading(control, bar)
        with Checkpoint(model, taken, reading.step) as files:
            loader = _Loader(files, model, precision, unpacked, by_node, reading.step)
            bar.total = loader.bytes(taken)
            reading.do(loader.jobs(taken))
    return loader.tables, loader.held


class _Reading:
    """Several threads that read, the progress that they make, and their end."""

    def __init__(self, control: Control, bar: tqdm[Any]) -> None:
        self._control = control
        self._bar = bar
        self._lock = threading.Lock()
        self._jobs = deque[Callable[[], None]]()
        self._errors = list[BaseException]()
        self._ended = False

    def step(self, size: int = 0) -> None:
        """Count bytes that have been read; raise if the reading is to end."""
        if self._ended:
            raise StoppedError("the reading has ended.")
        self._control.check()
        with self._lock:
            self._bar.update(size)

    def do(self, jobs: Iterable[Callable[[], None]]) -> None:
        """Do all jobs; the first error ends them and is raised."""
        self._jobs.extend(jobs)
        count = min(usable_cores(), MOST_THREADS, len(self._jobs))
        # Daemons, for Python's end stops a run and must not wait until its model is loaded.
        readers = [threading.Thread(target=self._read, name=f"read-{number}", daemon=True) for number in range(count)]
        take()
        try:
            for reader in readers:
                reader.start()
            for reader in readers:
                reader.join()
        finally:
            self._ended = True
            for reader in readers:
                if reader.ident is not None:
                    reader.join()
            give_back()  # new threads would inherit what the readers set
        if self._errors:
            raise self._errors[0]

    def _read(self) -> None:
        torch.get_num_threads()  # the first use copies the process-wide value; later, it would undo the next line
        torch.set_num_threads(1)
        while not self._ended:
            try:
                job = self._jobs.popleft()
            except IndexError:
                return
            try:
                job()
            except BaseException as error:  # raised by `do`
                self._errors.append(error)
                self._ended = True


class _Loader:
    """The tensors of a model as they are held, and the jobs that read them."""

    def __init__(
        self,
        files: Checkpoint,
        model: ModelConfig,
        precision: Precision,
        unpacked: Collection[tuple[int, Op]],
        by_node: Collection[tuple[int, Op]],
        step: Callable[[int], object],
    ) -> None:
        self.tables: Tensors = {}
        self.held: Held = {}
        self._files = files
        self._model = model
        self._precision = precision
        self._unpacked = unpacked
        self._by_node = by_node
        self._dividing = threading.Lock()  # so that only one layer is held twice at a time
        self._step = step
        self._sources = tables(model)

    def bytes(self, wanted: Iterable[tuple[int, Op]]) -> float:
        """Bytes of all that will be held."""
        whole = sum(math.prod(source.taken) * self._type(source).itemsize for source in self._sources.values())
        kinds = self._model.layer_kinds
        models = {kind: self._model.of_kind(kind) for kind in set(kinds)}
        return whole + sum(op.weight_bytes(models[kinds[layer]], self._precision, layer) for layer, op in wanted)

    def jobs(self, wanted: Iterable[tuple[int, Op]]) -> list[Callable[[], None]]:
        """Every tensor in one job or another, the longest first."""
        found = sorted(wanted, key=lambda each: each[1].plain is not experts)
        return [*(partial(self._load, *each) for each in found), *(partial(self._table, key) for key in self._sources)]

    def _table(self, key: str) -> None:
        self.tables[key] = self._joined((self._sources[key],))

    def _load(self, layer: int, op: Op) -> None:
        in_rows = (layer, op) in self._unpacked and self._precision.experts not in PACKED
        packs = packed(self._model, self._precision) and not in_rows
        found = operands(op, self._model, layer)
        matrices = list[Stored]()
        if op.plain is experts and packs:
            matrices = pack(self._files, self._model, layer, op, self._precision, self._step)
            if (layer, op) in self._by_node:
                with self._dividing:
                    matrices = divided(self._model, matrices)
            found = [each for each in found if each.matrices is None]
        others = [Stored(each.key, self._joined(each.sources).view(each.shape)) for each in found]
        self.held[layer, op] = [*matrices, *others]

    def _joined(self, sources: Sequence[Source]) -> torch.Tensor:
        """Tensors of the checkpoint, joined along their first dimension."""
        rows = [source.taken[0] for source in sources]
        whole = host_memory((sum(rows), *sources[0].taken[1:]), self._type(sources[0]))
        for source, own in zip(sources, whole.split(rows), strict=True):
            self._files.read_into(source, own)
            self._step(own.nbytes)
        return whole

    def _type(self, source: Source) -> torch.dtype:
        return torch.float32 if source.kept else TORCH_DTYPES[self._precision.weights]
