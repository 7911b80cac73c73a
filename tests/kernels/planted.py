"""Runs tests of trees with a fault, each in a fork of one process that has imported what takes long, but none of ours.

Reads one JSON object per line, {"root": ..., "file": ..., "tests": ...}, and writes {"code": ..., "output": ...}.
"""

import json
import os
import sys
import tempfile

import hypothesis  # noqa: F401
import pytest
import torch
import torch._inductor  # noqa: F401
import triton.language  # noqa: F401


def play(root: str, file: str, tests: str) -> int:
    """In a fork: pytest, with the tree in place of any other."""
    os.chdir(root)
    sys.path.insert(0, root)
    return int(pytest.main(["-q", "-x", "-p", "no:cacheprovider", "-p", "no:xdist", "-k", tests, file]))


def outcome(root: str, file: str, tests: str) -> dict[str, object]:
    with tempfile.TemporaryFile("w+") as told:
        sys.stdout.flush()
        child = os.fork()
        if not child:
            os.dup2(told.fileno(), 1)
            os.dup2(told.fileno(), 2)
            code = play(root, file, tests)
            sys.stdout.flush()
            os._exit(code)
        _, status = os.waitpid(child, 0)
        told.seek(0)
        return {"code": os.waitstatus_to_exitcode(status), "output": told.read()}


if __name__ == "__main__":
    for line in sys.stdin:
        print(json.dumps(outcome(**json.loads(line))), flush=True)
