"""Checks of the operands of public operations: numpy arrays, and CPU tensors of torch, read without a copy."""

import math
import numbers
import sys
from typing import Any, Protocol, TypeAlias, TypeVar, cast

import numpy as np
from numpy.lib.stride_tricks import as_strided
from numpy.typing import DTypeLike, NDArray

from .codegen.vector_ir import Storage


class TorchLike(Protocol):
    """The attributes of a torch tensor that this package uses; torch itself is never imported."""

    @property
    def dtype(self) -> Any: ...
    @property
    def device(self) -> Any: ...
    @property
    def requires_grad(self) -> bool: ...
    def detach(self) -> Any: ...


STORAGES = {np.float32: Storage.FP32, np.uint16: Storage.BF16, np.float16: Storage.FP16, np.int8: Storage.INT8}
CACHED = (np.float32, np.uint16, np.float16)
"""Dtypes of a KV cache without scales."""
Operand: TypeAlias = NDArray[Any] | TorchLike
_LARGEST = float(np.finfo(np.float32).max) / 2  # a score to the base 2 is 1.44 times as large, and must be finite
SameKind = TypeVar("SameKind", bound=Operand)


def host_array(name: str, operand: Operand) -> NDArray[Any]:
    """A numpy array over the memory of `operand`; torch.bfloat16 becomes uint16 that holds its bits."""
    if isinstance(operand, np.ndarray):
        if not operand.dtype.isnative:
            raise TypeError(f"{name} must be in this computer's byte order, not {operand.dtype}: convert it first.")
        return operand
    torch = sys.modules.get("torch")
    if torch is None or not isinstance(operand, torch.Tensor):
        raise TypeError(
            f"{name} must be a numpy array or a torch tensor, not {type(operand).__name__}: pass numpy.asarray({name})."
        )
    if operand.device.type != "cpu":
        raise ValueError(f"{name} must be in CPU memory, not on {operand.device}: pass {name}.cpu().")
    if torch.compiler.is_compiling():
        raise TypeError(
            f"{name} must have numbers, which it lacks while torch.compile traces: call the op outside of it."
        )
    if (operand.requires_grad and torch.is_grad_enabled()) or _has_tangent(operand):
        raise ValueError(
            f"{name} must ask for no gradient, which Numba's kernels do not give: pass {name}.detach(), or call under "
            "torch.no_grad()."
        )
    tensor = operand.detach()
    try:
        bits = tensor.view(torch.uint16) if tensor.dtype == torch.bfloat16 else tensor
        return cast("NDArray[Any]", bits.numpy())  # a string, since evaluating the type takes longer than the view
    except (TypeError, RuntimeError) as error:  # sparse, quantised, lazily negated, or of a dtype that numpy lacks
        raise TypeError(
            f"{name} must be a tensor that numpy can read, not {tensor.layout} of {tensor.dtype} ({error}): "
            "convert it before the call."
        ) from error


def _has_tangent(tensor: TorchLike) -> bool:
    """True if a torch tensor takes part in forward-mode differentiation."""
    try:
        return sys.modules["torch"].autograd.forward_ad.unpack_dual(tensor).tangent is not None
    except RuntimeError:  # vmap batches this tensor; numpy cannot read it, which is reported later
        return False


def float64(name: str, operand: Operand) -> NDArray[np.float64]:
    """The numbers of `operand` in float64, for references; uint16 holds bfloat16 bits."""
    array = host_array(name, operand)
    if array.dtype == np.uint16:
        array = (array.astype(np.uint32) << np.uint32(16)).view(np.float32)
    return array.astype(np.float64)


def checked(name: str, operand: Operand, letters: str, *dtypes: DTypeLike) -> NDArray[Any]:
    """`operand` as an array, whose dtype must be one of `dtypes` and whose axes those in `letters`, such as "B H D"."""
    array = host_array(name, operand)
    allowed = [np.dtype(dtype) for dtype in dtypes]
    if array.dtype not in allowed:
        names = " or ".join("uint16 (bfloat16 bits)" if d == np.uint16 else d.name for d in allowed)
        raise TypeError(f"{name} must be {names}, not {operand.dtype}: convert it before the call.")
    axes = letters.split()
    if array.ndim != len(axes):
        raise ValueError(f"{name} must have shape ({', '.join(axes)}), not {array.shape}: reshape it before the call.")
    return array


def whole(name: str, value: object) -> int:
    """`value` as an int, after a check that it is an integer."""
    if isinstance(value, bool) or not isinstance(value, numbers.Integral):
        raise TypeError(f"{name} must be a whole number, not {value!r}: pass an int.")
    return int(value)


def real(name: str, value: object) -> float:
    """`value` as a float; infinite if it is too large for fp32."""
    if not isinstance(value, numbers.Real):
        raise TypeError(f"{name} must be a number, not {value!r}: pass a float.")
    try:
        number = float(value)
    except OverflowError:
        return math.inf
    return number if abs(number) <= _LARGEST else math.inf


def contiguous(name: str, array: NDArray[Any]) -> NDArray[Any]:
    """`array` itself, after a check that it is C-contiguous and aligned."""
    if not (array.flags.c_contiguous and array.flags.aligned):
        raise ValueError(f"{name} must be C-contiguous and aligned: pass a copy (numpy.array or .clone()).")
    return array


def in_rows(name: str, array: NDArray[Any]) -> tuple[NDArray[Any], tuple[int, ...]]:
    """The memory of `array` from its first number to its last as a flat array, and the strides of its rows in numbers.

    With a flat array the compiler vectorises loops over a row, whatever the rows' strides. The numbers of a row must be
    contiguous, and all numbers aligned, which those in a field of a structured array need not be.
    """
    strides = tuple([stride // array.itemsize for stride in array.strides[:-1]])
    if array.flags.c_contiguous and array.flags.aligned:
        return frozen(array.reshape(-1)), strides
    together = array.strides[-1] == array.itemsize or array.shape[-1] <= 1
    if min(array.strides) < 0 or not together or not array.flags.aligned:
        raise ValueError(f"{name} must have rows of neighbouring numbers, aligned and in order in memory: pass a copy.")
    last = sum((size - 1) * stride for size, stride in zip(array.shape, (*strides, 1), strict=True))
    size = last + 1 if array.size else 0
    return as_strided(array, (size,), (array.itemsize,), writeable=False), strides


def check_apart(name: str, written: NDArray[Any], **read: NDArray[Any] | None) -> None:
    """Raise ValueError if `written` overlaps an operand that is read while it is stored."""
    for other, array in read.items():
        if array is not None and np.may_share_memory(written, array):
            raise ValueError(
                f"{name} must not overlap {other}, which is read while {name} is stored: pass a copy of {other}."
            )


def writeable(name: str, array: NDArray[Any]) -> NDArray[Any]:
    """`array` itself, after a check that it is C-contiguous, aligned and writeable."""
    if not array.flags.writeable:
        raise ValueError(f"{name} must be writeable, because the kernel stores into it: pass a copy.")
    return contiguous(name, array)


def scales_of(cache: NDArray[Any], scales: Operand | None) -> NDArray[np.float32] | None:
    """The scales (P, K, 2, b) of an int8 cache (P, K, 2, b, D), one per row, checked; None for other caches."""
    if cache.dtype != np.int8:
        if scales is not None:
            raise ValueError(f"scales must be left out: a cache of {cache.dtype} has none.")
        return None
    shape = cache.shape[:4]
    if scales is None:
        raise ValueError(f"scales must be given for a cache of int8: pass fp32 of shape (P, K, 2, b) = {shape}.")
    array = contiguous("scales", checked("scales", scales, "P K 2 b", np.float32))
    if array.shape != shape:
        raise ValueError(
            f"scales must have the shape (P, K, 2, b) = {shape} of kv's rows, not {array.shape}: pass the cache's own."
        )
    return array


def frozen(array: NDArray[Any]) -> NDArray[Any]:
    """A read-only view. All inputs are made read-only, since Numba would compile for both kinds of arrays."""
    view = array.view()
    view.flags.writeable = False
    return view


def same_kind(operand: SameKind, array: NDArray[Any]) -> SameKind:
    """`array` as a torch tensor if `operand` is one, else `array` itself; without a copy."""
    kind = array if isinstance(operand, np.ndarray) else sys.modules["torch"].from_numpy(array)
    return cast(SameKind, kind)


def same_type(operand: SameKind, array: NDArray[Any]) -> SameKind:
    """`array` as a torch tensor of the dtype of `operand` if that is a tensor, else `array` itself; without a copy."""
    if isinstance(operand, np.ndarray):
        return cast(SameKind, array)
    return cast(SameKind, sys.modules["torch"].from_numpy(array).view(operand.dtype))
