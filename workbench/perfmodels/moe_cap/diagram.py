"""MoE-CAP's diagram: a latency target as a point over memory and performance, hardware as a box."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from workbench.hardware.processors import Processor
from workbench.models import ModelConfig
from workbench.perfmodels.domain import Number, at_least, plain
from workbench.perfmodels.moe_cap.utilisation import (
    activated_bytes,
    kv_read_bytes,
    kv_tokens,
    practical,
    required_bandwidth,
    required_ops,
)

Verdict = np.bool_ | NDArray[np.bool_]


@dataclass(frozen=True)
class Requirement:
    """Point or line of a CAP diagram: the memory [B], bandwidth [B/s] and operations [FLOP/s] that a target needs."""

    memory: Number
    bandwidth: Number
    ops: Number

    def practical(self, *, smbu: ArrayLike, smfu: ArrayLike) -> Requirement:
        """The practical demand, the dashed line: nominal figures that hardware of this utilisation must have."""
        return Requirement(self.memory, practical(self.bandwidth, smbu), practical(self.ops, smfu))


class Fit(NamedTuple):
    """Result of comparing a point with a hardware's box, by edge: right (memory), top (bandwidth or operations)."""

    memory: Verdict
    bandwidth: Verdict
    ops: Verdict


def requirement(
    model: ModelConfig,
    *,
    batch: ArrayLike,
    context: ArrayLike,
    tpot: ArrayLike,
    coverage: ArrayLike,
    layers: ArrayLike | None = None,
) -> Requirement:
    """Theoretical demand of a latency target on hardware: capacity, bandwidth and operations.

    Parameters
    ----------
    model : ModelConfig
    batch, context : array_like
        Sequences, and cached tokens of each.
    tpot : array_like
        Time per output token [s].
    coverage : array_like
        Share of a layer's experts that the batch touches, 0 to 1.
    layers : array_like, optional
        Number of layers of a larger or smaller sibling, embeddings and head unchanged; by default the model's own.

    Returns
    -------
    Requirement
        Arrays of the arguments' broadcast shape.

    Raises
    ------
    ValueError
        If an argument is outside its domain.

    Notes
    -----
    MoE-CAP, Eqs. 1 and 2, section 4.1: sizes between models come from the number of layers.
    """
    scale: Number = np.float64(1.0)
    if layers is not None:
        scale = at_least("layers", layers, 1, mend="give decoder layers") / model.num_hidden_layers
    kv = scale * kv_read_bytes(model, batch, context)
    head = model.head_params
    fixed = model.head_bytes
    activated = fixed + scale * (activated_bytes(model, coverage) - fixed)
    ends = fixed + model.embedding_bytes
    tokens = at_least("context", context, 0, mend="give the cached tokens of one sequence")
    stored = np.asarray(batch, dtype=np.float64) * tokens * scale * model.kv_bytes_per_token(model.dtype)
    ops = required_ops(
        batch,
        head + scale * (model.active_params - head),
        scale * kv_tokens(model, context),
        model.kv_elements,
        tpot,
        query_group=model.query_group,
    )
    memory = ends + scale * (model.weight_bytes - ends) + stored
    together = np.broadcast_arrays(memory, required_bandwidth(activated, kv, tpot), ops)
    return Requirement(*map(plain, together))


def fits(needed: Requirement, processor: Processor) -> Fit:
    """Compare each point with the processor's box; a demand counts as not met if the catalogue lacks the figure."""
    return Fit(
        np.less_equal(needed.memory, processor.memory),
        np.less_equal(needed.bandwidth, processor.bandwidth),
        np.less_equal(needed.ops, processor.flops),
    )
