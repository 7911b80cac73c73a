"""Waiting in compiled code, with the GIL released: for moments by looking again and again, for long asleep."""

from __future__ import annotations

import platform
import sys
from typing import Any

from llvmlite import ir
from numba import types

from ..codegen.compiled import compiled, emitted
from ..codegen.vector_ir import I32, I64

_FUTEX = {"x86_64": 202, "aarch64": 98}
"""Linux' number of the call by which threads sleep until another wakes them, by machine."""
SLEEPS = sys.platform == "linux" and platform.machine() in _FUTEX
"""Whether compiled code can sleep here, and wake threads that do."""
_SLEEP = 128
_WAKE = 129


@emitted
def _rest(typing: Any) -> Any:
    """Let the core's other work go first for some cycles, where it has an instruction for that."""

    def emit(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        if platform.machine().lower() in ("x86_64", "amd64"):
            pause = ir.FunctionType(ir.VoidType(), [])
            known = builder.module.globals.get("llvm.x86.sse2.pause")
            builder.call(known or ir.Function(builder.module, pause, "llvm.x86.sse2.pause"), [])
        return context.get_dummy_value()

    return types.void(), emit


@emitted
def _give_way(typing: Any) -> Any:
    """Let another thread have the core, if one waits for it: the one that is waited for may."""

    def emit(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        if sys.platform == "linux":
            give = ir.FunctionType(I32, [])
            known = builder.module.globals.get("sched_yield")
            builder.call(known or ir.Function(builder.module, give, "sched_yield"), [])
        return context.get_dummy_value()

    return types.void(), emit


@compiled()
def pause(looks: int) -> None:
    """Pass the time between two looks; give way now and then, about every 3 us."""
    if looks % 64 == 63:
        _give_way()
    else:
        _rest()


def _futex(builder: Any, address: Any, operation: int, value: int) -> None:
    """Emit the system's call for the 32-bit word at an address; nothing where there is none."""
    if SLEEPS:
        call = ir.FunctionType(I64, [I64], var_arg=True)
        known = builder.module.globals.get("syscall")
        zero = I64(0)
        builder.call(
            known or ir.Function(builder.module, call, "syscall"),
            [I64(_FUTEX[platform.machine()]), address, I64(operation), I64(value), zero, zero, zero],
        )


@emitted
def sleep_at(typing: Any, address: Any) -> Any:
    """Sleep until woken, if the 32-bit word at this address is 0; it may end earlier."""

    def emit(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        _futex(builder, arguments[0], _SLEEP, 0)
        return context.get_dummy_value()

    return types.void(types.int64), emit


@emitted
def wake_at(typing: Any, address: Any) -> Any:
    """Wake a thread that sleeps at this address, if one does."""

    def emit(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        _futex(builder, arguments[0], _WAKE, 1)
        return context.get_dummy_value()

    return types.void(types.int64), emit
