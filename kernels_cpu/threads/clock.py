"""A clock for compiled code."""

from __future__ import annotations

import sys
from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils

from ..codegen.compiled import emitted
from ..codegen.vector_ir import I32, I64

TELLS_TIME = sys.platform == "linux"
"""Whether compiled code can tell the time here."""
_MONOTONIC = 1


@emitted
def nanoseconds(typing: Any) -> Any:
    """Time since a moment in the past [ns], on the clock of `time.perf_counter`; 0 where there is none."""

    def emit(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        if not TELLS_TIME:
            return I64(0)
        pair = cgutils.alloca_once(builder, ir.ArrayType(I64, 2))  # type: ignore[no-untyped-call]
        form = ir.FunctionType(I32, [I32, pair.type])
        known = builder.module.globals.get("clock_gettime")
        builder.call(known or ir.Function(builder.module, form, "clock_gettime"), [I32(_MONOTONIC), pair])
        seconds, rest = (builder.extract_value(builder.load(pair), place) for place in range(2))
        return builder.add(builder.mul(seconds, I64(10**9)), rest)

    return types.int64(), emit
