"""The matrix registers of Intel's server CPUs (AMX) as LLVM instructions: eight, of up to 16 rows of 16 words each."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils

from ..machine.features import has_matrices
from .compiled import emitted
from .vector_ir import I8, I64

ROWS = 16
"""Most rows of a register, and most 32-bit words of a row."""
TERMS = 3
"""Number of bf16 terms whose sum is an fp32, 8 of its 24 bits each: products of all terms with a bf16 are exact."""


class Matrices:
    """Appends matrix instructions to a function under construction; registers are numbers, addresses are integers.

    Executed on a CPU without AMX they end the process; `has_matrices` tells if this one has it.
    """

    def __init__(self, builder: Any) -> None:
        self.b = builder

    def _call(self, name: str, *operands: Any) -> None:
        signature = ir.FunctionType(ir.VoidType(), [operand.type for operand in operands])
        self.b.call(self.b.module.globals.get(name) or ir.Function(self.b.module, signature, name), operands)

    def _pointer(self, address: Any) -> Any:
        return self.b.inttoptr(address, I8.as_pointer())

    def shape(self, shapes: Sequence[tuple[Any, int]]) -> None:
        """Set each register's rows (int or i64) and words per row, and clear it; takes 175 cycles on a Xeon."""
        palette = ir.Constant(ir.ArrayType(I8, 64), bytearray([1, *[0] * 63]))
        table = cgutils.alloca_once_value(self.b, palette)  # type: ignore[no-untyped-call]
        first = self.b.ptrtoint(table, I64)
        for register, (rows, words) in enumerate(shapes):
            self._put(self.b.add(first, I64(16 + 2 * register)), I8(4 * words))
            count = I8(rows) if isinstance(rows, int) else self.b.trunc(rows, I8)
            self._put(self.b.add(first, I64(48 + register)), count)
        self._call("llvm.x86.ldtilecfg", self._pointer(first))

    def _put(self, address: Any, value: Any) -> None:
        self.b.store(value, self._pointer(address))

    def release(self) -> None:
        """Release the registers, so that the system need not save them."""
        self._call("llvm.x86.tilerelease")

    def clear(self, register: int) -> None:
        """Set every word of a register to zero."""
        self._call("llvm.x86.tilezero", I8(register))

    def load(self, register: int, address: Any, stride: Any) -> None:
        """Load rows that are `stride` bytes apart."""
        self._call("llvm.x86.tileloadd64", I8(register), self._pointer(address), stride)

    def store(self, register: int, address: Any, stride: Any) -> None:
        """Store rows `stride` bytes apart."""
        self._call("llvm.x86.tilestored64", I8(register), self._pointer(address), stride)

    def multiply(self, total: int, a: int, b: int) -> None:
        """total[m, n] += sum over k of a[m, k] . b[k, n] in fp32, where a word of a and b is two bf16.

        Denormal numbers count as zero. Takes 16 cycles, or with fewer rows of a as many as it has rows, at least 10.
        """
        self._call("llvm.x86.tdpbf16ps", I8(total), I8(a), I8(b))

    def multiply_bytes(self, total: int, a: int, b: int) -> None:
        """The same in int32, where a word of a is four signed bytes and one of b four unsigned bytes; equally fast."""
        self._call("llvm.x86.tdpbsud", I8(total), I8(a), I8(b))


@emitted
def release(typing: Any) -> Any:
    """Release the matrix registers on a CPU that has them."""

    def emit(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        if has_matrices():
            Matrices(builder).release()
        return context.get_dummy_value()

    return types.void(), emit
