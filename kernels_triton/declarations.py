"""Declarations: each operation's wrapper, work and reference, where they stand, and all that is public beside them.

A caller that collects operations reads `operations()` and `public_names()`; nobody keeps a list.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any, TypeVar

Named = TypeVar("Named", bound="Callable[..., Any] | type")


@dataclass(frozen=True)
class Operation:
    """One mathematical operation as this package computes it.

    Attributes
    ----------
    call : Callable
        The wrapper, which checks operands and has the operation's name.
    work : Callable, optional
        Shapes -> (flops [flop], bytes [byte]) that a call declares.
    reference : Callable, optional
        The same operands -> the answer in float64 or exact.
    """

    call: Callable[..., Any]
    work: Callable[..., Any] | None = None
    reference: Callable[..., Any] | None = None

    @property
    def name(self) -> str:
        """Name of the operation."""
        return self.call.__name__


_OPERATIONS: dict[str, Operation] = {}
_PUBLIC: dict[str, Any] = {}


def operation(call: Named) -> Named:
    """Declare the wrapper of an operation; `work_of` and `reference_of` declare what stands below it."""
    public(call)
    _OPERATIONS[call.__name__] = Operation(call)
    return call


def work_of(call: Callable[..., Any]) -> Callable[[Named], Named]:
    """Declare the work of an operation."""
    return lambda work: _completed(call, "work", work)


def reference_of(call: Callable[..., Any]) -> Callable[[Named], Named]:
    """Declare the reference of an operation."""
    return lambda reference: _completed(call, "reference", reference)


def public(own: Named) -> Named:
    """Declare a type, a preparation of operands or a measurement that is handed on beside the operations.

    Raises
    ------
    ValueError
        If something else has been declared under its name.
    """
    other = _PUBLIC.setdefault(own.__name__, own)
    if other is not own:
        raise ValueError(
            f"{own.__name__} must be declared once, not in {other.__module__} and in {own.__module__}: rename one."
        )
    return own


def operations() -> Mapping[str, Operation]:
    """All operations declared so far, by name."""
    return MappingProxyType(_OPERATIONS)


def public_names() -> Mapping[str, Any]:
    """Everything public that has been declared so far, by name."""
    return MappingProxyType(_PUBLIC)


def _completed(call: Callable[..., Any], field: str, own: Named) -> Named:
    made: dict[str, Any] = {field: public(own)}
    _OPERATIONS[call.__name__] = replace(_OPERATIONS[call.__name__], **made)
    return own
