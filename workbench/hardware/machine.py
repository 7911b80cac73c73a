"""Machines: a device that computes with its own memory, a host, and the link between them."""

from __future__ import annotations

import hashlib
import json
import math
import os
import platform
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cache, partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

from workbench.core.catalogue import Catalogue, cache_path, source_of
from workbench.core.display import html_table
from workbench.core.errors import ScenarioError
from workbench.core.kept import kept
from workbench.core.records import from_plain, read_json, reason, to_plain
from workbench.core.units import format_bytes, is_number, is_whole, parse_bytes
from workbench.hardware.profile import Cores, Profile
from workbench.hardware.system import System, torch_takes_cards

_RECORD = "record 2"
"""Version of a measured record's contents; another version is measured anew."""


_ITS_GPU = ", its GPU"
_ITS_CPU = ", its CPU"
"""Behind the name of a chip, of which both are parts."""


def _check_positive(name: str, **values: float) -> None:
    for what, value in values.items():
        if not is_number(value) or not value > 0:
            raise ScenarioError(f"{name} has {what}={value!r}; give a positive number.")


def _check_seconds(name: str, **values: float) -> None:
    for what, value in values.items():
        if not is_number(value) or not 0 <= value < math.inf:
            raise ScenarioError(f"{name} has {what}={value!r}; give seconds, at least 0.")


@dataclass(frozen=True)
class Interconnect:
    """Connection of the GPUs, or of the sockets, of one machine: each sends to its neighbour in a ring.

    Parameters
    ----------
    rate : float
        Rate in one direction [B/s].
    latency : float
        Latency of one message [s].

    Raises
    ------
    ScenarioError
        If the rate is not positive or the latency negative.
    """

    rate: float
    latency: float = 0.0

    def __post_init__(self) -> None:
        _check_positive("an interconnect", rate=self.rate)
        _check_seconds("an interconnect", latency=self.latency)


@dataclass(frozen=True)
class Device:
    """A device that computes, with its memory.

    Parameters
    ----------
    name : str
    memory : float
        Capacity [B].
    bandwidth : float
        Read bandwidth of that memory by this device [B/s].
    flops : tuple of (dtype, float)
        Sustained GEMM rate by dtype [FLOP/s].
    overhead : float
        Fixed time per operation [s]: launch, or Python per task.
    count : int
        Number of GPUs or sockets that it stands for; memory and rates are those of all together.
    between : Interconnect or None
        Their connection, if adding up partial sums takes time; None if it is free.

    Raises
    ------
    ScenarioError
        If a capacity or a rate is not positive, there is no FLOP rate, or a single GPU or socket has an interconnect.
    """

    name: str
    memory: float
    bandwidth: float
    flops: tuple[tuple[str, float], ...]
    overhead: float = 0.0
    count: int = 1
    between: Interconnect | None = None

    def __post_init__(self) -> None:
        _check_positive(self.name, memory=self.memory, bandwidth=self.bandwidth)
        _check_positive(self.name, **{f"flops of {dtype}": rate for dtype, rate in self.flops})
        _check_seconds(self.name, overhead=self.overhead)
        if not is_whole(self.count) or self.count < 1:
            raise ScenarioError(f"{self.name} has count={self.count!r}; give a whole number from 1 on.")
        if not self.flops:
            raise ScenarioError(f"{self.name} has no FLOP rate; give at least one, such as flops=(('bf16', 1e14),).")
        if self.between is not None and self.count == 1:
            raise ScenarioError(f"{self.name} is one, so nothing joins it; say how many there are with times(count).")

    def flop_rate(self, dtype: str) -> float:
        """Sustained rate for `dtype` [FLOP/s].

        Raises
        ------
        ScenarioError
            If no rate for that dtype is known.
        """
        for known, rate in self.flops:
            if known == dtype:
                return rate
        known_dtypes = ", ".join(known for known, _ in self.flops)
        raise ScenarioError(
            f"{self.name} has no known FLOP rate for {dtype}, only for {known_dtypes}; give "
            "Memory(weights=..., kv=...) one of these."
        )

    def times(self, count: int) -> Device:
        """`count` of these as one device: tensor parallelism in which communication is free.

        Raises
        ------
        ScenarioError
            If the count is no whole number from 1 on.

        Notes
        -----
        MoE-Lightning, section 4.3: memory, bandwidth and rates grow, and the link to the host does not.
        """
        if not is_whole(count) or count < 1:
            raise ScenarioError(f"{count!r} times {self.name} is no device; give a whole number from 1 on.")
        if count == 1:
            return self
        return replace(
            self,
            name=f"{count} x {self.name}",
            memory=count * self.memory,
            bandwidth=count * self.bandwidth,
            flops=tuple((dtype, count * rate) for dtype, rate in self.flops),
            count=count * self.count,
        )

    def joined(self, between: str | float | Interconnect) -> Device:
        """The device with an interconnect, or one of this rate [B/s], over which partial sums are added up."""
        if not isinstance(between, Interconnect):
            between = Interconnect(parse_bytes(between, what="rate"))
        joined = replace(self, between=between)
        return replace(joined, name=f"{self.name} over {format_bytes(between.rate)}/s")

    def spread(self, remote: float) -> Device:
        """The same sockets with pages on any of them: each socket reads one n-th from its own memory.

            B = n / ((1 / n) / B_own + (1 - 1 / n) / B_remote)

        Notes
        -----
        The rate is an upper bound: the sockets' connection is assumed to carry nothing else; see `Numa.OBLIVIOUS`.

        Raises
        ------
        ScenarioError
            If another socket's memory is read faster than its own.
        """
        share = 1 / self.count
        own = self.bandwidth / self.count
        if not 0 < remote <= own:
            raise ScenarioError(
                f"{self.name} cannot read remote={format_bytes(remote)}/s; give at most its own {format_bytes(own)}/s."
            )
        rate = self.count / (share / own + (1 - share) / remote)
        return replace(self, name=f"{self.name}, memory anywhere", bandwidth=rate, between=None)


@dataclass(frozen=True)
class Link:
    """Copies between host and device, each direction a lane of its own.

    Parameters
    ----------
    h2d : float
        Rate from host to device [B/s].
    d2h : float
        Rate from device to host [B/s].
    overhead : float
        Fixed time per copy [s].

    Raises
    ------
    ScenarioError
        If a rate is not positive or the overhead negative.
    """

    h2d: float
    d2h: float
    overhead: float = 0.0

    def __post_init__(self) -> None:
        _check_positive("the link", h2d=self.h2d, d2h=self.d2h)
        _check_seconds("the link", overhead=self.overhead)


@dataclass(frozen=True)
class Machine:
    """A GPU, a host CPU with its DRAM, and the link between them.

    `host` is the name of the computer on which the rates were measured, or None for a catalogue entry; `run` accepts
    only a machine whose host is this computer. If it is `throttled`, the link is slower than the hardware's on purpose,
    and the engine paces its copies. `cores` divides the host's cores among the lanes of a computer at hand. `profiles`
    has the measurements of `calibrate` at the shapes of models, and `rates` its other measurements, by name. `sources`
    has the source of every value of a catalogue entry, under names such as ``"gpu.flops.bf16"``.
    """

    name: str
    gpu: Device
    cpu: Device
    link: Link
    host: str | None = None
    throttled: bool = False
    measured: str = ""
    cores: Cores | None = None
    profiles: tuple[Profile, ...] = ()
    rates: tuple[tuple[str, float], ...] = ()
    sources: Mapping[str, str] = field(default_factory=dict, compare=False, repr=False)

    def profile(self, shape: str) -> Profile | None:
        """The profile measured at a model's shapes, or None."""
        return next((profile for profile in self.profiles if profile.shape == shape), None)

    def limit(self, *, gpu_memory: str | float | None = None, link: str | float | None = None) -> Machine:
        """The same machine with less GPU memory, or with a slower link [B/s, both directions].

        Raises
        ------
        ScenarioError
            If the limit is above the machine's own value.
        """
        machine = self
        if gpu_memory is not None:
            memory = parse_bytes(gpu_memory, what="gpu_memory")
            if memory > self.gpu.memory:
                raise ScenarioError(
                    f"{self.name} has {format_bytes(self.gpu.memory)} of GPU memory; limit(gpu_memory={gpu_memory!r}) "
                    "would raise it. Give a smaller value."
                )
            how = {"gpu.memory": f"limited on purpose, from {format_bytes(self.gpu.memory)}"}
            machine = replace(machine, gpu=replace(self.gpu, memory=memory), sources=machine.sources_with(how))
        if link is not None:
            rate = parse_bytes(link, what="link")
            if rate > min(self.link.h2d, self.link.d2h):
                raise ScenarioError(
                    f"the link of {self.name} reaches {format_bytes(min(self.link.h2d, self.link.d2h))}/s; "
                    f"limit(link={link!r}) would raise it. Give a smaller value."
                )
            lanes = {"link.h2d": self.link.h2d, "link.d2h": self.link.d2h}
            how = {name: f"limited on purpose, from {format_bytes(before)}/s" for name, before in lanes.items()}
            slower = replace(self.link, h2d=rate, d2h=rate)
            machine = replace(machine, link=slower, throttled=True, sources=machine.sources_with(how))
        return machine

    def joined(
        self, *, gpus: str | float | Interconnect | None = None, sockets: str | float | Interconnect | None = None
    ) -> Machine:
        """The same machine whose GPUs or sockets take time to add up their partial sums.

        Every matrix is split over them. On the GPUs each layer has two all-reduces, after the attention and after the
        experts; on the host it has a reduce-scatter after the experts, and one after the attention if that is there.

        Parameters
        ----------
        gpus, sockets : str, float or Interconnect, optional
            Connection of the GPUs, and of the sockets, or only its rate [B/s].

        Raises
        ------
        ScenarioError
            If there is only one GPU or socket.

        Notes
        -----
        MoE-Lightning section 4.3 and KTransformers section 3.3, which leave out this cost.
        """
        gpu = self.gpu if gpus is None else self.gpu.joined(gpus)
        cpu = self.cpu if sockets is None else self.cpu.joined(sockets)
        machine = replace(self, gpu=gpu, cpu=cpu)
        named = value_names(machine) if self.sources else []
        return replace(machine, sources={name: self.sources.get(name, "given") for name in named})

    def spread(self, remote: str | float) -> Machine:
        """The same machine with threads and pages on any socket; `remote` is the rate of another socket's memory [B/s].

        No matrix is split, so there are no partial sums, as in an engine that ignores sockets.
        """
        rate = parse_bytes(remote, what="remote")
        how = {"cpu.bandwidth": f"spread over the sockets, {format_bytes(rate)}/s from one to another"}
        return replace(self, cpu=self.cpu.spread(rate), sources=self.sources_with(how))

    def sources_with(self, how: Mapping[str, str]) -> dict[str, str]:
        """The sources of its values; those of changed values say how they were changed."""
        return {name: f"{how[name]}: {source}" if name in how else source for name, source in self.sources.items()}

    @property
    def one_memory(self) -> bool:
        """True for a chip whose GPU and CPU read the same memory."""
        chip = self.gpu.name.removesuffix(_ITS_GPU)
        return (self.gpu.name, self.cpu.name) == (chip + _ITS_GPU, chip + _ITS_CPU)

    @property
    def is_local(self) -> bool:
        """True if the rates were measured on this computer."""
        return self.host == platform.node()

    @property
    def has_card(self) -> bool:
        """True for a computer at hand whose gpu lane is computed by a card."""
        return self.cores is not None and not self.cores.gpu

    @property
    def shares_cores(self) -> bool:
        """True for a computer at hand whose lanes share the cores of its CPU."""
        return self.cores is not None and not self.has_card

    @classmethod
    def local(cls, *, device: str | None = None, refresh: bool = False) -> Machine:
        """This computer, with rates measured in a fresh process and kept for the next call.

        On the CPU, the gpu lane computes on half of the cores, the cpu lane on the others, and the link is a real copy.
        A card computes the gpu lane alone, and the link is its copies from and to pinned memory.
        The record is measured again when `refresh` is set, or when the card, Python or a library has changed.

        Parameters
        ----------
        device : "cpu" or "cuda", optional
            What computes the gpu lane: the CPU, or the NVIDIA card that torch sees first, which is the default where
            there is one and torch was built for it. `run` obeys the machine.
        refresh : bool

        Raises
        ------
        ScenarioError
            If there is no such device, or measuring fails.
        """
        if device not in (None, "cpu", "cuda"):
            raise ScenarioError(f"Machine.local has no device {device!r}; give device='cpu' or 'cuda'.")
        chosen = device or usual_device()
        try:
            return cls._kept(chosen, refresh=refresh)
        except ScenarioError as error:
            if device is not None or chosen == "cpu":
                raise
            print(f"{error} The CPU computes all meanwhile.", file=sys.stderr)
            return cls._kept("cpu", refresh=refresh)

    @classmethod
    def _kept(cls, device: str, *, refresh: bool) -> Machine:
        """This computer as it was measured last, or is now."""
        path = _record_path(device)
        what = "the rates of this computer"
        return kept(path, partial(cls._measured, device), load=cls.load, save=cls.save, what=what, refresh=refresh)

    @classmethod
    def _measured(cls, device: str) -> Machine:
        print("measuring this computer, once, in half a minute ...", file=sys.stderr, flush=True)
        command = [sys.executable, "-P", "-m", "workbench", "measure", "--device", device]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            last = (done.stderr.strip().splitlines() or ["no message"])[-1]
            raise ScenarioError(f"measuring this computer failed ({last}); try: {' '.join(command)}.")
        return cls._read(lambda: json.loads(done.stdout), "what measuring printed")

    @classmethod
    def load(cls, path: str | Path) -> Machine:
        """Read a machine written by `save`: measure on the server, predict on the laptop.

        Raises
        ------
        ScenarioError
            If the file is no such record.
        """
        return cls._read(lambda: read_json(path), str(path))

    @classmethod
    def _read(cls, plain: Callable[[], Any], where: str) -> Machine:
        try:
            machine: Machine = from_plain(cls, plain())
            return machine
        except (KeyError, TypeError, ValueError, AttributeError, OverflowError, RecursionError) as error:
            raise ScenarioError(
                f"{where} is no machine record ({reason(error)}); measure again with refresh=True."
            ) from error

    def save(self, path: str | Path) -> Path:
        """Write this machine as JSON."""
        path = Path(path)
        path.parent.mkdir(parents=True, exist_ok=True)
        unfinished = path.with_suffix(f".{os.getpid()}.part")
        try:
            unfinished.write_text(self.to_json(), encoding="utf-8")
            return unfinished.replace(path)
        except OSError:
            unfinished.unlink(missing_ok=True)
            raise

    def to_json(self) -> str:
        """This machine as JSON text."""
        return json.dumps(to_plain(self), indent=1)

    def __str__(self) -> str:
        gpu_rate = max(rate for _, rate in self.gpu.flops)
        return (
            f"{self.name}: gpu {format_bytes(self.gpu.memory)}, {gpu_rate / 1e12:.3g} TFLOP/s; "
            f"cpu {format_bytes(self.cpu.memory)}, {format_bytes(self.cpu.bandwidth)}/s; "
            f"link {format_bytes(self.link.h2d)}/s{' (throttled)' if self.throttled else ''}"
        )

    def _repr_html_(self) -> str:
        head = (self.name, "device", "memory", "bandwidth", "GEMM rate")
        rows = [
            (lane, d.name, format_bytes(d.memory), f"{format_bytes(d.bandwidth)}/s", _rates(d))
            for lane, d in (("gpu", self.gpu), ("cpu", self.cpu))
        ]
        slowed = "throttled" if self.throttled else ""
        link = ("link", slowed, "", f"{format_bytes(self.link.h2d)}/s in, {format_bytes(self.link.d2h)}/s out", "")
        return html_table([*rows, link], head) + self._sources_html()

    def _sources_html(self) -> str:
        if not self.sources:
            return ""
        return f"<details><summary>sources</summary>{html_table(self.sources.items())}</details>"


def usable_cores() -> int:
    """Cores that this process may use, which in a container can be fewer than the computer has."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _rates(device: Device) -> str:
    return ", ".join(f"{rate / 1e12:.3g} TFLOP/s {dtype}" for dtype, rate in device.flops)


@cache
def _versions() -> tuple[str, ...]:
    """Versions of the libraries that change the rates; they take a few milliseconds to read."""
    return tuple(f"{package}-{version(package)}" for package in ("torch", "numba", "numpy"))


def usual_device() -> str:
    """ "cuda" where there is an NVIDIA card that torch was built for, else "cpu"."""
    return "cuda" if System().has_card and torch_takes_cards() else "cpu"


def _record_path(device: str) -> Path:
    """Path of this computer's measured record; its name depends on everything that changes the rates."""
    computer = [platform.node(), platform.machine(), str(usable_cores()), platform.python_version()]
    cards = ["cuda", *System().cards] if device == "cuda" else []
    key = "|".join([_RECORD, *computer, *_versions(), *cards])
    return cache_path(f"machine-{hashlib.sha256(key.encode()).hexdigest()[:16]}.json")


def value_names(machine: Machine) -> list[str]:
    """Name of every value that a catalogue gives a machine, as `Machine.sources` has them."""
    names = []
    for lane, device in (("gpu", machine.gpu), ("cpu", machine.cpu)):
        counted = [f"{lane}.count"] if device.count > 1 else []
        rates = [f"{lane}.flops.{dtype}" for dtype, _ in device.flops]
        joined = [f"{lane}.between"] if device.between else []
        names += [*counted, *joined, f"{lane}.memory", f"{lane}.bandwidth", *rates]
    return [*names, "link.h2d", "link.d2h"]


def _from_catalogue(name: str, table: dict[str, Any]) -> Machine:
    def device(key: str) -> Device:
        entry = table[key]
        return Device(
            name=entry["name"],
            memory=parse_bytes(entry["memory"]),
            bandwidth=parse_bytes(entry["bandwidth"]),
            flops=tuple(entry["flops"].items()),
        ).times(entry.get("count", 1))

    link = table["link"]
    machine = Machine(name, device("gpu"), device("cpu"), Link(parse_bytes(link["h2d"]), parse_bytes(link["d2h"])))
    sources = {value: source_of(table["source"], value) for value in value_names(machine)}
    return replace(machine, sources=sources)


machines: Catalogue[Machine] = Catalogue("machines.toml", _from_catalogue)
