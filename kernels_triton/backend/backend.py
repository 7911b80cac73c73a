"""The choice of an implementation: the one that is named, else by the tensors; there is no silent fallback."""

from __future__ import annotations

import enum
import functools
import os
import sys

import torch

from .operators import requires_gradient


class Backend(enum.StrEnum):
    """TRITON compiles kernels for GPU tensors; INTERPRET runs them slowly on the CPU; TORCH runs on any device."""

    TRITON = "triton"
    INTERPRET = "triton-interpret"
    TORCH = "torch"


_KNOWN = frozenset(Backend)


def choose_backend(backend: str | None, tensor: torch.Tensor, *others: torch.Tensor | None) -> Backend:
    """Return the named backend; by default Triton for GPU tensors, torch for others and where a gradient is required.

    Raises
    ------
    ValueError
        If there is no such backend, or it cannot compute on this device or return the required gradient.

    Examples
    --------
    >>> choose_backend(None, torch.ones(1)).value
    'torch'
    """
    differentiated = requires_gradient(tensor, *others)
    if backend is None:
        return Backend.TRITON if tensor.is_cuda and not differentiated else Backend.TORCH
    if backend not in _KNOWN:
        known = ", ".join(map(repr, map(str, Backend)))
        raise ValueError(f"backend must be {known} or None, not {backend!r}: leave it out for the tensors' own.")
    chosen = Backend(backend)
    if chosen is Backend.TRITON and not tensor.is_cuda:
        raise ValueError(f"backend 'triton' needs GPU tensors, not {tensor.device}: move them, or leave backend out.")
    if chosen is Backend.INTERPRET and tensor.is_cuda:
        raise ValueError(f"backend 'triton-interpret' needs CPU tensors, not {tensor.device}: pass backend='triton'.")
    if differentiated and chosen is not Backend.TORCH:
        raise ValueError(
            f"backend must be 'torch' where an operand asks for a gradient, not {str(chosen)!r}: leave it out, or "
            "call under torch.no_grad()."
        )
    return chosen


@functools.cache
def enter_mode(backend: Backend) -> None:
    """Import triton in the mode that `backend` needs; the process stays in this mode.

    Raises
    ------
    RuntimeError
        If triton has been imported in the other mode.
    """
    interpret = backend is Backend.INTERPRET
    if interpret and "triton" not in sys.modules:
        os.environ["TRITON_INTERPRET"] = "1"
    from .mode import INTERPRETED

    if interpret != INTERPRETED:
        present = "with" if INTERPRETED else "without"
        needed = "without" if INTERPRETED else "with"
        raise RuntimeError(
            f"backend {str(backend)!r} is not to be had here, because triton was imported {present} "
            f"TRITON_INTERPRET=1: start Python {needed} it."
        )
