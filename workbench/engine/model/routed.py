"""The routed experts that stages compute, piece after piece of their weights, and counts of what was chosen."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Mapping, Sequence
from types import MethodType
from typing import NamedTuple, cast

import numpy as np
import numpy.typing as npt
import torch

from workbench.engine.devices.driver import Driver
from workbench.engine.lanes.transfer import Copy, copy_over
from workbench.engine.loading.tensors import Tensors
from workbench.engine.model.few_rows import FewRows
from workbench.engine.model.ops import Ops, RowLayout, added
from workbench.engine.model.weights import Weights
from workbench.models import ModelConfig
from workbench.stages import Op, Place, Stage

_NOTED = 4096
"""Most ids of a stage that are kept until the pass ends."""
_Piece = tuple[tuple[int, ...] | None, Tensors]
"""Experts of a layer, or None for all, and their weights."""


class Group(NamedTuple):
    """Rows whose experts are computed together.

    Attributes
    ----------
    h : Tensor (T, M)
    gates : Tensor (T, 2 j)
    decodes : Tensor (T, 1) or int
        1 for rows of decodes and 0 for those of prefills, or one number for all.
    """

    h: torch.Tensor
    gates: torch.Tensor
    decodes: torch.Tensor | int


class RoutedExperts:
    """Computes routed experts of every layer, whole or in sets, and counts their choices.

    Both compute lanes may call at once.

    Attributes
    ----------
    counts : ndarray (layers, experts) int64
        Times that each expert was computed for a row, until `settle` was called last.
    of_decodes : Counter
        Experts that were computed for decodes, "at once" and "late".
    """

    def __init__(
        self,
        model: ModelConfig,
        layers: Mapping[Place, Sequence[Ops]],
        weights: Weights,
        few: FewRows,
        driver: Driver,
    ) -> None:
        self.counts = np.zeros((model.num_hidden_layers, model.num_local_experts), np.int64)
        self.of_decodes = Counter[str]()
        self._model = model
        self._layers = layers
        self._weights = weights
        self._few = few
        self._driver = driver
        self._touched = 0  # distinct experts that a part chose in a stage, summed over parts, stages and layers
        self._chosen = list[tuple[_Choice, torch.Tensor]]()  # what was chosen, and the counts (2 experts,) on the card
        self._noted = list[tuple[_Choice, npt.NDArray[np.int32]]]()  # on the host: ids, plus E for those of decodes
        self._of_few = list[tuple[Sequence[int], torch.Tensor]]()  # layers and gates of few decodes
        self._fetched: dict[tuple[Op, int, int], list[_Piece]] = {}  # chosen experts by stage, layer and part
        self._pages: dict[tuple[int, ...], torch.Tensor] = {}  # on the card, by the experts that are held
        self._lock = threading.Lock()

    def compute(self, stage: Stage, layer: int, part: int, layout: RowLayout, group: Group) -> torch.Tensor:
        """Output (T, M) of the experts of a group that a stage computes."""
        h, gates, _ = group
        if not gates.numel():
            return torch.zeros_like(h)
        method = cast("MethodType", self._layers[stage.device][layer].experts)
        fetched = self._fetched.get((stage.op, layer, part), [])
        pieces = [*self._weights.pieces(layer, stage), *fetched]
        if pieces and pieces[0][0] is None:
            return self._of_piece(method, pieces[0][1], layout, h, gates)
        stay = len(pieces) - len(fetched)
        if h.device.type != "cpu":
            return self._on_card(method, pieces, stay, layout, h, gates)
        out = torch.zeros(h.shape, dtype=torch.float32)
        for place, (members, weights) in enumerate(pieces):
            pairs = Pairs.of(gates, members or ())
            if len(pairs.rows):
                held = place < stay
                found = self._of_piece(method, weights, layout, h[pairs.rows], pairs.gates, held=held)
                pairs.add_to(out, found.float())
        return out.to(h.dtype)

    def _on_card(
        self,
        method: MethodType,
        pieces: Sequence[_Piece],
        stay: int,
        layout: RowLayout,
        h: torch.Tensor,
        gates: torch.Tensor,
    ) -> torch.Tensor:
        """See `compute`: every piece is given all pairs, and leaves those of other experts out.

        The experts of the first `stay` pieces are the same in every call.
        """
        outputs = list[torch.Tensor]()
        for place, (members, weights) in enumerate(pieces):
            if members:  # else no token chose any of them
                pages = self._pages_of(members, h.device, keep=place < stay)
                outputs.append(self._of_piece(method, {**weights, "pages": pages}, layout, h, gates))
        if len(outputs) == 1:
            return outputs[0]
        return sum((each.float() for each in outputs), torch.zeros_like(h, dtype=torch.float32)).to(h.dtype)

    def _pages_of(self, members: tuple[int, ...], device: torch.device, *, keep: bool) -> torch.Tensor:
        """The page of every expert of a layer where these are held in their order: (E,) int32, -1 for the others.

        With `keep` the next call finds it on the card.
        """
        known = self._pages.get(members)
        if known is not None:
            return known
        pages = np.full(self._model.num_local_experts, -1, np.int32)
        pages[list(members)] = np.arange(len(members))
        there = torch.from_numpy(pages).to(device)
        if keep:
            self._pages[members] = there
        return there

    def fetch(self, stage: Stage, layer: int, part: int, gates: torch.Tensor) -> list[Copy]:
        """The copies of the streamed experts of a stage that are in gates (T, 2 j) into memory of their own."""
        found = list[_Piece]()
        copies = list[Copy]()
        ids = set(gates[:, : gates.shape[1] // 2].int().ravel().tolist())
        for members, sources in self._weights.on_host(layer, stage):
            every = range(self._model.num_local_experts) if members is None else members
            places = [place for place, expert in enumerate(every) if expert in ids]
            tensors = Tensors()
            for key, tensor in sources.items():
                shape = (len(places), *tensor.shape[1:])
                tensors[key] = torch.empty(shape, dtype=tensor.dtype, device=self._driver.device)
                for to, at in zip(tensors[key], places, strict=True):
                    copies.append(copy_over(self._driver, to, tensor[at]))
            found.append((tuple(every[place] for place in places), tensors))
        with self._lock:
            self._fetched[stage.op, layer, part] = found
        return copies

    def drop(self, stage: Stage, layer: int, part: int) -> None:
        """Free the experts that were fetched for a stage of a part."""
        with self._lock:
            fetched = self._fetched.pop((stage.op, layer, part), None)
        if fetched is not None:
            self._driver.stream("gpu").keep(fetched)

    def fetched_bytes(self) -> int:
        """Bytes of all fetched experts that have not been dropped."""
        with self._lock:
            every = [tensors for pieces in self._fetched.values() for _, tensors in pieces]
        return sum(tensor.nbytes for tensors in every for tensor in tensors.values())

    def _of_piece(
        self,
        method: MethodType,
        weights: Tensors,
        layout: RowLayout,
        h: torch.Tensor,
        gates: torch.Tensor,
        *,
        held: bool = True,
    ) -> torch.Tensor:
        few = self._few.of(method, weights, len(h)) if held and h.device.type == "cpu" else None
        read = {"h": h, "gates": gates}
        return cast("torch.Tensor", few.compute(layout, read) if few else method(layout, read, weights))

    def count(self, stage: Stage, layer: int, groups: Sequence[Group], when: str) -> None:
        """Count the experts that a stage computes, apart for prefills and for decodes.

        `when` is "at once" or "late". What a card chose is counted there, and comes with `settle`. `settle` also counts
        what few rows chose, since counting between two stages takes longer.
        """
        choice = _Choice(stage, layer, when)
        experts = self._model.num_local_experts
        if groups[0].gates.device.type == "cpu":
            each = [gates.numpy()[:, : gates.shape[1] // 2] + experts * np.asarray(of) for _, gates, of in groups]
            numbers = np.concatenate([some.ravel() for some in each]).astype(np.int32)
            if len(numbers) > _NOTED:
                self._add(choice, np.bincount(numbers, minlength=2 * experts))
                return
            with self._lock:
                self._noted.append((choice, numbers))
            return
        every = [added(gates[:, : gates.shape[1] // 2], decodes, experts) for _, gates, decodes in groups]
        apart = every[0] if len(every) == 1 else torch.cat([ids.flatten() for ids in every])
        counts = torch.histc(apart, bins=2 * experts, min=-0.5, max=2 * experts - 0.5)  # bincount would wait
        with self._lock:
            self._chosen.append((choice, counts))

    def count_few(self, layers: Sequence[int], gates: torch.Tensor) -> None:
        """Count the experts in the gates (layers, T, 2 k) of few decodes, all of which are computed at once, later."""
        with self._lock:
            self._of_few.append((layers, gates))

    def settle(self) -> None:
        """Count what was noted, and bring what was counted on the card, in one copy."""
        with self._lock:
            chosen = self._chosen
            noted = self._noted
            few = self._of_few
            self._chosen = []
            self._noted = []
            self._of_few = []
        if few:
            self._add_few(few)
        for choice, numbers in noted:
            self._add(choice, np.bincount(numbers, minlength=2 * self._model.num_local_experts))
        if chosen:
            every = torch.stack([counts for _, counts in chosen]).cpu().numpy().astype(np.int64)
            for (choice, _), counts in zip(chosen, every, strict=True):
                self._add(choice, counts)

    def _add_few(self, few: Sequence[tuple[Sequence[int], torch.Tensor]]) -> None:
        """Add the experts in the gates of few decodes, of stages that compute every expert at once."""
        width = few[0][1].shape[2] // 2
        every = self.counts.shape[1]
        layers = [layer for some, _ in few for layer in some]
        firsts = np.split(every * np.arange(len(layers)), np.cumsum([len(some) for some, _ in few])[:-1])
        pairs = zip(few, firsts, strict=True)
        ids = [(gates.numpy()[:, :, :width] + first[:, None, None]).ravel() for (_, gates), first in pairs]
        numbers = np.concatenate(ids).astype(np.int64)
        counts = np.bincount(numbers, minlength=len(layers) * every).reshape(len(layers), every)
        with self._lock:
            self._touched += int(np.count_nonzero(counts))
            np.add.at(self.counts, layers, counts)  # a layer may have several parts
            self.of_decodes["at once"] += len(numbers)

    def _add(self, choice: _Choice, counts: npt.NDArray[np.int64]) -> None:
        """Add the counts (2 experts,) of prefills and then of decodes, of those experts that the stage has."""
        subset = choice.stage.op.subset
        every = self._model.num_local_experts
        counts = counts.reshape(2, every)
        mine = slice(None) if subset is None else np.array(subset.of(choice.layer, every), np.int64)
        found = np.zeros_like(counts)
        found[:, mine] = counts[:, mine]
        both = found.sum(axis=0)
        with self._lock:
            self._touched += int(np.count_nonzero(both))
            self.counts[choice.layer] += both
            self.of_decodes[choice.when] += int(found[1].sum())

    def touched(self) -> int:
        """Distinct experts of each stage and part since the last call, added up."""
        with self._lock:
            found = self._touched
            self._touched = 0
        return found


class _Choice(NamedTuple):
    """A stage of a layer that computed experts, "at once" or "late"."""

    stage: Stage
    layer: int
    when: str


class Pairs(NamedTuple):
    """The pairs of a row and an expert of a set, in the order of rows, on the host.

    Attributes
    ----------
    rows : ndarray (P,) int64
        The row of each pair.
    rank : ndarray (P,) int64
        Number of the row's pairs before it.
    gates : Tensor (P, 2) fp32
        The place of each pair's expert in the set, and its weight.
    """

    rows: npt.NDArray[np.int64]
    rank: npt.NDArray[np.int64]
    gates: torch.Tensor

    @classmethod
    def of(cls, gates: torch.Tensor, members: Sequence[int]) -> Pairs:
        """The pairs in gates (T, 2 j) of a set's experts, in the order in which their weights are held."""
        ids, scales = np.hsplit(gates.numpy(), 2)
        place = np.full(int(max(ids.max(), *members, 0)) + 1, -1)
        place[list(members)] = np.arange(len(members))
        there = place[ids.astype(np.int64)]
        rows, columns = np.nonzero(there >= 0)
        rank = np.cumsum(there >= 0, axis=1)[rows, columns] - 1
        found = np.stack((there[rows, columns], scales[rows, columns]), axis=-1)
        return cls(rows, rank, torch.from_numpy(found.astype(np.float32)))

    def add_to(self, out: torch.Tensor, outputs: torch.Tensor) -> None:
        """Add the outputs (P, M) of the pairs to their rows of out (T, M), each row's in their order."""
        for rank in range(int(self.rank.max(initial=-1)) + 1):
            some = self.rank == rank
            rows = torch.from_numpy(self.rows[some])
            out[rows] = added(out[rows], outputs[torch.from_numpy(some)])
