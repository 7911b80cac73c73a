"""Processors and links of the catalogue, and machines that are built from them."""

from __future__ import annotations

import enum
import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from workbench.core.catalogue import Catalogue, source_of
from workbench.core.errors import ScenarioError
from workbench.core.units import format_bytes, parse_bytes
from workbench.hardware.machine import Device, Link, Machine, value_names


class ProcessorKind(enum.Enum):
    """Kind of a processor: a GPU or a CPU."""

    GPU = "gpu"
    CPU = "cpu"


@dataclass(frozen=True)
class Processor:
    """One GPU, or one socket of a CPU, at its nominal rates; nan where nothing is known.

    Attributes
    ----------
    memory : float
        Capacity of its memory [B]; for a CPU, that of the host.
    bandwidth, link : float
        Bandwidth of its memory, and of the link to the host in one direction [B/s].
    flops : float
        Dense 16-bit GEMM rate [FLOP/s].
    vector_flops : float
        A CPU's fp32 rate [FLOP/s].
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
        If a value is not positive, or formats are no tuple.
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
    formats: tuple[str, ...] = ("bf16", "fp16")
    sustained: tuple[str, ...] = ()
    sources: Mapping[str, str] = field(default_factory=dict, compare=False, repr=False)

    def __post_init__(self) -> None:
        for what in ("bandwidth", "memory", "flops", "vector_flops", "link"):
            value = getattr(self, what)
            if not isinstance(value, int | float) or value <= 0:
                raise ScenarioError(f"{self.name} has {what}={value!r}; give a positive number, or nan if unknown.")
        if not isinstance(self.formats, tuple):
            raise ScenarioError(f"{self.name} has formats={self.formats!r}; give a tuple such as ('bf16', 'fp16').")


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


def machine(
    gpu: str | Processor,
    cpu: str | Processor,
    *,
    memory: str | float | None = None,
    link: str | float | None = None,
    gpus: int = 1,
    sockets: int = 1,
    efficiency: str | Efficiency = "sustained",
) -> Machine:
    """A machine of these processors; its `sources` say of every value if it is nominal or derated.

    Parameters
    ----------
    gpu, cpu : str or Processor
        Names in `processors`, or processors of one's own.
    memory : str or float, optional
        DRAM of the host [B]; needed unless the catalogue has it for the CPU.
    link : str or float, optional
        A name in `links`, or a sustained rate [B/s], which is not derated; by default the GPU's nominal link.
    gpus, sockets : int
        Number of GPUs, and of sockets. All together count as one device with free communication; they share one link.
    efficiency : str or Efficiency
        "sustained" derates nominal rates by published measurements; "nominal" leaves them unchanged.

    Raises
    ------
    CatalogueError
        If a processor is unknown.
    ScenarioError
        If a processor is of the wrong kind or lacks a value, or a count is no whole number from 1 on.
    ValueError
        If memory or link is no quantity.

    Notes
    -----
    A CPU without a 16-bit rate computes bf16 at its fp32 rate. Both directions of the link are as fast.
    """
    one = _of_kind(gpu, ProcessorKind.GPU)
    host = _of_kind(cpu, ProcessorKind.CPU)
    shares = efficiencies[efficiency] if isinstance(efficiency, str) else efficiency
    if not isinstance(shares, Efficiency):
        raise ScenarioError(f"efficiency is {shares!r}; give one of {', '.join(efficiencies)} or an Efficiency.")
    gemm = _rated(one, "flops", shares, "gpu_flops")
    vector = _rated(host, "vector_flops", shares, "vector_flops")
    of_gpu = {
        "memory": _known(one, "memory"),
        "bandwidth": _rated(one, "bandwidth", shares, "gpu_bandwidth"),
        **{f"flops.{dtype}": gemm for dtype in one.formats},
    }
    of_cpu = {
        "memory": _dram(host, memory),
        "bandwidth": _rated(host, "bandwidth", shares, "cpu_bandwidth"),
        "flops.fp32": vector,
        "flops.bf16": vector if math.isnan(host.flops) else _rated(host, "flops", shares, "cpu_flops"),
    }
    rate = _link(one, link, shares)
    over = f" over {link}" if isinstance(link, str) else ""
    made = Machine(
        f"{_counted(gpu, gpus)} + {_counted(cpu, sockets)}{over}, {shares.name}",
        _device(one.name, of_gpu).times(gpus),
        replace(_device(host.name, of_cpu).times(sockets), memory=of_cpu["memory"].number),
        Link(rate.number, rate.number),
    )
    sources = {"link.h2d": rate.source, "link.d2h": rate.source}
    sources |= {f"gpu.{key}": value.source for key, value in of_gpu.items()}
    sources |= {f"cpu.{key}": value.source for key, value in of_cpu.items()}
    return replace(made, sources={name: sources.get(name, "given") for name in value_names(made)})


def _of_kind(processor: str | Processor, kind: ProcessorKind) -> Processor:
    """A processor, found by its name if need be; refused if it is of the other kind."""
    found = processors[processor] if isinstance(processor, str) else processor
    if not isinstance(found, Processor) or found.kind is not kind:
        fitting = ", ".join(name for name, other in processors.items() if other.kind is kind)
        name = found.name if isinstance(found, Processor) else found
        raise ScenarioError(f"{name} is no {kind.value}; give one of {fitting}.")
    return found


def _known(processor: Processor, what: str) -> Sourced:
    """A value that is not derated; it is nominal unless the processor says otherwise."""
    number: float = getattr(processor, what)
    if math.isnan(number):
        raise ScenarioError(f"{processor.name} has no known {what}; give a Processor with {what}=...")
    standing = "sustained" if what in processor.sustained else "nominal"
    return Sourced(number, f"{standing}: {source_of(processor.sources, what) if processor.sources else 'given'}")


def _rated(processor: Processor, what: str, shares: Efficiency, share: str) -> Sourced:
    """A rate, derated if it is nominal."""
    value = _known(processor, what)
    return value if what in processor.sustained else _derated(value, shares, share)


def _derated(nominal: Sourced, shares: Efficiency, share: str) -> Sourced:
    number, source = nominal
    factor: float = getattr(shares, share)
    if factor == 1:
        return nominal
    amount = f"{number / 1e12:.4g} TFLOP/s" if share.endswith("flops") else f"{format_bytes(number)}/s"
    why = source_of(shares.sources, share) if shares.sources else "given"
    return Sourced(factor * number, f"derated to {factor:.2g} of {amount}: {why}; {source}")


def _dram(host: Processor, memory: str | float | None) -> Sourced:
    if memory is not None:
        return Sourced(parse_bytes(memory, what="memory"), "given")
    if math.isnan(host.memory):
        raise ScenarioError(f"{host.name} has no DRAM of its own; say what its host has, such as memory='512GB'.")
    return _known(host, "memory")


def _link(gpu: Processor, link: str | float | None, shares: Efficiency) -> Sourced:
    """Rate of the GPU's own link, of a known link by name, or a given sustained rate."""
    if isinstance(link, str) and link in links:
        return _derated(links[link], shares, "link")
    if link is None:
        return _rated(gpu, "link", shares, "link")
    try:
        return Sourced(parse_bytes(link, what="link"), "given")
    except ValueError as error:
        raise ScenarioError(f"{error} Or name one of {', '.join(links)}.") from None


def _device(name: str, values: Mapping[str, Sourced]) -> Device:
    rates = tuple((key.removeprefix("flops."), v.number) for key, v in values.items() if key.startswith("flops."))
    return Device(name, values["memory"].number, values["bandwidth"].number, rates)


def _counted(processor: str | Processor, count: int) -> str:
    name = processor if isinstance(processor, str) else processor.name
    return name if count == 1 else f"{count} x {name}"


def _processor(name: str, table: dict[str, Any]) -> Processor:
    found: dict[str, Any] = {"sources": dict(table["source"])}
    found |= {key: parse_bytes(table[key], what=key) for key in ("memory", "bandwidth", "link") if key in table}
    found |= {key: float(table[key]) for key in ("flops", "vector_flops", "power", "price") if key in table}
    found |= {key: tuple(table[key]) for key in ("formats", "sustained") if key in table}
    return Processor(name=name, kind=ProcessorKind(table["kind"]), **found)


def _efficiency(name: str, table: dict[str, Any]) -> Efficiency:
    return Efficiency(name, **{share: table[share] for share in _SHARES}, sources=dict(table["source"]))


def _link_rate(name: str, table: dict[str, Any]) -> Sourced:
    return Sourced(parse_bytes(table["rate"], what=name), f"nominal: {table['source']['all']}")


processors: Catalogue[Processor] = Catalogue("processors.toml", _processor)
links: Catalogue[Sourced] = Catalogue("links.toml", _link_rate)
efficiencies: Catalogue[Efficiency] = Catalogue("efficiencies.toml", _efficiency)
