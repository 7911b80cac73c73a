"""Matrices of a checkpoint in the INT4 of GPTQ and AWQ: each is held in three or four tensors."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch

from workbench.core.errors import CheckpointError
from workbench.engine.loading.tensor_files import Entry
from workbench.engine.loading.tensors import Source
from workbench.kernels import Int4Order, int4_codes, int4_weights
from workbench.models.formats import Int4Layout

_SCALES = (torch.float16, torch.bfloat16, torch.float32)
_PER_WORD = 8
_MIDDLE = 8
"""Zero point where quantisation is symmetric."""
_OFF = 0.5
"""Mean distance of codes from their zero points that no matrix has: weights are about as often below 0 as above."""


class Int4Matrices:
    """The matrices in INT4 of a checkpoint.

    Parameters
    ----------
    layout : Int4Layout
    entries : mapping of str to Entry
        All tensors of the checkpoint.
    read : callable (str) -> Tensor
        Reads a tensor whole, as it is in its file.
    model : str
        Name of the model, for errors.
    """

    def __init__(
        self, layout: Int4Layout, entries: Mapping[str, Entry], read: Callable[[str], torch.Tensor], model: str
    ) -> None:
        self._layout = layout
        self._entries = entries
        self._read = read
        self._model = model

    def __contains__(self, name: str) -> bool:
        """True if the matrix of a tensor's name is in INT4."""
        return _part(name, "qweight") in self._entries

    def check(self, source: Source) -> None:
        """Check the tensors of a matrix (outputs, inputs), before any is read.

        Raises
        ------
        CheckpointError
            If one is missing, or has another shape or type.
        """
        name = source.name
        rows, columns = source.shape
        group = self._layout.group
        if rows % _PER_WORD or columns % group:
            raise CheckpointError(
                f"INT4 has {_PER_WORD} outputs in a word and {group} inputs in a group, and {name} of {self._model!r} "
                f"is {rows} x {columns}; use another model."
            )
        words = (columns // _PER_WORD, rows) if self._layout.method == "gptq" else (columns, rows // _PER_WORD)
        self._check_part(_part(name, "qweight"), words, (torch.int32,))
        self._check_part(_part(name, "qzeros"), (columns // group, rows // _PER_WORD), (torch.int32,))
        self._check_part(_part(name, "scales"), (columns // group, rows), _SCALES)
        if self._has_order(name):
            self._check_part(_part(name, "g_idx"), (columns,), (torch.int32,))

    def _check_part(self, name: str, shape: tuple[int, ...], dtypes: tuple[torch.dtype, ...]) -> None:
        found = self._entries.get(name)
        if found is None or found.shape != shape or found.dtype not in dtypes:
            told = "missing" if found is None else f"{found.shape} {found.dtype}"
            raise CheckpointError(
                f"tensor {name} of {self._model!r} is {told}, its config.json asks for {shape} {dtypes[0]}; the two do "
                "not belong together."
            )

    def _has_order(self, name: str) -> bool:
        return self._layout.method == "gptq" and _part(name, "g_idx") in self._entries

    def codes(self, name: str) -> torch.Tensor:
        """The codes (outputs, inputs) uint8 of a matrix.

        Raises
        ------
        CheckpointError
            If groups are not of inputs in a row, or zero points not 8 where quantisation is said to be symmetric.
        """
        if self._has_order(name):
            self._check_order(_part(name, "g_idx"))
        if self._layout.symmetric:
            self._check_middle(_part(name, "qzeros"))
        order = Int4Order.INPUTS if self._layout.method == "gptq" else Int4Order.AWQ
        return int4_codes(self._read(_part(name, "qweight")), order)

    def scales(self, name: str) -> torch.Tensor:
        """The scales (outputs, groups) of a matrix."""
        return self._read(_part(name, "scales")).T.contiguous()

    def zeros(self, name: str) -> torch.Tensor:
        """The zero points (outputs, groups) uint8 of a matrix."""
        if self._layout.method == "awq":
            order = Int4Order.AWQ
        else:
            order = Int4Order.OUTPUTS_LESS_ONE if self._layout.one_less else Int4Order.OUTPUTS
        return int4_codes(self._read(_part(name, "qzeros")), order)

    def check_zeros(self, name: str) -> None:
        """Check that zero points are in the middle of a matrix's codes, as those of the other format of GPTQ are not.

        Raises
        ------
        CheckpointError
            If they are one off.
        """
        if self._layout.symmetric or self._layout.method != "gptq":
            return
        off = float(self.codes(name).float().mean() - self.zeros(name).float().mean())
        if abs(off) > _OFF:
            told, other = ("gptq", "gptq_v2") if self._layout.one_less else ("gptq_v2", "gptq")
            raise CheckpointError(
                f"tensor {_part(name, 'qzeros')} of {self._model!r} is not in the checkpoint_format {told}: its codes "
                f"are {off:+.2f} from their zero points on average; correct checkpoint_format to {other}."
            )

    def weights(self, name: str, dtype: torch.dtype) -> torch.Tensor:
        """A matrix (outputs, inputs), converted to a type."""
        zeros = None if self._layout.symmetric else self.zeros(name)
        return int4_weights(self.codes(name), self.scales(name), dtype, zeros=zeros)

    def _check_order(self, name: str) -> None:
        """Refuse groups of inputs that are not in a row."""
        order = self._read(name)
        in_a_row = order.equal(torch.arange(len(order), dtype=order.dtype) // self._layout.group)
        if not in_a_row and order.any():  # all zeros stand for no order
            raise CheckpointError(
                f"tensor {name} of {self._model!r} puts inputs into groups out of order (desc_act=True), which run "
                "does not read; use one quantised with desc_act=False."
            )

    def _check_middle(self, name: str) -> None:
        """Refuse zero points that are not 8, stored as 7 or 8."""
        stored = int4_codes(self._read(name), Int4Order.OUTPUTS)
        if not any(stored.eq(middle).all() for middle in (_MIDDLE - 1, _MIDDLE)):
            raise CheckpointError(
                f"tensor {name} of {self._model!r} has zero points other than {_MIDDLE}, and its config.json sets "
                "sym=True; correct it to False."
            )


def _part(name: str, what: str) -> str:
    """Name of a tensor that is part of a matrix with this name."""
    return f"{name.removesuffix('.weight')}.{what}"
