"""`expert_mlp` against its float64 oracle, on every code path."""

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels_cpu import CodePath, expert_mlp, expert_mlp_reference, expert_mlp_work

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
# (M, F, weights): whole steps, a remainder of pieces, half a piece, fewer than a step; the last has no vector code
SHAPES = [(128, 352, "bf16"), (80, 48, "bf16"), (64, 160, "fp32"), (32, 96, "fp16"), (20, 13, "bf16")]


def problem(tokens: int, experts: int, chosen: int, shape: tuple[int, int, str], seed: int = 0) -> tuple[Any, ...]:
    rng = np.random.default_rng(seed)
    model, inner, dtype = shape
    kind = DTYPES[dtype]
    gate_up = torch.from_numpy(rng.standard_normal((experts, 2 * inner, model))).to(kind)
    down = torch.from_numpy(rng.standard_normal((experts, model, inner))).to(kind)
    h = rng.standard_normal((tokens, model), dtype=np.float32)
    ids = np.array([rng.permutation(experts)[:chosen] for _ in range(tokens)], np.int64).reshape(tokens, chosen)
    return h, gate_up, down, ids, rng.random((tokens, chosen), dtype=np.float32)


def error(found: Any, want: Any) -> float:
    return float(np.linalg.norm(found - want) / max(1e-30, np.linalg.norm(want)))


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 14), st.integers(1, 6), st.data(), st.sampled_from(SHAPES), st.sampled_from(CodePath))
def test_equals_float64_with_any_tokens_per_expert(tokens, experts, data, shape, path):
    case = problem(tokens, experts, data.draw(st.integers(1, experts)), shape, data.draw(st.integers(0, 99)))
    found = expert_mlp(*case, path=path, threads=data.draw(st.integers(1, 3)))
    assert error(found, expert_mlp_reference(*case)) < 1e-6


@pytest.mark.parametrize("path", [CodePath.AVX512, CodePath.PORTABLE])
def test_the_answer_does_not_depend_on_threads_nor_on_the_batch(path):
    h, gate_up, down, ids, weights = problem(7, 3, 2, SHAPES[0])
    whole = expert_mlp(h, gate_up, down, ids, weights, path=path, threads=1)
    np.testing.assert_array_equal(expert_mlp(h, gate_up, down, ids, weights, path=path, threads=4), whole)
    alone = [expert_mlp(h[t : t + 1], gate_up, down, ids[t : t + 1], weights[t : t + 1], path=path) for t in range(7)]
    np.testing.assert_allclose(np.concatenate(alone), whole, rtol=0, atol=1e-3 * np.abs(whole).max())


def test_large_gates_neither_overflow_nor_vanish():
    h, gate_up, down, ids, weights = problem(3, 2, 1, (32, 64, "fp32"))
    for scale in (1e3, 1e15):
        found = expert_mlp(scale * h, gate_up, down, ids, weights)
        assert error(found, expert_mlp_reference(scale * h, gate_up, down, ids, weights)) < 1e-6


def test_experts_may_lie_apart_and_tensors_are_read_in_place():
    h, gate_up, down, ids, weights = problem(4, 3, 2, SHAPES[0])
    apart = [[part.clone() for part in reversed(whole)][::-1] for whole in (gate_up, down)]
    out = torch.empty(h.shape)
    tensors = (torch.from_numpy(h), *apart, torch.from_numpy(ids), torch.from_numpy(weights))
    assert expert_mlp(*tensors, out=out) is out
    np.testing.assert_array_equal(out.numpy(), expert_mlp(h, gate_up, down, ids, weights))


def test_nan_in_an_expert_reaches_those_who_chose_it_only():
    h, gate_up, down, ids, weights = problem(6, 4, 1, (32, 64, "fp32"))
    ids = np.array([[0], [1], [2], [3], [1], [0]])
    gate_up[1, 5, 7] = np.nan
    found = np.isnan(expert_mlp(h, gate_up, down, ids, weights)).any(axis=1)
    assert found.tolist() == [False, True, False, False, True, False]


BAD: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"h": lambda h: h.astype(np.float64)}, TypeError, "h must be float32"),
    ({"h": lambda h: h[:, ::2]}, ValueError, "h must be C-contiguous"),
    ({"h": lambda h: h[:, :64].copy()}, ValueError, "gate_up must have an even number of rows of 64 columns"),
    ({"gate_up": lambda w: w[:, :-1].contiguous()}, ValueError, "gate_up must have an even number of rows"),
    ({"gate_up": lambda w: w[:0]}, ValueError, "gate_up must have an expert"),
    ({"gate_up": lambda w: [w[0], w[1].float(), w[2]]}, ValueError, r"gate_up\[1\] must be .* as gate_up\[0\]"),
    ({"gate_up": lambda w: [m[:, ::2] for m in w]}, ValueError, r"gate_up\[0\] must be C-contiguous"),
    ({"gate_up": lambda w: w.to(torch.int8)}, TypeError, "gate_up must be float32 or uint16"),
    ({"down": lambda w: w[:2]}, ValueError, r"down must be \(3, 128, 352\), which gate_up and h ask for, not \(2,"),
    ({"ids": lambda i: i + 2}, ValueError, r"ids\[\d, \d\] must be an expert in \[0, 3\), not \d: correct"),
    ({"ids": lambda i: i - 1}, ValueError, r"ids\[\d, \d\] must be an expert in \[0, 3\), not -1: correct"),
    ({"ids": lambda i: i[:-1]}, ValueError, "weights must have the shape of ids and both one row per row of h"),
    ({"weights": lambda w: w[:, :1].copy()}, ValueError, "weights must have the shape of ids"),
]


@pytest.mark.parametrize("change, kind, message", BAD)
def test_a_bad_operand_is_named_with_its_mend(change, kind, message):
    names = ("h", "gate_up", "down", "ids", "weights")
    case = dict(zip(names, problem(4, 3, 2, SHAPES[0]), strict=True))
    for name, make in change.items():
        case[name] = make(case[name])
    with pytest.raises(kind, match=message):
        expert_mlp(**case)


@pytest.mark.parametrize("option", [{"threads": 0}, {"out": np.empty((3, 128), np.float32)}])
def test_a_bad_option_is_named_with_its_mend(option):
    with pytest.raises(ValueError, match=r"must .*: leave"):
        expert_mlp(*problem(4, 3, 2, SHAPES[0]), **option)


def test_declared_work():
    flops, moved = expert_mlp_work(model_dim=8, expert_dim=16, tokens=5, chosen=2, touched=3, weight_itemsize=2)
    assert flops == 5 * 2 * 3 * 2 * 8 * 16  # three products, multiply and add
    assert moved == 3 * 3 * 8 * 16 * 2 + 2 * 5 * 8 * 4
