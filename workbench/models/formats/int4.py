"""Group-wise INT4 of GPTQ and AWQ, as checkpoints that `run` executes hold it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from reprlib import repr as short
from typing import Any, TypeGuard

from workbench.core.errors import CheckpointError
from workbench.core.records import read_json
from workbench.core.units import INT4_GROUPS

METHODS = ("gptq", "awq")
"""Values of ``quant_method``."""
_ONE_LESS = {"gptq": True, "gptq_v2": False}
"""Whether zero points are stored less one, by ``checkpoint_format``."""


@dataclass(frozen=True)
class Int4Layout:
    """Layout of a checkpoint's INT4: (code - zero point) * scale, with a scale and a zero point per row and group.

    Attributes
    ----------
    method : str
        "gptq" or "awq".
    group : int
        Columns that share a scale.
    symmetric : bool
        True if all zero points are 8. They are stored even so, as 7 or 8, whatever the format is called: some
        libraries write format gptq_v2 and call it gptq.
    one_less : bool
        True if zero points are stored less one, modulo 16.
    """

    method: str
    group: int
    symmetric: bool
    one_less: bool

    @property
    def name(self) -> str:
        """Format of the experts (see `workbench.core.units.STORED_INT4`)."""
        return f"{'int4' if self.symmetric else 'uint4'}_g{self.group}"


def is_int4(quantisation: object) -> TypeGuard[Mapping[str, Any]]:
    """True for a ``quantization_config`` of GPTQ or AWQ."""
    return isinstance(quantisation, Mapping) and quantisation.get("quant_method") in METHODS


def int4_layout(quantisation: Mapping[str, Any], name: str) -> Int4Layout:
    """The layout of the tensors that a ``quantization_config`` of GPTQ or AWQ describes.

    Parameters
    ----------
    quantisation : mapping
        The object ``quantization_config`` of a ``config.json``.
    name : str
        Name of the checkpoint, for errors.

    Raises
    ------
    CheckpointError
        If `run` does not read tensors of these settings.
    """
    method = quantisation["quant_method"]
    wanted: dict[str, tuple[Any, ...]] = {"bits": (4,), "group_size": INT4_GROUPS}
    usual: dict[str, Any] = {}
    if method == "gptq":
        usual = {"desc_act": False, "sym": True, "checkpoint_format": "gptq", "is_marlin_format": False}
        wanted |= {"desc_act": (False,), "sym": (True, False), "checkpoint_format": tuple(_ONE_LESS)}
        wanted |= {"is_marlin_format": (False,)}
    else:
        usual = {"version": "gemm", "zero_point": True}
        wanted |= {"version": ("gemm", "GEMM"), "zero_point": (True,)}
    found = {key: quantisation.get(key, usual.get(key)) for key in wanted}
    for key, values in wanted.items():
        if found[key] not in values:
            raise CheckpointError(
                f"checkpoint {name!r} in {method.upper()} sets {key}={short(found[key])} in its quantization_config, "
                f"and run reads {' or '.join(map(str, values))}; use one quantised so, or the model it was made of."
            )
    if method == "awq":
        return Int4Layout(method, found["group_size"], symmetric=False, one_less=False)
    return Int4Layout(method, found["group_size"], found["sym"], _ONE_LESS[found["checkpoint_format"]])


def int4_layout_of(folder: Path) -> Int4Layout | None:
    """The layout of a checkpoint's INT4; None if it has none.

    Raises
    ------
    CheckpointError
        As `int4_layout`, or if the folder's ``config.json`` is damaged.
    """
    try:
        raw = read_json(folder / "config.json")
    except ValueError as error:
        raise CheckpointError(f"{error}; restore it from where the model came.") from error
    found = raw.get("quantization_config") if isinstance(raw, Mapping) else None
    return int4_layout(found, folder.name) if is_int4(found) else None
