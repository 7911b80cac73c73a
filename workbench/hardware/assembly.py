"""Machines that are put together of processors."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace

from workbench.core.catalogue import source_of
from workbench.core.errors import ScenarioError
from workbench.core.units import format_bytes, parse_bytes
from workbench.hardware.dram import Dram, parse_memory
from workbench.hardware.machine import Device, Link, Machine, value_names
from workbench.hardware.processors import Efficiency, Processor, ProcessorKind, Sourced, efficiencies, links, processors

_LEAST_MEMORY = 1e8
"""A host has more memory than this [B]: less is a number without its unit."""


def machine(
    gpu: str | Processor,
    cpu: str | Processor | None = None,
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
        Names in `processors`, or processors of one's own. A chip that has both on one memory stands alone.
    memory : str or float, optional
        DRAM of the host: its capacity [B], such as "64GB", or also kind, speed and channels in use of each socket, such
        as "64GB ddr5-6000 x2". Without them the CPU has its fastest official DRAM in all channels. Needed unless the
        catalogue has it for the CPU. For a chip with both, its capacity; by default the largest on sale.
    link : str or float, optional
        A name in `links`, or a sustained rate [B/s], which is not derated; by default the GPU's nominal link, at the
        CPU's rate per lane where that is known and lower.
    gpus, sockets : int
        Number of GPUs, and of sockets. All together count as one device with free communication; they share one link.
    efficiency : str or Efficiency
        "sustained" derates nominal rates by published measurements; "nominal" leaves them unchanged.

    Raises
    ------
    CatalogueError
        If a processor is unknown.
    ScenarioError
        If a processor is of the wrong kind or lacks a value, the CPU takes no such memory, or a count is no whole
        number from 1 on.
    ValueError
        If memory or link is no quantity.

    Notes
    -----
    A CPU without a 16-bit rate computes bf16 at its fp32 rate. Both directions of the link are as fast. DRAM gives
    channels x transfers per second x 8 B, derated; where the cores' fabric is slower than that, it is the limit. Of one
    memory for both, the GPU has its share and the host the rest, and a copy between the two reads and writes it.
    """
    shares = efficiencies[efficiency] if isinstance(efficiency, str) else efficiency
    if not isinstance(shares, Efficiency):
        raise ScenarioError(f"efficiency is {shares!r}; give one of {', '.join(efficiencies)} or an Efficiency.")
    one = processors[gpu] if isinstance(gpu, str) else gpu
    if isinstance(one, Processor) and one.kind is ProcessorKind.UNIFIED:
        if cpu is not None or link is not None or (gpus, sockets) != (1, 1):
            raise ScenarioError(f"{one.name} has GPU and CPU on one memory; leave out cpu, link, gpus and sockets.")
        return _of_one_memory(one, memory, shares)
    _check_kind(one, ProcessorKind.GPU)
    if cpu is None:
        example = f"wb.machine({one.name!r}, 'ryzen-7950x', memory='64GB ddr5-6000 x2')"
        raise ScenarioError(f"{one.name} is a GPU without a host; name a CPU too, such as {example}.")
    host = processors[cpu] if isinstance(cpu, str) else cpu
    _check_kind(host, ProcessorKind.CPU)
    of_gpu = {
        "memory": _known(one, "memory"),
        "bandwidth": _rated(one, "bandwidth", shares, "gpu_bandwidth"),
        **_gemm(one, shares),
    }
    of_cpu = {**_dram(host, memory, shares), **_vector(host, shares)}
    over = f" over {link}" if isinstance(link, str) else ""
    return _assembled(
        f"{_counted(one, gpus)} + {_counted(host, sockets)}{over}, {shares.name}",
        _device(one.name, of_gpu).times(gpus),
        replace(_device(host.name, of_cpu).times(sockets), memory=of_cpu["memory"].number),
        {"gpu": of_gpu, "cpu": of_cpu},
        _link(one, host, link, shares),
    )


def _of_one_memory(chip: Processor, memory: str | float | None, shares: Efficiency) -> Machine:
    """The machine of a chip whose GPU and CPU have one memory, divided between them."""
    whole = _whole_memory(chip, memory)
    share = _known(chip, "gpu_share").number
    rate = _rated(chip, "bandwidth", shares, "gpu_bandwidth")
    told = f"of {format_bytes(whole.number)}: {_source(chip, 'gpu_share')}; {whole.source}"
    of_gpu = {
        "memory": Sourced(share * whole.number, f"{share:.3g} {told}"),
        "bandwidth": rate,
        **_gemm(chip, shares),
    }
    of_cpu = {
        "memory": Sourced((1 - share) * whole.number, f"the rest, {1 - share:.3g} {told}"),
        "bandwidth": _capped(chip, _rated(chip, "bandwidth", shares, "cpu_bandwidth")),
        "flops.fp32": _rated(chip, "vector_flops", shares, "vector_flops"),
        "flops.bf16": _rated(chip, "vector_flops", shares, "vector_flops"),
    }
    copies = Sourced(rate.number / 2, f"half of the memory's rate, which a copy reads and writes: {rate.source}")
    gpu, cpu = _device(f"{chip.name}, its GPU", of_gpu), _device(f"{chip.name}, its CPU", of_cpu)
    return _assembled(f"{chip.name}, {shares.name}", gpu, cpu, {"gpu": of_gpu, "cpu": of_cpu}, copies)


def _whole_memory(chip: Processor, memory: str | float | None) -> Sourced:
    largest = _known(chip, "memory")
    if memory is None:
        return largest
    capacity = parse_bytes(memory, what="memory")
    if capacity > largest.number:
        most = format_bytes(largest.number)
        raise ScenarioError(f"{chip.name} has at most {most} of memory, not {memory!r}; give a smaller capacity.")
    return Sourced(capacity, "given")


def _assembled(
    name: str, gpu: Device, cpu: Device, values: Mapping[str, Mapping[str, Sourced]], link: Sourced
) -> Machine:
    """A machine with the source of each of its values; what has none was given."""
    made = Machine(name, gpu, cpu, Link(link.number, link.number))
    sources = {"link.h2d": link.source, "link.d2h": link.source}
    for lane, of_lane in values.items():
        sources |= {f"{lane}.{key}": value.source for key, value in of_lane.items()}
    return replace(made, sources={value: sources.get(value, "given") for value in value_names(made)})


def _check_kind(processor: object, kind: ProcessorKind) -> None:
    """Refuse what is no processor of this kind."""
    if isinstance(processor, Processor) and processor.kind is kind:
        return
    fitting = ", ".join(name for name, other in processors.items() if other.kind is kind)
    name = processor.name if isinstance(processor, Processor) else processor
    raise ScenarioError(f"{name} is no {kind.value}; give one of {fitting}.")


def _known(processor: Processor, what: str) -> Sourced:
    """A value that is not derated; it is nominal unless the processor says otherwise."""
    number: float = getattr(processor, what)
    if math.isnan(number):
        raise ScenarioError(f"{processor.name} has no known {what}; give a Processor with {what}=...")
    standing = "sustained" if what in processor.sustained else "nominal"
    return Sourced(number, f"{standing}: {_source(processor, what)}")


def _source(processor: Processor, what: str) -> str:
    return source_of(processor.sources, what) if processor.sources else "given"


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


def _gemm(gpu: Processor, shares: Efficiency) -> dict[str, Sourced]:
    rate = _rated(gpu, "flops", shares, "gpu_flops")
    return {f"flops.{dtype}": rate for dtype in gpu.formats}


def _vector(host: Processor, shares: Efficiency) -> dict[str, Sourced]:
    vector = _rated(host, "vector_flops", shares, "vector_flops")
    matrix = vector if math.isnan(host.flops) else _rated(host, "flops", shares, "cpu_flops")
    return {"flops.fp32": vector, "flops.bf16": matrix}


def _dram(host: Processor, memory: str | float | None, shares: Efficiency) -> dict[str, Sourced]:
    """Capacity and rate of the host's DRAM, the CPU's own where none is given."""
    modules: Dram | None = None
    if memory is not None:
        amount, modules = parse_memory(memory, host=host.name, channels=host.channels, takes=host.dram)
        if amount < _LEAST_MEMORY:
            raise ScenarioError(
                f"memory={memory!r} is {format_bytes(amount)} for {host.name}; write for example '64GB'."
            )
        capacity = Sourced(amount, "given")
    elif math.isnan(host.memory):
        raise ScenarioError(f"{host.name} has no DRAM of its own; say what its host has, such as memory='512GB'.")
    else:
        capacity = _known(host, "memory")
    if modules is None:
        rate = _rated(host, "bandwidth", shares, "cpu_bandwidth")
    else:
        rate = _derated(Sourced(modules.rate, f"nominal: {modules}, given"), shares, "cpu_bandwidth")
    return {"memory": capacity, "bandwidth": _capped(host, rate)}


def _capped(host: Processor, rate: Sourced) -> Sourced:
    """The rate at which cores read DRAM, or that of their fabric if it is known and lower."""
    if not host.fabric < rate.number:
        return rate
    return Sourced(host.fabric, f"limited by the fabric: {_source(host, 'fabric')}; DRAM alone: {rate.source}")


def _link(gpu: Processor, host: Processor, link: str | float | None, shares: Efficiency) -> Sourced:
    """Rate of the GPU's own link, of a known link by name, or a given sustained rate."""
    if isinstance(link, str) and link in links:
        return _derated(links[link], shares, "link")
    if link is None and host.lane < gpu.lane and "link" not in gpu.sustained:
        source = f"nominal: {gpu.lanes} lanes at the rate of {host.name}: {_source(host, 'link')}"
        return _derated(Sourced(gpu.lanes * host.lane, source), shares, "link")
    if link is None:
        return _rated(gpu, "link", shares, "link")
    try:
        return Sourced(parse_bytes(link, what="link"), "given")
    except ValueError as error:
        raise ScenarioError(f"{error} Or name one of {', '.join(links)}.") from None


def _device(name: str, values: Mapping[str, Sourced]) -> Device:
    rates = tuple((key.removeprefix("flops."), v.number) for key, v in values.items() if key.startswith("flops."))
    return Device(name, values["memory"].number, values["bandwidth"].number, rates)


def _counted(processor: Processor, count: int) -> str:
    return processor.name if count == 1 else f"{count} x {processor.name}"
