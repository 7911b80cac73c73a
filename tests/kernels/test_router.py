"""`route` in torch against its float64 oracle, a softmax over the chosen, and its own promises."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kernels_triton import route, route_reference, route_work
from tests.examples import examples
from workbench import kernels


@st.composite
def routings(draw):
    """Logits that tie often, and options that go together."""
    groups, size = draw(st.sampled_from([(1, 8), (1, 60), (4, 5), (8, 32), (3, 1)]))
    kept = draw(st.integers(1, groups))
    k = draw(st.integers(1, min(8, kept * size)))
    torch.manual_seed(draw(st.integers(0, 99)))
    tokens = draw(st.integers(0, 5))
    logits = torch.randint(-3, 3, (tokens, groups * size)) / 2
    if draw(st.booleans()):
        logits = torch.randn(tokens, groups * size) * 3
    # multiples of 1/8 that are added to scores of a softmax could tie by rounding: the oracle has no bias there
    scoring = draw(st.sampled_from(["softmax", "sigmoid", "sparsemixer"]))
    if scoring == "sparsemixer":
        return logits, min(k, 4), {"scoring": scoring, "bias": None, "scale": 2.5, "groups": 1}
    bias = torch.randn(groups * size) if scoring == "sigmoid" and draw(st.booleans()) else None
    options = {"scoring": scoring, "bias": bias, "renormalise": draw(st.booleans()), "scale": 2.5}
    return logits, k, options | {"groups": groups, "kept_groups": kept}


@examples(200)
@given(routings())
def test_agrees_with_float64(case):
    logits, k, options = case
    found, want = route(logits, k, **options), route_reference(logits, k, **options)
    assert found.ids.dtype is torch.int32
    assert found.weights.dtype is torch.float32
    torch.testing.assert_close(found.weights.double(), want.weights, rtol=1e-5, atol=1e-9)
    if options["bias"] is None and options["groups"] == 1:
        assert found.ids.equal(want.ids)


def test_sparsemixer_looks_at_experts_near_the_best_that_is_left():
    found = route(torch.tensor([[2.0, 1.99, 1.0, -5.0]]), 2, scoring="sparsemixer")
    assert found.ids.tolist() == [[0, 1]]
    assert found.weights[0].tolist() == pytest.approx([1 / (1 + math.exp(-0.01)), 1.0])


def test_renormalised_softmax_is_the_softmax_over_the_chosen_logits():
    logits = torch.randn(9, 32, dtype=torch.float64)
    top, ids = logits.topk(4, dim=1)
    found = route(logits.float(), 4, renormalise=True)
    assert found.ids.equal(ids.int())
    torch.testing.assert_close(found.weights, top.softmax(dim=1).float(), rtol=1e-5, atol=0)


def test_of_equal_experts_and_groups_the_lowest_wins():
    assert route(torch.zeros(1, 64), 3).ids.tolist() == [[0, 1, 2]]
    assert route(torch.tensor([[0.0, -0.0, 0.0]]), 3).ids.tolist() == [[0, 1, 2]]
    for scoring in ("softmax", "sigmoid"):
        limited = route(torch.zeros(1, 12), 4, scoring=scoring, groups=4, kept_groups=2)
        assert limited.ids.tolist() == [[0, 1, 2, 3]]


def test_group_limit_looks_at_one_expert_with_softmax_and_at_two_with_sigmoid():
    logits = torch.tensor([[3.0, -9.0, 2.0, 2.0]])  # the best expert in the first group, the best two in the second
    assert route(logits, 1, groups=2).ids.tolist() == [[0]]
    assert route(logits, 1, scoring="sigmoid", groups=2).ids.tolist() == [[2]]


def test_bias_chooses_but_does_not_weigh():
    found = route(torch.zeros(1, 4), 1, scoring="sigmoid", bias=torch.tensor([0.0, 0.0, 9.0, 0.0]))
    assert found.ids.tolist() == [[2]]
    assert found.weights.tolist() == [[0.5]]


def test_ids_stay_valid_and_different_where_logits_are_not_finite():
    logits = torch.tensor([[-torch.inf, 1.0, -torch.inf, -torch.inf], [torch.nan, 1.0, 0.0, 2.0]])
    found = route(logits, 3)
    assert found.ids.tolist() == [[1, 0, 2], [3, 1, 2]]
    assert found.weights[0].tolist() == [1.0, 0.0, 0.0]


@examples(100)
@given(
    st.integers(0, 5), st.sampled_from([1, 8, 60, 129]), st.integers(1, 8), st.booleans(), st.sampled_from([1.0, 2.5])
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_numbas_kernel_agrees_with_float64(dtype, tokens, experts, k, renormalise, scale):
    """Also where logits tie."""
    torch.manual_seed(experts)
    logits = (torch.randn(tokens, experts + 2) * 3).to(dtype)[:, :experts]
    options = {"renormalise": renormalise, "scale": scale}
    for these in (logits, logits.round()):
        found = kernels.route(these, min(k, experts), threads=2, **options)
        want = route_reference(these, min(k, experts), **options)
        assert found.ids.equal(want.ids)
        torch.testing.assert_close(found.weights.double(), want.weights, rtol=1e-5, atol=1e-9)
        assert kernels.route(these, min(k, experts), **options).weights.equal(found.weights)


def test_numbas_ids_stay_valid_and_different_where_logits_are_not_finite():
    rows = [
        [-torch.inf, 1.0, -torch.inf, -torch.inf],
        [torch.nan, 1.0, 0.0, 2.0],
        [-torch.inf] * 4,
        [0, torch.inf, 1, 2],
    ]
    found, want = kernels.route(torch.tensor(rows), 3), route(torch.tensor(rows), 3)
    assert found.ids.equal(want.ids)
    assert found.weights.allclose(want.weights, equal_nan=True, atol=0)
    assert found.weights[0].tolist() == [1.0, 0.0, 0.0]


@pytest.mark.parametrize(
    "change",
    [
        {"scoring": "sigmoid"},
        {"groups": 2},
        {"groups": 2, "kept_groups": 2},
        {"bias": torch.zeros(8)},
        {"backend": "torch"},
    ],
)
def test_threads_are_refused_where_torch_computes(change):
    with pytest.raises(ValueError, match="leave"):
        kernels.route(torch.zeros(2, 8), 2, threads=1, **change)
    assert kernels.route(torch.zeros(2, 8), 2, **change).ids.shape == (2, 2)


BAD = [
    ({"logits": torch.zeros(4)}, ValueError, r"logits must have shape \(T, E\)"),
    ({"logits": torch.zeros(2, 8, dtype=torch.int32)}, TypeError, "logits must be fp32"),
    ({"logits": torch.zeros(8, 2).T}, ValueError, "contiguous columns"),
    ({"k": 0}, ValueError, r"k must be in \[1, 8\]"),
    ({"k": 5, "groups": 2}, ValueError, r"k must be in \[1, 4\], the experts in the choice, not 5"),
    ({"groups": 3}, ValueError, "groups must part 8 experts evenly"),
    ({"kept_groups": 2}, ValueError, r"kept_groups be in \[1, 1\]"),
    ({"bias": torch.zeros(7)}, ValueError, r"bias must be \(8,\) fp32"),
    ({"scoring": "tanh"}, ValueError, "scoring must be one of 'softmax', 'sigmoid', 'sparsemixer', not 'tanh'"),
    ({"scoring": "sparsemixer", "renormalise": True}, ValueError, "neither renormalise nor bias nor groups"),
    ({"backend": "cuda"}, ValueError, "backend must be 'triton', 'triton-interpret', 'torch' or None, not 'cuda'"),
    ({"backend": "triton"}, ValueError, "backend 'triton' needs GPU tensors, not cpu"),
]


@pytest.mark.parametrize("change, kind, message", BAD)
def test_a_bad_operand_is_named_with_its_mend(change, kind, message):
    case = {"logits": torch.zeros(2, 8), "k": 2} | change
    with pytest.raises(kind, match=message):
        route(case.pop("logits"), case.pop("k"), **case)


def test_declared_work():
    assert route_work(tokens=3, experts=8, chosen=2, logit_itemsize=2) == (4 * 3 * 8, 2 * 3 * 8 + 8 * 3 * 2)
