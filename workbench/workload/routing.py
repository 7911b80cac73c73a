"""Routing: how often each expert is chosen, by which sets of experts get their share of the work."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache

import numpy as np
import numpy.typing as npt

from workbench.core.errors import ScenarioError
from workbench.models import ModelConfig

_KEPT = 64
"""Answers that a function of `Frequencies.touching` keeps: one iteration asks the same several times."""
Touched = Callable[[float, int], float]
"""Expected number of distinct experts that some tokens are routed to, if so many experts of each token count."""


class Routing(ABC):
    """Expected routing of a model's tokens, layer by layer; tokens are independent of one another."""

    @abstractmethod
    def share(self, model: ModelConfig, layer: int, experts: Sequence[int]) -> float:
        """Share of all pairs of a token and an expert that some experts of a layer get."""

    @abstractmethod
    def touching(self, model: ModelConfig, layer: int, experts: Sequence[int]) -> Touched:
        """The function that tells how many of some experts of a layer are chosen; see `Touched`."""

    @abstractmethod
    def mark(self, layer: int) -> Hashable:
        """A mark that is equal for layers that are routed alike."""

    @abstractmethod
    def check(self, model: ModelConfig) -> None:
        """Refuse a model that it does not describe.

        Raises
        ------
        ScenarioError
            If it describes other layers or experts than the model has.
        """


@dataclass(frozen=True)
class Uniform(Routing):
    """Every expert is chosen equally often; distinct experts follow the model's `coverage`, if it has one."""

    def check(self, model: ModelConfig) -> None:
        """See `Routing.check`: it describes any model."""

    def share(self, model: ModelConfig, layer: int, experts: Sequence[int]) -> float:
        """See `Routing.share`: n / E."""
        return len(experts) / model.num_local_experts

    def touching(self, model: ModelConfig, layer: int, experts: Sequence[int]) -> Touched:
        """See `Routing.touching`: n (1 - (1 - each/E)^T) without a coverage."""
        part = len(experts) / model.num_local_experts
        if part == 1:
            return model.touched_experts
        return lambda tokens, each: part * model.touched_experts(tokens, each)

    def mark(self, layer: int) -> Hashable:
        """See `Routing.mark`."""
        return None


UNIFORM = Uniform()
"""The routing unless another is given."""


@dataclass(frozen=True)
class Frequencies(Routing):
    """Every expert of a layer is chosen as often as it was counted, as `Result.expert_counts` of a run tells.

    A token chooses expert e with the probability p_e = k n_e / (sum of n in its layer), so that T tokens touch
    1 - (1 - p_e)^T of it.

    Parameters
    ----------
    counts : (layers, experts)
        Times that each expert was chosen. Rows of layers without experts are not read.

    Raises
    ------
    ScenarioError
        If counts are no such table, or a count is negative or not finite.
    """

    counts: tuple[tuple[float, ...], ...]

    def __post_init__(self) -> None:
        try:
            table = np.array(self.counts, dtype=np.float64)
        except (TypeError, ValueError):
            table = np.zeros(0)
        if table.ndim != 2 or not table.size or not np.isfinite(table).all() or (table < 0).any():
            raise ScenarioError(
                "Frequencies(counts) takes a table (layers, experts) of numbers from 0 on, as the expert_counts of a "
                f"run; this one has the shape {table.shape}."
            )
        object.__setattr__(self, "counts", tuple(map(tuple, table.tolist())))

    def __str__(self) -> str:
        busiest = max(max(row) / sum(row) for row in self.counts if sum(row))
        return f"as counted in {self._table.sum():.0f} choices, up to {busiest:.1%} of a layer's for one expert"

    def check(self, model: ModelConfig) -> None:
        """See `Routing.check`."""
        wanted = (model.num_hidden_layers, model.num_local_experts)
        if self._table.shape != wanted:
            raise ScenarioError(f"Frequencies has counts of shape {self._table.shape}, {model.name} needs {wanted}.")
        for layer, kind in enumerate(model.layer_kinds):
            if not kind.dense and not self._table[layer].any():
                raise ScenarioError(
                    f"Frequencies has no counts for layer {layer} of {model.name}, which has experts; count a run."
                )

    def share(self, model: ModelConfig, layer: int, experts: Sequence[int]) -> float:
        """See `Routing.share`: the sum of n_e / sum of n over the experts."""
        row = self._table[layer]
        return float(row[list(experts)].sum() / row.sum())

    def touching(self, model: ModelConfig, layer: int, experts: Sequence[int]) -> Touched:
        """See `Routing.touching`: the sum of 1 - (1 - p_e)^T over the experts."""
        row = self._table[layer]
        shares = row[list(experts)] / row.sum()

        @lru_cache(_KEPT)
        def touched(tokens: float, each: int) -> float:
            missed = ((1.0 - np.minimum(1.0, each * shares)) ** tokens).sum()
            return float(len(shares) - missed)

        return touched

    def mark(self, layer: int) -> Hashable:
        """See `Routing.mark`."""
        return self.counts[layer]

    @cached_property
    def _table(self) -> npt.NDArray[np.float64]:
        return np.array(self.counts)
