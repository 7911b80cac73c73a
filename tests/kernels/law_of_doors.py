"""The law that every door keeps: whatever it is called with, float64's answer or an error of ours, and nothing else."""

from __future__ import annotations

import re
import traceback
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import torch
from torch.utils._pytree import tree_flatten_with_path, tree_unflatten

from tests.kernels.doors import Answer, Door, Operands
from tests.kernels.layouts import ARRAYS, PLAIN, REPEATED, TENSORS, Place, copied, overlapping, placed

ROOT = Path(__file__).parents[2]
OURS = tuple(str(ROOT / package) for package in ("kernels_cpu", "kernels_triton", "workbench"))
FEW = 1.5
"""Slack of results of a few numbers, whose rounding errors do not average out."""
SMALL = 1e-3
"""Size of a number below which errors count as of one so large: what cancels has no relative error."""


@dataclass(frozen=True)
class Call:
    """Operands of a door in memory: `leaves` are those that are tensors, by their names."""

    door: Door
    kind: str
    names: list[str]
    leaves: list[Any]
    tree: Any

    def operands(self, leaf: Any) -> Operands:
        """All operands, those in memory as `leaf` makes them."""
        made: Operands = tree_unflatten(
            [leaf(own) if isinstance(own, Place) else own for own in self.leaves], self.tree
        )
        return made

    def given(self) -> Operands:
        return self.operands(lambda place: place.given(self.kind))

    def values(self) -> Operands:
        return self.operands(Place.value)

    def places(self) -> list[tuple[str, Place]]:
        pairs = zip(self.names, self.leaves, strict=True)
        return [(name, leaf) for name, leaf in pairs if isinstance(leaf, Place)]

    def __str__(self) -> str:
        own = {f"{n} {p.dtype} {p.array.shape} strides {p.array.strides}" for n, p in self.places()}
        return f"{self.kind}s {sorted(own)} {self.operands(lambda _: ...)}"


def drawn(door: Door, random: Random, backend: str | None = None, *, wrong: float = 0.15) -> Call:
    """A call whose operands lie anywhere, in part over one another, and of which one is `wrong` as often as asked."""
    operands, kind = door.draw(random), random.choice(door.kinds)
    if door.backends and (chosen := backend or random.choice(door.backends)) is not None:
        operands["backend"] = chosen
    paths, tree = tree_flatten_with_path(operands)
    names = [str(getattr(path[-1], "name", path[0].key)) for path, _ in paths]
    leaves = [leaf for _, leaf in paths]
    tensors = [at for at, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor)]
    if tensors and random.random() < wrong:
        at = random.choice(tensors)
        leaves[at] = _spoiled(leaves[at], random)
    own = _laid_out(door, names, {at: leaves[at] for at in tensors}, kind, random)
    return Call(door, kind, names, [own.get(at, leaf) for at, leaf in enumerate(leaves)], tree)


def _spoiled(value: torch.Tensor, random: Random) -> torch.Tensor:
    """An operand of another type or shape, or with a number that is out of range."""
    way = random.choice(("type", "shape", "number"))
    if way == "type":
        others = (torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int32, torch.int16, torch.bool)
        return value.to(random.choice(others))
    if way == "number" and not value.is_floating_point() and value.numel():
        spoiled = value.clone()
        most = torch.iinfo(value.dtype).max
        spoiled.view(-1)[random.randrange(value.numel())] = random.choice((-1, -7, min(10**6, most), most))
        return spoiled
    return random.choice((value[None], value[..., :-1], value[:-1], value.flatten(), value[..., :0])).contiguous()


def _laid_out(
    door: Door, names: list[str], values: dict[int, torch.Tensor], kind: str, random: Random
) -> dict[int, Place]:
    layouts = TENSORS if kind == "tensor" else ARRAYS
    places: dict[int, Place] = {}
    for at, value in values.items():
        layout = PLAIN if random.random() < 0.7 else random.choice(layouts)
        if value.dtype is torch.bool or (layout == REPEATED and names[at] in door.written):
            layout = PLAIN
        places[at] = placed(value, layout, random)
    written = [at for at in values if names[at] in door.written]
    if written and random.random() < 0.4:
        places |= _over_one_another(random.choice(written), values, names, random)
    elif values and random.random() < 0.2:
        places |= _the_same(values, places, random)
    return places


def _over_one_another(
    written: int, values: dict[int, torch.Tensor], names: list[str], random: Random
) -> dict[int, Place]:
    """What is written in one piece of memory with another operand."""
    others = [at for at in values if at != written]
    other = random.choice(others)
    counts = names[written] != "out"  # what is in `out` before does not
    if random.random() < 0.5:
        host, guest = overlapping(values[written], values[other], random, guest_counts=not counts)
        return {written: host, other: guest}
    host, guest = overlapping(values[other], values[written], random, guest_counts=counts)
    return {other: host, written: guest}


def _the_same(values: dict[int, torch.Tensor], places: dict[int, Place], random: Random) -> dict[int, Place]:
    """Two operands that are only read are one."""
    one, other = random.choice(list(values)), random.choice(list(values))
    alike = values[one].shape == values[other].shape and values[one].dtype is values[other].dtype
    return {one: places[other]} if alike else {}


def check(call: Call) -> str:
    """Raise AssertionError where the law is broken; what came of the call: "answer" or "error"."""
    memory = [place.memory.copy() for _, place in call.places()]
    values = call.values()
    try:
        found = call.door.call(**call.given())
    except Exception as error:
        _check_error(error, call)
        _check_memory(call, memory, frozenset())
        return "error"
    values.pop("backend", None)
    want = call.door.formula(**values)
    written = [place.value() for name, place in call.places() if name in call.door.written]
    _check_answer((*_tensors(found, call.kind, want), *written), want, call.door.limit(values))
    _check_memory(call, memory, call.door.written)
    return "answer"


def _tensors(found: Any, kind: str, want: Answer) -> Answer:
    several = () if found is None else found if isinstance(found, tuple) else (found,)
    return tuple(_as_tensor(part, kind) for part in several)


def _as_tensor(part: Any, kind: str) -> torch.Tensor:
    if isinstance(part, np.ndarray):
        assert kind == "array"
        own = copied(part)
        return own.view(torch.bfloat16) if part.dtype == np.uint16 else own
    assert isinstance(part, int) or kind == "tensor"
    return torch.as_tensor(part)


def _check_answer(found: Answer, want: Answer, limit: float) -> None:
    assert len(found) == len(want)
    for one, other in zip(found, want, strict=True):
        assert one.shape == other.shape, f"shape {tuple(one.shape)}, not {tuple(other.shape)}"
        own, exact = one.double(), other.double()
        assert own.isnan().equal(exact.isnan()), "NaN where there is none, or none where there is"
        own, exact = own.nan_to_num(), exact.nan_to_num()
        error = float((own - exact).norm() / (exact.norm() + SMALL * own.numel() ** 0.5).clamp(min=SMALL))
        slack = FEW if own.numel() < 64 else 1
        assert error <= slack * limit, f"error {error:.2g}, at most {limit:.2g}"


def _check_error(error: Exception, call: Call) -> None:
    raised = traceback.extract_tb(error.__traceback__)[-1]
    text = "".join(traceback.format_exception(error)[-6:])
    ours = raised.filename.startswith(OURS) and (raised.line or "").startswith("raise ")
    assert ours, f"not an error of ours:\n{text}"
    assert isinstance(error, ValueError | TypeError), f"neither a value nor a type:\n{text}"
    operands = {*call.names, *call.operands(lambda _: None), call.door.call.__name__}
    named = re.search(rf"\b({'|'.join(operands)})\b", str(error))
    assert named, f"no operand is named:\n{text}"
    assert " must " in str(error) or " takes " in str(error), f"no expectation:\n{text}"
    assert ": " in str(error), f"no mend:\n{text}"


def _check_memory(call: Call, before: list[np.ndarray], written: frozenset[str]) -> None:
    """Nothing has changed but what is in operands that the op stores into."""
    open_ = [place.array for name, place in call.places() if name in written]
    for (name, place), old in zip(call.places(), before, strict=True):
        allowed = np.zeros(len(old), bool)
        for array in open_:
            if np.may_share_memory(array, place.memory):
                allowed |= _touched(array, place.memory)
        assert (old == place.memory)[~allowed].all(), f"memory of {name} changed where nothing is stored"


def _touched(array: np.ndarray, memory: np.ndarray) -> np.ndarray:
    """Bytes of `memory` that are of `array`."""
    marked, size = np.zeros(len(memory), bool), array.itemsize
    begin = array.ctypes.data - memory.ctypes.data
    offsets = np.zeros(array.shape, np.int64)
    for axis, (count, stride) in enumerate(zip(array.shape, array.strides, strict=True)):
        offsets += (np.arange(count) * stride).reshape(-1, *[1] * (array.ndim - axis - 1))
    for byte in range(size):
        marked[(begin + byte + offsets).ravel()] = True
    return marked
