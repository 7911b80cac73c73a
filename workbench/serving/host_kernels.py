"""Working memory of routed experts on the host's cores, where Numba computes packed ones part by part.

Its numbers are those of `kernels_cpu`, which is not imported before a run; a test holds them equal.
"""

from __future__ import annotations

from workbench.core.units import DTYPE_BYTES, GROUPS, QUANTISED
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
"""Bytes behind a row of terms, and behind one of results."""
_SUMS = 20 << 10
"""Bytes in which a thread adds up products of rounded weights, group by group."""
_UNPACKED = 64
"""Bytes of each column of a group of INT4, unpacked for a block of rows."""
_AHEAD = 15
"""Rows of bytes behind the last one, which matrix registers may read."""


def is_packed(model: ModelConfig) -> bool:
    """True if the experts' sizes are those of whole blocks."""
    return not (model.hidden_size % UNIT or model.expert_width % UNIT)


def experts_bytes(model: ModelConfig, precision: Precision, rows: float) -> float:
    """Bytes that packed experts take beyond their buffers while they compute so many rows [B].

    The rows and their sums in fp32 and in the weights' precision; the answer and the place of each pair of row and
    expert; of a part of the pairs gates, ups and both operands in fp32, the operands also in terms of bf16; and what
    one thread needs to add up products of rounded weights.
    """
    grouped = precision.group is not None or precision.experts in QUANTISED
    unit = precision.group or GROUPS[0] if grouped else UNIT
    outer, inner = (-(-size // unit) * unit for size in (model.hidden_size, model.expert_width))
    pairs = rows * model.num_experts_per_tok
    part = min(pairs, max(FEWEST, BUFFERED // (4 * (outer + 3 * inner))))
    operands = (4 + 2 * _TERMS) * (outer + inner) + 2 * _PADDING
    each_row = (8 + DTYPE_BYTES[precision.weights]) * outer
    ahead = _AHEAD * (outer + inner + 2 * _PADDING)
    answers = 4 * outer + _PADDING + 24
    sums = _SUMS + _UNPACKED * unit if grouped else 0
    return rows * each_row + pairs * answers + part * (8 * inner + _PADDING + operands) + ahead + sums
