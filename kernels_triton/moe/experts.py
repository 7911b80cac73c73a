"""Weights of experts, plain or quantised, in pages of any order; the activations between the products; and checks."""

from __future__ import annotations

import enum
from collections.abc import Collection
from typing import NamedTuple, TypeAlias

import torch
from torch.nn import functional

from ..backend.operands import FLOATS
from ..backend.operators import check_tensor, requires_gradient
from ..declarations import operation, public

LEFT_OUT = -1
"""The page of an expert that is computed elsewhere: it adds nothing here."""
_LARGEST = {torch.int8: 127.0, torch.uint8: 7.0, torch.float8_e4m3fn: 448.0}


@public
class Activation(enum.StrEnum):
    """Function of the gate g and the up projection u.

    SWIGLU is g sigmoid(g) u; GEGLU is g Phi(g) u with the normal distribution's Phi; CLAMPED is GPT-OSS'
    g sigmoid(1.702 g) (u + 1) with g <= 7 and -7 <= u <= 7, whose gates and ups alternate: g0 u0 g1 u1 ...
    """

    SWIGLU = "swiglu"
    GEGLU = "geglu"
    CLAMPED = "swiglu-clamped"


@public
class Quantised(NamedTuple):
    """Weights w = value * scale with one scale per row and group of neighbours.

    values (P, R, C) int8 in [-127, 127] or float8_e4m3fn; or (P, R, C / 2) uint8, two 4-bit weights + 8 in [1, 15] per
    byte: byte i of a group of G holds weight i in its lower and weight i + G / 2 in its upper half.
    scales (P, R, C / G) fp32, fp16 or bf16.

    With this layout of 4-bit weights a step of the kernel needs two products, each with contiguous columns of the
    tokens. The layout of the CPU's experts, words of eight columns, would need eight products with every eighth column,
    which pass through registers: compiled for sm_90 by triton 3.9, the loop over steps of 64 rows, 64 tokens and 128
    columns has 20 barriers instead of 6, 72 stores to shared memory instead of 8, and 6 asynchronous copies instead of
    36.
    """

    values: torch.Tensor
    scales: torch.Tensor

    @property
    def shape(self) -> tuple[int, int, int]:
        """(P, R, C) of the weights w."""
        pages, rows, stored = self.values.shape
        return pages, rows, stored * (2 if self.values.dtype is torch.uint8 else 1)

    @property
    def group(self) -> int:
        """Neighbouring weights that share a scale."""
        return self.shape[2] // max(1, self.scales.shape[2])


Weights: TypeAlias = torch.Tensor | Quantised


def split_weights(weight: Weights) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Split weights into values and, where they are quantised, scales."""
    if isinstance(weight, Quantised):
        return weight.values, weight.scales
    return weight, None


def join_weights(values: torch.Tensor, scales: torch.Tensor | None) -> Weights:
    """Join the values and scales of `split_weights`."""
    return values if scales is None else Quantised(values, scales)


@operation
def quantise(weight: torch.Tensor, kind: torch.dtype, group: int | None = None) -> Quantised:
    """Round weights symmetrically, each group to steps of its largest magnitude.

    Parameters
    ----------
    weight : (P, R, C) fp32, fp16 or bf16
    kind : torch.int8, torch.uint8 (which holds two 4-bit weights) or torch.float8_e4m3fn
    group : int, optional
        Number of weights that share a scale, a divisor of C; by default a whole row.

    Raises
    ------
    TypeError
        If the weights have another dtype.
    ValueError
        If they have another shape or require a gradient, there is no such kind, or the group does not divide C (for 4
        bits, into halves).

    Examples
    --------
    >>> quantise(torch.tensor([[[1.0, -2.0, 4.0, 7.0]]]), torch.uint8, 4).values.tolist()
    [[[201, 246]]]
    """
    check_tensor("weight", weight)
    if requires_gradient(weight):
        raise ValueError(
            "weight must ask for no gradient, which rounding does not give: pass weight.detach(), or call under "
            "torch.no_grad()."
        )
    if weight.dtype not in FLOATS:
        raise TypeError(f"weight must be fp32, fp16 or bf16, not {weight.dtype}: convert it before the call.")
    if weight.ndim != 3 or weight.shape[2] == 0:
        raise ValueError(f"weight must be (P, R, C) with columns, not {tuple(weight.shape)}: reshape it.")
    size = group or weight.shape[2]
    if kind not in _LARGEST:
        raise ValueError(
            f"kind must be torch.int8, torch.uint8 or torch.float8_e4m3fn, not {kind}: pass torch.uint8 for 4 bits."
        )
    if weight.shape[2] % size or (kind is torch.uint8 and size % 2):
        raise ValueError(
            f"group must divide {weight.shape[2]} columns, for 4 bits into halves, not {size}: leave it out for one "
            "scale per row."
        )
    grouped = weight.float().unflatten(2, (-1, size))
    scales = grouped.abs().amax(dim=3).clamp(min=1e-12) / _LARGEST[kind]
    scaled = grouped / scales[..., None]
    if kind is torch.float8_e4m3fn:
        return Quantised(scaled.to(kind).flatten(2), scales)
    steps = scaled.round()
    if kind is torch.int8:
        return Quantised(steps.to(kind).flatten(2), scales)
    low, high = (steps + 8).to(torch.uint8).chunk(2, dim=3)
    return Quantised((low | high << 4).flatten(2), scales)


@operation
def dequantise(weight: Weights, dtype: torch.dtype) -> torch.Tensor:
    """Convert weights to a tensor (..., R, C).

    Raises
    ------
    TypeError
        If values or scales are of a type that `quantise` does not make.
    ValueError
        If the scales do not match the values.

    Examples
    --------
    >>> dequantise(quantise(torch.tensor([[[1.0, -2.0, 4.0, 7.0]]]), torch.uint8, 4), torch.float32)
    tensor([[[ 1., -2.,  4.,  7.]]])
    """
    values, scales = split_weights(weight)
    check_tensor("weight", values)
    if scales is None:
        return values.to(dtype)
    check_tensor("weight.scales", scales)
    _check_scales("weight", values, scales)
    wide = values
    if values.dtype is torch.uint8:
        halves = values.unflatten(-1, (scales.shape[-1], -1))
        wide = torch.cat((halves & 15, halves >> 4), dim=-1).to(torch.int8).flatten(-2) - 8
    exact = torch.promote_types(dtype, torch.float32)
    scaled: torch.Tensor = wide.to(exact).unflatten(-1, (scales.shape[-1], -1)) * scales[..., None].to(exact)
    return scaled.flatten(-2).to(dtype)


def matrix_on(weight: Weights, page: int, dtype: torch.dtype) -> torch.Tensor:
    """Return the matrix (R, C) of one page."""
    if not isinstance(weight, Quantised):
        return weight[page].to(dtype)
    return dequantise(Quantised(weight.values[page], weight.scales[page]), dtype)


def activate(both: torch.Tensor, activation: Activation) -> torch.Tensor:
    """Apply the activation to gates and ups, (T, 2 F) -> (T, F), in the type of `both`."""
    if activation is Activation.CLAMPED:
        wide = both.float()  # in a 16-bit type each of the five operations would round
        gate = wide[..., ::2].clamp(max=7.0)
        up = wide[..., 1::2].clamp(-7.0, 7.0)
        return (gate * torch.sigmoid(1.702 * gate) * (up + 1)).to(both.dtype)
    gate, up = both.chunk(2, dim=-1)
    activated = functional.silu(gate) if activation is Activation.SWIGLU else functional.gelu(gate)
    return activated.mul_(up)


def check_weights(name: str, weight: Weights, x: torch.Tensor, rows: str, columns: int) -> None:
    """Raise unless `weight` can be multiplied with rows of `columns` numbers like those of x.

    Raises
    ------
    TypeError
        If dtypes disagree.
    ValueError
        If shapes, groups, memory layout or devices disagree.
    """
    values, scales = split_weights(weight)
    check_tensor(name if scales is None else f"{name}.values", values)
    if scales is not None:
        check_tensor(f"{name}.scales", scales)
        _check_scales(name, values, scales)
    if values.ndim != 3 or 0 in values.shape or weight.shape[2] != columns:
        raise ValueError(
            f"{name} must have shape (P, {rows}, {columns}), the columns of its input, not {tuple(values.shape)} "
            f"{values.dtype}: pass one page per expert."
        )
    if scales is None and values.dtype is not x.dtype:
        raise TypeError(f"{name} must be {x.dtype} as its input, not {values.dtype}: convert it, or pass Quantised.")
    for field, tensor in (("", values), (".scales", scales)):
        if tensor is None:
            continue
        if tensor.stride(2) != 1 and tensor.shape[2] > 1:
            raise ValueError(f"{name}{field} must have contiguous columns: call .contiguous() first.")
        if tensor.device != x.device:
            raise ValueError(f"{name}{field} must be on {x.device} as its input, not on {tensor.device}: move it.")
    if isinstance(weight, Quantised):
        group = weight.group
        if group != columns and group % 32:
            raise ValueError(
                f"{name}.scales must be of groups of a multiple of 32 or {columns} columns, not of {group}: "
                "make them with quantise."
            )


def _check_scales(name: str, values: torch.Tensor, scales: torch.Tensor) -> None:
    """Raise unless values (.., R, C), or (.., R, C / 2) of 4 bits, match scales (.., R, C / G)."""
    if values.dtype not in _LARGEST or scales.dtype not in FLOATS:
        raise TypeError(
            f"{name} must hold int8, uint8 or float8_e4m3fn and scales in fp32, fp16 or bf16, not "
            f"{values.dtype} and {scales.dtype}: make it with quantise."
        )
    alike = values.ndim == scales.ndim >= 2 and values.shape[:-1] == scales.shape[:-1]
    if not alike or not 1 <= scales.shape[-1] <= values.shape[-1] or values.shape[-1] % scales.shape[-1]:
        raise ValueError(
            f"{name}.scales must be one per row and group of the values, {tuple(values.shape)}, not "
            f"{tuple(scales.shape)}: make them with quantise."
        )


def check_pages(pages: torch.Tensor | None, held: int, x: torch.Tensor) -> int:
    """Check the page table and return the number of experts: one per entry, or one per page held without a table.

    Raises
    ------
    ValueError
        If the table is not a vector of whole numbers on the device of x.
    """
    if pages is None:
        return held
    check_tensor("pages", pages)
    if pages.ndim != 1 or pages.dtype not in (torch.int32, torch.int64) or not pages.is_contiguous():
        raise ValueError(
            f"pages must be (E,) int32 or int64, contiguous, not {tuple(pages.shape)} {pages.dtype}: pass one per "
            "expert, or a copy."
        )
    if pages.device != x.device:
        raise ValueError(f"pages must be on {x.device} as its input, not on {pages.device}: move it.")
    return len(pages)


def check_routing(ids: torch.Tensor, weights: torch.Tensor | None, x: torch.Tensor) -> None:
    """Raise unless `ids` and `weights` have k entries per row of x.

    Raises
    ------
    TypeError
        If ids are no whole numbers or weights are not fp32.
    ValueError
        If shapes, memory layout or devices disagree.
    """
    check_tensor("ids", ids)
    if weights is not None:
        check_tensor("weights", weights)
    if ids.dtype not in (torch.int32, torch.int64):
        raise TypeError(f"ids must be int32 or int64, not {ids.dtype}: convert them before the call.")
    if weights is not None and weights.dtype is not torch.float32:
        raise TypeError(f"weights must be fp32, not {weights.dtype}: convert them before the call.")
    if ids.ndim != 2 or ids.shape[0] != x.shape[0] or ids.shape[1] == 0:
        raise ValueError(
            f"ids must be ({x.shape[0]}, k), one row per row of x, not {tuple(ids.shape)}: pass one batch."
        )
    if weights is not None and weights.shape != ids.shape:
        raise ValueError(f"weights must be {tuple(ids.shape)} as ids, not {tuple(weights.shape)}: pass one batch.")
    for name, tensor in (("ids", ids), ("weights", weights)):
        if tensor is not None and (tensor.device != x.device or not tensor.is_contiguous()):
            raise ValueError(f"{name} must be contiguous and on {x.device} as x: call .contiguous() or move it.")


def check_chosen(chosen: Collection[int], pages: torch.Tensor | None, held: int) -> None:
    """Raise if a chosen expert does not exist, or is not on a page and not left out.

    Raises
    ------
    ValueError
        If so, naming the first such expert.
    """
    experts = held if pages is None else len(pages)
    for expert in chosen:
        if not 0 <= expert < experts:
            raise ValueError(f"ids must be experts in [0, {experts}), not {expert}: correct the routing.")
        if pages is not None and not LEFT_OUT <= pages[expert] < held:
            raise ValueError(
                f"pages[{expert}] must be one of the {held} pages held, or {LEFT_OUT}, not {pages[expert]}, since a "
                f"token chose expert {expert}: fetch it first."
            )
