"""Packed copies of weights that are used again and again: when they are made, out of date, and freed."""

import gc
import weakref

import pytest
import torch

import kernels_cpu
from kernels_triton import fused_moe_reference
from tests.kernels.experts_at_hand import LIMITS, error, layer, paged
from workbench import kernels
from workbench.hardware import FreeMemory
from workbench.kernels import cpu_twins, packed_copies

BF16 = torch.bfloat16
OFTEN = packed_copies._CALLS + 2
pytestmark = pytest.mark.skipif(not cpu_twins._VECTORS, reason="Numba's kernel takes torch's weights with vectors only")


@pytest.fixture(autouse=True)
def made(monkeypatch):
    """Weak references to the copies that are made; the computer has memory to spare."""
    copies, pack = [], packed_copies.pack_experts

    def packed(*weights):
        found = pack(*weights)
        copies.append(weakref.ref(found))
        return found

    monkeypatch.setattr(packed_copies, "pack_experts", packed)
    monkeypatch.setattr(packed_copies, "free_memory", lambda: FreeMemory(1e12, 1e12, "this computer"))
    return copies


def call(gate_up, down, **case):
    return kernels.fused_moe(experts=(gate_up, down), **case)


def called_often(case):
    for _ in range(OFTEN):
        found = call(**case)
    return found


def case_of(seed=0):
    return layer(9, 64, 96, 4, 2, BF16, seed)


def right(found, case):
    return error(found, fused_moe_reference(**case)) <= LIMITS[BF16]


def test_weights_that_stay_are_packed_once(made):
    case = case_of()
    for _ in range(packed_copies._CALLS):
        call(**case)
    assert not made
    assert right(called_often(case), case)
    assert len(made) == 1


@pytest.mark.parametrize(("for_many", "copies"), [(True, 1), (False, 0)])
def test_many_tokens_take_the_copy_where_it_is_faster_than_torch(for_many, copies, made, monkeypatch):
    """In place they take torch, as the calls do before there is a copy."""
    taken = []

    def in_numba(x, experts, *rest, **options):
        taken.append(experts)
        return compute(x, experts, *rest, **options)

    compute = kernels_cpu.fused_moe
    monkeypatch.setattr(kernels_cpu, "fused_moe", in_numba)
    monkeypatch.setattr(cpu_twins, "_MOST", 0)
    monkeypatch.setattr(cpu_twins, "_COPY_FOR_MANY", for_many)
    case = case_of()
    assert right(called_often(case), case)
    assert len(made) == copies
    assert taken == [made[0]() if made else None] * copies * (OFTEN - packed_copies._CALLS)


def test_layers_of_one_tensor_have_their_own_copies(made):
    first, second = case_of(0), case_of(1)
    whole = {name: torch.stack((first[name], second[name])) for name in ("gate_up", "down")}
    cases = [case | {name: whole[name][at] for name in whole} for at, case in enumerate((first, second))]
    found = [called_often(case) for case in cases]
    assert len(made) == 2
    assert all(map(right, found, cases))


WRITES = {
    "torch": lambda w: w.mul_(-1),
    "one row by torch": lambda w: w[:, 0].mul_(-1),
    "data": lambda w: w.data.mul_(-1),
    "numpy": lambda w: w.view(torch.int16).numpy().__ixor__(-(2**15)),
    "storage": lambda w: torch.tensor([], dtype=BF16).set_(w.untyped_storage()).mul_(-1),
}


@pytest.mark.parametrize("name", ["gate_up", "down"])
@pytest.mark.parametrize("write", WRITES)
def test_a_write_puts_a_copy_out_of_date(write, name, made):
    case = case_of()
    before = called_often(case)
    WRITES[write](case[name])
    after = call(**case)
    assert right(after, case)
    assert not torch.equal(before, after)
    assert made[0]() is None
    assert right(called_often(case), case)
    assert len(made) == 2


@pytest.mark.parametrize("name", ["gate_up", "down"])
def test_one_expert_that_is_overwritten_unseen_is_noticed(name):
    case = case_of()
    called_often(case)
    case[name][case["ids"][0, 0]].data.mul_(-1)
    assert right(call(**case), case)


@pytest.mark.parametrize("name", ["gate_up", "down"])
def test_an_expert_that_is_overwritten_unseen_is_noticed_when_it_is_used(name, made):
    case = layer(1, 64, 96, 9, 2, BF16, 0)
    used, other = case | {"ids": torch.tensor([[0, 1]])}, case | {"ids": torch.tensor([[1, 5]])}
    called_often(used)
    case[name][5].data.mul_(-1)
    assert right(call(**used), used)
    assert made[0]() is not None
    assert right(call(**other), other)
    assert made[0]() is None


def test_an_expert_out_of_range_is_told_by_the_kernel():
    case = layer(1, 64, 96, 9, 2, BF16, 0)
    called_often(case)
    with pytest.raises(ValueError, match=r"ids.* 9"):
        call(**case | {"ids": torch.tensor([[0, 9]])})


@pytest.mark.parametrize("name", ["gate_up", "down"])
def test_a_copy_goes_with_the_weights(name, made):
    case = case_of()
    called_often(case)
    assert made[0]() is not None
    del case[name]
    gc.collect()
    assert made[0]() is None


def test_nothing_is_packed_without_memory_to_spare(made, monkeypatch):
    monkeypatch.setattr(packed_copies, "free_memory", lambda: FreeMemory(0.5e12, 1e12, "this computer"))
    case = case_of()
    assert right(called_often(case), case)
    assert not made
    monkeypatch.setattr(packed_copies, "free_memory", lambda: FreeMemory(0.6e12, 1e12, "this computer"))
    called_often(case)
    assert len(made) == 1


def test_pages_and_tensors_of_inference_mode_are_used_in_place(made):
    called_often(paged(case_of()))
    with torch.inference_mode():
        case = case_of()
        called_often(case)
        assert right(call(**case), case)
    assert not made
