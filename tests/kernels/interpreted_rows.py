"""Norms, rotations, activations, embedding, logits and sampling in the interpreter. `test_triton.py` runs this file."""

import pytest
import torch

from kernels_triton import (
    Draws,
    add_rms_norm,
    embed,
    gated,
    gated_reference,
    layer_norm,
    layer_norm_reference,
    rms_norm,
    rms_norm_reference,
    rope,
    rope_reference,
    rope_table,
    sample,
    sampled_logits,
)
from tests.kernels.experts_at_hand import error

INTERPRET = "triton-interpret"
FP32, FP16, BF16 = DTYPES = torch.float32, torch.float16, torch.bfloat16
ROUNDED = {FP32: 1e-6, FP16: 5e-4, BF16: 4e-3}  # relative error of a number that is rounded once
TWICE = {FP32: 1e-5, FP16: 1e-3, BF16: 8e-3}
SHAPES = [(1, 1), (3, 7), (5, 64), (2, 129), (0, 8)]


def rows(T, M, dtype, seed=0):
    """Rows that lie apart."""
    torch.manual_seed(seed)
    return (torch.randn(T, 2 * M) * 3).to(dtype)[:, :M]


@pytest.mark.parametrize("T, M", SHAPES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_norms(T, M, dtype):
    x, residual = rows(T, M, dtype), rows(T, M, dtype, seed=1)
    weight, bias = torch.randn(2, M).to(dtype)
    assert error(rms_norm(x, weight, backend=INTERPRET), rms_norm_reference(x, weight)) <= TWICE[dtype]
    out, total = add_rms_norm(x, residual, weight, backend=INTERPRET)
    assert total.equal(x + residual)
    assert error(out, rms_norm_reference(total, weight)) <= TWICE[dtype]
    for shift in (None, bias):
        found = layer_norm(x, weight, shift, backend=INTERPRET)
        assert error(found, layer_norm_reference(x, weight, shift)) <= TWICE[dtype]


def test_eps_counts():
    x = torch.full((1, 4), 2.0)
    assert rms_norm(x, torch.ones(4), eps=12.0, backend=INTERPRET).allclose(torch.full((1, 4), 0.5))
    x = torch.tensor([[1.0, -1.0]])
    assert layer_norm(x, torch.ones(2), eps=3.0, backend=INTERPRET).allclose(x / 2)


@pytest.mark.parametrize(
    "T, H, D, R",
    [(3, 4, 64, 64), (5, 3, 80, 80), (70, 2, 24, 12), (11, 3, 128, 128), (1, 1, 2, 2), (0, 2, 8, 8)],
)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("interleaved", [False, True])
def test_rope(T, H, D, R, dtype, interleaved):
    torch.manual_seed(T)
    x = torch.randn(T, H + 1, D).to(dtype)[:, 1:]
    table, positions = rope_table(R, 100), torch.randint(100, (T,), dtype=torch.int32)
    for norm in ({}, {"weight": torch.randn(D).to(dtype)}):
        found = rope(x, positions, table, interleaved=interleaved, **norm, backend=INTERPRET)
        want = rope_reference(x, positions, table, interleaved=interleaved, **norm)
        assert error(found, want) <= ROUNDED[dtype]


@pytest.mark.parametrize("activation", ["swiglu", "geglu"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_gated(activation, dtype):
    for T, F in ((3, 5), (2, 1030), (0, 4)):
        x = rows(T, 2 * F, dtype)
        found = gated(x, activation=activation, backend=INTERPRET)
        assert error(found, gated_reference(x, activation=activation)) <= ROUNDED[dtype]


def test_embed():
    table = torch.randn(9, 1040)[:, :1030]
    ids = torch.tensor([8, 0, 8, 3], dtype=torch.int32)
    assert embed(ids, table, backend=INTERPRET).equal(table[ids])
    assert embed(ids[:0], table, backend=INTERPRET).shape == (0, 1030)


@pytest.mark.parametrize("T, M, V, R", [(5, 40, 33, 3), (20, 64, 70, 20), (1, 7, 1, 1), (3, 8, 5, 0)])
@pytest.mark.parametrize("dtype", DTYPES)
def test_sampled_logits(T, M, V, R, dtype):
    x, head, chosen = rows(T, M, dtype), rows(V, M, dtype, seed=1), torch.randperm(T)[:R]
    found = sampled_logits(x, chosen, head, backend=INTERPRET)
    assert found.dtype is FP32
    assert error(found, x[chosen].double() @ head.double().T) <= 1e-6


def draws(R, seed):
    """Half of the rows are greedy or take every token."""
    torch.manual_seed(seed)
    heat = torch.tensor([0.0, 0.3, 1.0, 1.7], dtype=torch.float64)[torch.randint(4, (R,))]
    top_k = torch.tensor([0, 1, 5, 9999])[torch.randint(4, (R,))]
    top_p = torch.tensor([0.1, 0.5, 0.9, 1.0], dtype=torch.float64)[torch.randint(4, (R,))]
    min_p = torch.tensor([0.0, 0.0, 0.1, 1.0], dtype=torch.float64)[torch.randint(4, (R,))]
    return Draws(heat, top_k, top_p, min_p, torch.randint(2**62, (R,)), torch.arange(R) % 5)


@pytest.mark.parametrize("R, V", [(14, 33), (2, 5000), (4, 1), (0, 8)])
def test_sample_gives_the_same_tokens_as_torch(R, V):
    """Logits in steps of 1/4, so that many are equal, and 0 beside -0."""
    torch.manual_seed(V)
    logits = (torch.randn(R, V) * 12).round() / 4
    logits[:, ::3] *= -1
    how = draws(R, seed=V)
    assert sample(logits, how, backend=INTERPRET).equal(sample(logits, how))
    assert sample(logits, backend=INTERPRET).equal(logits.argmax(dim=1))


def test_sample_of_an_odd_block(monkeypatch):
    """Ranks and sums run on over several blocks."""
    monkeypatch.setattr("kernels_triton.vocabulary.sampling._BLOCK", 16)
    logits, how = torch.randn(8, 45).mul(4).round(), draws(8, seed=3)
    assert sample(logits, how, backend=INTERPRET).equal(sample(logits, how))
