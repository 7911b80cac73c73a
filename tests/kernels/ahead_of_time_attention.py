"""Compiles attention and the kernels around it for GPUs that are not here; run by itself, without the interpreter.

python tests/kernels/ahead_of_time_attention.py 90    one JSON object per kernel
"""

import json
import sys
from collections.abc import Iterator
from typing import Any

import torch
from ahead_of_time import TYPES, built, described

from kernels_triton.attention.decode import is_shared
from kernels_triton.attention.jit_attention import decode, merge, prefill
from kernels_triton.attention.jit_kv_layout import move_kv
from kernels_triton.attention.options import attention_tiles, head_blocks, power
from kernels_triton.moe.jit_grouped import gated
from kernels_triton.moe.tiles import tiles_for
from kernels_triton.rows.jit_norms import layer_norm, rms_norm
from kernels_triton.rows.jit_rope import rope
from kernels_triton.rows.rows import launch_shape
from kernels_triton.vocabulary.jit_sampling import sample
from kernels_triton.vocabulary.jit_vocabulary import embed, logits

PAGE, GROUP = 16, 8
STRIDES = ("q_row", "q_head", "k_row", "k_head", "v_row", "v_head", "page_stride", "table_row")
PLAIN, FULL = {"WINDOW": 0, "CAPPED": False}, {"WINDOW": 4096, "CAPPED": True}
PREFILLS = [  # head dim, value dim, behind a prefix, with window, soft-cap and sinks
    (torch.bfloat16, 64, 64, True, False),
    (torch.bfloat16, 128, 128, True, False),
    (torch.bfloat16, 128, 128, True, True),
    (torch.bfloat16, 192, 128, False, False),
    (torch.bfloat16, 256, 256, True, False),
    (torch.float16, 80, 80, True, False),
    (torch.float32, 128, 128, True, False),
]
DECODES = [(torch.bfloat16, 64, False), (torch.bfloat16, 128, True), (torch.bfloat16, 256, False)]
DECODES += [(torch.float16, 80, False), (torch.float32, 128, False)]


def compiled_prefill(arch: int, dtype: torch.dtype, dim: int, value_dim: int, behind: bool, full: bool) -> Any:
    tiles, kind = attention_tiles("prefill", arch, dtype, max(dim, value_dim)), TYPES[dtype]
    pointers = dict.fromkeys(("q", "k", "v", "out"), kind) | {"starts": "i64", "key_starts": "i64"}
    cached = {"kv": kind, "table": "i32", "prefixes": "i64"}
    pointers |= (cached if behind else {}) | ({"sinks": "fp32"} if full else {})
    constants = dict.fromkeys({*cached, "sinks"} - set(pointers)) | head_blocks(dim, value_dim)
    constants |= {"GROUP": GROUP, "PAGE": PAGE if behind else 0, "SINKS": full} | (FULL if full else PLAIN)
    constants |= {"BLOCK_M": tiles.m, "BLOCK_N": tiles.n, "BLOCK_B": 64}
    types = {name: f"*{one}" for name, one in pointers.items()} | dict.fromkeys(("B", *STRIDES), "i32")
    return built(prefill, arch, types | SCALES, constants, tiles.warps, tiles.stages, STRIDES)


SCALES = {"scale": "fp32", "cap": "fp32"}


LATENTS = [(torch.bfloat16, 576, 512), (torch.float16, 288, 256), (torch.float32, 576, 512), (torch.bfloat16, 448, 384)]
LATENT_HEADS = 128


def compiled_decode(
    arch: int, dtype: torch.dtype, dim: int, full: bool, value_dim: int | None = None, heads: int = GROUP
) -> Any:
    """Of `heads` query heads per KV head; with a value dim, of latents."""
    tiles, kind = attention_tiles("decode", arch, dtype, dim), TYPES[dtype]
    pointers = {"q": kind, "kv": kind, "sums": "fp32", "denominators": "fp32", "maxima": "fp32", "table": "i32"}
    strides = ("q_row", "q_head", "page_stride", "head_stride", "value_offset", "table_row")
    types = {name: f"*{one}" for name, one in (pointers | {"lengths": "i64"}).items()} | dict.fromkeys(strides, "i32")
    constants = head_blocks(dim, value_dim or dim) | {"GROUP": heads, "PAGE": PAGE} | (FULL if full else PLAIN)
    constants |= {"KV_HEADS": 1 if value_dim else 8, "SHARED": is_shared(constants, 0 if value_dim else 1)}
    constants |= {"CHUNK": tiles.chunk, "BLOCK_G": min(tiles.m, power(heads)), "BLOCK_N": tiles.n}
    return built(decode, arch, types | SCALES, constants, tiles.warps, tiles.stages, strides)


def compiled_merge(arch: int, dim: int) -> Any:
    types = dict.fromkeys(("sums", "denominators", "maxima", "sinks"), "*fp32")
    types |= {"lengths": "*i64", "out": "*bf16", "chunks": "i32"}
    constants = {"DV": dim, "BLOCK_DV": dim, "WINDOW": 4096, "SINKS": True, "CHUNK": 512, "BLOCK": 16}
    return built(merge, arch, types, constants, 4, 3)


def around(arch: int) -> Iterator[tuple[str, Any]]:
    """Norms, rotations, activations, moves and the vocabulary's ends."""
    wide = launch_shape(4096)
    warps, block = wide["num_warps"], {"BLOCK": wide["BLOCK"]}
    types = dict.fromkeys(("x", "residual", "weight", "out", "total"), "*bf16")
    types |= {"stride": "i32", "residual_stride": "i32"}
    row = {"M": 4096, "EPS": 1e-5} | block
    yield "add_rms_norm", built(rms_norm, arch, types, row | {"ADDED": True}, warps, 3, ("residual_stride",))
    alone = {name: kind for name, kind in types.items() if name not in ("residual", "total")}
    yield "rms_norm", built(rms_norm, arch, alone, row | {"ADDED": False, "residual": None, "total": None}, warps, 3)
    types = dict.fromkeys(("x", "weight", "bias", "out"), "*bf16") | {"stride": "i32"}
    yield "layer_norm", built(layer_norm, arch, types, row | {"BIASED": True}, warps, 3)
    types = dict.fromkeys(("x", "weight", "out"), "*bf16") | {"positions": "*i64", "table": "*fp32", "n": "i32"}
    types |= {"x_row": "i32", "x_head": "i32"}
    constants = {"H": 8, "EPS": 1e-6, "NORMED": True}
    for dim, turned, interleaved, heads in ((128, 128, False, 32), (128, 64, True, 16)):
        cut = {"D": dim, "R": turned, "INTERLEAVED": interleaved, "BLOCK": heads}
        cut |= {"BLOCK_PAIR": turned // 2, "BLOCK_REST": max(1, dim - turned)}
        yield "rope", built(rope, arch, types, constants | cut, 4, 3, ("x_row", "x_head"))
    types = {"x": "*bf16", "out": "*bf16", "stride": "i32", "F": "i32"}
    for activation in (1, 2):
        yield "gated", built(gated, arch, types, {"ACTIVATION": activation, "BLOCK": 1024}, 4, 3, ("F",))
    types = dict.fromkeys(("kv", "k", "v"), "*bf16") | {"slots": "*i64"}
    types |= dict.fromkeys(("page_stride", "k_row", "v_row"), "i32")
    for out in (False, True):
        constants = {"HEADS": 8, "SIZE": PAGE, "DIM": 128, "OUT": out, "BLOCK": 1024}
        yield "move_kv", built(move_kv, arch, types, constants, 4, 3, ("page_stride", "k_row", "v_row"))
    types = {"ids": "*i64", "table": "*bf16", "out": "*bf16", "stride": "i32", "M": "i32"}
    yield "embed", built(embed, arch, types, {"BLOCK": 1024}, 4, 3, ("M",))
    types = dict.fromkeys(("temperatures", "top_ps", "min_ps"), "*fp64") | {"logits": "*fp32"}
    types |= dict.fromkeys(("top_ks", "seeds", "positions", "out"), "*i64") | {"stride": "i32", "V": "i32"}
    yield "sample", built(sample, arch, types, {"DRAWN": True, "BLOCK": 4096}, 8, 3)
    draws = ("temperatures", "top_ks", "top_ps", "min_ps", "seeds", "positions")
    greedy = {name: kind for name, kind in types.items() if name not in draws}
    yield "sample", built(sample, arch, greedy, dict.fromkeys(draws) | {"DRAWN": False, "BLOCK": 4096}, 8, 3)


def compiled_logits(arch: int, rows: int) -> Any:
    tiles = tiles_for(arch, torch.bfloat16, rows)
    types = {"x": "*bf16", "rows": "*i64", "head": "*bf16", "out": "*fp32"}
    types |= dict.fromkeys(("R", "N", "K", "x_stride", "weight_row"), "i32")
    own = tiles.plain
    constants = {"EVEN_K": True, "BLOCK_M": tiles.m, "BLOCK_N": own.n, "BLOCK_K": own.k}
    return built(logits, arch, types, constants, own.warps, own.stages)


def main(arch: int) -> None:
    def tell(name: str, kernel: Any, **more: object) -> None:
        print(json.dumps({"arch": arch, "kernel": name} | more | described(kernel, arch)), flush=True)

    for case in PREFILLS:
        tell("prefill", compiled_prefill(arch, *case), x=TYPES[case[0]], case=str(case))
    for own in DECODES:
        tell("decode", compiled_decode(arch, *own), x=TYPES[own[0]], case=str(own))
    for dtype, dim, value_dim in LATENTS:
        kernel = compiled_decode(arch, dtype, dim, False, value_dim, LATENT_HEADS)
        tell("decode", kernel, x=TYPES[dtype], case=f"latents of {dim}")
    for rows in (1, 1000):
        tell("logits", compiled_logits(arch, rows), x="bf16", case=rows)
    for dim in (128, 512):
        tell("merge", compiled_merge(arch, dim), case=dim)
    for name, kernel in around(arch):
        tell(name, kernel)


if __name__ == "__main__":
    main(int(sys.argv[1]))
