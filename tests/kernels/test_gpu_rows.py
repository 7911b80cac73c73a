"""The torch side of norms, rotations, activations and the vocabulary's ends: float64, Hugging Face, and refusals."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kernels_triton import (
    Draws,
    Linear,
    Llama3,
    Yarn,
    add_rms_norm,
    add_rms_norm_work,
    embed,
    embed_work,
    gated,
    gated_reference,
    gated_work,
    layer_norm,
    layer_norm_reference,
    layer_norm_work,
    logprobs,
    penalise,
    rms_norm,
    rms_norm_reference,
    rms_norm_work,
    rope,
    rope_reference,
    rope_table,
    rope_work,
    sample,
    sample_work,
    sampled_logits,
    sampled_logits_work,
)
from kernels_triton.rows.rope_table import frequencies
from tests.examples import examples
from tests.kernels.experts_at_hand import error

DTYPES = [torch.float32, torch.float16, torch.bfloat16]
LIMITS = {torch.float32: 1e-5, torch.float16: 1e-3, torch.bfloat16: 8e-3}


@examples(60)
@given(st.integers(0, 5), st.sampled_from([1, 7, 64]), st.sampled_from(DTYPES), st.integers(0, 99))
def test_rows_agree_with_float64(T, M, dtype, seed):
    torch.manual_seed(seed)
    x, residual = (torch.randn(2, T, M) * 3).to(dtype)
    weight, bias = torch.randn(2, M).to(dtype)
    out, total = add_rms_norm(x, residual, weight)
    assert total.equal(x + residual)
    for found, want in (
        (rms_norm(x, weight), rms_norm_reference(x, weight)),
        (out, rms_norm_reference(total, weight)),
        (layer_norm(x, weight, bias), layer_norm_reference(x, weight, bias)),
        (gated(torch.cat((x, residual), dim=1)), gated_reference(torch.cat((x, residual), dim=1))),
    ):
        assert found.dtype is dtype
        assert error(found, want) <= LIMITS[dtype] * (1.5 if T * M < 8 else 1)


@examples(60)
@given(st.integers(0, 5), st.sampled_from([(8, 8), (10, 4), (64, 64)]), st.sampled_from(DTYPES), st.booleans())
def test_rope_agrees_with_float64(T, dims, dtype, interleaved):
    torch.manual_seed(T)
    x, positions = torch.randn(T, 3, dims[0]).to(dtype), torch.randint(50, (T,))
    table = rope_table(dims[1], 50)
    for norm in ({}, {"weight": torch.randn(dims[0]).to(dtype)}):
        found = rope(x, positions, table, interleaved=interleaved, **norm)
        assert error(found, rope_reference(x, positions, table, interleaved=interleaved, **norm)) <= LIMITS[dtype]


SCALINGS = [
    (None, {"rope_type": "default"}),
    (Linear(4.0), {"rope_type": "linear", "factor": 4.0}),
    (Yarn(16.0, 4096), {"rope_type": "yarn", "factor": 16.0, "original_max_position_embeddings": 4096}),
    (
        Yarn(40.0, 4096, fast=16.0, slow=2.0, attention=1.0),
        {"rope_type": "yarn", "factor": 40.0, "original_max_position_embeddings": 4096, "beta_fast": 16.0,
         "beta_slow": 2.0, "attention_factor": 1.0},
    ),
    (
        Llama3(8.0, 8192),
        {"rope_type": "llama3", "factor": 8.0, "original_max_position_embeddings": 8192, "low_freq_factor": 1.0,
         "high_freq_factor": 4.0},
    ),
]  # fmt: skip


@pytest.mark.parametrize("scaling, words", SCALINGS)
def test_tables_are_hugging_faces(scaling, words):
    transformers = pytest.importorskip("transformers")
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    config = transformers.LlamaConfig(
        hidden_size=512, num_attention_heads=4, head_dim=128, max_position_embeddings=131072,
        rope_parameters=words | {"rope_theta": 5e5},
    )  # fmt: skip
    theirs = LlamaRotaryEmbedding(config)
    torch.testing.assert_close(frequencies(128, 5e5, scaling), theirs.inv_freq, rtol=1e-6, atol=0)
    cos, sin = theirs(torch.zeros(1), torch.arange(300)[None])
    table = rope_table(128, 300, theta=5e5, scaling=scaling)
    torch.testing.assert_close(table, torch.cat((cos[0, :, :64], sin[0, :, :64]), dim=1), rtol=1e-4, atol=1e-5)


def test_turning_keeps_lengths_and_relative_positions():
    """The product of a query and a key depends on their distance alone."""
    table, x = rope_table(16, 100_000), torch.randn(1, 1, 16).repeat(2, 1, 1)
    products = []
    for first, second in ((0, 7), (90_000, 90_007)):
        a, b = rope(x, torch.tensor([first, second]), table)
        torch.testing.assert_close(a.norm(), x[0].norm())
        products.append((a * b).sum())
    torch.testing.assert_close(*products, rtol=1e-2, atol=1e-2)


def test_vocabulary():
    x, head = torch.randn(4, 8).bfloat16(), torch.randn(9000, 8).bfloat16()
    rows = torch.tensor([3, 1])
    assert error(sampled_logits(x, rows, head), x[rows].double() @ head.double().T) < 1e-6
    assert embed(torch.tensor([7, 7]), head).equal(head[[7, 7]])


def drawn(
    logits: np.ndarray, temperature: float, top_k: int, top_p: float, min_p: float, seed: int, position: int
) -> int:
    """By a running sum of probabilities in float64."""
    if not temperature:
        return int(logits.argmax())
    wide = logits.astype(np.float64)
    probability = np.exp((wide - wide.max()) / temperature)
    order = np.argsort(-probability, kind="stable")
    order = order[: top_k or None]
    mass = np.cumsum(probability[order] / probability[order].sum())
    nucleus = mass[min(int(np.searchsorted(mass, top_p)), len(mass) - 1)]
    nucleus = min(nucleus, mass[np.count_nonzero(probability[order] >= min_p) - 1])
    draw = np.random.Generator(np.random.Philox(key=seed, counter=position)).random()
    return int(order[np.searchsorted(mass, draw * nucleus, side="right")])


def test_sample_draws_by_the_running_sum_of_probabilities():
    """Also with seeds of 64 bits, which int64 holds as negative numbers."""
    rng = np.random.default_rng(0)
    logits = rng.standard_normal((300, 60), dtype=np.float32) * 3
    temperatures, top_p = rng.choice([0.0, 0.5, 1.0], 300), rng.choice([0.2, 0.8, 1.0], 300)
    top_k, min_p = rng.choice([0, 3, 20], 300), rng.choice([0.0, 0.05, 0.4], 300)
    seeds = np.arange(300, dtype=np.uint64)
    seeds[::2] = 2**64 - 1 - seeds[::2]
    columns = (temperatures, top_k, top_p, min_p, seeds.view(np.int64), np.arange(300))
    found = sample(torch.from_numpy(logits), Draws(*map(torch.from_numpy, columns)))
    how = zip(logits, temperatures, top_k, top_p, min_p, seeds.tolist(), range(300), strict=True)
    assert found.tolist() == [drawn(*one) for one in how]


def test_sample_follows_the_probabilities():
    logits = torch.tensor([0.5, 0.3, 0.2]).log().expand(4000, 3).contiguous()
    ones, none, places = torch.ones(4000, dtype=torch.float64), torch.zeros(4000).long(), torch.arange(4000)
    counts = torch.bincount(sample(logits, Draws(ones, none, ones, 0 * ones, none, places)))
    assert (counts / 4000 - torch.tensor([0.5, 0.3, 0.2])).abs().max() < 0.03
    for cut in ((none, 0.6 * ones, 0 * ones), (none + 2, ones, 0 * ones), (none, ones, 0.5 * ones)):
        assert sample(logits, Draws(ones, *cut, none, places)).unique().tolist() == [0, 1]


def test_a_row_does_not_depend_on_its_batch():
    logits, one = torch.randn(5, 40), torch.ones(5, dtype=torch.float64)
    draws = Draws(one, torch.arange(5) * 9, 0.9 * one, 0.1 * one, torch.arange(5), torch.arange(5))
    alone = [sample(logits[r : r + 1], Draws(*(part[r : r + 1] for part in draws))) for r in range(5)]
    assert torch.cat(alone).equal(sample(logits, draws))


X, ONE, HALF = torch.ones(2, 4), torch.tensor([1]), torch.full((2,), 0.5, dtype=torch.float64)
BAD = [
    (lambda: rms_norm(torch.ones(4), torch.ones(4)), ValueError, r"x must be \(T, M\)"),
    (lambda: rms_norm(X, torch.ones(3)), ValueError, r"weight must be \(4,\)"),
    (lambda: rms_norm(X, torch.ones(4).half()), TypeError, "weight must be torch.float32 as x"),
    (lambda: rms_norm(torch.ones(4, 2).T, torch.ones(4)), ValueError, "contiguous columns"),
    (lambda: add_rms_norm(X, X[:1], torch.ones(4)), ValueError, r"residual must be \(2, 4\)"),
    (lambda: layer_norm(X, torch.ones(4), torch.ones(3)), ValueError, r"bias must be \(4,\)"),
    (lambda: rms_norm(X, torch.ones(4), backend="triton"), ValueError, "backend 'triton' needs GPU tensors"),
    (lambda: gated(X[:, :3]), ValueError, "gated takes"),
    (lambda: gated(X, activation="relu"), ValueError, "'swiglu' or 'geglu'"),
    (lambda: rope(X, torch.zeros(2).long(), rope_table(4, 2)), ValueError, r"x must be \(T, H, D\)"),
    (lambda: rope(X[None], torch.tensor([2]), rope_table(4, 2)), ValueError, r"positions must be in \[0, 2\)"),
    (lambda: rope(X[None], torch.tensor([0]), rope_table(6, 2)), ValueError, "table must be"),
    (lambda: rope_table(3, 2), ValueError, "dims must be even"),
    (lambda: rope_table(4, 2, scaling=Linear(0.0)), ValueError, "must be positive"),
    (lambda: embed(torch.tensor([2]), X), ValueError, r"ids must be in \[0, 2\)"),
    (lambda: sampled_logits(X, torch.tensor([0]), X.half()), ValueError, r"head must be \(V, 4\)"),
    (lambda: sample(X.half()), TypeError, "logits must be fp32"),
    (lambda: logprobs(X, torch.tensor([0, 4])), ValueError, r"tokens must be in \[0, 4\)"),
    (lambda: logprobs(X, torch.tensor([0, 1]), -1), ValueError, "best must be at least 0"),
    (lambda: penalise(X, ONE, 9 * ONE, ONE > 0, HALF, HALF), ValueError, r"tokens must be in \[0, 4\)"),
    (lambda: penalise(X, ONE, ONE, ONE, HALF, HALF), TypeError, "generated must be bool"),
    (lambda: sample(X, Draws(*[torch.ones(2)] * 6)), TypeError, "draws.temperatures must be float64"),
]


@pytest.mark.parametrize("call, kind, message", BAD)
def test_a_bad_operand_is_named_with_its_mend(call, kind, message):
    with pytest.raises(kind, match=message):
        call()


def test_declared_work():
    assert rms_norm_work(3, 8, 2)[1] == 2 * (8 + 2 * 3 * 8)
    assert add_rms_norm_work(3, 8, 2)[1] == 2 * (8 + 4 * 3 * 8)
    assert layer_norm_work(3, 8, 2)[1] == 2 * (16 + 2 * 3 * 8)
    assert gated_work(3, 8, 2)[1] == 2 * 3 * 3 * 8
    assert rope_work(3, 2, 8, 4, 2) == (3 * 2 * 2 * 6, 2 * 2 * 3 * 2 * 8 + 4 * 3 * 4)
    assert embed_work(3, 8, 2) == (0, 2 * 2 * 3 * 8)
    assert sampled_logits_work(3, 8, 10, 2) == (2 * 3 * 8 * 10, 2 * 8 * 13 + 4 * 30)
    assert sample_work(3, 10) == (0, 144)
