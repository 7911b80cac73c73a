"""Experts divided among NUMA nodes: each node holds a slice of every expert's inner dim, and its cores compute with it.

This is tensor parallelism inside one computer (KTransformers, section 3.3): a node's cores read its own weights
alone, and only the token's row and a row of partial sums per token and node move between nodes.
"""

from __future__ import annotations

import functools
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..declarations import public
from ..machine.huge_pages import empty_in_huge_pages
from ..threads.team import on_node, process_cpus
from .weights import ROWS, PackedExperts

_SYSTEM = Path("/sys/devices/system/node")


@public
@dataclass(frozen=True)
class NodeExperts:
    """The routed experts of one layer in slices, one per node, from `experts_by_node`.

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
    """CPUs that this process may use, by NUMA node; nodes without one are left out. One where the system tells none.

    Examples
    --------
    >>> len(numa_nodes()) >= 1
    True
    """
    usable = process_cpus()
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
def experts_by_node(experts: PackedExperts, *, nodes: Sequence[Collection[int]] | None = None) -> NodeExperts:
    """Divide a layer's packed experts into slices, each copied by a thread of its node, into the node's memory.

    Slices keep the numbers and the format of the weights. With one node they stay where they are.

    Parameters
    ----------
    experts : PackedExperts
        Of gate_up (E, 2 F, M) and down (E, M, F); F is cut.
    nodes : sequence of collections of CPUs, optional
        CPUs of each node, by default those of this computer (`numa_nodes`).

    Returns
    -------
    NodeExperts
        For `fused_moe`, which takes neither biases nor another activation than "swiglu" with it. With several nodes the
        slices are copies, and the whole experts are no longer needed.

    Raises
    ------
    ValueError
        If a node has no CPU, or there are more nodes than pieces of the inner dim (`PackedExperts.pieces`).

    Examples
    --------
    >>> from kernels_cpu import pack_experts
    >>> experts = pack_experts(np.ones((2, 512, 4), np.float32), np.ones((2, 4, 256), np.float32))
    >>> [own.down.dim for own in experts_by_node(experts, nodes=[{0}, {0}]).slices]
    [128, 128]
    """
    chosen = tuple(map(frozenset, numa_nodes() if nodes is None else nodes))
    if not all(chosen) or not 1 <= len(chosen) <= experts.pieces:
        raise ValueError(
            f"nodes must each have a CPU and be at most {experts.pieces}, the pieces of the inner dim "
            f"{experts.down.dim}, not {[sorted(node) for node in chosen]}: leave them out for this computer's, or the "
            "experts whole."
        )
    if len(chosen) == 1:
        return NodeExperts((experts,), chosen)
    piece = experts.down.dim // experts.pieces
    copying = []
    for own, cpus in zip(np.array_split(range(experts.pieces), len(chosen)), chosen, strict=True):
        bounds = (int(own[0]) * piece, int(own[-1] + 1) * piece)
        copying.append(on_node(functools.partial(_slice, experts, *bounds), cpus))
    return NodeExperts(tuple(copied.result() for copied in copying), chosen)


def _slice(experts: PackedExperts, begin: int, end: int) -> PackedExperts:
    """Copy the rows begin .. end - 1 of gates and of ups, and these columns of downs."""
    up = experts.gate_up
    down = experts.down
    gates = slice(begin // ROWS, end // ROWS)
    ups = slice((down.dim + begin) // ROWS, (down.dim + end) // ROWS)
    steps = slice(begin // down.format.per_word, end // down.format.per_word)
    groups = slice(begin // down.group, end // down.group) if down.format.scaled else slice(0)
    words, scales = (_joined([held[:, gates], held[:, ups]], 1) for held in (up.words, up.scales))
    columns, of_columns = _joined([down.words[:, :, steps]], 2), _joined([down.scales[:, :, groups]], 2)
    return PackedExperts(
        replace(up, words=words, scales=scales, rows=2 * (end - begin)),
        replace(down, words=columns, scales=of_columns, dim=end - begin),
    )


def _joined(parts: Sequence[NDArray[Any]], axis: int) -> NDArray[Any]:
    """A copy of parts, joined along an axis, in memory that no thread has touched before."""
    shape = list(parts[0].shape)
    shape[axis] = sum(part.shape[axis] for part in parts)
    found = empty_in_huge_pages(tuple(shape), parts[0].dtype)
    np.concatenate(parts, axis, out=found)
    return found
