"""The routed experts of one layer: gate and up, activation, down, and the weighted sum over a token's experts."""

from __future__ import annotations

import torch

from ..backend.backend import Backend, choose_backend, enter_mode
from ..backend.operators import check_tensor, operator
from ..declarations import operation, reference_of, work_of
from . import torch_path
from .experts import Activation, Weights, check_pages, check_routing, check_weights, join_weights, split_weights
from .grouped_gemm import check_bias, check_input, grouped_gemm_reference, launch
from .pairs import sort_pairs
from .tiles import LayerTiles, arch_of, tiles_for

_COLUMNS = 1024  # columns per program of `combine`
_KNOWN = frozenset(Activation)


@operation
def fused_moe(
    x: torch.Tensor,
    gate_up: Weights,
    down: Weights,
    ids: torch.Tensor,
    weights: torch.Tensor,
    *,
    activation: str = "swiglu",
    gate_up_bias: torch.Tensor | None = None,
    down_bias: torch.Tensor | None = None,
    pages: torch.Tensor | None = None,
    backend: str | None = None,
) -> torch.Tensor:
    """Compute the routed experts of one layer.

        out[t] = sum over j of weights[t, j] * (down[p] a(gate_up[p] x[t] + gate_up_bias[p]) + down_bias[p])
        p = pages[ids[t, j]]

    On a GPU three kernels follow the sort: gate and up projections with the activation, down projections with the
    weights, and the sum over j in the given order. In torch the experts are computed one after the other and summed in
    their order. Both are deterministic. torch.compile and fake tensors see `torch.ops.moe_workbench.fused_moe`.

    Parameters
    ----------
    x : (T, M) fp32, fp16 or bf16, contiguous columns
        Normed hidden states.
    gate_up : (P, 2 F, M) of x's type, or Quantised
        Per page an expert's gates and then its ups, which alternate where the activation is "swiglu-clamped".
    down : (P, M, F) of x's type, or Quantised
    ids : (T, k) int32 or int64, contiguous
        Experts of each token. On a GPU they are not checked: one that is out of range, or whose page is, makes its
        token's row NaN and no other.
    weights : (T, k) fp32, contiguous
        Weights of these experts, from `route`, or from `with_shared` with experts that every token has.
    activation : "swiglu", "geglu" or "swiglu-clamped"
        Function of gate and up projection: see `Activation`.
    gate_up_bias, down_bias : (P, 2 F) and (P, M) of x's type, optional
    pages : (E,) int32 or int64, optional
        Page of each expert in weights and biases, by default page e for expert e; -1 for an expert that is computed
        elsewhere and adds nothing. Pages of experts that no token chose are never read: their transfer may still be
        under way.
    backend : "triton", "triton-interpret" or "torch", optional
        By default Triton for GPU tensors, torch for others and where an operand requires a gradient.

    Returns
    -------
    (T, M) of x's type
        Relative Frobenius error against float64: 8e-3 in bf16, 1e-3 in fp16, 1e-5 in fp32.

    Raises
    ------
    TypeError
        If dtypes disagree.
    ValueError
        If shapes, memory layout or devices disagree, an id or its page is out of range (torch), or the backend cannot
        compute here.

    Examples
    --------
    >>> x, gate_up, down = torch.full((1, 1), 2.0), torch.ones(1, 2, 1), torch.ones(1, 1, 1)
    >>> fused_moe(x, gate_up, down, torch.zeros(1, 1).long(), torch.ones(1, 1))
    tensor([[3.5232]])
    """
    if activation not in _KNOWN:
        known = ", ".join(map(repr, map(str, Activation)))
        raise ValueError(f"activation must be {known}, not {activation!r}: leave it out for 'swiglu'.")
    check_moe(x, gate_up, down, ids, weights, gate_up_bias, down_bias, pages)
    operands = (x, *split_weights(gate_up), *split_weights(down), ids, weights, gate_up_bias, down_bias, pages)
    out: torch.Tensor = _fused(*operands, str(activation), str(choose_backend(backend, *operands)))
    return out


def check_moe(
    x: torch.Tensor,
    gate_up: Weights,
    down: Weights,
    ids: torch.Tensor,
    weights: torch.Tensor,
    gate_up_bias: torch.Tensor | None,
    down_bias: torch.Tensor | None,
    pages: torch.Tensor | None,
) -> None:
    """Raise unless the operands of `fused_moe` match.

    Raises
    ------
    TypeError
        If dtypes disagree.
    ValueError
        If shapes, memory layout or devices disagree.
    """
    check_tensor("x", x)
    if x.ndim != 2:
        raise ValueError(f"x must have shape (T, M), not {tuple(x.shape)}: reshape it before the call.")
    check_input("x", x, 0)
    check_routing(ids, weights, x)
    check_weights("gate_up", gate_up, x, "2 F", x.shape[1])
    held, rows, _ = gate_up.shape
    if rows % 2:
        raise ValueError(f"gate_up must have an even number of rows, gates and ups, not {rows}: pass both.")
    check_weights("down", down, x, "M", rows // 2)
    if (down.shape[0], down.shape[1]) != (held, x.shape[1]):
        raise ValueError(
            f"down must be ({held}, {x.shape[1]}, {rows // 2}), which gate_up and x ask for, not "
            f"{tuple(down.shape)}: pass (P, M, F) of the same layer."
        )
    check_bias("gate_up_bias", gate_up_bias, gate_up, x)
    check_bias("down_bias", down_bias, down, x)
    check_pages(pages, held, x)


def _compute(
    x: torch.Tensor,
    gate_up: torch.Tensor,
    gate_up_scales: torch.Tensor | None,
    down: torch.Tensor,
    down_scales: torch.Tensor | None,
    ids: torch.Tensor,
    weights: torch.Tensor,
    gate_up_bias: torch.Tensor | None,
    down_bias: torch.Tensor | None,
    pages: torch.Tensor | None,
    activation: str,
    backend: str,
) -> torch.Tensor:
    first = join_weights(gate_up, gate_up_scales)
    second = join_weights(down, down_scales)
    function = Activation(activation)
    biases = (gate_up_bias, down_bias)
    if backend == Backend.TORCH:
        return torch_path.experts_of(x, first, second, ids, weights, function, biases, pages)
    experts = len(gate_up) if pages is None else len(pages)
    sizes = (x.shape[1], first.shape[1] // 2)
    tiles = tiles_for(arch_of(x.device), gate_up.dtype, ids.numel() / experts, sizes)
    return with_triton(x, first, second, ids, weights, function, biases, pages, experts, Backend(backend), tiles)


_fused = operator("fused_moe", _compute, lambda x, *_rest: x.new_empty(x.shape))


def with_triton(
    x: torch.Tensor,
    gate_up: Weights,
    down: Weights,
    ids: torch.Tensor,
    weights: torch.Tensor,
    activation: Activation,
    biases: tuple[torch.Tensor | None, torch.Tensor | None],
    pages: torch.Tensor | None,
    experts: int,
    backend: Backend,
    tiles: LayerTiles,
) -> torch.Tensor:
    """Compute `fused_moe` by the Triton kernels with given tiles, which a tuner varies."""
    enter_mode(backend)
    blocks = sort_pairs(ids, experts, tiles.m, backend=backend)
    inner = launch(x, gate_up, biases[0], ids, None, pages, activation, blocks, tiles.m, tiles.gated)
    inner = inner.view(*ids.shape, inner.shape[1])
    rows = launch(inner, down, biases[1], ids, weights, pages, None, blocks, tiles.m, tiles.plain)
    return rows if ids.shape[1] == 1 else _combined(rows, ids.shape[1])


def _combined(rows: torch.Tensor, chosen: int) -> torch.Tensor:
    """Sum the k rows of each token, (T k, M) -> (T, M)."""
    from .jit_grouped import combine

    out = rows.new_empty(rows.shape[0] // chosen, rows.shape[1])
    if out.numel():
        grid = (out.shape[0], -(-out.shape[1] // _COLUMNS))
        combine[grid](rows, out, out.shape[1], K=chosen, BLOCK=_COLUMNS)
    return out


@work_of(fused_moe)
def fused_moe_work(
    model_dim: int, expert_dim: int, tokens: int, chosen: int, touched: int, weight_bytes: float, itemsize: int
) -> tuple[int, int]:
    """Work that one call declares: (flops [flop], bytes [byte]).

        flops = 6 M F T k,  bytes = 3 M F weight_bytes E_touched + 2 itemsize M T

    Parameters
    ----------
    model_dim, expert_dim : int
        M and F.
    tokens, chosen, touched : int
        T, k, and the number of different experts that were chosen.
    weight_bytes : float
        Size of one weight with its share of a scale: 0.625 for 4 bits in groups of 32 with fp32 scales [byte].
    itemsize : int
        Size of a number of x [byte].

    Examples
    --------
    >>> fused_moe_work(model_dim=4096, expert_dim=14336, tokens=1, chosen=2, touched=2, weight_bytes=2, itemsize=2)
    (704643072, 704659456)
    """
    moved = 3 * model_dim * expert_dim * weight_bytes * touched + 2 * itemsize * model_dim * tokens
    return 6 * model_dim * expert_dim * tokens * chosen, round(moved)


@reference_of(fused_moe)
def fused_moe_reference(
    x: torch.Tensor,
    gate_up: Weights,
    down: Weights,
    ids: torch.Tensor,
    weights: torch.Tensor,
    *,
    activation: str = "swiglu",
    gate_up_bias: torch.Tensor | None = None,
    down_bias: torch.Tensor | None = None,
    pages: torch.Tensor | None = None,
) -> torch.Tensor:
    """Compute `fused_moe` in float64, pair by pair, the oracle of its tests: -> (T, M) float64.

    Examples
    --------
    >>> x, gate_up, down = torch.full((1, 1), 2.0), torch.ones(1, 2, 1), torch.ones(1, 1, 1)
    >>> round(fused_moe_reference(x, gate_up, down, torch.zeros(1, 1).long(), torch.ones(1, 1)).item(), 4)
    3.5232
    """
    both = grouped_gemm_reference(x, gate_up, ids, bias=gate_up_bias, pages=pages)
    inner = _reference_activation(both, activation)
    return grouped_gemm_reference(inner, down, ids, weights, bias=down_bias, pages=pages).sum(dim=1)


def _reference_activation(both: torch.Tensor, activation: str) -> torch.Tensor:
    if activation == "swiglu-clamped":
        gate = both[..., ::2].clamp(max=7)
        up = both[..., 1::2].clamp(-7, 7)
        return gate / (1 + torch.exp(-1.702 * gate)) * (up + 1)
    gate, up = both.chunk(2, dim=-1)
    factor = torch.special.ndtr(gate) if activation == "geglu" else 1 / (1 + torch.exp(-gate))
    return gate * factor * up
