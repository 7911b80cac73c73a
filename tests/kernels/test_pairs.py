"""`sort_pairs` in torch: every pair once, in the block of its expert, in order."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from kernels_triton import sort_pairs
from tests.examples import examples


@examples(100)
@given(st.integers(0, 40), st.integers(1, 8), st.integers(1, 12), st.sampled_from([1, 4, 16]), st.integers(0, 99))
def test_each_pair_has_one_row_in_a_block_of_its_expert(tokens, k, experts, block, seed):
    torch.manual_seed(seed)
    ids = torch.randint(-1, experts + 2, (tokens, k))  # those beyond the experts come last
    pairs, owners, rows = sort_pairs(ids, experts, block)
    rows = int(rows)
    runs = [[] for _ in range(experts + 1)]
    for row, pair in enumerate(pairs[:rows].tolist()):
        if pair < ids.numel():
            runs[owners[row // block]].append(pair)
    chosen = [e if 0 <= e < experts else experts for e in ids.flatten().tolist()]
    assert runs == [[p for p, e in enumerate(chosen) if e == expert] for expert in range(experts + 1)]
    assert rows == sum(-(-len(run) // block) * block for run in runs)
    assert rows <= len(pairs) == len(owners) * block


def test_pairs_are_int64_where_int32_is_too_small():
    ids = torch.empty((2**28, 8), dtype=torch.int32, device="meta")
    assert sort_pairs(ids[:1], 8, 16).pairs.dtype is torch.int32
    assert sort_pairs(ids, 8, 16).pairs.dtype is torch.int64
