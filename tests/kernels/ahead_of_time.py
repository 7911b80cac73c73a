"""Compiles the kernels for GPUs that are not here and tells what came out; run by itself, without the interpreter.

python tests/kernels/ahead_of_time.py 90 16-bit    one JSON object per kernel, and per row of tiles.json and
way to read weights
"""

import dataclasses
import itertools
import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any

import torch

from kernels_triton.backend.mode import triton
from kernels_triton.moe.jit_grouped import combine, grouped
from kernels_triton.moe.jit_pairs import count_pairs, place_pairs
from kernels_triton.moe.jit_router import route
from kernels_triton.moe.tiles import KINDS, SHARED_KIB, LayerTiles, Tiles, table, tiles_for

BINARIES = Path(triton.__file__).parent / "backends/nvidia/bin"
TYPES = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}
STORED = {torch.int8: "i8", torch.uint8: "u8", torch.float8_e4m3fn: "fp8e4nv"} | TYPES
BITS = {torch.int8: 8, torch.uint8: 4, torch.float8_e4m3fn: 8}
GROUP = 128
EVEN = ("N", "K", "x_stride", "weight_page", "weight_row", "bias_page", "out_stride")  # sizes that are multiples of 16
NUMBERS = (*EVEN, "n", "E", "P", "scale_page", "scale_row")


def built(
    kernel: Any,
    arch: int,
    types: dict[str, str],
    constants: dict[str, Any],
    warps: int,
    stages: int,
    strides: Collection[str] = EVEN,
) -> Any:
    """One kernel compiled as a launch would: pointers and strides are multiples of 16."""
    names = kernel.arg_names
    signature = {name: types.get(name, "constexpr") for name in names}
    even = [name for name, kind in types.items() if kind.startswith("*") or name in (*strides, "stride")]
    source = triton.compiler.ASTSource(
        kernel,
        signature=signature,
        constexprs={(names.index(name),): value for name, value in constants.items()},
        attrs={(names.index(name),): [["tt.divisibility", 16]] for name in even},
    )
    target = triton.backends.compiler.GPUTarget("cuda", arch, 32)
    return triton.compile(source, target=target, options={"num_warps": warps, "num_stages": stages})


def grouped_kernel(arch: int, x: torch.dtype, weights: torch.dtype, m: int, tiles: Tiles, gated: bool) -> Any:
    """The grouped GEMM: gated with pages and biases, or plain with routing weights."""
    bits = BITS.get(weights, 0)
    pointers = {"x": TYPES[x], "weight": STORED[weights], "scale": "fp32" if bits else STORED[weights]}
    pointers |= {"out": TYPES[x], "pairs": "i32", "experts": "i32", "rows": "i64", "pages": "i32"}
    pointers["bias" if gated else "factors"] = TYPES[x] if gated else "fp32"
    step = min(tiles.k, GROUP) if bits else tiles.k
    constants = {"factors" if gated else "bias": None, "SHARE": 2 if gated else 1, "ACTIVATION": int(gated)}
    constants |= {"BITS": bits, "GROUP": GROUP if bits else 1 << 30, "PAGED": True, "BIASED": gated}
    constants |= {"WEIGHTED": not gated, "EVEN_K": True, "BLOCK_M": m, "BLOCK_N": tiles.n, "BLOCK_K": step}
    types = {name: f"*{kind}" for name, kind in pointers.items()} | dict.fromkeys(NUMBERS, "i32")
    if tiles.tma:
        types["weight"] = f"tensordesc<{STORED[weights]}[1, {tiles.n}, {step // 2 if bits == 4 else step}]>"
    constants |= {"GROUP_M": tiles.group, "TMA": tiles.tma}
    return built(grouped, arch, types, constants, tiles.warps, tiles.stages)


def small_kernels(arch: int) -> Iterator[tuple[str, Any]]:
    """Everything beside the grouped GEMM."""
    pointers = {"ids": "*i32", "counts": "*i64", "n": "i32", "E": "i32"}
    yield "count_pairs", built(count_pairs, arch, pointers, {"BLOCK": 1024}, 4, 3)
    pointers |= {"pairs": "*i32", "experts": "*i32", "rows": "*i64"}
    yield "place_pairs", built(place_pairs, arch, pointers, {"ROWS": 16, "BLOCK": 1024, "BLOCK_E": 256}, 4, 3)
    pointers = {"rows": "*fp16", "out": "*fp16", "N": "i32"}
    yield "combine", built(combine, arch, pointers, {"K": 8, "BLOCK": 1024}, 4, 3)
    pointers = {"logits": "*fp32", "bias": "*fp32", "ids": "*i32", "weights": "*fp32", "stride": "i32", "scale": "fp32"}
    constants = {"K": 8, "GROUPS": 8, "SIZE": 32, "KEPT": 4, "SIGMOID": True, "RENORMALISE": True, "BIASED": True}
    yield "route", built(route, arch, pointers, constants | {"BLOCK_G": 8, "BLOCK_S": 32, "BLOCK_K": 8}, 1, 3)


def described(kernel: Any, arch: int) -> dict[str, Any]:
    """Registers, stack, shared memory and matrix instructions of what was compiled."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(kernel.asm["cubin"])
        file.flush()
        used, machine = (
            subprocess.run([BINARIES / tool, option, file.name], capture_output=True, text=True, check=True).stdout
            for tool, option in (("cuobjdump", "-res-usage"), ("nvdisasm", "-c"))
        )
    registers, stack = map(int, re.search(r"REG:(\d+) STACK:(\d+)", used).groups())
    counts = {
        name: len(re.findall(rf"\b{name}", machine)) for name in ("HGMMA", "HMMA", "STL", "LDL", "LDGSTS", "UTMALDG")
    }
    shared = kernel.metadata.shared
    fits = shared <= SHARED_KIB[arch] * 1024
    return {"registers": registers, "stack": stack, "shared": shared, "fits": fits} | counts


def loads() -> list[float]:
    """One number of pairs per expert for each bucket of the table."""
    bounds = {row["most_rows"] for row in table()}
    return [*sorted(float(bound) for bound in bounds if bound), 1e9]


def cases(arch: int, kind: str) -> Iterator[tuple[torch.dtype, torch.dtype, LayerTiles]]:
    """Types and tiles that the table has for an architecture and a kind of weights; e4m3 needs sm_89."""
    for weights in STORED:
        if KINDS[weights] != kind or (weights is torch.float8_e4m3fn and arch < 89):
            continue
        x = weights if weights in TYPES else torch.bfloat16
        for tiles in dict.fromkeys(tiles_for(arch, weights, rows) for rows in loads()):
            yield x, weights, tiles


def main(arch: int, kind: str) -> None:
    for name, kernel in small_kernels(arch):
        print(json.dumps({"arch": arch, "kernel": name} | described(kernel, arch)))
    for x, weights, tiles in cases(arch, kind):
        copies = (False, True) if arch >= 90 and kind != "fp32" else (False,)
        for name, tma in itertools.product(("gated", "plain"), copies):
            own = dataclasses.replace(getattr(tiles, name), tma=tma)
            kernel = grouped_kernel(arch, x, weights, tiles.m, own, name == "gated")
            head = {"arch": arch, "kernel": name, "x": TYPES[x], "weights": STORED[weights], "m": tiles.m, "tma": tma}
            head |= {"tiles": [own.n, own.k, own.group, own.warps, own.stages]}
            print(json.dumps(head | described(kernel, arch)))


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2])
