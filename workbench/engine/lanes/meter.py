"""Meters of the energy that the hardware itself counts: a GPU's through NVML, the processors' through RAPL."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from functools import reduce
from pathlib import Path

from workbench.core.energy import Energy

RAPL = Path("/sys/class/powercap")
Counter = Callable[[], float]
"""Function that returns the joules counted since some moment."""


class Meter:
    """Counts joules from `start` on. `read` it so often that no counter passes its end twice in between.

    Parameters
    ----------
    source : str
    counters : list of (Counter, float)
        Counters, each with the joules after which it begins again at zero.
    """

    def __init__(self, source: str, counters: list[tuple[Counter, float]]) -> None:
        self._source = source
        self._counters = counters
        self.start()

    def start(self) -> None:
        """Set the count to zero."""
        self._joules = 0.0
        self._seen = [count() for count, _ in self._counters]

    def read(self) -> Energy:
        """Energy since `start`."""
        now = [count() for count, _ in self._counters]
        for before, after, (_, most) in zip(self._seen, now, self._counters, strict=True):
            self._joules += after - before + (most if after < before else 0.0)
        self._seen = now
        return Energy(self._joules, self._source)

    def beside(self, other: Meter) -> Meter:
        """A meter that counts what both do."""
        return Meter(f"{self._source}; {other._source}", [*self._counters, *other._counters])


def energy_meter(*, on_card: bool) -> Meter | None:
    """A meter of what computes a run: the processors, and with a card the GPUs; of one of them where one counts."""
    found = [meter for meter in (processors(), gpus() if on_card else None) if meter is not None]
    return reduce(Meter.beside, found) if found else None


def processors(root: Path = RAPL) -> Meter | None:
    """A meter of the processors' packages; None if RAPL is absent or not readable for this user."""
    try:
        packages = [
            (_file(folder / "energy_uj"), _file(folder / "max_energy_range_uj")())
            for folder in sorted(root.glob("intel-rapl:?"))
        ]
        return Meter("RAPL, all programs on these processors", packages) if packages else None
    except (OSError, ValueError):
        return None


def _file(path: Path) -> Counter:
    """A counter that reads microjoules from a file."""
    return lambda: int(path.read_text()) / 1e6


def gpus() -> Meter | None:
    """A meter of all GPUs that NVML knows; None without its library, or if a GPU does not count."""
    try:
        nvml = ctypes.CDLL("libnvidia-ml.so.1")
        count = ctypes.c_uint()
        if nvml.nvmlInit_v2() or nvml.nvmlDeviceGetCount_v2(ctypes.byref(count)) or not count.value:
            return None
        counters = [(_gpu(nvml, index), float("inf")) for index in range(count.value)]
        return Meter("NVML, all programs on these GPUs", counters)
    except (OSError, ValueError):
        return None


def _gpu(nvml: ctypes.CDLL, index: int) -> Counter:
    device = ctypes.c_void_p()
    if nvml.nvmlDeviceGetHandleByIndex_v2(index, ctypes.byref(device)):
        raise OSError(f"NVML does not give GPU {index}.")

    def joules() -> float:
        total = ctypes.c_ulonglong()
        if nvml.nvmlDeviceGetTotalEnergyConsumption(device, ctypes.byref(total)):
            raise OSError(f"GPU {index} does not count its energy.")
        return total.value / 1e3

    return joules
