"""Processors, links and drives of the catalogue, and the shares of their nominal rates that last."""

from __future__ import annotations

import enum
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from workbench.core.catalogue import Catalogue, source_of
from workbench.core.errors import ScenarioError
from workbench.core.units import is_whole, parse_bytes
from workbench.hardware.dram import parse_dram


class ProcessorKind(enum.Enum):
    """Kind of a processor: a GPU, a CPU, or one chip with both on one memory."""

    GPU = "gpu"
    CPU = "cpu"
    UNIFIED = "unified"


_LANES = 16
"""PCIe lanes of a GPU, if nothing else is said, and those that a CPU's link is given for."""


@dataclass(frozen=True)
class Processor:
    """One GPU, one socket of a CPU, or one chip with both, at its nominal rates; nan where nothing is known.

    Attributes
    ----------
    memory : float
        Capacity of its memory [B]; for a CPU, that of the host; for a chip with both, the largest on sale.
    bandwidth : float
        Bandwidth of its memory [B/s].
    link : float
        A GPU's link to the host, or the 16 PCIe lanes of a CPU for a GPU, in one direction [B/s].
    lanes : int
        PCIe lanes of a GPU.
    flops : float
        Dense 16-bit GEMM rate [FLOP/s]; for a chip with both, that of the GPU.
    vector_flops : float
        A CPU's fp32 rate [FLOP/s].
    channels : int or None
        Memory channels of a CPU.
    dram : tuple of str
        The fastest DRAM of each kind that a CPU takes, such as "ddr5-5200"; `bandwidth` is for the first.
    fabric : float
        What the cores of a CPU read at most, however fast its DRAM is [B/s].
    gpu_share : float
        Share of its memory that the GPU of a chip with both may use.
    power : float
        Thermal design power [W].
    price : float
        Purchase price [USD].
    formats : tuple of str
        The 16-bit formats that `flops` holds for.
    sustained : tuple of str
        Names of the rates that are sustained and not nominal: they are never derated.
    sources : mapping of str to str

    Raises
    ------
    ScenarioError
        If a value is not positive, a share is above 1, a count is no whole number, or formats or dram are no tuple.
    """

    name: str
    kind: ProcessorKind
    bandwidth: float
    memory: float = math.nan
    flops: float = math.nan
    vector_flops: float = math.nan
    power: float = math.nan
    price: float = math.nan
    link: float = math.nan
    lanes: int = _LANES
    channels: int | None = None
    dram: tuple[str, ...] = ()
    fabric: float = math.nan
    gpu_share: float = math.nan
    formats: tuple[str, ...] = ("bf16", "fp16")
    sustained: tuple[str, ...] = ()
    sources: Mapping[str, str] = field(default_factory=dict, compare=False, repr=False)

    def __post_init__(self) -> None:
        for what in ("bandwidth", "memory", "flops", "vector_flops", "link", "fabric", "gpu_share"):
            value = getattr(self, what)
            if not isinstance(value, int | float) or value <= 0:
                raise ScenarioError(f"{self.name} has {what}={value!r}; give a positive number, or nan if unknown.")
        if not isinstance(self.formats, tuple):
            raise ScenarioError(f"{self.name} has formats={self.formats!r}; give a tuple such as ('bf16', 'fp16').")
        if self.gpu_share > 1:
            raise ScenarioError(f"{self.name} has gpu_share={self.gpu_share!r}; give a share above 0 and at most 1.")
        for what in ("lanes", "channels"):
            count = getattr(self, what)
            if count is not None and (not is_whole(count) or count < 1):
                raise ScenarioError(f"{self.name} has {what}={count!r}; give a whole number from 1 on.")
        if not isinstance(self.dram, tuple):
            raise ScenarioError(f"{self.name} has dram={self.dram!r}; give a tuple such as ('ddr5-5200',).")
        for name in self.dram:
            parse_dram(name, 1)

    @property
    def lane(self) -> float:
        """Rate of one PCIe lane [B/s]: of a GPU's link, or of a CPU's."""
        return self.link / (self.lanes if self.kind is ProcessorKind.GPU else _LANES)


@dataclass(frozen=True)
class Efficiency:
    """Shares of nominal rates that are sustained in practice, each above 0 and at most 1.

    Raises
    ------
    ScenarioError
        If one lies outside.
    """

    name: str
    gpu_flops: float = 1.0
    gpu_bandwidth: float = 1.0
    cpu_flops: float = 1.0
    vector_flops: float = 1.0
    cpu_bandwidth: float = 1.0
    link: float = 1.0
    sources: Mapping[str, str] = field(default_factory=dict, compare=False, repr=False)

    def __post_init__(self) -> None:
        for rate in _SHARES:
            if not isinstance(getattr(self, rate), int | float) or not 0 < getattr(self, rate) <= 1:
                raise ScenarioError(
                    f"efficiency {self.name!r} has {rate}={getattr(self, rate)!r}; give a share above 0 and at most 1."
                )


_SHARES = ("gpu_flops", "gpu_bandwidth", "cpu_flops", "vector_flops", "cpu_bandwidth", "link")


class Sourced(NamedTuple):
    """A number and its source."""

    number: float
    source: str


_NUMBERS = ("flops", "vector_flops", "power", "price", "gpu_share")


def _processor(name: str, table: dict[str, Any]) -> Processor:
    found: dict[str, Any] = {"sources": dict(table["source"])}
    found |= {key: parse_bytes(table[key], what=key) for key in ("memory", "bandwidth", "fabric") if key in table}
    found |= {key: float(table[key]) for key in _NUMBERS if key in table}
    found |= {key: tuple(table[key]) for key in ("formats", "sustained", "dram") if key in table}
    if "link" in table:
        found |= _link(table["link"], table)
    if "channels" in table:
        modules = parse_dram(table["dram"][0], table["channels"])
        found |= {"channels": modules.channels, "bandwidth": modules.rate}
        found["sources"]["bandwidth"] = f"{modules}; {source_of(table['source'], 'dram')}"
    return Processor(name=name, kind=ProcessorKind(table["kind"]), **found)


def _link(link: str, table: dict[str, Any]) -> dict[str, Any]:
    """Rate and lanes of a link by its name in `links`, or as they are given."""
    if link in links:
        return {"link": links[link].number, "lanes": int(link.rpartition("-x")[2])}
    return {"link": parse_bytes(link, what="link"), "lanes": table["lanes"]}


def _efficiency(name: str, table: dict[str, Any]) -> Efficiency:
    return Efficiency(name, **{share: table[share] for share in _SHARES}, sources=dict(table["source"]))


def _nominal_rate(name: str, table: dict[str, Any]) -> Sourced:
    return Sourced(parse_bytes(table["rate"], what=name), f"nominal: {table['source']['all']}")


PUT_TOGETHER = (
    "Or put one together: wb.Processor('my gpu', wb.ProcessorKind.GPU, bandwidth=936e9, memory=24e9, flops=71.2e12, "
    "link=31.5e9), or wb.Processor('my cpu', wb.ProcessorKind.CPU, bandwidth=83.2e9, vector_flops=2.3e12)"
)

processors: Catalogue[Processor] = Catalogue("processors.toml", _processor, mend=PUT_TOGETHER)
links: Catalogue[Sourced] = Catalogue("links.toml", _nominal_rate)
drives: Catalogue[Sourced] = Catalogue("drives.toml", _nominal_rate)
efficiencies: Catalogue[Efficiency] = Catalogue("efficiencies.toml", _efficiency)
