"""Corrections of Triton's interpreter for bfloat16.

The interpreter keeps bfloat16 as 16 bits in an unsigned integer, and multiplies, adds and compares those integers; it
rounds by truncation (seen in triton 3.6 and 3.9). The correction widens such values to fp32 before each operation,
which is exact, and rounds results to nearest, ties to even, as hardware does. It also corrects loops that end at an
argument, which fail in triton 3.6 with numpy 2.4.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray


def widened(bits: NDArray[np.uint16]) -> NDArray[np.float32]:
    """Convert bfloat16 bits to fp32: a bfloat16 is the upper half of an fp32."""
    return (bits.astype(np.uint32) << np.uint32(16)).view(np.float32)


def rounded(values: NDArray[np.float32]) -> NDArray[np.uint16]:
    """Round to the bits of the nearest bfloat16, ties to even; NaN becomes the quiet NaN of its sign."""
    bits = np.atleast_1d(values).astype(np.float32, copy=False).view(np.uint32).astype(np.uint64)
    upper = (bits + 0x7FFF + (bits >> 16 & 1)) >> 16
    quiet = (bits >> 16 & 0x8000) | 0x7FC0
    return np.where(np.isnan(values), quiet, upper).astype(np.uint16).reshape(np.shape(values))


def mend(interpreter: Any, tl: Any) -> None:
    """Give the interpreter's builder a class that widens bfloat16 first; a second call changes nothing."""
    builder = interpreter.interpreter_builder
    if type(builder).__name__ != "Mended":
        builder.__class__ = _mended(interpreter, tl)
        interpreter._patch_lang_tensor = _counting(interpreter._patch_lang_tensor)


def _counting(patch: Any) -> Any:
    """Extend the interpreter's patch of tensors: one of a single element also serves as an index."""

    def patched(tensor: Any, scope: Any) -> None:
        patch(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    return patched


def _mended(interpreter: Any, tl: Any) -> type:
    handle = interpreter.TensorHandle

    def wide(operand: Any) -> Any:
        narrow = operand.dtype.scalar == tl.bfloat16
        return handle(widened(operand.data), tl.float32) if narrow else operand

    def narrowed(result: Any) -> Any:
        return handle(rounded(result.data), tl.bfloat16) if result.data.dtype == np.float32 else result

    class Mended(interpreter.InterpreterBuilder):  # type: ignore[misc]
        def cast_impl(self, src: Any, dst_type: Any) -> Any:
            if dst_type.scalar != tl.bfloat16:
                return super().cast_impl(wide(src), dst_type)
            return narrowed(super().cast_impl(wide(src), tl.float32))

        def create_fp_to_fp(self, src: Any, dst_type: Any, rounding_mode: Any) -> Any:
            if dst_type.scalar != tl.bfloat16:
                return super().create_fp_to_fp(wide(src), dst_type, rounding_mode)
            if src.dtype.scalar in (tl.float16, tl.bfloat16, tl.float32, tl.float64):
                return self.cast_impl(src, dst_type)
            return narrowed(super().create_fp_to_fp(src, tl.float32, rounding_mode))

        def create_dot(self, a: Any, b: Any, d: Any, *rest: Any) -> Any:
            return super().create_dot(wide(a), wide(b), d, *rest)

        def binary_op(self, lhs: Any, rhs: Any, op: Any) -> Any:
            result = super().binary_op(wide(lhs), wide(rhs), op)
            return narrowed(result) if lhs.dtype.scalar == tl.bfloat16 else result

        def unary_op(self, arg: Any, op: Any) -> Any:
            result = super().unary_op(wide(arg), op)
            return narrowed(result) if arg.dtype.scalar == tl.bfloat16 else result

    return Mended
