"""Declarations: each operation's wrapper, work, reference and fault, where they stand, and what is public beside them.

A caller that collects operations reads `operations()` and `public_names()`; nobody keeps a list.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any, NamedTuple, TypeVar

Named = TypeVar("Named", bound="Callable[..., Any] | type")


class Fault(NamedTuple):
    """A wrong kernel that the tests must notice: `right` stands once in `module` of this package."""

    module: str
    right: str
    wrong: str


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
    fault : Fault, optional
        What the law of this operation must notice.
    peers : tuple of str
        Other people's implementations, by the names of the benchmarks.
    """

    call: Callable[..., Any]
    work: Callable[..., Any] | None = None
    reference: Callable[..., Any] | None = None
    fault: Fault | None = None
    peers: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        """Name of the operation."""
        return self.call.__name__


_OPERATIONS: dict[str, Operation] = {}
_PUBLIC: dict[str, Any] = {}


def operation(
    *,
    work: Callable[..., Any] | None = None,
    reference: Callable[..., Any] | None = None,
    fault: Fault | None = None,
    peers: tuple[str, ...] = (),
) -> Callable[[Named], Named]:
    """Declare the wrapper of an operation; `work_of` and `reference_of` declare what stands below it."""

    def declare(call: Named) -> Named:
        _OPERATIONS[call.__name__] = Operation(call, work, reference, fault, peers)
        for own in (call, work, reference):
            if own is not None:
                _PUBLIC[own.__name__] = own
        return call

    return declare


def work_of(call: Callable[..., Any]) -> Callable[[Named], Named]:
    """Declare the work of an operation."""
    return lambda work: _completed(call, "work", work)


def reference_of(call: Callable[..., Any]) -> Callable[[Named], Named]:
    """Declare the reference of an operation."""
    return lambda reference: _completed(call, "reference", reference)


def public(own: Named) -> Named:
    """Declare a type, a preparation of operands or a measurement that is handed on beside the operations."""
    _PUBLIC[own.__name__] = own
    return own


def operations() -> Mapping[str, Operation]:
    """All operations declared so far, by name."""
    return MappingProxyType(_OPERATIONS)


def public_names() -> Mapping[str, Any]:
    """Everything public that has been declared so far, by name."""
    return MappingProxyType(_PUBLIC)


def _completed(call: Callable[..., Any], field: str, own: Named) -> Named:
    made: dict[str, Any] = {field: own}
    _OPERATIONS[call.__name__] = replace(_OPERATIONS[call.__name__], **made)
    return public(own)
