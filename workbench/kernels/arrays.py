"""Numpy arrays as operands: Numba takes them directly, other kernels take CPU tensors of the same memory."""

from __future__ import annotations

import functools
import inspect
import itertools
import sys
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from kernels_cpu.arguments import host_array

_NOTE = """Numpy arrays are taken as CPU tensors of the same memory, uint16 as bfloat16 bits, all or none of the
    operands, with any `backend` of CPU tensors; the results are then arrays with their own memory.

    """


class _Shared:
    """An array's memory, marked writeable so that torch does not warn; no operation stores into it."""

    def __init__(self, array: np.ndarray[Any, Any]) -> None:
        self._array = array
        self.__array_interface__ = array.__array_interface__ | {"data": (array.ctypes.data, False)}


@functools.cache
def for_tensors(name: str) -> Any:
    """Return the function of this name for tensors; imports torch."""
    import workbench.kernels.cpu_twins as twins

    return getattr(twins, name)


def directly(x: object, for_numba: Mapping[str, object], for_tensors: Mapping[str, object], *others: object) -> bool:
    """True if Numba's wrapper is to be called: for arrays, and with an argument that only Numba's kernels take.

    False with an argument that only kernels for tensors take, such as `backend`: arrays then become CPU tensors of the
    same memory (`computed`).

    Raises
    ------
    ValueError
        If an argument is given that the kernels for these operands do not take.
    """
    numba_only = next((name for name, value in for_numba.items() if value is not None), None)
    if numba_only is None and not any(isinstance(operand, np.ndarray) for operand in (x, *others)):
        return False
    device = getattr(x, "device", None)
    if device is not None and getattr(device, "type", device) != "cpu":
        if numba_only is not None:
            raise ValueError(
                f"{numba_only} must be left out for tensors on {device}, whose kernel does not take it: leave it out, "
                "or move the operands to CPU memory."
            )
        return False
    tensors_only = next((name for name, value in for_tensors.items() if value is not None), None)
    if tensors_only is not None and numba_only is not None:
        raise ValueError(
            f"{tensors_only} must be left out for a call with {numba_only}, which Numba computes: leave one of them "
            "out."
        )
    return tensors_only is None


@functools.cache
def taking_arrays(call: Callable[..., Any], module: str, name: str) -> Callable[..., Any]:
    """Extend `call`, which takes tensors, to arrays: one function per call, which pickle finds as module.name."""

    @functools.wraps(call)
    def for_both(*args: Any, **kwargs: Any) -> Any:
        return computed(call, *args, **kwargs)

    before, parameters, after = (call.__doc__ or "").partition("Parameters\n")
    if parameters:
        parameters = _NOTE + parameters
    for_both.__doc__ = before + parameters + after
    for_both.__module__ = module
    for_both.__qualname__ = name
    return for_both


def computed(call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Compute `call`, with arrays as results where all operands are arrays; `call` checks mixtures with tensors."""
    given = (*args, *kwargs.values())
    if any(map(_is_tensor, given)) or not any(map(_is_array, given)):
        return call(*args, **kwargs)
    bound = inspect.signature(call).bind(*args, **kwargs)
    arrays = {name: value for name, value in bound.arguments.items() if _is_array(value)}
    for name, value in bound.arguments.items():
        bound.arguments[name] = _map_leaves(functools.partial(_tensor, name), value)
    return _map_leaves(functools.partial(_array, arrays), call(*bound.args, **bound.kwargs))


def _is_array(operand: object) -> bool:
    """True for an array, or a tuple that contains one."""
    return isinstance(operand, np.ndarray) or (isinstance(operand, tuple) and any(map(_is_array, operand)))


def _is_tensor(operand: object) -> bool:
    """True for a tensor, or a tuple that contains one."""
    if isinstance(operand, tuple):
        return any(map(_is_tensor, operand))
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(operand, torch.Tensor)


def _map_leaves(change: Callable[[Any], Any], operand: Any) -> Any:
    """Apply `change` to an operand, or to every leaf of a tuple."""
    if isinstance(operand, tuple):
        leaves = [_map_leaves(change, entry) for entry in operand]
        return type(operand)(*leaves) if hasattr(operand, "_fields") else tuple(leaves)
    return change(operand)


def _tensor(name: str, leaf: Any) -> Any:
    """A CPU tensor of the same memory for an array; other operands as they are."""
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
    """An array of the same numbers for a tensor, copied if it shares an operand's memory, which may be read-only."""
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
    shared = any(np.may_share_memory(array, operand) for operand in _leaves(tuple(operands.values())))
    return array.copy() if shared else array


def _leaves(operand: Any) -> list[Any]:
    """All arrays in nested tuples."""
    if isinstance(operand, tuple):
        return list(itertools.chain.from_iterable(map(_leaves, operand)))
    return [operand] if isinstance(operand, np.ndarray) else []
