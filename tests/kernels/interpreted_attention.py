"""Attention kernels in the interpreter, against float64. `test_triton.py` runs this file in a process of its own."""

import pytest
import torch

from kernels_triton import AttentionTiles, append_kv, decode_attention, gather_kv, prefill_attention
from tests.kernels.attention_at_hand import (
    check_decode,
    check_mla_decode,
    check_prefill,
    decodes,
    latents,
    prompts,
    with_prefix,
)

INTERPRET = "triton-interpret"
FP32, FP16, BF16 = torch.float32, torch.float16, torch.bfloat16
OPTIONS = [{}, {"window": 5}, {"softcap": 3.0}, {"sinks": True}, {"window": 18, "softcap": 20.0, "sinks": True}]


def given(options: dict, heads: int) -> dict:
    """The options with one sink per head where there are sinks."""
    return options | ({"sinks": torch.randn(heads)} if "sinks" in options else {})


@pytest.mark.parametrize(
    "lengths, H, K, D, Dv, dtype",
    [
        ([0, 1, 17, 0, 5], 4, 2, 64, 64, FP32),  # empty sequences, one token, a block and a token
        ([15, 16], 2, 2, 16, 16, BF16),
        ([33], 3, 1, 80, 80, FP16),
        ([4, 18], 2, 1, 24, 16, FP32),  # MLA's heads: wider keys than values
        ([19], 1, 1, 192, 128, BF16),
        ([20], 1, 1, 256, 256, BF16),
        ([], 2, 1, 16, 16, FP32),
    ],
)
def test_prefill(lengths, H, K, D, Dv, dtype):
    check_prefill(prompts(lengths, H, K, D, dtype, Dv), INTERPRET)


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("dtype", [FP32, BF16])
def test_prefill_with_a_prefix(options, dtype):
    """Prefixes of nothing, one token, a cache block and one less and more, and past a tile."""
    case = prompts([3, 1, 5, 2, 0, 19], 4, 2, 32, dtype) | given(options, 4)
    check_prefill(with_prefix(case, [0, 1, 7, 8, 9, 21], b=8), INTERPRET)


def test_prefill_over_a_narrower_cache():
    check_prefill(with_prefix(prompts([3, 5], 2, 1, 16, FP32), [9, 4], b=4, kv_dtype=BF16), INTERPRET)


@pytest.mark.parametrize("options", OPTIONS)
def test_prefill_with_more_keys_than_queries(options):
    case = prompts([20, 9], 2, 1, 16, FP32) | given(options, 2)
    q = torch.cat((case["q"][17:20], case["q"][20:21]))
    k, v = case["k"][:21], case["v"][:21]
    starts, key_starts = torch.tensor([0, 3, 4]), torch.tensor([0, 20, 21])
    check_prefill(case | {"q": q, "k": k, "v": v, "starts": starts, "key_starts": key_starts}, INTERPRET)


def test_a_chunked_prompt_is_the_prompt():
    case = prompts([37], 2, 1, 16, FP32)
    whole = prefill_attention(**case, backend=INTERPRET)
    kv = torch.full((6, 1, 2, 8, 16), torch.nan)
    table = torch.tensor([[3, 0, 5, 1, 4, 2]], dtype=torch.int32)
    slots = table[0].long().repeat_interleave(8)[:37] * 8 + torch.arange(37) % 8
    for low, high in ((0, 1), (1, 20), (20, 37)):
        part = {name: case[name][low:high] for name in ("q", "k", "v")}
        prefix = (kv, table, torch.tensor([low]))
        found = prefill_attention(
            **part, starts=torch.tensor([0, high - low]), prefix=type(with_prefix(case, [0], 8)["prefix"])(*prefix),
            backend=INTERPRET,
        )  # fmt: skip
        torch.testing.assert_close(found, whole[low:high], rtol=1e-5, atol=1e-6)
        append_kv(kv, slots[low:high], part["k"], part["v"], backend=INTERPRET)


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("dtype", [FP32, BF16])
def test_decode(options, dtype):
    """Nothing, one token, a block and one more and less, and several chunks of 128."""
    case = decodes([0, 1, 7, 8, 9, 130, 128], 4, 2, 8, 32, dtype, window=options.get("window"))
    check_decode(case | given(options, 4), INTERPRET)


@pytest.mark.parametrize(
    "H, K, D, dtype, kv_dtype",
    [(20, 1, 16, BF16, BF16), (3, 3, 80, FP16, FP16), (2, 1, 128, FP32, BF16), (1, 1, 256, BF16, BF16)],
)
def test_decode_of_other_heads(H, K, D, dtype, kv_dtype):
    check_decode(decodes([19, 3], H, K, 4, D, dtype, kv_dtype), INTERPRET)


@pytest.mark.parametrize(
    "H, b, D, value_dim, dtype, kv_dtype",
    [
        (20, 4, 48, 32, BF16, BF16),  # the row's first numbers are the value, and are loaded once
        (3, 7, 24, 16, FP32, FP16),
        (2, 8, 32, 24, FP32, FP32),  # values that are no power of two are loaded apart
        (5, 16, 40, 24, FP16, BF16),
        (2, 1, 16, 16, BF16, FP32),
        (2, 4, 576, 512, FP32, FP32),  # DeepSeek's
    ],
)
def test_latents(H, b, D, value_dim, dtype, kv_dtype):
    """Nothing, one token, less and more than a block, and several chunks of 128."""
    check_mla_decode(latents([0, 1, 17, 130], H, b, D, value_dim, dtype, kv_dtype), INTERPRET)


def test_a_decode_does_not_depend_on_its_batch_nor_a_longer_table():
    case = decodes([140, 300, 12], 2, 1, 8, 16, BF16)
    together = decode_attention(**case, backend=INTERPRET)
    for s in range(3):
        alone = {name: case[name][s : s + 1].contiguous() for name in ("q", "table", "lengths")}
        assert decode_attention(kv=case["kv"], **alone, backend=INTERPRET).equal(together[s : s + 1])


def test_chunks_add_up_past_what_merge_takes_at_once():
    case = decodes([140], 2, 1, 8, 16, FP32)
    found = decode_attention(**case, tiles=AttentionTiles(16, 16, 4, 1, chunk=8), backend=INTERPRET)
    torch.testing.assert_close(found, decode_attention(**case), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("kv_dtype", [FP32, FP16, BF16])
@pytest.mark.parametrize("dtype", [FP32, BF16])
def test_rows_into_the_cache_and_back(kv_dtype, dtype):
    kv = torch.zeros(5, 3, 2, 4, 20, dtype=kv_dtype)
    slots = torch.tensor([19, 0, 7, 8])
    k, v = torch.randn(4, 2, 3, 20).to(dtype).unbind(1)
    append_kv(kv, slots, k, v, backend=INTERPRET)
    want = torch.zeros_like(kv)
    append_kv(want, slots, k, v)
    assert kv.equal(want)
    for back, rows in zip(gather_kv(kv, slots, backend=INTERPRET), (k, v), strict=True):
        assert back.equal(rows.to(kv_dtype))


def test_offsets_past_32_bits():
    """Two blocks of a cache that are 2^31 numbers apart; the memory between them is never touched."""
    kv = torch.empty(2**27 + 1, 1, 2, 1, 16, dtype=BF16)
    kv[0], kv[2**27] = 1, 3
    table, lengths = torch.tensor([[2**27]], dtype=torch.int32), torch.tensor([1])
    assert decode_attention(torch.ones(1, 1, 16).bfloat16(), kv, table, lengths, backend=INTERPRET).eq(3).all()
    assert gather_kv(kv, torch.tensor([2**27]), backend=INTERPRET)[1].eq(3).all()
