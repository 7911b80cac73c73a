"""Attention in torch behind the doors of the Triton kernels: against float64, the CPU's kernel, and what it refuses."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import kernels_cpu
from kernels_triton import (
    append_kv,
    decode_attention,
    decode_attention_work,
    gather_kv,
    mla_decode,
    mla_decode_work,
    prefill_attention,
    prefill_attention_work,
)
from tests.examples import examples
from tests.kernels.attention_at_hand import (
    check_decode,
    check_mla_decode,
    check_prefill,
    decodes,
    latents,
    prompts,
    with_prefix,
)
from workbench import kernels

DTYPES = [torch.float32, torch.float16, torch.bfloat16]
LENGTHS = st.lists(st.integers(0, 19), max_size=4)


def options(heads):
    return st.fixed_dictionaries(
        {},
        optional={
            "window": st.integers(1, 25),
            "softcap": st.sampled_from([2.0, 30.0]),
            "sinks": st.just(torch.linspace(-2, 2, heads)),
            "scale": st.just(0.3),
        },
    )


@examples(30)
@given(LENGTHS, options(4), st.sampled_from(DTYPES), st.data())
def test_prefill_agrees_with_float64(lengths, given, dtype, data):
    case = prompts(lengths, 4, 2, 16, dtype) | given
    if data.draw(st.booleans()):
        case = with_prefix(case, [data.draw(st.sampled_from([0, 1, 3, 4, 5, 9])) for _ in lengths], b=4)
    check_prefill(case, "torch")


@examples(30)
@given(LENGTHS, options(6), st.sampled_from(DTYPES), st.sampled_from(DTYPES))
def test_decode_agrees_with_float64(lengths, given, dtype, kv_dtype):
    case = decodes(lengths, 6, 2, 4, 16, dtype, kv_dtype, given.get("window"))
    check_decode(case | given, "torch")


@examples(20)
@given(LENGTHS, st.sampled_from([(24, 16), (16, 16), (20, 3)]), st.sampled_from(DTYPES), st.sampled_from(DTYPES))
def test_decodes_of_latents_agree_with_float64(lengths, dims, dtype, kv_dtype):
    check_mla_decode(latents(lengths, 3, 4, *dims, dtype, kv_dtype), "torch")


BAD_LATENTS = [
    ({"kv": lambda kv: kv[:, None]}, ValueError, r"kv must be \(P, b, 24\), not"),
    ({"kv": lambda kv: kv.double()}, TypeError, "kv must be float32 or float16 or bfloat16"),
    ({"table": lambda t: t * 0 - 1}, ValueError, r"table\[0, 0\] must be a block of kv in \[0, 4\), not -1"),
    ({"lengths": lambda n: n + 9}, ValueError, r"lengths\[0\] must be in \[0, 4\], not 13"),
]


@pytest.mark.parametrize("change, kind, message", BAD_LATENTS)
def test_a_decode_of_latents_names_a_bad_operand_and_its_mend(change, kind, message):
    case = latents([4, 3], 2, 4, 24, 16, torch.float32)
    for name, make in change.items():
        case[name] = make(case[name])
    with pytest.raises(kind, match=message):
        mla_decode(**case)


@pytest.mark.parametrize(
    "option, kind, message",
    [
        ({"value_dim": 25}, ValueError, r"value_dim must be in 1 \.\. 24"),
        ({"value_dim": 4.0}, TypeError, r"value_dim must be a whole number, not 4\.0"),
        ({"value_dim": True}, TypeError, "value_dim must be a whole number, not True"),
        ({"scale": None}, TypeError, "scale must be a number, not None"),
        ({"scale": float("inf")}, ValueError, "scale must be finite, not inf: pass the factor"),
    ],
)
def test_options_of_latents_are_checked_by_every_door(option, kind, message):
    for decode in (mla_decode, kernels.mla_decode):
        with pytest.raises(kind, match=message):
            decode(**latents([4, 3], 2, 4, 24, 16, torch.float32) | option)


def test_the_cpus_kernels_share_the_cache():
    """What the CPU appended and attends to is what the GPU's doors read, block for block."""
    kv, table = torch.zeros(7, 2, 2, 4, 16, dtype=torch.bfloat16), torch.tensor([[5, 2], [0, 6]], dtype=torch.int32)
    slots = torch.cat([table[:, 0].long().repeat_interleave(4) * 4 + torch.arange(8) % 4, table[:, 1].long() * 4])
    k, v = torch.randn(2, 10, 2, 16)
    kernels_cpu.append_kv(kv, slots, k, v)
    other = torch.zeros_like(kv)
    append_kv(other, slots, k, v)
    assert kv.equal(other)
    assert gather_kv(kv, slots)[0].equal(k.bfloat16())
    q, lengths = torch.randn(2, 4, 16), torch.tensor([5, 5])
    want = kernels_cpu.decode_attention(q, kv, table, lengths)
    torch.testing.assert_close(decode_attention(q, kv, table, lengths), want)


BAD_PREFILL = [
    ({"q": lambda q: q[0]}, ValueError, r"q must be \(T, heads, dim\)"),
    (dict.fromkeys("qkv", lambda x: x[:, :, :8]) | {"backend": lambda _: "triton-interpret"}, ValueError, "dim >= 16"),
    ({"q": lambda q: q.double()}, TypeError, "q must be fp32, fp16 or bf16"),
    ({"k": lambda k: k.half()}, ValueError, "k must be torch.float32 on cpu as q"),
    ({"v": lambda v: v[:-1]}, ValueError, r"k and v must be \(S, K, 16\)"),
    ({"starts": lambda s: s.float()}, TypeError, "starts must be int32 or int64"),
    ({"starts": lambda s: s + 1}, ValueError, "starts must rise from 0 to 7"),
    ({"key_starts": lambda _: torch.tensor([0, 2, 7])}, ValueError, "as many keys as queries"),
    ({"window": lambda _: 0}, ValueError, "window must be >= 1"),
    ({"softcap": lambda _: 0.0}, ValueError, "softcap must be positive"),
    ({"scale": lambda _: float("nan")}, ValueError, "scale must be finite"),
    ({"sinks": lambda _: torch.zeros(3)}, ValueError, r"sinks must be \(4,\)"),
    ({"backend": lambda _: "triton"}, ValueError, "backend 'triton' needs GPU tensors"),
]


@pytest.mark.parametrize("change, kind, message", BAD_PREFILL)
def test_prefill_names_a_bad_operand_and_its_mend(change, kind, message):
    case = prompts([4, 3], 4, 2, 16, torch.float32)
    for name, make in change.items():
        case[name] = make(case.get(name))
    with pytest.raises(kind, match=message):
        prefill_attention(**case)


BAD_DECODE = [
    ({"kv": lambda kv: kv[:, :, :1]}, ValueError, r"kv must be \(P, K, 2, b, 16\)"),
    ({"kv": lambda kv: kv.double()}, TypeError, "kv must be float32 or float16 or bfloat16"),
    ({"table": lambda t: t.long()}, TypeError, "table must be int32"),
    ({"table": lambda t: t[:1]}, ValueError, r"table must be \(2, W\)"),
    ({"table": lambda t: t * 0 - 1}, ValueError, r"table\[0, 0\] must be a block of kv in \[0, 4\), not -1"),
    ({"lengths": lambda n: n + 9}, ValueError, r"lengths\[0\] must be in \[0, 4\], not 13"),
]


@pytest.mark.parametrize("change, kind, message", BAD_DECODE)
def test_decode_names_a_bad_operand_and_its_mend(change, kind, message):
    case = decodes([4, 3], 4, 2, 4, 16, torch.float32)
    for name, make in change.items():
        case[name] = make(case.get(name))
    with pytest.raises(kind, match=message):
        decode_attention(**case)


def test_slots_that_do_not_exist_are_refused():
    kv, rows = torch.zeros(2, 1, 2, 4, 16), torch.zeros(1, 1, 16)
    with pytest.raises(ValueError, match=r"slots must be in \[0, 8\)"):
        append_kv(kv, torch.tensor([8]), rows, rows)


def test_rows_of_the_same_cache_and_slots_that_occur_twice_are_refused():
    kv, slots = torch.zeros(2, 1, 2, 4, 16), torch.tensor([1, 1])
    with pytest.raises(ValueError, match=r"slots must differ, not \[1, 1\]: pass"):
        append_kv(kv, slots, torch.zeros(2, 1, 16), torch.zeros(2, 1, 16))
    with pytest.raises(ValueError, match=r"kv must not overlap v, .*: pass a copy of v"):
        append_kv(kv, slots[:1], torch.zeros(1, 1, 16), kv[:1, :, 1, 0])


def test_declared_work():
    flops, moved = prefill_attention_work(4, 2, 16, 8, pairs=6, queries=3, keys=3, itemsize=2)
    assert flops == 6 * 4 * 2 * (16 + 8)
    assert moved == 2 * 3 * (4 * (16 + 8) + 2 * (16 + 8))
    flops, moved = decode_attention_work(4, 2, 16, context=10, rows=3, kv_itemsize=2, itemsize=4)
    assert flops == 10 * 4 * 2 * (16 + 16)
    assert moved == 10 * 2 * 2 * 16 * 2 + 4 * 3 * 4 * 2 * 16
    flops, moved = mla_decode_work(4, 24, 16, context=10, rows=3, kv_itemsize=2, itemsize=4)
    assert flops == 10 * 4 * 2 * (24 + 16)
    assert moved == 10 * 24 * 2 + 4 * 3 * 4 * (24 + 16)
