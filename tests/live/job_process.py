"""A job in a process of its own, which a test may kill: python job_process.py FOLDER [POISON]

With POISON, an id, the process dies as soon as that request is computed.
"""

import os
import signal
import sys
from pathlib import Path
from typing import Any

from workbench.engine.session import Session
from workbench.jobs import LLM
from workbench.jobs.answers import Journal


def die_with(poison: str) -> None:
    """Let the engine kill its process once it has this request."""
    begin = Journal.begin
    ask = Session.ask
    latest: list[str] = []

    def begun(self: Journal, custom_id: str, *, alone: bool) -> None:
        begin(self, custom_id, alone=alone)
        latest[:] = [custom_id]

    def asked(self: Session, *given: Any) -> Any:
        if latest == [poison]:
            os.kill(os.getpid(), signal.SIGKILL)
        return ask(self, *given)

    Journal.begin = begun  # type: ignore[method-assign]
    Session.ask = asked  # type: ignore[method-assign]


if __name__ == "__main__":
    folder = Path(sys.argv[1])
    for each in sys.argv[2:]:
        die_with(each)
    job = LLM(folder / "model", weights="fp32", kv="fp32")
    print(job.generate_file(folder / "requests.jsonl", out=folder / "answers.jsonl", together=8))
