"""Files of Linux in which the system says what it is; everything reads as nothing where there are none."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path

_GROUPS = "sys/fs/cgroup"


@dataclass(frozen=True)
class System:
    """The folders ``proc`` and ``sys`` below a root."""

    root: Path = Path("/")

    def text(self, path: str) -> str:
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
    def last_cache(self) -> str:
        """Size of the last-level cache of the first core, such as ``32768K``; empty if it is not told."""
        folder = self.root / "sys/devices/system/cpu/cpu0/cache"
        levels = sorted(folder.glob("index[0-9]*"), key=lambda each: self.text(f"{each.relative_to(self.root)}/level"))
        return self.text(f"{levels[-1].relative_to(self.root)}/size") if levels else ""

    @property
    def governor(self) -> str:
        """The rule by which the first core chooses its clock; empty if it is not told."""
        return self.text("sys/devices/system/cpu/cpu0/cpufreq/scaling_governor")

    @property
    def huge_pages(self) -> str:
        """The rule for transparent huge pages: ``always``, ``madvise`` or ``never``; empty if it is not told."""
        chosen = re.search(r"\[(\w+)\]", self.text("sys/kernel/mm/transparent_hugepage/enabled"))
        return chosen[1] if chosen else ""

    @property
    def core_limit(self) -> float | None:
        """Cores that this process's control groups grant on average; None without a limit."""
        limits = [limit for folder in self._groups() if (limit := self._quota(folder)) is not None]
        return min(limits, default=None)

    def _groups(self) -> list[str]:
        """Folders of this process's control group and those around it."""
        folders = list[str]()
        for line in self.text("proc/self/cgroup").splitlines():
            _, controllers, path = line.split(":", 2)
            if controllers and "cpu" not in controllers.split(","):
                continue
            top = f"{_GROUPS}/{controllers}" if controllers else _GROUPS
            own = Path(path.lstrip("/"))
            folders += [os.path.normpath(f"{top}/{part}") for part in (own, *own.parents)]
        return folders

    def _quota(self, folder: str) -> float | None:
        """Cores that one group grants: microseconds of a period, in either version's files."""
        quota, _, period = self.text(f"{folder}/cpu.max").partition(" ")
        if not quota:
            quota = self.text(f"{folder}/cpu.cfs_quota_us")
            period = self.text(f"{folder}/cpu.cfs_period_us")
        return int(quota) / int(period) if quota.isdecimal() and period.isdecimal() else None
