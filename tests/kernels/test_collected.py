"""The door is what the kernel packages declare: a new operation is in it at once, and in the laws' table or missed."""

import importlib.util
import inspect
import json
import pickle
import subprocess
import sys
from pathlib import Path
from random import Random

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import kernels_cpu
import kernels_triton
from tests.kernels import doors
from tests.kernels.attention_at_hand import decodes
from tests.kernels.doors import SAME, Door, numbers
from tests.kernels.experts_at_hand import layer
from tests.kernels.law_of_doors import check, drawn
from workbench import kernels
from workbench.kernels import collected

ROOT = Path(__file__).parents[2]
HALVE = """
import torch
from kernels_triton.declarations import operation, reference_of, work_of


@operation
def halve(x: torch.Tensor) -> torch.Tensor:
    \"\"\"Half of each number.\"\"\"
    if not isinstance(x, torch.Tensor):
        raise TypeError(f"x must be a torch tensor, not {type(x).__name__}: pass torch.as_tensor(x).")
    if not x.is_floating_point():
        raise TypeError(f"x must be floats, not {x.dtype}: convert it.")
    return x / 2


@work_of(halve)
def halve_work(rows: int, itemsize: int) -> tuple[int, int]:
    return rows, 2 * itemsize * rows


@reference_of(halve)
def halve_reference(x: torch.Tensor) -> torch.Tensor:
    return x.double() / 2
"""


@pytest.fixture
def halve(tmp_path, monkeypatch):
    """A kernel of one file, imported; what it declares is forgotten afterwards."""
    declarations = sys.modules["kernels_triton.declarations"]
    for name in ("_OPERATIONS", "_PUBLIC"):
        monkeypatch.setattr(declarations, name, dict(getattr(declarations, name)))
    (tmp_path / "halve.py").write_text(HALVE)
    spec = importlib.util.spec_from_file_location("halve", tmp_path / "halve.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_a_new_operation_is_in_the_door_with_work_and_reference(halve):
    assert {"halve", "halve_work", "halve_reference"} <= {*kernels.__all__} & {*dir(kernels)}
    door = collected.doors()["halve"]
    assert (door.work, door.reference) == (halve.halve_work, kernels.halve_reference)
    assert inspect.unwrap(door.reference) is halve.halve_reference
    assert kernels.halve(torch.ones(2)).tolist() == [0.5, 0.5]
    np.testing.assert_array_equal(kernels.halve(np.ones(2, np.float32)), np.full(2, 0.5, np.float32))


def test_a_new_operation_is_missed_by_name_until_the_laws_meet_it(halve, monkeypatch):
    assert doors.without_a_door() == ["kernels_triton.halve"]
    door = Door(
        lambda random: {"x": numbers(random, torch.float32, 3)},
        kernels.halve,
        lambda x: (halve.halve_reference(x),),
        SAME,
        kinds=("tensor", "array"),
    )
    monkeypatch.setitem(doors.DOORS, "halve", door)
    assert doors.without_a_door() == []
    assert check(drawn(door, Random(1), wrong=0)) == "answer"


def test_both_wrappers_of_an_operation_are_missed(monkeypatch):
    monkeypatch.delitem(doors.DOORS, "kernels_cpu.rope")
    assert doors.without_a_door() == ["kernels_cpu.rope"]


@pytest.mark.parametrize("package", ["kernels_cpu", "kernels_triton"])
def test_a_name_is_declared_once(package, halve):
    declarations = sys.modules[f"{package}.declarations"]
    declared = dict(declarations.operations())

    def rope(x):
        return x

    for declare in (declarations.operation, declarations.public, declarations.work_of(declared["rope"].call)):
        with pytest.raises(ValueError, match=rf"rope must be declared once, not in {package}\.rows\.rope and in tests"):
            declare(rope)
    assert declarations.operations() == declared


def test_what_is_no_longer_declared_is_gone():
    assert "halve" not in kernels.__all__
    with pytest.raises(AttributeError, match=r"'workbench\.kernels' has no attribute 'halve'"):
        _ = kernels.halve


def test_an_operation_has_one_name_and_internals_none():
    gone = {"flash_decode", "expert_mlp", "scatter_kv", "tuning", "timed", "side_by_side", "operation", "collected"}
    assert gone.isdisjoint(kernels.__all__)
    assert dir(kernels) == kernels.__all__ == sorted(set(kernels.__all__))
    own = {}
    exec("from workbench.kernels import *", own)
    assert set(kernels.__all__) == set(own) - {"__builtins__"}


def test_every_operation_of_both_packages_chooses_by_the_operands():
    both = [door for door in collected.doors().values() if door.on_cpu and door.on_gpu]
    assert {door.name for door in both} >= {"decode_attention", "fused_moe", "append_kv", "rms_norm"}
    for door in both:
        assert door.call.__module__.startswith("workbench.kernels."), door.name


def test_both_packages_declare_in_the_same_way():
    texts = {(ROOT / package / "declarations.py").read_text() for package in ("kernels_cpu", "kernels_triton")}
    assert len(texts) == 1


@pytest.mark.parametrize("name", ["decode_attention", "fused_moe"])
@given(st.tuples(*[st.integers(1, 4096)] * 5), st.sampled_from([2, 4]), st.sampled_from([2, 4]))
def test_both_packages_declare_the_same_work(name, sizes, stored, itemsize):
    cpu, gpu = (package.operations()[name].work for package in (kernels_cpu, kernels_triton))
    assert cpu(*sizes, stored, itemsize) == gpu(*sizes, stored, itemsize)


def test_importing_the_door_is_light_and_arrays_need_no_torch():
    code = (
        "import json, sys; from workbench import kernels; import numpy as np; loaded = lambda: sorted("
        "{'torch', 'triton', 'numba'} & {name.partition('.')[0] for name in sys.modules}); first = loaded();"
        "kernels.decode_attention(np.ones((1, 1, 2), np.float32), np.zeros((1, 1, 2, 4, 2), np.float32),"
        "np.zeros((1, 1), np.int32), np.ones(1, np.int64)); print(json.dumps([first, loaded()]))"
    )
    run = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    assert json.loads(run.stdout) == [[], ["numba"]]


def test_decodes_are_numbas_bit_for_bit_with_its_arguments_and_without():
    case = decodes([3, 9], 6, 2, 4, 16, torch.float32)
    q = case["q"].contiguous()
    case = {name: value for name, value in case.items() if name not in ("q", "window")}
    want, out = kernels_cpu.decode_attention(q, **case), torch.empty_like(q)
    assert kernels.decode_attention(q, **case).equal(want)
    assert kernels.decode_attention(q, **case, threads=1, out=out) is out
    assert out.equal(want)
    arrays = {name: value.numpy() for name, value in case.items()}
    np.testing.assert_array_equal(kernels.decode_attention(q.numpy(), **arrays), want.numpy())


def test_arrays_of_sixteen_bits_and_empty_sequences_are_answered_as_tensors_are():
    case = decodes([3, 0, 9], 6, 2, 4, 16, torch.bfloat16)
    case = {name: value.contiguous() for name, value in case.items() if name != "window"}
    found = kernels.decode_attention(
        **{
            name: (value.view(torch.uint16) if value.dtype is torch.bfloat16 else value).numpy()
            for name, value in case.items()
        }
    )
    assert torch.from_numpy(found).view(torch.bfloat16).equal(kernels.decode_attention(**case))


def _decode(**more):
    case = decodes([3], 6, 2, 4, 16, torch.float32) | more
    return kernels.decode_attention(**case)


def _on_meta(**more):
    case = {name: own.to("meta") for name, own in decodes([3], 6, 2, 4, 16, torch.float32).items() if name != "window"}
    return kernels.decode_attention(**case, **more)


def _layer(packed, **more):
    case = layer(2, 64, 32, 3, 2, torch.bfloat16)
    pair = case.pop("gate_up"), case.pop("down")
    x = case.pop("x")
    experts = kernels.pack_experts(*pair) if packed else pair
    return kernels.fused_moe(x.float() if packed else x, experts, **case, **more)


REFUSED = {
    "threads on another device": (lambda: _on_meta(threads=1), "threads must be left out for tensors on meta, .*: "),
    "out on another device": (lambda: _on_meta(out=torch.ones(1, 6, 16)), "out must be left out for tensors on meta"),
    "a backend and threads": (lambda: _decode(threads=1, backend="torch"), "backend must be left out for a call with"),
    "pages of packed experts": (lambda: _layer(True, pages=torch.arange(3)), "pages must be left out for packed"),
    "another activation": (
        lambda: _layer(True, activation="geglu"),
        "activation must be .* for packed experts, not 'geglu': give",
    ),
    "threads of matrices": (lambda: _layer(False, threads=1), "threads must be left out for experts that are not"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_a_kernel_cannot_do_is_refused_in_one_sentence(name):
    call, message = REFUSED[name]
    with pytest.raises(ValueError, match=message):
        call()


def test_experts_are_packed_or_a_pair():
    with pytest.raises(
        TypeError, match=r"experts must be PackedExperts, NodeExperts or a pair \(gate_up, down\), not Te"
    ):
        kernels.fused_moe(torch.ones(1, 2), torch.ones(1, 2, 2), torch.zeros(1, 1).long(), torch.ones(1, 1))


def test_results_have_memory_of_their_own(tmp_path):
    np.ones(4, np.float32).tofile(tmp_path / "weights")
    weights = np.memmap(tmp_path / "weights", np.float32, "r", shape=(1, 2, 2))
    found = kernels.dequantise(weights, torch.float32)
    assert not np.may_share_memory(found, weights)
    found[:] = 2
    assert weights.tolist() == [[[1, 1], [1, 1]]]


def _mixed(**arrays):
    case = layer(2, 64, 32, 3, 2, torch.float32)
    pair = case.pop("gate_up"), case.pop("down")
    return kernels.fused_moe(**case | arrays, experts=pair)


def test_arrays_among_tensors_of_a_pair_are_refused_by_name():
    ids, x = np.zeros((2, 2), np.int64), torch.ones(2, 64)
    for tokens in (x, x.clone().requires_grad_()):
        with pytest.raises(TypeError, match="ids must be a torch tensor, not ndarray: pass"):
            _mixed(x=tokens, ids=ids)
    with pytest.raises(TypeError, match="x must be a torch tensor, not ndarray: pass"):
        _mixed(x=x.numpy())


def test_half_an_array_among_tensors_is_refused_by_name():
    with pytest.raises(TypeError, match="x must be a torch tensor, not ndarray: pass"):
        kernels.rms_norm(np.ones((2, 4), np.float16), torch.ones(4).half())


def test_a_door_is_one_function_that_pickle_finds():
    for name in collected.doors():
        door = getattr(kernels, name)
        assert door is getattr(kernels, name), name
        assert pickle.loads(pickle.dumps(door)) is door, name
    assert pickle.loads(pickle.dumps(kernels.route_reference)) is kernels.route_reference


ASKING = torch.ones(1, 1, 1, requires_grad=True)


@pytest.mark.parametrize("backend", [None, "torch"])
def test_a_cache_takes_no_row_that_asks_for_a_gradient_and_names_it(backend):
    with pytest.raises(ValueError, match=r"k must ask for no gradient, .*: pass k\.detach\(\)"):
        kernels.append_kv(torch.zeros(1, 1, 2, 4, 1), torch.tensor([1]), ASKING, ASKING.detach(), backend=backend)


def test_a_result_of_a_type_that_numpy_lacks_is_refused():
    with pytest.raises(
        TypeError, match=r"weight must be a torch tensor for a result of torch\.float8_e4m3fn, .*: pass"
    ):
        kernels.quantise(np.ones((1, 2, 2), np.float32), torch.float8_e4m3fn)


def test_a_backend_takes_arrays_as_tensors_of_the_cpu():
    x, weight = np.full((2, 4), 3, np.float32), np.ones(4, np.float32)
    np.testing.assert_allclose(kernels.layer_norm(x + weight, weight, backend="torch"), np.zeros((2, 4)), atol=1e-3)
    np.testing.assert_allclose(kernels.rms_norm(x, weight, backend="torch"), np.ones((2, 4)), rtol=1e-5)
    with pytest.raises(ValueError, match=r"backend.* needs GPU tensors|backend must"):
        kernels.rms_norm(x, weight, backend="triton")
    kv, one = np.zeros((1, 1, 2, 4, 1), np.float32), np.ones((1, 1, 1), np.float32)
    kernels.append_kv(kv, np.array([2]), one, one, backend="torch")
    assert kv.ravel().tolist() == [0, 0, 1, 0] * 2
    kv.flags.writeable = False
    with pytest.raises(ValueError, match="kv must be writeable"):
        kernels.append_kv(kv, np.array([2]), one, one, backend="torch")


def test_references_take_what_their_doors_take():
    x, weight = np.arange(8, dtype=np.float32).reshape(2, 4), np.ones(4, np.float32)
    for call, operands in (("rms_norm", (x, weight)), ("layer_norm", (x, weight)), ("gated", (x,)), ("route", (x, 2))):
        found, want = getattr(kernels, call)(*operands), getattr(kernels, f"{call}_reference")(*operands)
        for one, other in zip(found, want, strict=True):
            assert isinstance(other, np.ndarray)
            np.testing.assert_allclose(one, other, rtol=1e-5)
    turned = x[:, None], np.array([0, 1]), kernels.rope_table(4, 2).numpy()
    np.testing.assert_allclose(kernels.rope(*turned), kernels.rope_reference(*turned), rtol=1e-5)
