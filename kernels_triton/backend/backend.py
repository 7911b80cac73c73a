"""Which implementation of an op computes: chosen by the tensors unless named, and never silently another."""

from __future__ import annotations

import enum
import os
import sys

import torch

from .operators import asks_gradient


class Backend(enum.StrEnum):
    """TRITON is compiled, for GPU tensors; INTERPRET runs the same kernels slowly on the CPU; TORCH runs anywhere."""

    TRITON = "triton"
    INTERPRET = "triton-interpret"
    TORCH = "torch"


def choose_backend(backend: str | None, tensor: torch.Tensor, *others: torch.Tensor | None) -> Backend:
    """The backend named, or Triton for a tensor on a GPU, and torch elsewhere and where an operand asks for a gradient.

    Raises
    ------
    ValueError
        If there is no such backend, or it cannot compute on this device or gives no gradient that is asked for.

    Examples
    --------
    >>> choose_backend(None, torch.ones(1)).value
    'torch'
    """
    followed = asks_gradient(tensor, *others)
    if backend is None:
        return Backend.TRITON if tensor.is_cuda and not followed else Backend.TORCH
    if backend not in set(Backend):
        known = ", ".join(map(repr, map(str, Backend)))
        raise ValueError(f"backend must be {known} or None, not {backend!r}: leave it out for the tensors' own.")
    chosen = Backend(backend)
    if chosen is Backend.TRITON and not tensor.is_cuda:
        raise ValueError(f"backend 'triton' needs GPU tensors, not {tensor.device}: move them, or leave backend out.")
    if chosen is Backend.INTERPRET and tensor.is_cuda:
        raise ValueError(f"backend 'triton-interpret' needs CPU tensors, not {tensor.device}: pass backend='triton'.")
    if followed and chosen is not Backend.TORCH:
        raise ValueError(
            f"backend must be 'torch' where an operand asks for a gradient, not {str(chosen)!r}: leave it out, or "
            "call under torch.no_grad()."
        )
    return chosen


def enter_mode(backend: Backend) -> None:
    """Import triton in the mode that `backend` needs; the whole process stays in it.

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
        there, needed = ("with", "without") if INTERPRETED else ("without", "with")
        raise RuntimeError(
            f"backend {str(backend)!r} is not to be had here, because triton was imported {there} TRITON_INTERPRET=1: "
            f"start Python {needed} it."
        )
