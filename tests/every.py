"""Every test: those that share the computer in two processes, then those that need it alone. `./lab test --all`.

python tests/every.py [--deep] [pytest arguments]    both runs get the arguments; a selection by -m narrows both
"""

import argparse
import contextlib
import os
import subprocess
import sys
from collections.abc import Sequence

NO_TESTS, INTERRUPTED = 5, 2  # exit codes of pytest


def selection(own: str, asked: str) -> list[str]:
    return ["-m", f"({asked}) and {own}" if asked else own]


def runs(asked: str, deep: bool, rest: Sequence[str]) -> list[list[str]]:
    """Arguments of pytest; what comes later wins."""
    patience = ["-o", "timeout=3600"] if deep else []
    together = ["-n", "2", "--dist", "loadfile", "--no-loadscope-reorder", "--durations", "20"]
    shared = [*together, *patience, *rest, *selection("not alone", asked)]
    return [shared, [*patience, *rest, *selection("alone", asked), "-n", "0"]]


def worst(codes: Sequence[int]) -> int:
    """Where neither run found a test, that is the outcome; where one did, the other does not count."""
    told = [code for code in codes if code != NO_TESTS]
    return max(map(abs, told), default=NO_TESTS)


def ended(child: "subprocess.Popen[bytes]") -> int:
    """Its exit code; Ctrl-C reaches pytest as well, which ends in order."""
    while True:
        with contextlib.suppress(KeyboardInterrupt):
            return child.wait()


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("-m", default="")
    parser.add_argument("--deep", action="store_true")
    asked, rest = parser.parse_known_args(argv)
    env = os.environ | ({"WB_TEST_DEEP": "1"} if asked.deep else {})
    codes: list[int] = []
    for arguments in runs(asked.m, asked.deep, rest):
        codes.append(ended(subprocess.Popen([sys.executable, "-m", "pytest", *arguments], env=env)))
        if codes[-1] == INTERRUPTED:
            break
    return worst(codes)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
