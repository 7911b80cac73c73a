"""The kernels that Python calls, with the types that they are compiled for."""

from __future__ import annotations

from workbench.simulate.kernels.compiling import Compiled
from workbench.simulate.kernels.layout import lay_out
from workbench.simulate.kernels.stretch import advance

__all__ = ["COMPILED", "advance", "lay_out"]

_ONE = "int64[::1]"
_TWO = "int64[:, ::1]"
_REAL = "float64[::1]"
_REALS = "float64[:, ::1]"
_ORDER = f"Tuple(({_ONE}, {_ONE}, {_ONE}, {_ONE}, {_ONE}, {_ONE}, {_TWO}, {_TWO}, {_TWO}))"
_TAPES = f"Tuple(({_TWO}, {_REAL}, {_TWO}, {_ONE}))"
_PLAN = f"{_ORDER}, {_TAPES}, {_ONE}, {_TWO}, {_ONE}"
_COLUMNS = f"UniTuple({_ONE}, 7)"
_LISTS = f"UniTuple({_ONE}, 3)"
_TOKENS = f"Tuple(({_REAL}, {_ONE}, {_TWO}))"

COMPILED = Compiled(
    (
        lay_out,
        f"int64({_PLAN}, {_REAL}, {_REALS}, float64, float64, float64, boolean, {_REAL}, {_REAL}, {_REAL}, {_REAL}, "
        f"{_ONE})",
    ),
    (
        advance,
        f"int64({_PLAN}, {_REALS}, float64, float64, boolean, {_COLUMNS}, {_LISTS}, {_ONE}, {_REAL}, {_TOKENS}, "
        f"{_REAL}, {_REAL}, {_TWO}, {_REALS}, {_REAL}, {_REALS}, {_REALS}, {_TWO}, int64)",
    ),
)
