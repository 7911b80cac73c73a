"""Writes constraints.txt, which ./lab installs: the newest versions that pyproject.toml allows and that work together.

    python lock.py      then run ./lab test --all, and commit the file if nothing fails

Run it with the oldest Python that pyproject.toml allows: newer ones may get versions that this one cannot install. A
fresh virtual environment is made for it in a temporary folder, with the extras `test` (which has `lab`), `docs` and
`ray`.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import tomllib
import venv
from collections.abc import Iterable
from datetime import UTC, date, datetime
from pathlib import Path

ROOT = Path(__file__).parent
LOCK = ROOT / "constraints.txt"
TORCH = "torch==2.13.0"
"""As in ./lab."""
WITH_TORCH = ("triton", "nvidia-", "cuda-")
"""Not locked: torch's CUDA build asks for versions of its own, its CPU build for none."""


def locked(frozen: Iterable[str]) -> list[str]:
    """Lines of a lock from those of `pip freeze`, without what torch decides and without local versions (+cpu)."""
    pins = [line.partition("+")[0] for line in frozen if "==" in line]
    return sorted(pin for pin in pins if not pin.startswith(WITH_TORCH))


def written(pins: Iterable[str], day: date) -> str:
    """The file."""
    head = f"# Versions that work together, found on {day} by: python lock.py\n"
    return head + "".join(f"{pin}\n" for pin in pins)


def oldest_python() -> tuple[int, int]:
    """The oldest that pyproject.toml allows."""
    asked = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["requires-python"]
    major, minor = asked.removeprefix(">=").split(".")
    return int(major), int(minor)


def check_python(running: tuple[int, int]) -> None:
    """Refuse every Python but the oldest: what it installs, newer ones install too.

    Raises
    ------
    SystemExit
    """
    oldest = oldest_python()
    if running != oldest:
        major, minor = oldest
        raise SystemExit(
            f"lock.py needs Python {major}.{minor}, the oldest that pyproject.toml allows, and this is "
            f"{running[0]}.{running[1]}; run python{major}.{minor} lock.py."
        )


def main() -> None:
    """Install the newest versions and write down which these are."""
    check_python(sys.version_info[:2])
    with tempfile.TemporaryDirectory() as folder:
        venv.create(folder, with_pip=True)
        python = str(Path(folder) / ("Scripts/python.exe" if sys.platform == "win32" else "bin/python"))
        for wanted in (TORCH, f"{ROOT}[docs,ray,test]"):
            subprocess.run([python, "-m", "pip", "install", "--disable-pip-version-check", wanted], check=True)
        frozen = subprocess.run([python, "-m", "pip", "freeze"], check=True, capture_output=True, text=True).stdout
    LOCK.write_text(written(locked(frozen.splitlines()), datetime.now(UTC).date()), encoding="utf-8")
    print(f"wrote {LOCK}")


if __name__ == "__main__":
    main()
