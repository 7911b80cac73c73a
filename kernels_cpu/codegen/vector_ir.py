"""LLVM vectors, which Numba's types lack, for the intrinsics of the kernels.

Every vector has `lanes` fp32 lanes, one register of the code path: 16 with AVX-512, 8 with AVX2. Only generic LLVM
instructions are emitted, so that each path also runs, more slowly, on computers without its registers.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from llvmlite import ir

from ..machine.features import has

F64 = ir.DoubleType()
F32 = ir.FloatType()
F16 = ir.HalfType()
I8 = ir.IntType(8)
I16 = ir.IntType(16)
I32 = ir.IntType(32)
I64 = ir.IntType(64)
LINE = 64
"""Bytes of a cache line."""

# 2**f for |f| <= 1/2: Taylor coefficients of exp(f ln 2); the first term left out is below 1.6e-7 of 2**f at |f| = 1/2.
EXP2 = [math.log(2) ** k / math.factorial(k) for k in range(7)]
ROUND = 1.5 * 2**23
"""Added to a small fp32, it leaves the nearest integer in the low bits."""


class _BFloat(ir.Type):  # type: ignore[misc]
    """LLVM's type bfloat, which llvmlite lacks."""

    intrinsic_name = "bf16"

    def _to_string(self) -> str:
        return "bfloat"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _BFloat)

    def __hash__(self) -> int:
        return hash(_BFloat)


class Storage(enum.IntEnum):
    """Number formats in which the cache stores rows; an int, so that Numba can pass it as a literal."""

    FP32 = 0
    BF16 = 1
    FP16 = 2
    INT8 = 3

    @property
    def itemsize(self) -> int:
        """Bytes of an element."""
        return {Storage.FP32: 4, Storage.INT8: 1}.get(self, 2)


@dataclass(frozen=True)
class Load:
    """One load of a row: the elements from `start` on that become `vectors` registers of fp32."""

    start: int
    vectors: int


def row_loads(dim: int, storage: Storage, lanes: int) -> tuple[Load, ...]:
    """The loads of a row of `dim` elements; a load of bf16 gives two registers, the even and the odd elements."""
    wide = 2 * lanes if storage is Storage.BF16 else lanes
    whole = [Load(start, wide // lanes) for start in range(0, dim - wide + 1, wide)]
    rest = [Load(start, 1) for start in range(len(whole) * wide, dim, lanes)]
    return (*whole, *rest)


class Emitter:
    """Appends vector instructions to a function under construction; addresses are 64-bit integers."""

    def __init__(self, builder: Any, lanes: int) -> None:
        self.b = builder
        self.lanes = lanes
        self.f32s = ir.VectorType(F32, lanes)
        self.i32s = ir.VectorType(I32, lanes)
        self.zero = self.const(0.0)

    def const(self, value: float) -> Any:
        """`value` in every lane."""
        return ir.Constant(self.f32s, [F32(value)] * self.lanes)

    def iconst(self, value: int) -> Any:
        """An integer in every lane."""
        return ir.Constant(self.i32s, [I32(value)] * self.lanes)

    def at(self, address: Any, offset: Any = 0) -> Any:
        """An address plus an offset in bytes."""
        if isinstance(offset, int):
            return self.b.add(address, I64(offset)) if offset else address
        return self.b.add(address, offset)

    def load(self, address: Any, llvm_type: Any, align: int) -> Any:
        """Load a value of an LLVM type."""
        return self.b.load(self.b.inttoptr(address, llvm_type.as_pointer()), align=align)

    def store(self, value: Any, address: Any, align: int) -> None:
        """Store a value."""
        self.b.store(value, self.b.inttoptr(address, value.type.as_pointer()), align=align)

    def load_f32(self, address: Any, offset: int = 0) -> Any:
        """Load a register of fp32 from scratch memory, which is aligned to registers."""
        return self.load(self.at(address, offset), self.f32s, 4 * self.lanes)

    def store_f32(self, value: Any, address: Any, offset: int = 0) -> None:
        """Store a register of fp32 to scratch memory."""
        self.store(value, self.at(address, offset), 4 * self.lanes)

    def _function(self, name: str, result: Any, arguments: Sequence[Any]) -> Any:
        known = self.b.module.globals.get(name)
        return known or ir.Function(self.b.module, ir.FunctionType(result, arguments), name)

    def fma(self, a: Any, b: Any, c: Any) -> Any:
        """a b + c, rounded once."""
        function = self._function(f"llvm.fma.v{self.lanes}f32", self.f32s, [self.f32s] * 3)
        return self.b.call(function, [a, b, c])

    def prefetch(self, address: Any, level: int) -> None:
        """Prefetch a cache line into this cache level; non-temporal prefetch (NTA) measured slower than none."""
        types = [I8.as_pointer(), I32, I32, I32]
        function = self._function("llvm.prefetch.p0", ir.VoidType(), types)
        reading = I32(0)
        data = I32(1)
        self.b.call(function, [self.b.inttoptr(address, types[0]), reading, I32(4 - level), data])

    def keep_order(self) -> None:
        """Keep loads, stores and prefetches on their side of this place: LLVM gathers them in a burst otherwise."""
        self.b.asm(ir.FunctionType(ir.VoidType(), []), "", "~{memory}", [], True)

    def shuffle(self, a: Any, b: Any, lanes: Sequence[int]) -> Any:
        """Select lanes by number: those of a come first, then those of b."""
        mask = ir.Constant(ir.VectorType(I32, len(lanes)), [I32(lane) for lane in lanes])
        return self.b.shuffle_vector(a, b, mask)

    def spread(self, value: Any) -> Any:
        """Broadcast a scalar to every lane."""
        single = self.b.insert_element(ir.Constant(ir.VectorType(value.type, self.lanes), ir.Undefined), value, I32(0))
        return self.shuffle(single, single, [0] * self.lanes)

    def spread_f32(self, address: Any, offset: int = 0) -> Any:
        """Broadcast an fp32 from memory to every lane."""
        return self.spread(self.load(self.at(address, offset), F32, 4))

    def spread_i32(self, address: Any) -> Any:
        """Broadcast a 32-bit word from memory to every lane."""
        return self.spread(self.load(address, I32, 4))

    def dot_bf16(self, total: Any, a: Any, b: Any) -> Any:
        """total + a0 b0 + a1 b1 for the bf16 pair in each word, an instruction of AVX512_BF16."""
        pairs = ir.VectorType(_BFloat(), 2 * self.lanes)
        function = self._function("llvm.x86.avx512bf16.dpbf16ps.512", self.f32s, [self.f32s, pairs, pairs])
        return self.b.call(function, [total, self.b.bitcast(a, pairs), self.b.bitcast(b, pairs)])

    def dot_bytes(self, total: Any, a: Any, b: Any) -> Any:
        """total + the dot product of four unsigned bytes of a and four signed bytes of b per word, by AVX512_VNNI."""
        function = self._function("llvm.x86.avx512.vpdpbusd.512", self.i32s, [self.i32s] * 3)
        return self.b.call(function, [total, a, b])

    def dot_pairs(self, a: Any, b: Any) -> Any:
        """Dot products of two signed 16-bit integers of a and two of b per word, by AVX2."""
        pairs = ir.VectorType(I16, 2 * self.lanes)
        function = self._function("llvm.x86.avx2.pmadd.wd", self.i32s, [pairs] * 2)
        return self.b.call(function, [self.b.bitcast(a, pairs), self.b.bitcast(b, pairs)])

    def dot_small_bytes(self, a: Any, b: Any) -> Any:
        """Dot products of two unsigned bytes of a and two signed bytes of b, as 16 bits, which must hold them; AVX2."""
        pairs = ir.VectorType(I16, 2 * self.lanes)
        bytes_ = ir.VectorType(I8, 4 * self.lanes)
        function = self._function("llvm.x86.avx2.pmadd.ub.sw", pairs, [bytes_] * 2)
        return self.b.call(function, [self.b.bitcast(a, bytes_), self.b.bitcast(b, bytes_)])

    def magnitudes(self, value: Any) -> Any:
        """The magnitudes of signed bytes, as unsigned bytes; AVX2."""
        bytes_ = ir.VectorType(I8, 4 * self.lanes)
        function = self._function(f"llvm.abs.v{4 * self.lanes}i8", bytes_, [bytes_, ir.IntType(1)])
        found = self.b.call(function, [self.b.bitcast(value, bytes_), ir.IntType(1)(0)])
        return self.b.bitcast(found, self.i32s)

    def with_signs(self, value: Any, signs: Any) -> Any:
        """Signed bytes, negated where those of `signs` are negative and 0 where they are 0; AVX2."""
        bytes_ = ir.VectorType(I8, 4 * self.lanes)
        function = self._function("llvm.x86.avx2.psign.b", bytes_, [bytes_] * 2)
        found = self.b.call(function, [self.b.bitcast(value, bytes_), self.b.bitcast(signs, bytes_)])
        return self.b.bitcast(found, self.i32s)

    def looked_up(self, table: Sequence[int], indices: Any) -> Any:
        """Replace each byte, an index below 16, by that byte of the table; by AVX512BW, or by AVX2 half by half."""
        bytes_ = ir.VectorType(I8, 4 * self.lanes)
        whole = self.lanes == 16 and has("avx512bw")
        size = 64 if whole else 32
        some = ir.VectorType(I8, size)
        name = "llvm.x86.avx512.pshuf.b.512" if whole else "llvm.x86.avx2.pshuf.b"
        function = self._function(name, some, [some] * 2)
        every = ir.Constant(some, [I8(byte) for byte in table] * (size // 16))
        places = self.b.bitcast(indices, bytes_)
        if size == 4 * self.lanes:
            return self.b.bitcast(self.b.call(function, [every, places]), self.i32s)
        low, high = (self.b.call(function, [every, self.shuffle(places, places, range(at, at + 32))]) for at in (0, 32))
        return self.b.bitcast(self.shuffle(low, high, range(64)), self.i32s)

    def bits(self, value: Any) -> Any:
        """The bits of fp32 lanes as integers."""
        return self.b.bitcast(value, self.i32s)

    def floats(self, value: Any) -> Any:
        """Integer lanes read as the bits of fp32."""
        return self.b.bitcast(value, self.f32s)

    def upper_halves(self, low: Any, high: Any) -> Any:
        """Words made of the upper halves of two registers' words: for fp32, the bf16 that they are cut to."""
        return self.b.or_(self.b.lshr(low, self.iconst(16)), self.b.and_(high, self.iconst(0xFFFF0000)))

    def pairs(self, load: Load, row: Any) -> Any:
        """Load a register of bf16 pairs from a row, as words; the second half is 0 where the row ends."""
        address = self.at(row, load.start * Storage.BF16.itemsize)
        if load.vectors == 2:
            return self.load(address, self.i32s, Storage.BF16.itemsize)
        half = self.load(address, ir.VectorType(I32, self.lanes // 2), Storage.BF16.itemsize)
        return self.shuffle(half, ir.Constant(half.type, [I32(0)] * (self.lanes // 2)), range(self.lanes))

    def widen(self, load: Load, row: Any, storage: Storage) -> list[Any]:
        """Load registers of fp32 from a row; rows need no alignment beyond that of their elements."""
        lanes = self.lanes
        address = self.at(row, load.start * storage.itemsize)
        align = storage.itemsize
        if storage is Storage.FP32:
            return [self.load(address, self.f32s, align)]
        if storage is Storage.FP16:
            return [self.b.fpext(self.load(address, ir.VectorType(F16, lanes), align), self.f32s)]
        if storage is Storage.INT8:
            numbers = self.b.sext(self.load(address, ir.VectorType(I8, lanes), align), self.i32s)
            return [self.b.sitofp(numbers, self.f32s)]
        if load.vectors == 1:
            narrow = self.load(address, ir.VectorType(I16, lanes), align)
            return [self.floats(self.b.shl(self.b.zext(narrow, self.i32s), self.iconst(16)))]
        pairs = self.load(address, self.i32s, align)
        return [
            self.floats(self.b.shl(pairs, self.iconst(16))),
            self.floats(self.b.and_(pairs, self.iconst(0xFFFF0000))),
        ]

    def larger(self, a: Any, b: Any) -> Any:
        """The larger of a and b in each lane; b where a is NaN."""
        return self.b.select(self.b.fcmp_ordered(">", a, b), a, b)

    def across(self, value: Any, combine: Callable[[Any, Any], Any], period: int = 1) -> Any:
        """Combine the lanes whose numbers are equal modulo `period`; each of them gets the result."""
        step = self.lanes // 2
        while step >= period:
            value = combine(value, self.shuffle(value, value, [lane ^ step for lane in range(self.lanes)]))
            step //= 2
        return value

    def sums(self, vectors: Iterable[Any]) -> Any:
        """A register whose lane i is the sum over the lanes of vector i; there are as many vectors as lanes.

        Vectors are added as they come, so that the computation of the next ones overlaps.
        """
        waiting: list[tuple[int, Any]] = []
        for vector in vectors:
            step = 1
            while waiting and waiting[-1][0] == step:
                first = waiting.pop()[1]
                low, high = _halves(step, self.lanes)
                vector = self.b.fadd(self.shuffle(first, vector, low), self.shuffle(first, vector, high))
                step *= 2
            waiting.append((step, vector))
        return waiting[0][1]

    def exp2(self, x: Any) -> Any:
        """2**x for x <= 0: relative error below 3e-7; 0 for x below about -126; NaN stays NaN."""
        bounded = self.b.select(self.b.fcmp_ordered("<", x, self.const(-127.0)), self.const(-127.0), x)
        shifted = self.b.fadd(bounded, self.const(ROUND))
        fraction = self.b.fsub(bounded, self.b.fsub(shifted, self.const(ROUND)))
        value = self.const(EXP2[-1])
        for coefficient in reversed(EXP2[:-1]):
            value = self.fma(value, fraction, self.const(coefficient))
        exponent = self.b.shl(self.b.add(self.bits(shifted), self.iconst(127)), self.iconst(23))
        return self.b.fmul(value, self.floats(exponent))

    def loop(
        self,
        count: Any,
        carried: Sequence[Any],
        body: Callable[[Any, list[Any]], Sequence[Any]],
        *,
        may_be_empty: bool = False,
    ) -> list[Any]:
        """Run `body(index, carried)` for index 0 .. count - 1; its result is carried to the next.

        There is at least one, unless the loop `may_be_empty`.
        """
        before = self.b.block
        inside = self.b.append_basic_block("each")
        after = self.b.append_basic_block("done")
        if may_be_empty:
            self.b.cbranch(self.b.icmp_signed(">", count, I64(0)), inside, after)
        else:
            self.b.branch(inside)
        self.b.position_at_end(inside)
        index = self.b.phi(I64)
        index.add_incoming(I64(0), before)
        values = [self.b.phi(value.type) for value in carried]
        for phi, value in zip(values, carried, strict=True):
            phi.add_incoming(value, before)
        results = list(body(index, values))
        following = self.b.add(index, I64(1))
        index.add_incoming(following, self.b.block)
        for phi, value in zip(values, results, strict=True):
            phi.add_incoming(value, self.b.block)
        last = self.b.block
        self.b.cbranch(self.b.icmp_signed("<", following, count), inside, after)
        self.b.position_at_end(after)
        if not may_be_empty:
            return results
        ends = [self.b.phi(value.type) for value in carried]
        for phi, value, result in zip(ends, carried, results, strict=True):
            phi.add_incoming(value, before)
            phi.add_incoming(result, last)
        return ends


def _halves(step: int, lanes: int) -> tuple[list[int], list[int]]:
    """Lanes of registers a and b to add in one step of a transposing reduction, which halves the units of each.

    Units are single lanes at first and 128 bits later. Four units become two by (a0 a1 b2 b3) + (a2 a3 b0 b1), whose
    first operand is a blend and needs no shuffle, and two become one by (a0 a2 b0 b2) + (a1 a3 b1 b3).
    """
    unit = 1 if step < 4 else 4
    low: tuple[int, ...]
    high: tuple[int, ...]
    if lanes == 2 * unit:
        low = (0, 3)
        high = (1, 2)
    elif step == unit:
        low = (0, 1, 6, 7)
        high = (2, 3, 4, 5)
    else:
        low = (0, 2, 4, 6)
        high = (1, 3, 5, 7)
    count = len(low)

    def lanes_of(units: tuple[int, ...]) -> list[int]:
        found: list[int] = []
        for block in range(0, lanes, count * unit):
            for place in units:
                first = block + (place % count) * unit + (lanes if place >= count else 0)
                found += range(first, first + unit)
        return found

    return lanes_of(low), lanes_of(high)
