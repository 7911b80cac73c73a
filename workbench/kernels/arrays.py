"""Numpy arrays at doors: taken by Numba as they are, or as CPU tensors of the same memory."""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from kernels_cpu.arguments import host_array

_HERE = """Numpy arrays are taken as CPU tensors of the same memory, uint16 as bfloat16 bits, all or none of the
    operands, with any `backend` that CPU tensors may have; arrays with memory of their own are returned then.

    """


class _Shared:
    """Memory of an array for numpy to take as writeable: torch warns of any other, and no door stores into these."""

    def __init__(self, array: np.ndarray[Any, Any]) -> None:
        self._array = array
        self.__array_interface__ = array.__array_interface__ | {"data": (array.ctypes.data, False)}


def for_tensors(name: str) -> Any:
    """The function of this name for tensors; imports torch."""
    import workbench.kernels.cpu_twins as twins

    return getattr(twins, name)


def directly(x: object, for_numba: Mapping[str, object], for_tensors: Mapping[str, object], *others: object) -> bool:
    """True where Numba's wrapper itself is to be called: for arrays, and for an argument that only it takes.

    False where an argument is given that only kernels for tensors take, `backend` above all: arrays become CPU tensors
    of the same memory then (`computed`).

    Raises
    ------
    ValueError
        If an argument is given that the kernels for these operands do not take.
    """
    own = next((name for name, value in for_numba.items() if value is not None), None)
    if own is None and not any(isinstance(operand, np.ndarray) for operand in (x, *others)):
        return False
    device = getattr(x, "device", None)
    if device is not None and str(device) != "cpu":
        if own is not None:
            raise ValueError(
                f"{own} must be left out for tensors on {device}, whose kernel does not take it: leave it out, or move "
                "the operands to CPU memory."
            )
        return False
    foreign = next((name for name, value in for_tensors.items() if value is not None), None)
    if foreign is not None and own is not None:
        raise ValueError(
            f"{foreign} must be left out for a call with {own}, which Numba computes: leave one of them out."
        )
    return foreign is None


@functools.cache
def taking_arrays(call: Callable[..., Any], module: str, name: str) -> Callable[..., Any]:
    """`call`, which takes tensors, for arrays too: always the same function, found by this module and name."""

    @functools.wraps(call)
    def door(*args: Any, **kwargs: Any) -> Any:
        return computed(call, *args, **kwargs)

    before, parameters, after = (call.__doc__ or "").partition("Parameters\n")
    door.__doc__ = before + (_HERE + parameters if parameters else "") + after
    door.__module__, door.__qualname__ = module, name  # pickle looks for it there
    return door


def computed(call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Answer of `call`, as arrays where all operands are; tensors and mixtures are its own to take or refuse."""
    given = (*args, *kwargs.values())
    if not any(map(_is_array, given)) or any(map(_is_tensor, given)):
        return call(*args, **kwargs)
    bound = inspect.signature(call).bind(*args, **kwargs)
    arrays = {name: value for name, value in bound.arguments.items() if _is_array(value)}
    own = {name: _with(functools.partial(_tensor, name), value) for name, value in bound.arguments.items()}
    bound.arguments.update(own)
    return _with(functools.partial(_array, arrays), call(*bound.args, **bound.kwargs))


def _is_array(own: object) -> bool:
    return isinstance(own, np.ndarray) or (isinstance(own, tuple) and any(map(_is_array, own)))


def _is_tensor(own: object) -> bool:
    torch = sys.modules.get("torch")
    found = torch is not None and isinstance(own, torch.Tensor)
    return found or (isinstance(own, tuple) and any(map(_is_tensor, own)))


def _with(change: Callable[[Any], Any], own: Any) -> Any:
    """The same with every leaf of its tuples changed."""
    if isinstance(own, tuple):
        parts = [_with(change, part) for part in own]
        return type(own)(*parts) if hasattr(own, "_fields") else tuple(parts)
    return change(own)


def _tensor(name: str, leaf: Any) -> Any:
    import torch

    if not isinstance(leaf, np.ndarray):
        return leaf
    array = host_array(name, leaf)
    if any(stride < 0 or stride % array.itemsize for stride in array.strides) or not array.flags.aligned:
        raise ValueError(f"{name} must have its numbers aligned and in order in memory: pass a copy.")
    try:
        tensor = torch.from_numpy(np.asarray(_Shared(array)))
    except TypeError as error:
        raise TypeError(f"{name} must be of a type that torch has, not {array.dtype}: convert it.") from error
    return tensor.view(torch.bfloat16) if array.dtype == np.uint16 else tensor


def _array(operands: Mapping[str, Any], leaf: Any) -> Any:
    """The same numbers, in memory of their own: `_Shared` lets numpy write where the operand may not be written."""
    import torch

    if not isinstance(leaf, torch.Tensor):
        return leaf
    bits = leaf.view(torch.uint16) if leaf.dtype is torch.bfloat16 else leaf
    try:
        array = bits.numpy()
    except TypeError as error:
        name = next(iter(operands))
        raise TypeError(
            f"{name} must be a torch tensor for a result of {leaf.dtype}, a type that numpy lacks: pass "
            f"torch.from_numpy({name})."
        ) from error
    shared = any(np.may_share_memory(array, own) for own in _leaves(tuple(operands.values())))
    return array.copy() if shared else array


def _leaves(own: Any) -> list[Any]:
    """All arrays in its tuples."""
    if isinstance(own, tuple):
        return [leaf for part in own for leaf in _leaves(part)]
    return [own] if isinstance(own, np.ndarray) else []
