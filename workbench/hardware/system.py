"""Files of Linux in which the system says what it is; everything reads as nothing where there are none."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple


class Group(NamedTuple):
    """The folder of a control group; `legacy` if its files have the names of version 1."""

    folder: Path
    legacy: bool


@dataclass(frozen=True)
class System:
    """The folders ``proc``, ``sys`` and ``dev`` below a root."""

    root: Path = Path("/")

    def text(self, path: str | Path) -> str:
        """A file's text without blanks around it; empty where there is none or it is hidden."""
        try:
            return (self.root / path).read_text(encoding="utf-8").strip()
        except OSError:
            return ""

    @property
    def cpu_name(self) -> str:
        """The name that the CPU gives itself; empty where it gives none."""
        found = re.search(r"^model name\s*: (.+)$", self.text("proc/cpuinfo"), re.MULTILINE)
        return found[1].strip() if found else ""

    @property
    def cards(self) -> list[str]:
        """The text of NVIDIA's driver on each of its cards."""
        folders = sorted((self.root / "proc/driver/nvidia/gpus").glob("*"))
        return [self.text(folder / "information") for folder in folders]

    @property
    def has_card(self) -> bool:
        """True if this process may open an NVIDIA card, and CUDA is not told to hide all of them.

        A container may see the driver of cards that it may not open.
        """
        shown = os.environ.get("CUDA_VISIBLE_DEVICES", "0")
        return re.match(r"\d|GPU-|MIG-", shown) is not None and any((self.root / "dev").glob("nvidia[0-9]*"))

    @property
    def last_cache(self) -> str:
        """Size of the last-level cache of the first core, such as ``32768K``; empty if it is not told."""
        folder = self.root / "sys/devices/system/cpu/cpu0/cache"
        levels = sorted(folder.glob("index[0-9]*"), key=lambda each: self.text(each / "level"))
        return self.text(levels[-1] / "size") if levels else ""

    @property
    def governor(self) -> str:
        """The rule by which the first core chooses its clock; empty if it is not told."""
        return self.text("sys/devices/system/cpu/cpu0/cpufreq/scaling_governor")

    @property
    def huge_pages(self) -> str:
        """The rule for transparent huge pages: ``always``, ``madvise`` or ``never``; empty if it is not told."""
        chosen = re.search(r"\[(\w+)\]", self.text("sys/kernel/mm/transparent_hugepage/enabled"))
        return chosen[1] if chosen else ""

    def groups(self, controller: str) -> Iterator[Group]:
        """Control groups that limit this process's use of "memory" or "cpu", from its own to the outermost."""
        for line in self.text("proc/self/cgroup").splitlines():
            _, controllers, path = line.split(":", 2)
            if controllers and controller not in controllers.split(","):
                continue
            top = self.root / "sys/fs/cgroup" / controllers
            own = top / path.lstrip("/")
            for folder in (own, *(parent for parent in own.parents if parent.is_relative_to(top))):
                yield Group(folder, bool(controllers))

    @property
    def core_limit(self) -> float | None:
        """Cores that this process's control groups grant on average; None without a limit."""
        limits = [limit for group in self.groups("cpu") if (limit := self._cores(group)) is not None]
        return min(limits, default=None)

    def _cores(self, group: Group) -> float | None:
        """Cores that one group grants: microseconds of a period."""
        if group.legacy:
            quota = self.text(group.folder / "cpu.cfs_quota_us")
            period = self.text(group.folder / "cpu.cfs_period_us")
        else:
            quota, _, period = self.text(group.folder / "cpu.max").partition(" ")
        return int(quota) / int(period) if quota.isdecimal() and period.isdecimal() else None


def torch_takes_cards() -> bool:
    """True if the torch that is installed was built for NVIDIA cards; it is not imported, which would take a second."""
    found = find_spec("torch")
    if found is None or found.origin is None:
        return False
    try:
        text = Path(found.origin).with_name("version.py").read_text(encoding="utf-8")
    except OSError:
        return False
    return re.search(r"^cuda\b[^=\n]*= *'\d", text, re.MULTILINE) is not None
