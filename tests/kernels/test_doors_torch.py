"""Every door keeps its word to torch and numpy: what autograd, torch.compile, FakeTensor, vmap and arrays get of it.

Each is float64's answer, or the same as outside of them, or an error of ours.
"""

import inspect
import re
import traceback
from random import Random
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch._subclasses import FakeTensorMode
from torch.autograd.forward_ad import dual_level, make_dual, unpack_dual
from torch.utils._pytree import tree_flatten, tree_unflatten

import kernels_cpu
from kernels_triton.backend.operators import requires_gradient
from tests.examples import examples
from tests.kernels.doors import BF16, DOORS, FLOATS, FP16, WAYS_TO_PACK, Door, Operands
from tests.kernels.law_of_doors import OURS
from workbench import kernels
from workbench.kernels import collected

DRAWS = 4
"""Drawn calls per door and law."""
TENSORS = [name for name, door in DOORS.items() if "tensor" in door.kinds and name != "rope_table"]
GIVES = {"rms_norm", "add_rms_norm", "layer_norm", "gated", "rope", "decode_attention", "prefill_attention"}
GIVES |= {"gather_kv", "fused_moe", "grouped_gemm", "route", "with_shared", "embed", "sampled_logits", "dequantise"}
GIVES |= {"penalise", "logprobs", "linear", "mla_decode"}
"""Doors that give gradients; every other one refuses, or has none to give."""
TRACED = GIVES | {"append_kv", "sample", "quantise"}
"""Doors that torch.compile, FakeTensor and vmap go through; every other one refuses."""


def together(door: Door, random: Random) -> Operands:
    """Operands without a slot that occurs twice."""
    while True:
        operands = door.draw(random)
        slots = operands.get("slots", torch.empty(0))
        if not door.written or len(slots.unique()) == len(slots):
            return operands


def drawn(door: Door, random: Random) -> Operands:
    """Operands that go together and have numbers."""
    for _ in range(50):
        operands = together(door, random)
        if all(leaf.numel() for leaf in tree_flatten(operands)[0] if isinstance(leaf, torch.Tensor)):
            return operands | ({"dtype": torch.float32} if "dtype" in operands else {})
    raise AssertionError("no draw has a row")


def with_leaves(operands: Operands, change) -> Operands:
    """The same with every tensor changed."""
    leaves, tree = tree_flatten(operands)
    return tree_unflatten([change(leaf) if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves], tree)


def copied(operands: Operands) -> Operands:
    """The same in memory of its own."""
    return with_leaves(operands, lambda leaf: leaf.detach().clone())


def answer(door: Door, operands: Operands) -> tuple[torch.Tensor, ...]:
    """What is returned and written."""
    found = door.call(**operands)
    several = () if found is None else found if isinstance(found, tuple) else (found,)
    several = tuple(torch.as_tensor(part) for part in several)
    return (*several, *(operands[name] for name in sorted(door.written) if operands.get(name) is not None))


def or_our_error(work) -> Any:
    """What `work` returns; None where it raises an error of ours."""
    try:
        return work()
    except (TypeError, ValueError) as error:
        last = traceback.extract_tb(error.__traceback__)[-1]
        ours = last.filename.startswith(OURS) and (last.line or "").startswith("raise ")
        if not ours or not re.search(r"( must | takes ).*: ", str(error), re.DOTALL):
            raise
        return None


def differentiable(leaf: Any) -> bool:
    return isinstance(leaf, torch.Tensor) and leaf.dtype in FLOATS


def gradients(results, sources: list[torch.Tensor], random: Random) -> list[torch.Tensor] | None:
    """Of the results' products with drawn numbers; None where no result has any."""
    generator = torch.Generator().manual_seed(random.getrandbits(32))
    weights = [torch.randn(part.shape, generator=generator, dtype=torch.float64) for part in results]
    met = [(part * weight).sum() for part, weight in zip(results, weights, strict=True) if part.requires_grad]
    return list(torch.autograd.grad(sum(met), sources, materialize_grads=True)) if met else None


def limit(leaves: list[torch.Tensor]) -> float:
    """Of gradients, by the narrowest type."""
    dtypes = {leaf.dtype for leaf in leaves}
    return 5e-2 if BF16 in dtypes else 1e-2 if FP16 in dtypes else 1e-4


def check_gradients(door: Door, name: str, operands: Operands, seed: int, call) -> None:
    """`call` of operands that ask for gradients gives those of float64."""
    leaves, tree = tree_flatten(operands)
    asking = [leaf.detach().clone().requires_grad_() if differentiable(leaf) else leaf for leaf in leaves]
    exact = [leaf.detach().clone().requires_grad_() if differentiable(leaf) else leaf for leaf in leaves]
    sources = [at for at, leaf in enumerate(leaves) if differentiable(leaf)]
    found = or_our_error(lambda: call(tree_unflatten(asking, tree)))
    assert found is not None or name not in GIVES, "refused"
    if found is None or not sources:
        return
    got = gradients(found, [asking[at] for at in sources], Random(seed))
    own = dict(zip(operands, operands, strict=True))
    wide = {key: value for key, value in tree_unflatten(exact, tree).items() if key in own and key != "backend"}
    want = gradients(door.formula(**wide), [exact[at] for at in sources], Random(seed))
    assert (got is None) == (want is None), "gradients are lost"
    if got is None or want is None:
        return
    least = 0.3 * max(float(part.norm()) for part in want)
    for one, other in zip(got, want, strict=True):
        error = float((one.double() - other).norm()) / max(float(other.norm()), least, 1e-2)
        assert error <= limit([leaves[at] for at in sources]), f"error {error:.2g} of {tuple(one.shape)}"


@pytest.mark.parametrize("name", TENSORS)
@examples(DRAWS)
@given(st.integers(0, 2**32))
def test_gradients_are_those_of_float64_or_refused(name, seed):
    door = DOORS[name]
    check_gradients(door, name, drawn(door, Random(seed)), seed, lambda own: answer(door, own))


@pytest.mark.parametrize("name", sorted(GIVES))
def test_compiled_gradients_are_those_of_float64(name):
    door = DOORS[name]
    torch._dynamo.reset()
    compiled = torch.compile(lambda own: answer(door, own), backend="aot_eager", fullgraph=True)
    check_gradients(door, name, drawn(door, Random(1)), 1, compiled)


@pytest.mark.parametrize("name", sorted(GIVES))
def test_gradients_forwards_are_those_backwards(name):
    """<w, J v> = <J' w, v>, by torch.func."""
    door, random = DOORS[name], Random(2)
    leaves, tree = tree_flatten(drawn(door, random))
    at = next(at for at, leaf in enumerate(leaves) if differentiable(leaf))
    leaves = [leaf.float() if differentiable(leaf) else leaf for leaf in leaves]
    point, along = leaves[at].nan_to_num(), torch.randn(leaves[at].shape)

    def call(own: torch.Tensor) -> torch.Tensor:
        found = answer(door, tree_unflatten([*leaves[:at], own, *leaves[at + 1 :]], tree))
        return torch.cat([part.float().flatten() for part in found if part.is_floating_point()])

    value, pushed = torch.func.jvp(call, (point,), (along,))
    back = torch.func.vjp(call, point)[1]
    weights = torch.randn(value.shape)
    torch.testing.assert_close(pushed @ weights, (back(weights)[0] * along).sum(), rtol=1e-3, atol=1e-3)


def test_a_tangent_is_seen_though_gradients_are_off():
    """Wherever it stands, and only while forward mode follows it."""
    plain = torch.ones(2, 4)
    with torch.no_grad(), dual_level():
        dual = make_dual(torch.rand(2, 4), torch.ones(2, 4))
        assert requires_gradient(1.0, plain, None, dual)
        assert requires_gradient(dual, plain)
        assert not requires_gradient(plain, None)
        assert unpack_dual(kernels.rms_norm(dual, plain[0])).tangent is not None
        assert unpack_dual(kernels.rms_norm(plain, unpack_dual(dual).primal[0])).tangent is None
        assert unpack_dual(kernels.rms_norm(plain, dual[0])).tangent is not None
    assert not requires_gradient(plain, dual)


@pytest.mark.parametrize("name", TENSORS)
def test_compiled_calls_give_the_same_or_an_error_of_ours(name):
    door = DOORS[name]
    operands = drawn(door, Random(3))
    torch._dynamo.reset()
    compiled = torch.compile(lambda own: answer(door, own), backend="eager", fullgraph=True)
    if name not in TRACED:
        with pytest.raises(torch._dynamo.exc.Unsupported, match=r"raised exception \w+Error\(.*( must | takes ).*: "):
            compiled(copied(operands))
        return
    found = compiled(copied(operands))
    for one, other in zip(found, answer(door, copied(operands)), strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("name", TENSORS)
@examples(DRAWS)
@given(st.randoms(use_true_random=False))
def test_fake_and_meta_tensors_have_the_shapes_of_true_ones_or_are_refused(name, random):
    door = DOORS[name]
    operands = together(door, random)
    want = answer(door, copied(operands)) if name in TRACED else ()
    with FakeTensorMode() as mode:
        fakes = with_leaves(operands, mode.from_tensor)
        found = or_our_error(lambda: answer(door, fakes))
    metas = or_our_error(lambda: answer(door, with_leaves(operands, lambda leaf: leaf.to("meta"))))
    for case, where in ((found, "cpu"), (metas, "meta")):
        assert (case is None) == (name not in TRACED)
        for one, other in zip(case or (), want, strict=case is not None):
            assert (one.shape, one.dtype, one.device.type) == (other.shape, other.dtype, where)
            assert one.is_contiguous() == other.is_contiguous()


@pytest.mark.parametrize("name", TENSORS)
@examples(DRAWS)
@given(st.integers(0, 2**32))
def test_vmap_gives_what_a_call_per_entry_gives_or_an_error_of_ours(name, seed):
    """Of all operands, or of the first one with numbers alone."""
    door = DOORS[name]
    operands = drawn(door, Random(seed))
    leaves, tree = tree_flatten(operands)
    floats = [at for at, leaf in enumerate(leaves) if differentiable(leaf)]
    tensors = [at for at, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor)]
    if not floats:
        return
    written = [at for at in tensors if door.written]
    for batched in (tensors, written or floats[:1]):
        entries = [
            [leaf * 0.5**entry if at in batched and at in floats else leaf for at, leaf in enumerate(leaves)]
            for entry in range(2)
        ]
        want = [answer(door, copied(tree_unflatten(entry, tree))) for entry in entries if name in TRACED]
        stacked = [torch.stack([entry[at] for entry in entries]) for at in batched]

        def call(*own: torch.Tensor, batched: list[int] = batched) -> tuple[torch.Tensor, ...]:
            by_place = dict(zip(batched, own, strict=True))
            return answer(door, tree_unflatten([by_place.get(at, leaf) for at, leaf in enumerate(leaves)], tree))

        found = or_our_error(lambda call=call, stacked=stacked: torch.func.vmap(call)(*stacked))
        assert (found is None) == (name not in TRACED)
        for parts, one in zip(zip(*want, strict=True), found or (), strict=found is not None):
            torch.testing.assert_close(one, torch.stack(parts), rtol=1e-5, atol=1e-5, equal_nan=True)


def as_array(leaf: torch.Tensor) -> np.ndarray:
    bits = {BF16: torch.uint16, torch.float8_e4m3fn: torch.uint8}
    return leaf.view(bits[leaf.dtype]).numpy() if leaf.dtype in bits else leaf.numpy()


@pytest.mark.parametrize("name", TENSORS)
@examples(DRAWS)
@given(st.integers(0, 2**32))
def test_an_array_among_tensors_is_refused_by_name_or_changes_nothing(name, seed):
    """One operand after the other; only what Numba computes itself takes both."""
    door = DOORS[name]
    operands = drawn(door, Random(seed))
    names = [own for own, value in operands.items() for _ in tree_flatten(value)[0]]
    leaves, tree = tree_flatten(operands)
    tensors = [at for at, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor)]
    declared = collected.doors().get(name)
    numba = name.startswith("kernels_cpu.") or declared is None or declared.on_cpu is not None
    for at in tensors if len(tensors) > 1 else ():
        own = tree_flatten(copied(operands))[0]
        mixed = tree_unflatten([as_array(leaf) if place == at else leaf for place, leaf in enumerate(own)], tree)
        if name == "fused_moe" or not numba:
            with pytest.raises(TypeError, match=rf"{names[at]}[.\w]* must be a torch tensor, not ndarray: pass torch"):
                door.call(**mixed)
        else:
            found = or_our_error(lambda mixed=mixed: answer(door, mixed))
            want = answer(door, copied(operands))
            for one, other in zip(found or (), want, strict=found is not None):
                own = torch.as_tensor(one)  # what is written may be an array
                own = own.view(BF16) if own.dtype is torch.uint16 else own
                torch.testing.assert_close(own, other, rtol=1e-2, atol=1e-2, equal_nan=True)


@pytest.mark.parametrize("name", sorted({*DOORS, *WAYS_TO_PACK}))
def test_help_shows_shapes_and_an_example(name):
    package, _, own = name.rpartition(".")
    text = inspect.getdoc(getattr(kernels_cpu if package else kernels, own))
    assert re.search(r"\((\d*[A-Z]\w*|\.\.\.)[ ,)]", text), "no shape"
    assert f"{own}(" in text.partition("Examples\n---")[2], "no example"
    assert max(map(len, text.splitlines())) <= 120


def test_gradients_of_gradients_are_those_of_float64():
    torch.manual_seed(0)
    x, weight = torch.randn(3, 8, requires_grad=True), torch.rand(8, requires_grad=True)
    torch.autograd.gradgradcheck(
        lambda a, b: kernels.rms_norm(a, b), (x, weight), eps=1e-2, atol=2e-2, rtol=2e-2, nondet_tol=0
    )


@pytest.mark.parametrize("backend", ["triton", "triton-interpret"])
def test_triton_gives_no_gradients_and_says_so(backend):
    x = torch.ones(2, 8, requires_grad=True)
    message = "must be 'torch' where an operand asks" if backend == "triton-interpret" else "needs GPU tensors"
    with pytest.raises(ValueError, match=message):
        kernels.gated(x, backend=backend)


def test_operators_are_what_torch_asks_of_them():
    """Schemas, fakes and gradients, by torch's own check."""
    x, weight, table = torch.randn(3, 2, 8), torch.rand(8), kernels.rope_table(8, 9)
    asking = weight.clone().requires_grad_()
    ops = torch.ops.moe_workbench
    kernels.rms_norm(x[0], weight)
    calls = [
        (ops.rms_norm_in_numba, (x[0], asking, 1e-5)),
        (ops.add_rms_norm_in_numba, (x[0], x[1], weight, 1e-5)),
        (ops.gated_in_numba, (x[0], "geglu")),
        (ops.rope_in_numba, (x, torch.tensor([1, 0, 8]), table, True, asking, 1e-5)),
        (ops.rope, (x, torch.tensor([1, 0, 8]), table, False, asking, 1e-5, "torch")),
        (ops.embed, (torch.tensor([1, 0]), x[0].clone().requires_grad_(), "torch")),
    ]
    for op, operands in calls:
        torch.library.opcheck(op.default, operands)
