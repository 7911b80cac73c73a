"""The order of a layer's built-in operations.

Most of it follows from the buffers. The residual stream, which many operations read and write, allows any order; an
operation that reads it before another one has added to it would compute something else.
"""

from __future__ import annotations

from collections.abc import Mapping

from workbench.stages.ops import Op, attention, combine, experts, flatten, out_proj, qkv, route, shared_experts

_STEPS: Mapping[Op, tuple[int, int]] = {
    qkv: (0, 0),
    **dict.fromkeys(flatten(attention), (1, 1)),
    out_proj: (2, 2),
    route: (3, 3),
    shared_experts: (3, 4),
    experts: (4, 4),
    combine: (5, 5),
}
"""The first and the last step of a layer at which an operation can stand."""


def comes_before(one: Op, other: Op) -> bool:
    """True if a layer has one built-in operation before the other, and they share rows."""
    if one.plain not in _STEPS or other.plain not in _STEPS:
        return False
    return _share_rows(one, other) and _STEPS[one.plain][1] < _STEPS[other.plain][0]


def is_same(one: Op, other: Op) -> bool:
    """True if two operations of a layer are the same built-in one for some of their rows."""
    return one.plain in _STEPS and one.plain == other.plain and one.subset == other.subset and _share_rows(one, other)


def _share_rows(one: Op, other: Op) -> bool:
    return not set(one.rows.classes).isdisjoint(other.rows.classes)
