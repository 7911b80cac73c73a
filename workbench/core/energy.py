"""Energy of a run, with its source: counted by a meter, or modelled from time, bytes and operations."""

from __future__ import annotations

import math
import tomllib
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import numpy.typing as npt

from workbench.core.catalogue import data_path
from workbench.core.errors import ResultError
from workbench.core.units import is_number


@dataclass(frozen=True)
class Energy:
    """An amount of energy, and its source.

    Attributes
    ----------
    joules : float
    source : str
        ``NVML``, ``RAPL`` or both if a meter counted it, else ``model`` and the hardware that its constants hold for.
    """

    joules: float
    source: str

    def __post_init__(self) -> None:
        if not (is_number(self.joules) and 0 <= self.joules < math.inf):
            raise ResultError(f"an energy has joules={self.joules!r}; give a number from 0 on.")


@dataclass(frozen=True)
class EnergyModel:
    """Model of energy from time, bytes and operations.

    Attributes
    ----------
    static_power : float
        Power that the hardware draws at any time [W].
    per_byte, per_flop : float
        Energy of one byte read from GPU memory [J/B], and of one operation [J/FLOP].
    """

    static_power: float
    per_byte: float
    per_flop: float

    def joules(
        self, seconds: npt.ArrayLike, read: npt.ArrayLike, flops: npt.ArrayLike
    ) -> float | npt.NDArray[np.float64]:
        """E = P_static T + e_b bytes + e_f FLOP [J].

        Parameters
        ----------
        seconds, read, flops : array_like
            Time [s], bytes read from GPU memory [B], operations [FLOP].

        Raises
        ------
        ValueError
            If one of them is negative or infinite.

        Notes
        -----
        Links between GPUs are left out.
        """
        total: float | npt.NDArray[np.float64] = 0.0
        given = {
            "seconds": (seconds, self.static_power),
            "read": (read, self.per_byte),
            "flops": (flops, self.per_flop),
        }
        for name, (amount, each) in given.items():
            found = np.asarray(amount, dtype=np.float64)
            if not (np.isfinite(found).all() and (found >= 0).all()):
                raise ValueError(f"{name} must be at least 0 and finite, not {found}; give what the run took.")
            total = total + each * found
        return total


@lru_cache(maxsize=1)
def published_model() -> tuple[EnergyModel, str]:
    """The only published model, and the hardware that its constants hold for."""
    table = tomllib.loads(data_path("catalogue/published/layered_prefill.toml").read_text(encoding="utf-8"))
    found = table["energy_model"]
    model = EnergyModel(found["static_power"], found["per_byte"], found["per_flop"])
    return model, "model (constants of two H100, fitted to Layered Prefill's Table 8)"
