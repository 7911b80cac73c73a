"""The project's kernels on a tensor of the simulated device: each is one piece of work, with the host's results."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from kernels_triton import Draws, Prefix
from tests.device.rehearsal import rehearsed
from tests.device.streams import Adversary
from workbench import kernels

T, B, H, K, D, M, F, E, P, V = 5, 2, 4, 2, 16, 32, 8, 6, 6, 11
BLOCK = 4

RANDOM = torch.Generator().manual_seed(0)


def drawn(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=RANDOM)


LOGITS = drawn(3, V)
KV = drawn(P, K, 2, BLOCK, D)
TABLE = torch.tensor([[1, 3], [2, 0]], dtype=torch.int32)
LENGTHS = torch.tensor([7, 3])
SLOTS = torch.tensor([3, 9, 17, 4, 20])
IDS = torch.tensor([[0, 1], [2, 3], [4, 5], [1, 3], [5, 0]], dtype=torch.int32)
HEADS = drawn(T, H, D), drawn(T, K, D), drawn(T, K, D), torch.tensor([0, 2, 5])
DRAWS = (
    torch.tensor([0.0, 1.0, 0.7]).double(),
    torch.tensor([0, 5, 3]),
    torch.full((3,), 0.9).double(),
    torch.zeros(3).double(),
    torch.tensor([1, 2, 3]),
    torch.tensor([0, 1, 2]),
)


def appended(kv: torch.Tensor, *rows: torch.Tensor, backend: str | None) -> torch.Tensor:
    kernels.append_kv(kv, *rows, backend=backend)
    return kv


Kernel = Callable[..., Any]
CALLS: dict[str, tuple[Kernel, tuple[torch.Tensor, ...]]] = {
    "rms_norm": (kernels.rms_norm, (drawn(T, M), drawn(M))),
    "add_rms_norm": (kernels.add_rms_norm, (drawn(T, M), drawn(T, M), drawn(M))),
    "layer_norm": (kernels.layer_norm, (drawn(T, M), drawn(M), drawn(M))),
    "linear": (lambda *operands, backend: kernels.linear(*operands), (drawn(T, M), drawn(F, M), drawn(F))),
    "rope": (kernels.rope, (drawn(T, H, D), torch.arange(T), kernels.rope_table(D, T))),
    "gated": (kernels.gated, (drawn(T, 2 * F),)),
    "route": (lambda logits, backend: kernels.route(logits, 2, renormalise=True, backend=backend), (drawn(T, E),)),
    "fused_moe": (
        lambda x, gate_up, down, *chosen, backend: kernels.fused_moe(x, (gate_up, down), *chosen, backend=backend),
        (drawn(T, M), drawn(E, 2 * F, M), drawn(E, M, F), IDS, drawn(T, 2).abs()),
    ),
    "prefill_attention": (kernels.prefill_attention, HEADS),
    "prefill_attention with a prefix": (
        lambda q, k, v, starts, *prefix, backend: kernels.prefill_attention(
            q, k, v, starts, prefix=Prefix(*prefix), backend=backend
        ),
        (*HEADS, KV, TABLE, LENGTHS),
    ),
    "decode_attention": (kernels.decode_attention, (drawn(B, H, D), KV, TABLE, LENGTHS)),
    "mla_decode": (
        lambda *operands, backend: kernels.mla_decode(*operands, value_dim=9, scale=0.2, backend=backend),
        (drawn(B, H, D), KV[:, 0, 0].contiguous(), TABLE, LENGTHS),
    ),
    "append_kv": (appended, (KV, SLOTS, drawn(T, K, D), drawn(T, K, D))),
    "gather_kv": (kernels.gather_kv, (KV, SLOTS)),
    "embed": (kernels.embed, (torch.tensor([1, 0, 2]), drawn(V, M))),
    "sampled_logits": (kernels.sampled_logits, (drawn(T, M), torch.tensor([0, 3]), drawn(V, M))),
    "sample": (kernels.sample, (LOGITS,)),
    "sample with draws": (
        lambda logits, *draws, backend: kernels.sample(logits, Draws(*draws), backend=backend),
        (LOGITS, *DRAWS),
    ),
}


@pytest.mark.parametrize("name", CALLS)
def test_a_kernel_computes_what_torch_does_on_the_host(name):
    call, operands = CALLS[name]
    with torch.no_grad():
        expected = call(*(operand.clone() for operand in operands), backend="torch")
        driver = rehearsed(Adversary())
        with driver.stream("gpu").issuing():
            there = [operand.to(driver.device) for operand in operands]
            before = driver.cuda.queues.worked
            driver.cuda.memory.waits.clear()
            found = call(*there, backend=None)
            assert (driver.waits, driver.cuda.queues.worked) == ({}, before)
            for one, other in zip(listed(found), listed(expected), strict=True):
                torch.testing.assert_close(one.cpu(), other)


def listed(result: torch.Tensor | tuple[torch.Tensor, ...]) -> list[torch.Tensor]:
    return [result] if isinstance(result, torch.Tensor) else list(result)
