"""Working memory of routed experts on the host's cores, where Numba computes packed ones part by part.

Its numbers are those of `kernels_cpu`, which is not imported before a run; a test holds them equal.
"""

from __future__ import annotations

from workbench.core.units import DTYPE_BYTES
from workbench.models import ModelConfig
from workbench.stages import Precision

UNIT = 64
"""Sizes of packed experts are multiples of it."""
BUFFERED = 16 << 20
"""Bytes of fp32 buffers of a part of the pairs of row and expert."""
FEWEST = 128
"""Least limit of a part [pairs]."""
_TERMS = 1
"""Terms in bf16 of a number, where there are any."""
_PADDING = 64
"""Bytes behind a row of terms."""
_AHEAD = 15
"""Rows of bytes behind the last one, which matrix registers may read."""


def is_packed(model: ModelConfig) -> bool:
    """True if the experts' sizes are those of whole blocks."""
    return not (model.hidden_size % UNIT or model.expert_width % UNIT)


def experts_bytes(model: ModelConfig, precision: Precision, rows: float) -> float:
    """Bytes that packed experts take beyond their buffers while they compute so many rows [B].

    The rows and their sums in fp32 and in the weights' precision; the answer and the place of each pair of row and
    expert; and of a part of the pairs gates, ups and both operands in fp32, the operands also in terms of bf16.
    """
    outer = model.hidden_size
    inner = model.expert_width
    pairs = rows * model.num_experts_per_tok
    part = min(pairs, max(FEWEST, BUFFERED // (4 * (outer + 3 * inner))))
    operands = (4 + 2 * _TERMS) * (outer + inner) + 2 * _PADDING
    each_row = (8 + DTYPE_BYTES[precision.weights]) * outer
    ahead = _AHEAD * (outer + inner + 2 * _PADDING)
    return rows * each_row + pairs * (4 * outer + 24) + part * (8 * inner + operands) + ahead
