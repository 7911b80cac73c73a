"""What a process can still take: the least that the computer and every control group around it leave."""

from pathlib import Path

import psutil
import pytest

from workbench.hardware import FreeMemory, free_memory

UNIFIED = ("memory.max", "memory.current", "inactive_file")
LEGACY = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
UNLIMITED = 9_223_372_036_854_771_712  # what the older version says where there is no limit


@pytest.fixture
def computer(monkeypatch: pytest.MonkeyPatch) -> None:
    """A computer with 1000 bytes, 800 of them free."""

    class Memory:
        available, total = 800, 1000

    monkeypatch.setattr(psutil, "virtual_memory", lambda: Memory)


def group(folder: Path, limit: object, usage: int, files: int, names: tuple[str, str, str]) -> str:
    """Fake a control group."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / names[0]).write_text(f"{limit}\n")
    (folder / names[1]).write_text(f"{usage}\n")
    (folder / "memory.stat").write_text(f"anon 7\n{names[2]} {files}\n")
    return f"control group {folder}"


def belongs(root: Path, *lines: str) -> None:
    (root / "proc/self").mkdir(parents=True)
    (root / "proc/self/cgroup").write_text("".join(f"{line}\n" for line in lines))


def test_without_control_groups_it_is_what_the_computer_has_free(computer: None, tmp_path: Path) -> None:
    assert free_memory(tmp_path) == FreeMemory(800, 1000, "this computer")


@pytest.mark.parametrize(
    ("line", "top", "names"),
    [("0::/user/job", "", UNIFIED), ("5:memory:/user/job", "memory", LEGACY)],
    ids=["unified", "legacy"],
)
def test_the_tightest_group_decides(
    line: str, top: str, names: tuple[str, str, str], computer: None, tmp_path: Path
) -> None:
    """Files that the group read are taken back by the system; the group around may leave less than its own."""
    belongs(tmp_path, "3:cpu,cpuacct:/elsewhere", line)
    base = tmp_path / "sys/fs/cgroup" / top
    own = group(base / "user/job", 600, 500, 100, names)
    assert free_memory(tmp_path) == FreeMemory(200, 600, own)
    outer = group(base / "user", 700, 650, 0, names)
    assert free_memory(tmp_path) == FreeMemory(50, 700, outer)
    group(base / "user", 700, 900, 0, names)
    assert free_memory(tmp_path).bytes == 0
    for folder in (base / "user", base / "user/job"):
        group(folder, "max" if names is UNIFIED else UNLIMITED, 500, 0, names)
    assert free_memory(tmp_path).of == "this computer"


@pytest.mark.parametrize(("line", "top", "names"), [("0::/", "", UNIFIED), ("5:memory:/docker/1f", "memory", LEGACY)])
def test_in_a_container_its_own_group_is_the_top_one(
    line: str, top: str, names: tuple[str, str, str], computer: None, tmp_path: Path
) -> None:
    """The path is then the root, or the one outside, which the container does not see."""
    belongs(tmp_path, line)
    of = group(tmp_path / "sys/fs/cgroup" / top, 300, 100, 0, names)
    assert free_memory(tmp_path) == FreeMemory(200, 300, of)
