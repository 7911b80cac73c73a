"""Packed copies of experts' weights that are used again and again, each kept for as long as the weights themselves.

Numba's kernel reads packed weights faster than torch's. A copy costs as much as a few calls, and as much memory as the
weights, so it is made for weights that stayed the same over several calls, where the computer has memory to spare.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass
from typing import NamedTuple
from weakref import WeakKeyDictionary

import torch

from kernels_cpu import PackedExperts, pack_experts
from workbench.hardware import free_memory

_CALLS = 3
"""Calls with the same weights after which these are packed."""
_SPARED = 0.5
"""Share of the computer's memory that stays free of copies."""
_SAMPLE = 32
"""Numbers of two rows of each matrix that show whether it was overwritten: a cache line, and no kernel takes fewer."""


class _State(NamedTuple):
    """Torch's counts of the writes to both weights."""

    gate_up: int
    down: int


class _Place(NamedTuple):
    """The place of a pair of weights in its memory."""

    gate_up: int
    down: int
    shape: torch.Size


class _Samples(NamedTuple):
    """The bits of some numbers of each matrix."""

    gate_up: torch.Tensor
    down: torch.Tensor


@dataclass
class _Pair:
    """A pair of weights as it was at its last call, and the number of calls that found it so."""

    state: _State
    samples: _Samples
    calls: int = 0
    copy: PackedExperts | None = None


_Memory = WeakKeyDictionary[torch.UntypedStorage, WeakKeyDictionary[torch.UntypedStorage, dict[_Place, _Pair]]]
_pairs: _Memory = WeakKeyDictionary()
"""By the memory of gate_up, then of down: a pair is forgotten when either is freed."""
_lock = threading.Lock()


def packed_copy(gate_up: torch.Tensor, down: torch.Tensor, ids: torch.Tensor) -> PackedExperts | None:
    """Return the packed copy of a pair of weights, or None where they are to be used in place.

    A copy is out of date when torch counts a write to the tensors that are passed. It does not count those through
    `data`, numpy or a pointer, so the first 32 numbers of two rows of each matrix that is used are compared, too: a
    write that torch does not count and that leaves all of them as they were is not noticed. Tensors of inference mode,
    whose writes are not counted, have no copy.

    Parameters
    ----------
    gate_up : (E, 2 F, M) torch.bfloat16, contiguous
    down : (E, M, F) torch.bfloat16, contiguous
    ids : (T, k) int32 or int64
        Experts that are used; one that is out of range is left to the kernel.
    """
    if gate_up.is_inference() or down.is_inference():
        return None
    state = _State(gate_up._version, down._version)
    samples = _Samples(_sample(gate_up), _sample(down))
    with _lock:
        pair = _pair(gate_up, down)
        if pair is None or pair.state != state or not _alike(pair.samples, samples, ids):
            kept = _Samples(*(sample.clone() for sample in samples))
            _remember(gate_up, down, _Pair(state, kept))
            return None
        pair.calls += 1
        if pair.copy is not None or pair.calls != _CALLS:
            return pair.copy
    pair.copy = _copied(gate_up, down)  # by one thread alone, while others go on
    if pair.copy is None:
        pair.calls = 0  # there may be memory later
    return pair.copy


def _pair(gate_up: torch.Tensor, down: torch.Tensor) -> _Pair | None:
    by_down = _pairs.get(gate_up.untyped_storage())
    by_place = by_down and by_down.get(down.untyped_storage())
    return by_place.get(_place(gate_up, down)) if by_place else None


def _remember(gate_up: torch.Tensor, down: torch.Tensor, pair: _Pair) -> None:
    by_down = _pairs.setdefault(gate_up.untyped_storage(), WeakKeyDictionary())
    by_down.setdefault(down.untyped_storage(), {})[_place(gate_up, down)] = pair


def _place(gate_up: torch.Tensor, down: torch.Tensor) -> _Place:
    return _Place(int(gate_up.storage_offset()), int(down.storage_offset()), gate_up.shape)


def _sample(matrices: torch.Tensor) -> torch.Tensor:
    """View the bits of the first numbers of two rows of each matrix: of gate_up, one of the gate and one of the up."""
    rows = matrices.shape[1]
    return matrices[:, rows // 4 :: rows // 2, :_SAMPLE].view(torch.int16)


def _alike(before: _Samples, now: _Samples, ids: torch.Tensor) -> bool:
    """True if the samples of the experts that are used are equal.

    Comparing those of all takes 0.2 ms more where 128 experts have 2048 x 768 and no sample is in a cache (two Zen 4
    cores).
    """
    experts = len(now.down)
    if ids.numel() >= experts:
        return all(map(torch.equal, before, now))
    used = ids.flatten().clamp(0, experts - 1)
    return all(
        torch.equal(old.index_select(0, used), new.index_select(0, used)) for old, new in zip(before, now, strict=True)
    )


def _copied(gate_up: torch.Tensor, down: torch.Tensor) -> PackedExperts | None:
    """Pack a pair of weights, unless less than half of the computer's memory would be free afterwards."""
    memory = free_memory()
    if memory.bytes - gate_up.nbytes - down.nbytes < _SPARED * memory.whole:
        return None
    return pack_experts(gate_up, down)
