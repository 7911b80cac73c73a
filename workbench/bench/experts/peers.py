"""Experts by torch's own kernels: in its plain type, with INT8 weights, with INT8 activations too, and in INT4."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import torch
from torch.nn import functional

from workbench.bench.cpu.work import PLAIN

Linear = Callable[[torch.Tensor], torch.Tensor]
"""A product (tokens, inputs) -> (tokens, outputs)."""


TORCH = "torch, BF16" if PLAIN is torch.bfloat16 else "torch, FP32"
"""What one would write without these kernels."""
TORCH_INT8 = "torch, INT8"
"""Weights and activations in INT8: torch's dynamic quantisation."""
TORCH_INT8_WEIGHTS = "torch, INT8 weights"
"""Activations in BF16."""
TORCH_INT4 = "torch, INT4"
"""Weights in groups with a scale and a zero point, activations in BF16."""
_GROUP = 32
_TINY = 1e-30
"""Least range of a group, so that one of equal numbers has a scale too."""


class Peer(NamedTuple):
    """Experts in one of torch's formats.

    Attributes
    ----------
    products : sequence of (Linear, Linear)
        Of gate and up together, and of down, for each expert.
    dtype : torch.dtype
        Type of activations.
    nbytes : int
        Size of one expert's weights.
    """

    products: Sequence[tuple[Linear, Linear]]
    dtype: torch.dtype
    nbytes: int

    def compute(self, expert: int, h: torch.Tensor) -> torch.Tensor:
        """One expert (tokens, M) of hidden states (tokens, M) fp32."""
        gate_up, down = self.products[expert]
        gate, up = gate_up(h.to(self.dtype)).chunk(2, dim=-1)
        return down(functional.silu(gate) * up)


def torch_peers(gate_up: torch.Tensor, down: torch.Tensor) -> Mapping[str, Peer]:
    """Experts of weights (E, 2 F, M) and (E, M, F) in bf16, in each of torch's formats that takes such sizes."""
    makers = {
        TORCH: (PLAIN, _plain),
        TORCH_INT8: (torch.float32, _int8),
        TORCH_INT8_WEIGHTS: (torch.bfloat16, _int8_weights),
        TORCH_INT4: (torch.bfloat16, _int4),
    }
    if any(size % _GROUP for size in down.shape[1:]):
        del makers[TORCH_INT4]
    found = dict[str, Peer]()
    for name, (dtype, make) in makers.items():
        made = [(make(first), make(second)) for first, second in zip(gate_up, down, strict=True)]
        products = [(first, second) for (first, _), (second, _) in made]
        found[name] = Peer(products, dtype, sum(size for _, size in made[0]))
    return found


def _plain(matrix: torch.Tensor) -> tuple[Linear, int]:
    own = matrix.to(PLAIN)
    return lambda x: functional.linear(x, own), own.nbytes


def _int8(matrix: torch.Tensor) -> tuple[Linear, int]:
    scales, codes = _rows_in_int8(matrix)
    zeros = torch.zeros(len(codes), dtype=torch.int64)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # such tensors are to be removed from torch
        quantised = torch._make_per_channel_quantized_tensor(codes, scales.double(), zeros, 0)
    packed = torch.ops.quantized.linear_prepack(quantised, None)
    # As torch's own modules do: activations of 7 bits, so that sums of two products fit 16 bits.
    return lambda x: torch.ops.quantized.linear_dynamic(x, packed, True), codes.nbytes + scales.nbytes


def _int8_weights(matrix: torch.Tensor) -> tuple[Linear, int]:
    scales, codes = _rows_in_int8(matrix)
    narrow = scales.bfloat16()
    return lambda x: torch._weight_int8pack_mm(x, codes, narrow), codes.nbytes + narrow.nbytes


def _rows_in_int8(matrix: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Scales (rows) fp32 and codes (rows, columns) int8."""
    scales = matrix.float().abs().amax(dim=1).clamp_min(_TINY) / 127
    return scales, torch.round(matrix.float() / scales[:, None]).to(torch.int8)


def _int4(matrix: torch.Tensor) -> tuple[Linear, int]:
    """Codes 0 to 15 of groups, whose number is (code - 8) scale + middle."""
    grouped = matrix.float().unflatten(1, (-1, _GROUP))
    low = grouped.amin(dim=-1)
    scales = (grouped.amax(dim=-1) - low).clamp_min(_TINY) / 15
    codes = torch.round((grouped - low[..., None]) / scales[..., None]).int().flatten(1)
    packed = torch.ops.aten._convert_weight_to_int4pack_for_cpu(codes, 1)
    both = torch.stack((scales.T, (low + 8 * scales).T), dim=-1).bfloat16().contiguous()
    multiply = torch.ops.aten._weight_int4pack_mm_for_cpu
    return lambda x: multiply(x, packed, _GROUP, both), codes.numel() // 2 + both.nbytes
