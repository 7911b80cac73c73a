"""A job on engines of Ray in a process of its own: python ray_process.py FOLDER. A marker lets an engine die once."""

import os
import signal
import sys
from pathlib import Path
from typing import Any

from workbench.jobs import LLM, many

FOLDER = Path(sys.argv[1]) if len(sys.argv) > 1 else Path()


class Mortal(many.Engine):
    """An engine that dies in the middle of its second call, where nobody of this job has died yet."""

    calls = 0

    def __call__(self, requests: Any) -> Any:
        """Answer, or die."""
        self.calls += 1
        marker = Path(os.environ["DIES_ONCE"])
        if self.calls == 2 and marker.exists():
            marker.unlink()
            os.kill(os.getpid(), signal.SIGKILL)
        return super().__call__(requests)


if __name__ == "__main__":
    many.Engine = Mortal  # type: ignore[misc]
    job = LLM(FOLDER / "model", weights="fp32", kv="fp32")
    print(job.generate_file(FOLDER / "requests.jsonl", out=FOLDER / "answers.jsonl", together=4, engines=2))
