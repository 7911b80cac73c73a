"""Collection of the names that the kernel packages declare, with one name per operation.

An operation of both packages has a function in `attention.py`, `moe.py` or `rows.py` that dispatches by the operands.
An operation of Numba's package alone is its wrapper. One of Triton's package alone, and its reference, is its wrapper
extended to arrays, which it takes as CPU tensors.

Without `backend=` Numba computes arrays where it has the operation for their types. With it they are taken as CPU
tensors of the same memory.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import kernels_cpu
from workbench.kernels import attention, moe, rows
from workbench.kernels.arrays import taking_arrays

if TYPE_CHECKING:
    import kernels_triton

_BY_OPERAND = (attention, moe, rows)


@dataclass(frozen=True)
class Door:
    """One operation of `workbench.kernels`.

    Attributes
    ----------
    name : str
    call : the function of that name
    work : declared flops and bytes from shapes, or None
    reference : the result in float64, or exact, from the same operands, or None
    on_cpu : declaration of `kernels_cpu`, or None
    on_gpu : declaration of `kernels_triton`, or None
    """

    name: str
    call: Callable[..., Any]
    work: Callable[..., Any] | None
    reference: Callable[..., Any] | None
    on_cpu: kernels_cpu.Operation | None
    on_gpu: kernels_triton.Operation | None


def public(name: str) -> Any:
    """Return the object of this public name; torch is imported only where Numba's package does not have it.

    Raises
    ------
    AttributeError
        If there is none.
    """
    for module in _BY_OPERAND:
        if name in module.__all__:
            return getattr(module, name)
    if name in kernels_cpu.public_names():
        return kernels_cpu.public_names()[name]
    import kernels_triton

    found = kernels_triton.public_names().get(name)
    if found is None:
        raise AttributeError(f"module 'workbench.kernels' has no attribute {name!r}")
    for operation in kernels_triton.operations().values():
        if found in (operation.call, operation.reference):
            return taking_arrays(found, "workbench.kernels", name)
    return found


def names() -> list[str]:
    """All public names, sorted."""
    import kernels_triton

    return sorted({*kernels_cpu.public_names(), *kernels_triton.public_names()})


def doors() -> dict[str, Door]:
    """All operations, by name."""
    import kernels_triton

    cpu = kernels_cpu.operations()
    gpu = kernels_triton.operations()
    return {name: _door(name, cpu.get(name), gpu.get(name)) for name in sorted({*cpu, *gpu})}


def _door(name: str, cpu: kernels_cpu.Operation | None, gpu: kernels_triton.Operation | None) -> Door:
    declared = [operation for operation in (cpu, gpu) if operation is not None]
    works = [operation.work for operation in declared if operation.work is not None]
    references = [operation.reference for operation in declared if operation.reference is not None]
    work = public(works[0].__name__) if works else None
    reference = public(references[0].__name__) if references else None
    return Door(name, public(name), work, reference, cpu, gpu)
