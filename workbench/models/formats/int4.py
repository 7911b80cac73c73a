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

_METHODS = ("gptq", "awq")
"""Values of ``quant_method``."""
_ONE_LESS = {"gptq": True, "gptq_v2": False}
"""Whether zero points are stored less one, by ``checkpoint_format``."""
_NAMES = {
    "bits": ("bits", "w_bit"),
    "group_size": ("group_size", "q_group_size"),
    "checkpoint_format": ("checkpoint_format", "format"),
    "version": ("version", "format", "checkpoint_format"),
}
"""Keys that mean the same setting."""
REMEDY = "use one quantised so, or the model it was made of"


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
        True if words of zero points are stored less 0x11111111: each point less one, with a borrow from the next.
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
    return isinstance(quantisation, Mapping) and quantisation.get("quant_method") in _METHODS


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
    wanted: dict[str, tuple[Any, ...]] = {"bits": (4,), "group_size": INT4_GROUPS, "pack_dtype": ("int32",)}
    usual: dict[str, Any] = {"pack_dtype": "int32"}
    if method == "gptq":
        usual |= {"desc_act": False, "sym": True, "checkpoint_format": "gptq", "is_marlin_format": False}
        wanted |= {"desc_act": (False,), "sym": (True, False), "checkpoint_format": tuple(_ONE_LESS)}
        wanted |= {"is_marlin_format": (False,)}
    else:
        usual |= {"version": "gemm", "zero_point": True}
        wanted |= {"version": ("gemm",), "zero_point": (True,)}
    settings = dict[str, Any]()
    for key, values in wanted.items():
        told = [_lower(quantisation[each]) for each in _NAMES.get(key, (key,)) if quantisation.get(each) is not None]
        settings[key] = told[0] if told else usual.get(key)
        differ = any(other != told[0] for other in told)
        if differ or settings[key] not in values:
            found = " and ".join(map(short, told if differ else [settings[key]]))
            raise CheckpointError(
                f"checkpoint {name!r} in {method.upper()} sets {key}={found} in its quantization_config, and run reads "
                f"{' or '.join(map(str, values))}; {REMEDY}."
            )
    if method == "awq":
        return Int4Layout(method, settings["group_size"], symmetric=False, one_less=False)
    return Int4Layout(method, settings["group_size"], settings["sym"], _ONE_LESS[settings["checkpoint_format"]])


def _lower(value: Any) -> Any:
    return value.lower() if isinstance(value, str) else value


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
