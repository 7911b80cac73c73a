"""DRAM of a host: kind, speed and channels of its modules, and the rate that follows."""

from __future__ import annotations

import re
from dataclasses import dataclass

from workbench.core.errors import ScenarioError
from workbench.core.units import is_whole, parse_bytes

_CHANNEL_BYTES = 8
"""Bytes that a channel moves in a transfer; the two half channels of a DDR5 module count as one."""
_SPEEDS = {"ddr3": (800, 2200), "ddr4": (1600, 5400), "ddr5": (3200, 10_000)}
"""Slowest and fastest modules on sale [MT/s]."""
_MODULES = re.compile(r"\s*(\S.*?)\s+([a-z]+\d\w*)-(\d+)(?:\s+x(\d+))?\s*", re.IGNORECASE)
_EXAMPLE = "'64GB ddr5-6000 x2'"


@dataclass(frozen=True)
class Dram:
    """DRAM in the channels of one socket.

    Attributes
    ----------
    kind : str
        "ddr3", "ddr4" or "ddr5".
    speed : int
        Transfers of a channel [MT/s].
    channels : int
        Channels with modules in them.

    Raises
    ------
    ScenarioError
        If the kind is unknown, no module of that kind has the speed, or there is no channel.
    """

    kind: str
    speed: int
    channels: int

    def __post_init__(self) -> None:
        if self.kind not in _SPEEDS:
            raise ScenarioError(f"DRAM of kind {self.kind!r} is unknown; give one of {', '.join(_SPEEDS)}.")
        slowest, fastest = _SPEEDS[self.kind]
        if not slowest <= self.speed <= fastest:
            raise ScenarioError(f"no {self.kind} has {self.speed} MT/s; give a speed from {slowest} to {fastest}.")
        if not is_whole(self.channels) or self.channels < 1:
            raise ScenarioError(f"DRAM in {self.channels!r} channels is none; give a whole number from 1 on.")

    @property
    def rate(self) -> float:
        """Nominal rate of all channels [B/s]: channels x transfers per second x 8 B."""
        return self.channels * self.speed * 1e6 * _CHANNEL_BYTES

    def __str__(self) -> str:
        channels = "1 channel" if self.channels == 1 else f"{self.channels} channels"
        return f"{channels} x {self.speed} MT/s x {_CHANNEL_BYTES} B"


def parse_dram(name: str, channels: int) -> Dram:
    """DRAM by a name such as "ddr5-5200".

    Raises
    ------
    ScenarioError
        If it is no such name.
    """
    kind, _, speed = name.partition("-")
    if not speed.isdecimal():
        raise ScenarioError(f"DRAM {name!r} has no speed; write for example 'ddr5-5200'.")
    return Dram(kind, int(speed), channels)


def parse_memory(
    text: str | float, *, host: str, channels: int | None, takes: tuple[str, ...]
) -> tuple[float, Dram | None]:
    """Capacity [B], and the modules if they are told, of a text such as "64GB" or "64GB ddr5-6000 x2".

    Parameters
    ----------
    text : str or float
        Capacity; then kind, speed and channels in use. Without channels, all that the CPU has.
    host : str
        Name of the CPU.
    channels : int or None
        Channels of the CPU; None if unknown.
    takes : tuple of str
        The fastest DRAM of each kind that the CPU takes, such as "ddr5-5200"; empty if unknown.

    Raises
    ------
    ScenarioError
        If the text is neither, or the CPU takes no such modules.
    """
    match = _MODULES.fullmatch(text) if isinstance(text, str) else None
    if match is None:
        return _capacity(text), None
    capacity, kind, speed, used = match.groups()
    kinds = [name.partition("-")[0] for name in takes]
    if kinds and kind.lower() not in kinds:
        fitting = f"'{capacity} {takes[0]} x{channels or 2}'"
        raise ScenarioError(f"{host} takes {' or '.join(kinds)}, not {kind.lower()}; write for example {fitting}.")
    count = channels if used is None else int(used)
    if count is None:
        raise ScenarioError(f"memory {text!r} does not say how many channels are in use; write for example {_EXAMPLE}.")
    if channels is not None and count > channels:
        fitting = f"'{capacity} {kind.lower()}-{speed} x{channels}'"
        raise ScenarioError(f"{host} has {channels} memory channels, not {count}; write at most {fitting}.")
    return _capacity(capacity), Dram(kind.lower(), int(speed), count)


def _capacity(text: str | float) -> float:
    try:
        return parse_bytes(text, what="memory")
    except ValueError as error:
        raise ScenarioError(f"{error} Or add its modules: {_EXAMPLE}.") from None
