"""The matrix registers of Intel's server CPUs (AMX) as LLVM instructions: eight, of up to 16 rows of 16 words."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from llvmlite import ir
from numba.core import cgutils

from .vector_ir import I8, I64

ROWS = 16
"""Most rows of a register, and words in one of its rows."""


class Matrices:
    """Appends matrix instructions to a function under construction; registers go by number, addresses are integers.

    A computer without them stops the process: `has_matrices` says whether this one has them.
    """

    def __init__(self, builder: Any) -> None:
        self.b = builder

    def _call(self, name: str, *operands: Any) -> None:
        kind = ir.FunctionType(ir.VoidType(), [operand.type for operand in operands])
        self.b.call(self.b.module.globals.get(name) or ir.Function(self.b.module, kind, name), operands)

    def _pointer(self, address: Any) -> Any:
        return self.b.inttoptr(address, I8.as_pointer())

    def shape(self, shapes: Sequence[tuple[int, int]]) -> None:
        """Give each register so many rows and words per row, and clear it; 175 cycles on a Xeon."""
        table = bytearray(64)
        table[0] = 1
        for register, (rows, words) in enumerate(shapes):
            table[16 + 2 * register], table[48 + register] = 4 * words, rows
        name = f"matrices.{'.'.join(f'{rows}x{words}' for rows, words in shapes)}"
        constant = ir.Constant(ir.ArrayType(I8, len(table)), table)
        place = self.b.module.globals.get(name) or cgutils.global_constant(self.b.module, name, constant)  # type: ignore[no-untyped-call]
        self._call("llvm.x86.ldtilecfg", self.b.bitcast(place, I8.as_pointer()))

    def release(self) -> None:
        """Give the registers back to the system."""
        self._call("llvm.x86.tilerelease")

    def clear(self, register: int) -> None:
        """Zero in every word."""
        self._call("llvm.x86.tilezero", I8(register))

    def load(self, register: int, address: Any, apart: int) -> None:
        """Rows that lie so many bytes apart."""
        self._call("llvm.x86.tileloadd64", I8(register), self._pointer(address), I64(apart))

    def store(self, register: int, address: Any, apart: int) -> None:
        """Rows to so many bytes apart."""
        self._call("llvm.x86.tilestored64", I8(register), self._pointer(address), I64(apart))

    def multiply(self, total: int, a: int, b: int) -> None:
        """total[m, n] += sum over k of a[m, k] . b[k, n] in fp32, where a word of a and b is two bf16.

        What is denormal counts as zero. 16 cycles, or as many as a has rows but at least 10.
        """
        self._call("llvm.x86.tdpbf16ps", I8(total), I8(a), I8(b))
