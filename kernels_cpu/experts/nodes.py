"""Experts divided among NUMA nodes: each node holds a slice of every expert's inner dim, and its cores compute with it.

This is tensor parallelism inside one computer (KTransformers, section 3.3): no node reads another node's weights, and
only one row of partial sums per token and node moves between nodes.
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
from .packing.rounded import checked_layer, pack_experts
from .weights import GROUP, Format, PackedExperts

_SYSTEM = Path("/sys/devices/system/node")


@public
@dataclass(frozen=True)
class NodeExperts:
    """The routed experts of one layer in slices, one per node, packed by `pack_by_node`.

    Attributes
    ----------
    slices : tuple of PackedExperts
        The experts of the layer, in each slice with a range of their inner dim.
    nodes : tuple of frozenset of int
        CPUs of the node of each slice.
    """

    slices: tuple[PackedExperts, ...]
    nodes: tuple[frozenset[int], ...]

    @property
    def nbytes(self) -> int:
        """Bytes of all slices."""
        return sum(own.nbytes for own in self.slices)

    def __len__(self) -> int:
        return len(self.slices[0])


@public
def numa_nodes(system: Path = _SYSTEM) -> tuple[frozenset[int], ...]:
    """CPUs that this process may use, by NUMA node; a single node where the system reports none.

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
    """Parse a list of CPUs such as ``0-3,8``."""
    found = list[int]()
    for numbers in filter(None, text.strip().split(",")):
        first, _, last = numbers.partition("-")
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
    """Pack a layer's experts in slices, each by a thread of its node, so that it is in the node's memory.

    Parameters
    ----------
    gate_up : (E, 2 F, M), or E matrices (2 F, M)
    down : (E, M, F), or E matrices (M, F)
    format, group
        As of `pack_experts`, like the weights' types.
    nodes : sequence of collections of CPUs, optional
        CPUs of each node, by default those of this computer (`numa_nodes`).

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
    >>> [own.down.dim for own in pack_by_node(gate_up, down, nodes=[{0}, {0}]).slices]
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
    packing = []
    for own, cpus in zip(np.array_split(range(units), len(chosen)), chosen, strict=True):
        bounds = (own[0] * group, min(inner, (own[-1] + 1) * group))
        packing.append(on_node(functools.partial(_slice, first, second, bounds, format, group), cpus))
    return NodeExperts(tuple(packed.result() for packed in packing), chosen)


def _slice(
    gate_up: Sequence[NDArray[Any]],
    down: Sequence[NDArray[Any]],
    bounds: tuple[int, int],
    format: Format | str | None,
    group: int,
) -> PackedExperts:
    """Pack the columns begin .. end - 1 of the inner dim of all experts."""
    begin, end = bounds
    inner = down[0].shape[1]
    both = [np.concatenate([m[begin:end], m[inner + begin : inner + end]]) for m in gate_up]
    return pack_experts(both, [m[:, begin:end] for m in down], format=format, group=group)
