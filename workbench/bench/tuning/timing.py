"""A process that times calls of one group of kernels with its own settings, when it is told to.

`python -m workbench.bench.tuning.timing GROUP` says which calls there are, and then, for each line with a name, how
long that call took. Settings are compiled into the kernels, so that others need another process.
"""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from workbench.core.errors import WorkbenchError
from workbench.kernels import Parameters

_LEAST = 2e-3
"""Time that a call is repeated for: a shorter one would be timed with what the processes before left in the caches."""


class TimingError(WorkbenchError):
    """A process that times kernels ended, or its results are wrong."""


class Timing:
    """A process that times the calls of one group of kernels with its own settings.

    Parameters
    ----------
    group : str
    settings : Parameters
    folder : Path
        Where the settings are written to, and compiled code is kept.
    """

    def __init__(self, group: str, settings: Parameters, folder: Path) -> None:
        self.settings = settings
        self._group = group
        self._names: list[str] | None = None
        table = folder / f"{group}-{len(list(folder.iterdir()))}.toml"
        table.write_text(settings.text(), encoding="utf-8")
        env = os.environ | {
            Parameters.VARIABLE: str(table),
            "NUMBA_CACHE_DIR": str(folder),
            "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
        }
        self._process = subprocess.Popen(
            [sys.executable, "-m", "workbench.bench.tuning.timing", group],
            env=env,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,  # Ctrl-C is for the search alone
        )

    def compile(self) -> list[str]:
        """Wait until all calls are compiled; returns their names.

        Raises
        ------
        TimingError
            If a result is wrong with these settings, or the process ended.
        """
        if self._names is None:
            told = self._answer()
            if "wrong" in told:
                raise TimingError(told["wrong"])
            self._names = told["calls"]
        return self._names

    def seconds(self, call: str) -> float:
        """Time one call [s].

        Raises
        ------
        TimingError
            If the process ended.
        """
        stdin: Any = self._process.stdin
        try:
            stdin.write(call + "\n")
            stdin.flush()
        except BrokenPipeError:
            raise self._ended() from None
        return float(self._answer()["seconds"])

    def end(self) -> None:
        """End the process."""
        self._process.kill()
        self._process.wait()

    def _answer(self) -> dict[str, Any]:
        stdout: Any = self._process.stdout
        line = stdout.readline()
        if not line:
            raise self._ended()
        told: dict[str, Any] = json.loads(line)
        return told

    def _ended(self) -> TimingError:
        code = self._process.wait()
        return TimingError(f"a process that timed {self._group} ended with {code}; what it said stands above.")


def _serve(group: str) -> None:
    from workbench.bench.tuning.calls import calls_of

    def say(**told: Any) -> None:
        print(json.dumps(told), flush=True)

    try:
        calls = calls_of(group)
    except ArithmeticError as error:
        say(wrong=str(error))
        return
    repeats = {name: max(1, math.ceil(_LEAST / _seconds(call, 1))) for name, call in calls.items()}
    say(calls=list(calls))
    for line in sys.stdin:
        name = line.rstrip("\n")
        if repeats[name] > 1:
            calls[name]()
        say(seconds=_seconds(calls[name], repeats[name]))


def _seconds(call: Any, repeats: int) -> float:
    """Mean time of a call [s]."""
    begin = time.perf_counter()
    for _ in range(repeats):
        call()
    return (time.perf_counter() - begin) / repeats


if __name__ == "__main__":
    _serve(sys.argv[1])
