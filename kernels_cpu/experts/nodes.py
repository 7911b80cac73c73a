"""Experts spread over NUMA nodes: each holds a slice of every expert's inner dim, and its cores compute with it.

Tensor parallelism inside a computer (KTransformers, section 3.3): no node reads another's weights, and what crosses
is one row of partial sums per token and node.
"""

from __future__ import annotations

import functools
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..arguments import Operand
from ..declarations import public
from ..threads.team import on_node, usable_cpus
from .weights import GROUP, Format, PackedExperts, checked_layer, pack_experts

_SYSTEM = Path("/sys/devices/system/node")


@public
@dataclass(frozen=True)
class NodeExperts:
    """The routed experts of one layer in slices, one per node, packed by `pack_by_node`.

    Attributes
    ----------
    slices : tuple of PackedExperts
        Each the same experts with a part of their inner dim.
    nodes : tuple of frozenset of int
        CPUs of each slice's node.
    """

    slices: tuple[PackedExperts, ...]
    nodes: tuple[frozenset[int], ...]

    @property
    def nbytes(self) -> int:
        """Bytes of all slices."""
        return sum(part.nbytes for part in self.slices)

    def __len__(self) -> int:
        return len(self.slices[0])


@public
def numa_nodes(system: Path = _SYSTEM) -> tuple[frozenset[int], ...]:
    """CPUs that this process may use, by NUMA node; one node where the system tells of none.

    Examples
    --------
    >>> len(numa_nodes()) >= 1
    True
    """
    usable = usable_cpus()
    found = []
    for node in sorted(system.glob("node[0-9]*"), key=lambda path: int(path.name[4:])):
        cpus = frozenset(_listed((node / "cpulist").read_text())) & usable
        found += [cpus] if cpus else []
    return tuple(found) or (usable,)


def _listed(text: str) -> list[int]:
    """``0-3,8`` as numbers."""
    found = list[int]()
    for run in filter(None, text.strip().split(",")):
        first, _, last = run.partition("-")
        found += range(int(first), int(last or first) + 1)
    return found


@public
def pack_by_node(
    gate_up: Operand | Sequence[Operand],
    down: Operand | Sequence[Operand],
    *,
    format: Format | str | None = None,
    group: int = GROUP,
    nodes: Sequence[Collection[int]] | None = None,
) -> NodeExperts:
    """Pack a layer's experts in slices, each by a thread of its node, so that the node's memory holds it.

    Parameters
    ----------
    gate_up : (E, 2 F, M), or E matrices (2 F, M)
    down : (E, M, F), or E matrices (M, F)
    format, group
        These and the weights' types as of `pack_experts`.
    nodes : sequence of collections of CPUs, optional
        The nodes; those of this computer (`numa_nodes`) unless given.

    Returns
    -------
    NodeExperts
        For `fused_moe`.

    Raises
    ------
    TypeError, ValueError
        As of `pack_experts`, and if a node has no CPU or there are more nodes than groups of the inner dim.

    Examples
    --------
    >>> gate_up, down = np.ones((2, 512, 4), np.float32), np.ones((2, 4, 256), np.float32)
    >>> [part.down.dim for part in pack_by_node(gate_up, down, nodes=[{0}, {0}]).slices]
    [128, 128]
    """
    first, second = checked_layer(gate_up, down)
    chosen = tuple(map(frozenset, numa_nodes() if nodes is None else nodes))
    inner = second[0].shape[1]
    units = -(-inner // group)
    if not all(chosen) or not 1 <= len(chosen) <= units:
        raise ValueError(
            f"nodes must each have a CPU and be at most {units}, the groups of {group} in the inner dim {inner}, not "
            f"{[sorted(node) for node in chosen]}: leave them out for this computer's."
        )
    runs = [(part[0] * group, min(inner, (part[-1] + 1) * group)) for part in np.array_split(range(units), len(chosen))]
    waiting = [
        on_node(functools.partial(_slice, first, second, run, format, group), cpus, 1)
        for run, cpus in zip(runs, chosen, strict=True)
    ]
    return NodeExperts(tuple(part.result() for part in waiting), chosen)


def _slice(
    gate_up: Sequence[NDArray[Any]],
    down: Sequence[NDArray[Any]],
    run: tuple[int, int],
    format: Format | str | None,
    group: int,
) -> PackedExperts:
    begin, end = run
    inner = down[0].shape[1]
    both = [np.concatenate([m[begin:end], m[inner + begin : inner + end]]) for m in gate_up]
    return pack_experts(both, [m[:, begin:end] for m in down], format=format, group=group)
