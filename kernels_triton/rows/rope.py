"""Rotary position embeddings of queries or keys, optionally after a norm per head, in one pass over memory."""

from __future__ import annotations

import torch

from ..backend.backend import Backend, choose_backend, enter_mode
from ..backend.operands import FLOATS, INDEX, check_operand, check_range
from ..backend.operators import check_tensor, operator
from ..declarations import operation, reference_of, work_of
from .rows import check_vector

_TILE = 4096  # numbers per program


@operation
def rope(
    x: torch.Tensor,
    positions: torch.Tensor,
    table: torch.Tensor,
    *,
    interleaved: bool = False,
    weight: torch.Tensor | None = None,
    eps: float = 1e-6,
    backend: str | None = None,
) -> torch.Tensor:
    """Rotate pairs of every head's first R dims by an angle that grows with the token's position.

        (a, b) -> (a cos - b sin, b cos + a sin),  a = y[i], b = y[i + R / 2]

    y is x, or x normalised per head to unit mean square and scaled by `weight` (Qwen3's qk-norm). The other D - R dims
    are not rotated. Computed in fp32 and rounded once.

    Parameters
    ----------
    x : (T, H, D) fp32, fp16 or bf16
        Rows and heads may be strided, as in a slice of a fused qkv.
    positions : (T,) int32 or int64
        Below P; on a GPU they are not checked.
    table : (P, R) fp32, contiguous
        From `rope_table`, R <= D.
    interleaved : bool
        True if pairs are neighbours, y[2 i] and y[2 i + 1] (GPT-J, DeepSeek).
    weight : (D,) of x's type, optional
    eps : float
        Epsilon of the norm.
    backend : "triton", "triton-interpret" or "torch", optional
        By default Triton for GPU tensors, torch for others and where an operand requires a gradient.

    Returns
    -------
    (T, H, D) of x's type, contiguous
        Relative Frobenius error against float64 with the same table: 4e-3 in bf16, 5e-4 in fp16, 1e-6 in fp32.

    Raises
    ------
    TypeError
        If an operand has another dtype.
    ValueError
        If shapes, memory layout or devices disagree, or (on the CPU) a position is out of range.

    Examples
    --------
    >>> table = torch.tensor([[1.0, 0.0], [0.0, 1.0]])  # no turn, a quarter turn
    >>> rope(torch.tensor([[[3.0, 4.0, 5.0]]]), torch.tensor([1]), table)
    tensor([[[-4.,  3.,  5.]]])
    """
    _check(x, positions, table, weight)
    chosen = choose_backend(backend, x, table, weight)
    out: torch.Tensor = _rope(x, positions, table, bool(interleaved), weight, float(eps), str(chosen))
    return out


def _compute(
    x: torch.Tensor,
    positions: torch.Tensor,
    table: torch.Tensor,
    interleaved: bool,
    weight: torch.Tensor | None,
    eps: float,
    backend: str,
) -> torch.Tensor:
    if x.device.type == "cpu":
        check_range("positions", positions, len(table), "make a longer table")
    if backend == Backend.TORCH:
        return _rotated(x.float(), positions, table, interleaved, weight, eps).to(x.dtype).contiguous()
    enter_mode(Backend(backend))
    from .jit_rope import rope as kernel

    tokens, heads, dim = x.shape
    rotated = table.shape[1]
    out = x.new_empty(x.shape)
    pair = _power_of_two(rotated // 2)
    rest = _power_of_two(dim - rotated)
    block = 1 << max(1, _TILE // (2 * pair + rest)).bit_length() - 1
    if out.numel():
        kernel[(-(-tokens * heads // block),)](
            x,
            positions,
            table,
            weight,
            out,
            tokens * heads,
            *x.stride()[:2],
            H=heads,
            D=dim,
            R=rotated,
            EPS=eps,
            INTERLEAVED=interleaved,
            NORMED=weight is not None,
            BLOCK=block,
            BLOCK_PAIR=pair,
            BLOCK_REST=rest,
        )
    return out


def _power_of_two(size: int) -> int:
    """The next power of two, at least 1."""
    return 1 << max(0, size - 1).bit_length()


_rope = operator("rope", _compute, lambda x, *_rest: x.new_empty(x.shape))


def _check(x: torch.Tensor, positions: torch.Tensor, table: torch.Tensor, weight: torch.Tensor | None) -> None:
    check_tensor("x", x)
    check_tensor("table", table)
    if x.dtype not in FLOATS:
        raise TypeError(f"x must be fp32, fp16 or bf16, not {x.dtype}: convert it before the call.")
    if x.ndim != 3 or 0 in x.shape[1:] or (x.stride(2) != 1 and x.shape[2] > 1):
        raise ValueError(f"x must be (T, H, D) with the numbers of a head together, not {tuple(x.shape)}: reshape it.")
    if table.ndim != 2 or table.shape[1] % 2 or not 2 <= table.shape[1] <= x.shape[2]:
        raise ValueError(
            f"table must be (P, R) with an even R <= {x.shape[2]}, not {tuple(table.shape)}: make it with rope_table."
        )
    check_operand("table", table, tuple(table.shape), (torch.float32,), x)
    check_operand("positions", positions, (x.shape[0],), INDEX, x)
    if weight is not None:
        check_vector("weight", weight, x)


def _rotated(
    wide: torch.Tensor,
    positions: torch.Tensor,
    table: torch.Tensor,
    interleaved: bool,
    weight: torch.Tensor | None,
    eps: float,
) -> torch.Tensor:
    if weight is not None:
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps) * weight.to(wide.dtype)
    rotated = table.shape[1]
    cos, sin = table[positions.long()][:, None].to(wide.dtype).chunk(2, dim=2)
    pairs = wide[..., :rotated].unflatten(2, (-1, 2) if interleaved else (2, -1))
    axis = 3 if interleaved else 2
    a, b = pairs.unbind(axis)
    both = torch.stack((a * cos - b * sin, b * cos + a * sin), dim=axis).flatten(2)
    return torch.cat((both, wide[..., rotated:]), dim=2)


@work_of(rope)
def rope_work(tokens: int, heads: int, head_dim: int, turned: int, itemsize: int) -> tuple[int, int]:
    """Work that one call without a norm declares: (flops [flop], bytes [byte]).

        flops = 3 T H R,  bytes = 2 itemsize T H D + 4 T R

    Examples
    --------
    >>> rope_work(tokens=2, heads=4, head_dim=8, turned=8, itemsize=2)
    (192, 320)
    """
    return 3 * tokens * heads * turned, 2 * itemsize * tokens * heads * head_dim + 4 * tokens * turned


@reference_of(rope)
def rope_reference(
    x: torch.Tensor,
    positions: torch.Tensor,
    table: torch.Tensor,
    *,
    interleaved: bool = False,
    weight: torch.Tensor | None = None,
    eps: float = 1e-6,
) -> torch.Tensor:
    """Compute `rope` in float64 by products of complex numbers, the oracle of its tests: -> (T, H, D) float64.

    Examples
    --------
    >>> rope_reference(torch.ones(1, 1, 2), torch.tensor([0]), torch.tensor([[0.0, 1.0]])).tolist()
    [[[-1.0, 1.0]]]
    """
    wide = x.double()
    if weight is not None:
        wide = weight.double() * wide / (wide.square().mean(-1, keepdim=True) + eps).sqrt()
    half = table.shape[1] // 2
    dims = torch.arange(2 * half)
    pairs = dims.view(half, 2) if interleaved else dims.view(2, half).T
    first, second = pairs.unbind(1)
    rotation = torch.complex(*table[positions.long()].double().chunk(2, dim=1))[:, None]
    rotated = torch.complex(wide[..., first], wide[..., second]) * rotation
    out = wide.clone()
    out[..., first] = rotated.real
    out[..., second] = rotated.imag
    return out
