"""Registration of computations as operators of torch, for torch.compile, FakeTensor, vmap and autograd."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.autograd.forward_ad import unpack_dual

_NAMESPACE = "moe_workbench"
_PLAIN = "_without_gradients"
"""Suffix of the name of a second operator without a backward pass, for calls outside of compiled code that require no
gradient: the backward pass makes each call 7 us longer (`rms_norm` of 4 rows of 64 numbers on a Zen 4 core)."""


def operator(
    name: str,
    compute: Callable[..., Any],
    shaped: Callable[..., Any],
    *,
    formula: Callable[..., Any] | None = None,
    written: Sequence[str] = (),
) -> Callable[..., Any]:
    """Register the operator `torch.ops.moe_workbench.<name>` and return a function that calls it.

    Where autograd follows an operand, the function calls the formula. vmap calls the operator once per entry.

    Parameters
    ----------
    name : str
    compute : function of tensors, numbers and strings, all positional and annotated
    shaped : function of the same operands
        Empty results of the same shapes, dtypes and strides.
    formula : function of the same operands, optional
        The same computation in operations of torch that torch.compile can trace. Without it, `compute` is
        differentiated; in compiled code another operator computes the backward pass.
    written : names of operands, optional
        Operands that `compute` stores into; it then returns nothing.

    Raises
    ------
    ValueError
        From the returned function, if it stores into an operand and autograd follows one.

    Examples
    --------
    >>> def halve(x: torch.Tensor) -> torch.Tensor:
    ...     return x / 2
    >>> operator("halve", halve, torch.empty_like)(torch.tensor([3.0], requires_grad=True))
    tensor([1.5000], grad_fn=<DivBackward0>)
    """
    # torch.library.custom_op is not used: its calls import triton before the mode is chosen.
    schema = torch.library.infer_schema(compute, mutates_args=tuple(written))
    plain = f"{name}{_PLAIN}"
    for own in (name, plain):
        torch.library.define(f"{_NAMESPACE}::{own}", schema)
        torch.library.impl(f"{_NAMESPACE}::{own}", "CompositeExplicitAutograd", compute)
        torch.library.register_fake(f"{_NAMESPACE}::{own}", shaped)
    names = list(inspect.signature(compute).parameters)
    with_backward = _overload(name)
    without_backward = _overload(plain)
    if not written:
        _register_backward(name, schema, formula or compute)

    def call(*operands: Any) -> Any:
        if not requires_gradient(*operands):
            registered = with_backward if torch.compiler.is_compiling() else without_backward
            return registered(*operands)
        if written:
            own = next(name for name, operand in zip(names, operands, strict=True) if requires_gradient(operand))
            raise ValueError(
                f"{own} must ask for no gradient, since the call stores into {' and '.join(written)}: pass "
                f"{own}.detach(), or call under torch.no_grad()."
            )
        if formula is not None:
            return formula(*operands)
        return with_backward(*operands) if _compiles_reverse_mode(operands) else compute(*operands)

    def entry_by_entry(batch: Any, dims: tuple[Any, ...], *operands: Any) -> Any:
        results = [call(*_entry(operands, dims, at)) for at in range(batch.batch_size)]
        if written:
            return None, None
        if isinstance(results[0], torch.Tensor):
            return torch.stack(results), 0
        stacked = tuple(torch.stack(entries) for entries in zip(*results, strict=True))
        return stacked, (0,) * len(stacked)

    for own in (name, plain):
        torch.library.register_vmap(f"{_NAMESPACE}::{own}", entry_by_entry)
    return call


def requires_gradient(*operands: object) -> bool:
    """True if autograd follows one of the operands, in reverse or forward mode.

    Examples
    --------
    >>> requires_gradient(torch.ones(1), None), requires_gradient(torch.ones(1, requires_grad=True))
    (False, True)
    """
    reverse_mode = torch.is_grad_enabled() and any(
        isinstance(operand, torch.Tensor) and operand.requires_grad for operand in operands
    )
    return reverse_mode or _have_tangent(operands)


def check_tensor(name: str, operand: object) -> None:
    """Raise unless `operand` is a tensor of torch.

    Raises
    ------
    TypeError
        If it is an array of numpy or anything else.

    Examples
    --------
    >>> check_tensor("x", [1.0])
    Traceback (most recent call last):
    TypeError: x must be a torch tensor, not list: pass torch.as_tensor(x).
    """
    if not isinstance(operand, torch.Tensor):
        raise TypeError(f"{name} must be a torch tensor, not {type(operand).__name__}: pass torch.as_tensor({name}).")


def _have_tangent(operands: Sequence[object]) -> bool:
    """True if an operand has a tangent; while forward mode is off, the first tensor tells, as its own primal."""
    for operand in operands:
        if not isinstance(operand, torch.Tensor):
            continue
        try:
            primal, tangent = unpack_dual(operand)
        except RuntimeError:  # vmap batches this tensor: its entries are checked instead
            continue
        if tangent is not None:
            return True
        if primal is operand:
            return False
    return False


def _compiles_reverse_mode(operands: Sequence[Any]) -> bool:
    """True while code is compiled and no operand has a tangent: registered operators have reverse mode only."""
    return torch.compiler.is_compiling() and not _have_tangent(operands)


def _overload(name: str) -> Callable[..., Any]:
    overload: Callable[..., Any] = getattr(getattr(torch.ops, _NAMESPACE), name).default
    return overload


def _entry(operands: Sequence[Any], dims: Sequence[Any], at: int) -> list[Any]:
    """Select the operands of one entry of a batch of vmap."""
    own = []
    for operand, dim in zip(operands, dims, strict=True):
        batched = isinstance(operand, torch.Tensor) and dim is not None
        own.append(operand.select(dim, at) if batched else operand)
    return own


def _register_backward(name: str, schema: str, formula: Callable[..., Any]) -> None:
    """Give operator `name` a backward pass, which is an operator too because a formula may depend on values."""
    inputs = schema[1 : schema.rindex(") ->")]
    backward = f"{_NAMESPACE}::{name}_backward"

    def compute(grads: Sequence[torch.Tensor | None], *rest: Any) -> list[torch.Tensor]:
        return _gradients(formula, grads, rest[:-1], rest[-1])

    def shaped(_grads: Sequence[torch.Tensor | None], *rest: Any) -> list[torch.Tensor]:
        return [torch.empty_like(rest[at], memory_format=torch.contiguous_format) for at in rest[-1]]

    def keep(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        ctx.places = [at for at, operand in enumerate(inputs) if isinstance(operand, torch.Tensor)]
        ctx.save_for_backward(*(inputs[at] for at in ctx.places))
        ctx.others = [None if at in ctx.places else operand for at, operand in enumerate(inputs)]

    def differentiate(ctx: Any, *grads: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        operands = list(ctx.others)
        for at, tensor in zip(ctx.places, ctx.saved_tensors, strict=True):
            operands[at] = tensor
        wanted = [at for at in ctx.places if ctx.needs_input_grad[at]]
        computed = _overload(f"{name}_backward")(list(grads), *operands, wanted)
        found = dict(zip(wanted, computed, strict=True))
        return tuple(found.get(at) for at in range(len(operands)))

    torch.library.define(backward, f"(Tensor?[] grads, {inputs}, int[] wanted) -> Tensor[]")
    torch.library.impl(backward, "CompositeExplicitAutograd", compute)
    torch.library.register_fake(backward, shaped)
    torch.library.register_autograd(f"{_NAMESPACE}::{name}", differentiate, setup_context=keep)


def _gradients(
    formula: Callable[..., Any], grads: Sequence[torch.Tensor | None], operands: Sequence[Any], wanted: Sequence[int]
) -> list[torch.Tensor]:
    """Differentiate the formula with respect to the wanted operands: new and contiguous tensors."""
    own = [operand.detach() if isinstance(operand, torch.Tensor) else operand for operand in operands]
    sources = [own[at].requires_grad_() for at in wanted]
    with torch.enable_grad():
        result = formula(*own)
    results = (result,) if isinstance(result, torch.Tensor) else result
    outputs: list[torch.Tensor] = []
    output_grads: list[torch.Tensor] = []
    for output, grad in zip(results, grads, strict=True):
        if grad is not None and output.requires_grad:
            outputs.append(output)
            output_grads.append(grad)
    found = torch.autograd.grad(outputs, sources, output_grads, allow_unused=True, materialize_grads=True)
    return [grad.clone(memory_format=torch.contiguous_format) for grad in found]
