"""The Triton kernels in the interpreter, against float64. `test_triton.py` runs this file in a process of its own."""

import pytest
import torch

from kernels_triton import route, route_reference, sort_pairs

INTERPRET = "triton-interpret"

ROUTERS = [
    (8, 2, {}),
    (60, 4, {"renormalise": True}),
    (256, 8, {"scoring": "sigmoid", "groups": 8, "kept_groups": 4, "renormalise": True, "scale": 2.5, "bias": True}),
    (160, 6, {"groups": 8, "kept_groups": 3, "scale": 16.0}),
    (3, 1, {"scoring": "sigmoid", "groups": 3, "kept_groups": 1}),
    (16, 1, {"scoring": "sigmoid"}),
]


@pytest.mark.parametrize("experts, k, options", ROUTERS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_route(experts, k, options, dtype):
    torch.manual_seed(experts)
    logits = (torch.randn(7, experts) * 2).to(dtype)
    given = options | ({"bias": torch.randn(experts)} if "bias" in options else {})
    found, want = route(logits, k, backend=INTERPRET, **given), route_reference(logits, k, **given)
    assert found.ids.equal(want.ids)
    torch.testing.assert_close(found.weights.double(), want.weights, rtol=1e-5, atol=1e-9)


def test_route_breaks_ties_and_ranks_nan_last_as_torch_does():
    logits = torch.tensor([[0.0] * 8, [1, 2, 2, 1, 2, 0, 0, 0], [torch.nan, 1, -torch.inf, 1, 0, 0, 0, 0]])
    for options in ({}, {"groups": 4, "kept_groups": 2}, {"scoring": "sigmoid", "groups": 2, "kept_groups": 2}):
        if options:
            logits = logits.nan_to_num(nan=-9.0)
        assert route(logits, 4, backend=INTERPRET, **options).ids.equal(route(logits, 4, **options).ids)


@pytest.mark.parametrize("tokens, k, experts, block", [(1, 1, 1, 16), (5, 2, 8, 16), (40, 8, 60, 16), (1100, 2, 3, 32)])
def test_sort_pairs(tokens, k, experts, block):
    torch.manual_seed(tokens)
    ids = torch.randint(experts, (tokens, k), dtype=torch.int32)
    found, want = (sort_pairs(ids, experts, block, backend=backend) for backend in (INTERPRET, "torch"))
    rows = int(want.rows)
    assert int(found.rows) == rows
    assert found.pairs[:rows].equal(want.pairs[:rows])
    assert found.experts[: rows // block].equal(want.experts[: rows // block])
