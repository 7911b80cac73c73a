"""The order of a layer's built-in operations.

Most of it follows from the buffers. The residual stream, which many operations read and write, allows any order; an
operation that reads it before another one has added to it would compute something else.
"""

from __future__ import annotations

from collections.abc import Mapping

from workbench.stages.ops import (
    BUILT_IN,
    Op,
    attention,
    combine,
    experts,
    flatten,
    out_proj,
    qkv,
    route,
    shared_experts,
)

_STEPS: Mapping[str, tuple[int, int]] = {
    qkv.name: (0, 0),
    **{op.name: (1, 1) for op in flatten(attention)},
    out_proj.name: (2, 2),
    route.name: (3, 3),
    shared_experts.name: (3, 4),
    experts.name: (4, 4),
    combine.name: (5, 5),
}
"""The first and the last step of a layer at which a built-in operation can stand, by its name."""


def comes_before(one: Op, other: Op) -> bool:
    """True if a layer has one built-in operation before the other, and they share rows."""
    if not (_is_built_in(one) and _is_built_in(other)):
        return False
    return _share_rows(one, other) and _STEPS[one.plain.name][1] < _STEPS[other.plain.name][0]


def repeats(one: Op, other: Op) -> bool:
    """True if two operations are the same built-in one for some of their rows."""
    return _is_built_in(one) and one.plain is other.plain and one.subset == other.subset and _share_rows(one, other)


def _is_built_in(op: Op) -> bool:
    return BUILT_IN.get(op.plain.name) is op.plain


def _share_rows(one: Op, other: Op) -> bool:
    return not set(one.rows.classes).isdisjoint(other.rows.classes)
