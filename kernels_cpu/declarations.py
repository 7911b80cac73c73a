"""Decorators that declare each operation's wrapper, work and reference, and every other public name.

`operations()` and `public_names()` return all declarations, so that no list has to be maintained.
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
        Flops and bytes of a call from its shapes: -> (flops [flop], bytes [byte]).
    reference : Callable, optional
        The result in float64, or exact, from the same operands.
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
    """Declare the wrapper of an operation, before its `work_of` and `reference_of`."""
    public(call)
    _OPERATIONS[call.__name__] = Operation(call)
    return call


def work_of(call: Callable[..., Any]) -> Callable[[Named], Named]:
    """Declare the work of an operation."""
    return lambda work: _completed(call, "work", work)


def reference_of(call: Callable[..., Any]) -> Callable[[Named], Named]:
    """Declare the reference of an operation."""
    return lambda reference: _completed(call, "reference", reference)


def public(declared: Named) -> Named:
    """Declare a public name that is no operation: a type, a preparation of operands or a measurement.

    Raises
    ------
    ValueError
        If another object has been declared under its name.
    """
    name = declared.__name__
    first = _PUBLIC.setdefault(name, declared)
    if first is not declared:
        raise ValueError(
            f"{name} must be declared once, not in {first.__module__} and in {declared.__module__}: rename one."
        )
    return declared


def operations() -> Mapping[str, Operation]:
    """All operations declared so far, by name."""
    return MappingProxyType(_OPERATIONS)


def public_names() -> Mapping[str, Any]:
    """All public objects declared so far, by name."""
    return MappingProxyType(_PUBLIC)


def _completed(call: Callable[..., Any], field: str, declared: Named) -> Named:
    """Store `declared` in a field of the operation's record."""
    change: dict[str, Any] = {field: public(declared)}
    _OPERATIONS[call.__name__] = replace(_OPERATIONS[call.__name__], **change)
    return declared
