"""Arrays over memory that compiled code knows by its address."""

from __future__ import annotations

from typing import Any

from numba import types

from .compiled import emitted


@emitted
def pointer(typing: Any, address: Any) -> Any:
    """An address as `numba.carray` takes it: ``carray(pointer(address), shape, dtype)`` is an array there."""

    def emit(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.inttoptr(arguments[0], context.get_value_type(types.voidptr))

    return types.voidptr(types.int64), emit
