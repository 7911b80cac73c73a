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
    operands; what is returned are arrays then.

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
    """Whether Numba's wrapper itself is to be called: for arrays, and where an argument is given that only it takes.

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
    if foreign is not None:
        why = "numpy arrays" if own is None else f"a call with {own}"
        raise ValueError(f"{foreign} must be left out for {why}, which Numba computes: leave it out, or pass tensors.")
    return True


def taking_arrays(call: Callable[..., Any]) -> Callable[..., Any]:
    """`call`, which takes tensors, for arrays too."""

    @functools.wraps(call)
    def door(*args: Any, **kwargs: Any) -> Any:
        if not any(_is_array(own) for own in (*args, *kwargs.values())) or _some(_is_tensor, args, kwargs):
            return call(*args, **kwargs)
        return through_tensors(call, *args, **kwargs)

    before, parameters, after = (call.__doc__ or "").partition("Parameters\n")
    door.__doc__ = before + (_HERE + parameters if parameters else "") + after
    return door


def through_tensors(call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """What `call` answers to tensors of the arrays' memory, as arrays."""
    bound = inspect.signature(call).bind(*args, **kwargs)
    own = {name: _with(functools.partial(_tensor, name), value) for name, value in bound.arguments.items()}
    bound.arguments.update(own)
    return _with(_array, call(*bound.args, **bound.kwargs))


def _is_array(own: object) -> bool:
    return isinstance(own, np.ndarray) or (isinstance(own, tuple) and any(map(_is_array, own)))


def _is_tensor(own: object) -> bool:
    torch = sys.modules.get("torch")
    found = torch is not None and isinstance(own, torch.Tensor)
    return found or (isinstance(own, tuple) and any(map(_is_tensor, own)))


def _some(test: Callable[[object], bool], args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    return any(map(test, (*args, *kwargs.values())))


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


def _array(leaf: Any) -> Any:
    import torch

    if not isinstance(leaf, torch.Tensor):
        return leaf
    bits = leaf.view(torch.uint16) if leaf.dtype is torch.bfloat16 else leaf
    return bits.numpy()
