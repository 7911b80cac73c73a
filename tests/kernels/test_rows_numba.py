"""Norms, rotations and activations in Numba: against float64 at odd sizes, threads, memory layouts, and refusals."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kernels_cpu import add_rms_norm, gated, rms_norm, rope
from kernels_cpu.rows import rows
from kernels_triton import gated_reference, rms_norm_reference, rope_reference, rope_table
from tests.examples import examples
from tests.kernels.experts_at_hand import error

FP32, BF16 = DTYPES = torch.float32, torch.bfloat16
ROUNDED = {FP32: 1e-6, BF16: 4e-3}  # relative error of a number that is rounded once
TWICE = {FP32: 1e-5, BF16: 8e-3}
SIZES = st.sampled_from([1, 2, 3, 7, 15, 16, 17, 33, 64, 129, 1000])


def numbers(T, M, dtype, apart=0):
    """Rows that lie `apart` numbers apart; what is between them is NaN."""
    return torch.cat((torch.randn(T, M) * 3, torch.full((T, apart), torch.nan)), dim=1).to(dtype)[:, :M]


@examples(60)
@given(st.integers(0, 5), SIZES, st.sampled_from(DTYPES), st.integers(0, 3), st.integers(0, 99))
def test_norms_agree_with_float64(T, M, dtype, apart, seed):
    torch.manual_seed(seed)
    x, residual, weight = numbers(T, M, dtype, apart), numbers(T, M, dtype, 2 * apart), torch.randn(M).to(dtype)
    few = 1.5 if T * M < 8 else 1
    found = rms_norm(x, weight)
    assert found.dtype is dtype
    assert error(found, rms_norm_reference(x, weight)) <= TWICE[dtype] * few
    out, total = add_rms_norm(x, residual, weight)
    assert total.equal(x + residual)
    assert error(out, rms_norm_reference(total, weight)) <= TWICE[dtype] * few


@examples(60)
@given(st.integers(0, 5), SIZES, st.sampled_from(DTYPES), st.integers(0, 3), st.sampled_from(["swiglu", "geglu"]))
def test_activations_agree_with_float64(T, F, dtype, apart, activation):
    torch.manual_seed(F)
    x = numbers(T, 2 * F, dtype, apart)
    found = gated(x, activation=activation)
    assert found.dtype is dtype
    assert error(found, gated_reference(x, activation=activation)) <= ROUNDED[dtype]


def test_activations_of_large_gates():
    """The tails keep their relative error, and nothing overflows."""
    gates = torch.tensor([[-80.0, -12.0, -5.0, -1e-3, 0.0, 1e-3, 9.0, 3e38]])
    x = torch.cat((gates, torch.ones(1, 8)), dim=1)
    want = gated_reference(x).float()
    torch.testing.assert_close(gated(x), want, rtol=2e-5, atol=1e-33)
    gates = torch.tensor([[-9.0, -5.0, -2.0, 0.0, 2.0, 9.0]])
    x = torch.cat((gates, torch.ones(1, 6)), dim=1)
    want = gated_reference(x, activation="geglu").float()
    torch.testing.assert_close(gated(x, activation="geglu"), want, rtol=2e-5, atol=1e-30)


@examples(60)
@given(
    st.integers(0, 5),
    st.sampled_from([(1, 2, 2), (3, 80, 80), (2, 24, 12), (4, 64, 64), (1, 128, 32), (5, 17, 8)]),
    st.sampled_from(DTYPES),
    st.booleans(),
    st.booleans(),
)
def test_rope_agrees_with_float64(T, heads, dtype, interleaved, normed):
    H, D, R = heads
    torch.manual_seed(T)
    x = torch.randn(T, H + 3, D + 1).to(dtype)[:, 1 : H + 1, :D]  # as in a fused qkv, and heads apart
    table, positions = rope_table(R, 50), torch.randint(50, (T,))
    more = {"weight": torch.randn(D).to(dtype)} if normed else {}
    found = rope(x, positions, table, interleaved=interleaved, **more)
    assert found.dtype is dtype
    assert error(found, rope_reference(x, positions, table, interleaved=interleaved, **more)) <= ROUNDED[dtype]


def test_eps_counts():
    x = torch.full((1, 4), 2.0)
    assert rms_norm(x, torch.ones(4), eps=12.0).allclose(torch.full((1, 4), 0.5))
    table = torch.tensor([[1.0, 0.0]])
    found = rope(torch.full((1, 1, 2), 2.0), torch.tensor([0]), table, weight=torch.ones(2), eps=12.0)
    assert found.allclose(torch.full((1, 1, 2), 0.5))


@pytest.mark.parametrize("threads", [1, 2, 3, 8])
def test_threads_share_the_rows_and_change_nothing(threads, monkeypatch):
    monkeypatch.setattr(rows, "SHARE", 16)
    x, weight, positions, table = numbers(7, 48, BF16), torch.randn(48).bfloat16(), torch.arange(7), rope_table(8, 7)
    heads = x.view(7, 3, 16)
    assert rms_norm(x, weight, threads=threads).equal(rms_norm(x, weight, threads=1))
    for found, want in zip(add_rms_norm(x, x, weight, threads=threads), add_rms_norm(x, x, weight), strict=True):
        assert found.equal(want)
    assert gated(x, threads=threads).equal(gated(x, threads=1))
    assert rope(heads, positions, table, threads=threads).equal(rope(heads, positions, table, threads=1))


def test_rows_are_divided_among_as_many_threads_as_have_work(monkeypatch):
    monkeypatch.setattr(rows, "SHARE", 16)

    def shares(shape):
        found = []
        rows.by_rows(lambda low, high: found.append((low, high)), shape, 3)
        return sorted(found)

    assert shares((7, 48)) == [(0, 2), (2, 4), (4, 7)]
    assert shares((7, 5)) == [(0, 3), (3, 7)]  # 35 numbers are two threads' least
    assert shares((1, 4)) == [(0, 1)]


def test_nan_stays_in_its_row():
    x = numbers(3, 20, BF16)
    x[1, 3] = torch.nan
    assert rms_norm(x, torch.ones(20).bfloat16()).isnan().all(dim=1).tolist() == [False, True, False]
    assert gated(x).isnan().nonzero().tolist() == [[1, 3]]


def test_numpy_and_torch_give_the_same():
    x = numbers(3, 20, BF16)
    bits = x.view(torch.uint16).numpy()
    found = gated(bits)
    assert isinstance(found, np.ndarray)
    assert torch.from_numpy(found).view(BF16).equal(gated(x))


X, P = np.ones((2, 4), np.float32), np.zeros(2, np.int64)
FIELD = np.ones(2, [("own", np.float32, 4), ("odd", np.uint8)])["own"]  # rows 17 bytes apart
TABLE = np.ones((2, 4), np.float32)
BAD = [
    (lambda: rms_norm(X[0], X[0]), ValueError, r"x must have shape \(T, M\)"),
    (lambda: rms_norm(X.astype(np.float64), X[0]), TypeError, "x must be float32 or uint16"),
    (lambda: rms_norm([1.0], X[0]), TypeError, "x must be a numpy array or a torch tensor"),
    (lambda: rms_norm(X, X[0, :3]), ValueError, r"weight must be \(4,\)"),
    (lambda: rms_norm(X, X[0].astype(np.uint16)), TypeError, "weight must be float32"),
    (lambda: rms_norm(X.T[::2], X[0, :2]), ValueError, "x must have rows of neighbouring numbers"),
    (lambda: rms_norm(X[::-1], X[0]), ValueError, "x must have rows of neighbouring numbers"),
    (lambda: rms_norm(X[:, :0], X[0, :0]), ValueError, "x must have numbers in every row"),
    (lambda: rms_norm(X, X[0], threads=0), ValueError, "threads must be >= 1"),
    (lambda: rms_norm(FIELD, X[0]), ValueError, "x must have rows of neighbouring numbers, aligned"),
    (lambda: add_rms_norm(X, FIELD, X[0]), ValueError, "residual must have rows of neighbouring numbers, aligned"),
    (lambda: gated(FIELD), ValueError, "x must have rows of neighbouring numbers, aligned"),
    (lambda: rope(FIELD[:, None], P, TABLE), ValueError, "x must have rows of neighbouring numbers, aligned"),
    (lambda: add_rms_norm(X, X[:1], X[0]), ValueError, r"residual must be \(2, 4\) as x"),
    (lambda: gated(X[:, :3]), ValueError, "gated takes"),
    (lambda: gated(X, activation="relu"), ValueError, "'swiglu' or 'geglu'"),
    (lambda: rope(X[:, None], P + 2, TABLE), ValueError, r"positions must be in \[0, 2\)"),
    (lambda: rope(X[:, None], P - 1, TABLE), ValueError, r"positions must be in \[0, 2\)"),
    (lambda: rope(X[:, None], P[:1], TABLE), ValueError, r"positions must be \(2,\)"),
    (lambda: rope(X[:, None], P, TABLE[:, :3].copy()), ValueError, "an even R <= 4"),
    (lambda: rope(X[:, None], P, np.ones((2, 6), np.float32)), ValueError, "an even R <= 4"),
]


@pytest.mark.parametrize("call, kind, message", BAD)
def test_a_bad_operand_is_named_with_its_mend(call, kind, message):
    with pytest.raises(kind, match=message):
        call()
