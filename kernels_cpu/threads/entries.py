"""Calls of compiled functions that another thread can make: an address of code and one of what it computes with."""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Sequence
from typing import Any

import numpy as np
from llvmlite import ir
from numba import types
from numpy.typing import NDArray

from ..codegen.compiled import emitted
from ..codegen.vector_ir import I64

_RUN = ir.FunctionType(I64, [I64])


def _key(given: Sequence[Any]) -> int:
    """A number that tells these types from any others, the same in every process."""
    names = "\n".join(each.name for each in given)
    return int.from_bytes(hashlib.sha256(names.encode()).digest()[:8], "little", signed=True)


@emitted
def key_of(typing: Any, arguments: Any) -> Any:
    """The number of the types of a tuple."""

    def emit(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        return I64(_key(signature.args[0].types))

    return types.int64(arguments), emit


def _place(context: Any, arguments: Any) -> Any:
    """LLVM's type of a call: the function, its counter and the tuple of its other arguments."""
    return ir.LiteralStructType([I64, I64, context.get_value_type(arguments)])


@emitted
def placed(typing: Any, function: Any, counter: Any, arguments: Any) -> Any:
    """Lay a call on the stack of the function that calls this, until that one returns; return its address."""

    def emit(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        with builder.goto_entry_block():
            place = builder.alloca(_place(context, signature.args[2]))
        for field, value in enumerate(values):
            builder.store(value, builder.gep(place, [ir.IntType(32)(0), ir.IntType(32)(field)], inbounds=True))
        return builder.ptrtoint(place, I64)

    return types.int64(types.int64, types.int64, arguments), emit


@emitted
def runner_of(typing: Any, arguments: Any) -> Any:
    """The address of code that makes a call at an address that `placed` returned for a tuple of these types."""

    def emit(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        (given,) = signature.args
        runner = ir.Function(builder.module, _RUN, "run_placed")
        runner.linkage = "internal"
        inner = ir.IRBuilder(runner.append_basic_block())
        place = inner.load(inner.inttoptr(runner.args[0], _place(context, given).as_pointer()))
        taken = (types.int64, *given.types)
        code = context.call_conv.get_function_type(types.none, taken)
        function = inner.inttoptr(inner.extract_value(place, 0), code.as_pointer())
        several = inner.extract_value(place, 2)
        each = [inner.extract_value(several, at) for at in range(len(given.types))]
        given_to_it = [inner.extract_value(place, 1), *each]
        status, _ = context.call_conv.call_function(inner, function, types.none, taken, given_to_it)
        inner.ret(inner.zext(status.is_error, I64))
        return builder.ptrtoint(runner, I64)

    return types.int64(arguments), emit


@emitted
def run(typing: Any, runner: Any, place: Any) -> Any:
    """Make the call that was placed; 1 if it ended with an error, else 0."""

    def emit(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        return builder.call(builder.inttoptr(values[0], _RUN.as_pointer()), [values[1]])

    return types.int64(types.int64, types.int64), emit


class Entries:
    """Addresses of the machine code of a compiled function, one for each tuple of types that it was called with.

    Attributes
    ----------
    known : (n, 2) int64
        Number of the types, as `key_of` tells it, and address.
    """

    def __init__(self, serve: Any) -> None:
        self._serve = serve
        self.known: NDArray[np.int64] = np.empty((0, 2), np.int64)

    def learn(self, arguments: Sequence[Any]) -> None:
        """Compile or load the function for a counter and arguments of these types."""
        given = [self._serve.typeof_pyval(each) for each in arguments]
        taken = (types.int64, *given)
        self._serve.compile(taken)
        found = self._serve.overloads[taken]
        if found.signature.return_type != types.none:
            name = self._serve.py_func.__qualname__
            raise TypeError(f"{name} must return nothing, not {found.signature.return_type}: let it store its results.")
        address = found.library.get_pointer_to_function(found.fndesc.llvm_func_name)
        self.known = np.vstack([self.known, [(_key(given), address)]])


@functools.cache
def entries_of(serve: Any) -> Entries:
    """The entries of a compiled function."""
    return Entries(serve)
