"""A process that times calls of one group of kernels with its own settings, when it is told to.

`python -m workbench.bench.tuning.timing GROUP` says which calls there are, and then, for each line with a name, how
long that call took. Settings are compiled into the kernels, so that others need another process.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import IO, Any

from workbench.kernels import Parameters


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
        command = [sys.executable, "-m", "workbench.bench.tuning.timing", group]
        self._process = subprocess.Popen(command, env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def compile(self) -> list[str]:
        """Wait until all calls are compiled; returns their names.

        Raises
        ------
        ArithmeticError
            If a result is wrong with these settings.
        """
        if self._names is None:
            told = self._answer()
            if "wrong" in told:
                raise ArithmeticError(told["wrong"])
            self._names = told["calls"]
        return self._names

    def seconds(self, call: str) -> float:
        """Time one call [s]."""
        stdin: Any = self._process.stdin
        stdin.write(call + "\n")
        stdin.flush()
        return float(self._answer()["seconds"])

    def end(self) -> None:
        """End the process."""
        self._process.kill()
        self._process.communicate()

    def _answer(self) -> dict[str, Any]:
        stdout: IO[str] | Any = self._process.stdout
        line = stdout.readline()
        if not line:
            raise RuntimeError(
                f"the process that times {self._group} ended with {self._process.wait()}; what it said stands above."
            )
        told: dict[str, Any] = json.loads(line)
        return told


def _serve(group: str) -> None:
    from workbench.bench.tuning.calls import calls_of

    def say(**told: Any) -> None:
        print(json.dumps(told), flush=True)

    try:
        calls = calls_of(group)
    except ArithmeticError as error:
        say(wrong=str(error))
        return
    say(calls=list(calls))
    for line in sys.stdin:
        call = calls[line.rstrip("\n")]
        begin = time.perf_counter()
        call()
        say(seconds=time.perf_counter() - begin)


if __name__ == "__main__":
    _serve(sys.argv[1])
