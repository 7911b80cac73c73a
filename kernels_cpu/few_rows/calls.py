"""Calls of stages in compiled code: each takes one address, of the numbers that describe the call."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
from numba import carray, types  # type: ignore[attr-defined]
from numpy.typing import NDArray

from ..codegen.compiled import compiled, emitted
from ..codegen.vector_ir import I64
from ..codegen.views import pointer
from ..threads.clock import nanoseconds
from ..threads.crew import BOARD

_FORM = types.int64(types.int64)


@compiled()
def words(address: int, count: int) -> Any:
    """Numbers int64 (count,) at an address."""
    return carray(pointer(address), (count,), np.int64)


@compiled()
def fields(address: int) -> Any:
    """The numbers of a call or of a plan at an address; none has more than 32."""
    return words(address, 32)


@compiled()
def opened(address: int) -> Any:
    """The numbers of a call with helpers, and what the first three are addresses of: board, plan, and scratch."""
    call = fields(address)
    return call, words(call[0], BOARD), fields(call[1]), fields(call[2])


@compiled()
def real(numbers: Any, place: int) -> Any:
    """The fp32 number at a place among numbers, as `Plan` tells it."""
    return numbers.view(np.float32)[2 * place]


def laid(*numbers: int) -> NDArray[np.int64]:
    """The numbers of a call."""
    return np.array(numbers, np.int64)


def address_of(numbers: NDArray[Any]) -> int:
    """The address of numbers."""
    return int(numbers.__array_interface__["data"][0])


@functools.cache
def code_of(serve: Any) -> int:
    """The address of the machine code of compiled work that takes an address and returns a whole number."""
    serve.compile(_FORM.args)
    found = serve.overloads[_FORM.args]
    if types.unliteral(found.signature.return_type) != _FORM.return_type:  # type: ignore[no-untyped-call]
        name = serve.py_func.__qualname__
        raise TypeError(
            f"{name} must return an int64, not {found.signature.return_type}: let it return 0 if all is well."
        )
    return int(found.library.get_pointer_to_function(found.fndesc.llvm_func_name))


@emitted
def _call(typing: Any, code: Any, address: Any) -> Any:
    """Call the machine code of work, as `code_of` tells it; 1 if it ended with an error."""

    def emit(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        form = context.call_conv.get_function_type(_FORM.return_type, _FORM.args)
        function = builder.inttoptr(values[0], form.as_pointer())
        status, answer = context.call_conv.call_function(builder, function, _FORM.return_type, _FORM.args, values[1:])
        return builder.select(status.is_error, I64(1), answer)

    return types.int64(types.int64, types.int64), emit


@compiled()
def make_calls(codes: Any, calls: Any, ends: Any) -> int:
    """Make calls one after the other, of work that returns 0 if all is well; -1, or the place of the first that failed.

    codes (n,) holds the addresses of the work, calls (n,) those of the numbers. Each of len(ends) layers has as many.
    ends[i] becomes the time at which layer i ended [ns].
    """
    done = 0
    for layer in range(len(ends)):
        for _ in range(len(codes) // len(ends)):
            if _call(codes[done], calls[done]):
                return done
            done += 1
        ends[layer] = nanoseconds()
    return -1


class Plan:
    """Numbers that describe a stage to compiled code: sizes, fp32 numbers, and addresses of arrays, which it keeps.

    Attributes
    ----------
    numbers : ndarray int64
    address : int
    """

    def __init__(self, *numbers: int | np.float32 | NDArray[Any]) -> None:
        self._kept = [number for number in numbers if isinstance(number, np.ndarray)]
        self.numbers = laid(*map(_told, numbers))
        self.address = address_of(self.numbers)


def _told(number: int | np.float32 | NDArray[Any]) -> int:
    if isinstance(number, np.ndarray):
        return address_of(number)
    return int(number.view(np.int32)) if isinstance(number, np.float32) else int(number)
