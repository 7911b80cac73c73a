"""All that the kernel packages declare, under one name per operation.

An operation of both packages has a function in `attention.py`, `moe.py` or `rows.py` that chooses by the operands. One
of Numba alone is its wrapper; one of Triton alone is its wrapper, which takes arrays as CPU tensors beside, and so do
the references of Triton's package.

Without `backend=` arrays go to Numba where it has the operation for their types. With it they are CPU tensors of the
same memory, and it means what it means for those.
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
    """One operation of the door.

    Attributes
    ----------
    name : str
    call : the function of that name
    work : shapes -> (flops, bytes), or None where nothing is declared
    reference : the same operands -> float64's or the exact answer, or None
    on_cpu : what `kernels_cpu` declares, or None
    on_gpu : what `kernels_triton` declares, or None
    """

    name: str
    call: Callable[..., Any]
    work: Callable[..., Any] | None
    reference: Callable[..., Any] | None
    on_cpu: kernels_cpu.Operation | None
    on_gpu: kernels_triton.Operation | None


def public(name: str) -> Any:
    """The object of this name in the door; torch is imported only where Numba's package does not have it.

    Raises
    ------
    AttributeError
        If nothing has.
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
    for own in kernels_triton.operations().values():
        if found in (own.call, own.reference):
            return taking_arrays(found, "workbench.kernels", name)
    return found


def names() -> list[str]:
    """All public names, sorted."""
    import kernels_triton

    return sorted({*kernels_cpu.public_names(), *kernels_triton.public_names()})


def doors() -> dict[str, Door]:
    """All operations, by name."""
    import kernels_triton

    cpu, gpu = kernels_cpu.operations(), kernels_triton.operations()
    return {name: _door(name, cpu.get(name), gpu.get(name)) for name in sorted({*cpu, *gpu})}


def _door(name: str, cpu: kernels_cpu.Operation | None, gpu: kernels_triton.Operation | None) -> Door:
    declared = [own for own in (cpu, gpu) if own is not None]
    works = [own.work for own in declared if own.work is not None]
    references = [own.reference for own in declared if own.reference is not None]
    work = public(works[0].__name__) if works else None
    reference = public(references[0].__name__) if references else None
    return Door(name, public(name), work, reference, cpu, gpu)
