"""Which implementation of an op computes: chosen by the tensors unless named, and never silently another."""

from __future__ import annotations

import enum
import os
import sys

import torch


class Backend(enum.StrEnum):
    """TRITON is compiled, for GPU tensors; INTERPRET runs the same kernels slowly on the CPU; TORCH runs anywhere."""

    TRITON = "triton"
    INTERPRET = "triton-interpret"
    TORCH = "torch"


def choose_backend(backend: str | None, tensor: torch.Tensor) -> Backend:
    """The backend named, or what the tensor's device asks for: Triton on a GPU, torch elsewhere.

    Raises
    ------
    ValueError
        If there is no such backend, or it cannot compute on this device or in this process.

    Examples
    --------
    >>> choose_backend(None, torch.ones(1)).value
    'torch'
    """
    if backend is None:
        return Backend.TRITON if tensor.is_cuda else Backend.TORCH
    if backend not in set(Backend):
        known = ", ".join(map(repr, map(str, Backend)))
        raise ValueError(f"backend must be {known} or None, not {backend!r}: leave it out for the tensors' own.")
    chosen = Backend(backend)
    if chosen is Backend.TRITON and not tensor.is_cuda:
        raise ValueError(f"backend 'triton' needs GPU tensors, not {tensor.device}: move them, or leave backend out.")
    if chosen is Backend.INTERPRET and tensor.is_cuda:
        raise ValueError(f"backend 'triton-interpret' needs CPU tensors, not {tensor.device}: pass backend='triton'.")
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
    from .jit.mode import INTERPRETED

    if interpret != INTERPRETED:
        there, needed = ("with", "without") if INTERPRETED else ("without", "with")
        raise RuntimeError(
            f"backend {str(backend)!r} is not to be had here, because triton was imported {there} TRITON_INTERPRET=1: "
            f"start Python {needed} it."
        )
