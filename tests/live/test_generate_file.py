"""A job ends with every request answered once or set aside by name, whoever kills it meanwhile and how often."""

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

import workbench as wb
from tests.examples import DEEP
from tests.live import job_process
from tests.talking import talking
from workbench.core.errors import CapacityError, WorkloadError
from workbench.engine.model import forward
from workbench.jobs import LLM, answering, generate
from workbench.jobs.generate import Finished
from workbench.jobs.requests import seed_of

ROOT = Path(__file__).parents[2]
REQUESTS = 2000 if DEEP else 120
KILLS = 5 if DEEP else 2


def ask(number: int) -> dict[str, Any]:
    """A request whose length, kind and way of sampling depend on its number."""
    drawn = random.Random(number)
    word = "".join(drawn.choices("abcdefghijklmnopqrstuvwxyz", k=drawn.randint(2, 12)))
    role = drawn.choice(["sort", "copy", "reverse"])
    how: dict[str, Any] = {"max_tokens": drawn.randint(1, 40)}
    if number % 3 == 0:
        how |= {"temperature": 1.5, "top_p": 0.9}
    if number % 4 == 0:
        how |= {"stop": ["\n"]}
    if number % 2:
        body = {"messages": [{"role": role, "content": word}], **how}
        return {"custom_id": f"r{number}", "method": "POST", "url": "/v1/chat/completions", "body": body}
    body = {"prompt": f"{role}:{word}=", **how}
    return {"custom_id": f"r{number}", "method": "POST", "url": "/v1/completions", "body": body}


class Folder:
    """A model, a file of requests, and what a job makes of them."""

    def __init__(self, path: Path, lines: list[Any]) -> None:
        self.path = path
        self.out = path / "answers.jsonl"
        talking(path / "model")
        self.write(lines)

    def write(self, lines: list[Any]) -> None:
        whole = [line if isinstance(line, str) else json.dumps(line) for line in lines]
        (self.path / "requests.jsonl").write_text("\n".join(whole) + "\n")

    @property
    def llm(self) -> LLM:
        return LLM(self.path / "model", weights="fp32", kv="fp32")

    def finish(self, **options: Any) -> Finished:
        options = {"out": self.out, "together": 8} | options
        return self.llm.generate_file(self.path / "requests.jsonl", **options)

    def start(self, *poison: str) -> "subprocess.Popen[bytes]":
        command = [sys.executable, job_process.__file__, str(self.path), *poison]
        env = os.environ | {"PYTHONPATH": str(ROOT)}
        with (self.path / "said.txt").open("ab") as said:
            return subprocess.Popen(command, env=env, stdout=said, stderr=said)

    @property
    def lines(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self.out.read_bytes().splitlines()] if self.out.exists() else []

    @property
    def texts(self) -> dict[str, str]:
        """Answers by id, each of which is there once."""
        found = {}
        for line in self.lines:
            (choice,) = line["response"]["body"]["choices"]
            assert line["custom_id"] not in found
            found[line["custom_id"]] = choice["message"]["content"] if "message" in choice else choice["text"]
        return found

    @property
    def faults(self) -> dict[str | None, str]:
        path = self.path / "answers.errors.jsonl"
        lines = path.read_bytes().splitlines() if path.exists() else []
        return {each["custom_id"]: each["error"]["code"] for each in map(json.loads, lines)}


@pytest.fixture
def folder(tmp_path: Path) -> Folder:
    return Folder(tmp_path, [ask(number) for number in range(24)])


def alone(of: Folder, number: int) -> str:
    """The text of a request by `LLM`, alone."""
    line = ask(number)
    body = dict(line["body"])
    body |= {} if "temperature" not in body else {"seed": seed_of(line["custom_id"])}
    asked = body.pop("messages", None)
    return of.llm.chat(asked, **body)[0] if asked else of.llm.generate([body.pop("prompt")], **body)[0]


def test_every_request_gets_the_text_that_it_gets_alone(folder: Folder) -> None:
    done = folder.finish()
    assert (done.answered, done.before, done.aside, folder.faults) == (24, 0, 0, {})
    assert folder.texts == {f"r{number}": alone(folder, number) for number in range(24)}
    usage = [line["response"]["body"]["usage"]["completion_tokens"] for line in folder.lines]
    assert done.tokens == sum(usage)
    assert sorted(path.name for path in folder.path.iterdir()) == ["answers.jsonl", "model", "requests.jsonl"]
    before = folder.out.read_bytes()
    again = folder.finish()
    assert (again.answered, again.before, again.tokens) == (24, 24, 0)
    assert folder.out.read_bytes() == before


def test_requests_that_cannot_be_served_are_set_aside_by_name(folder: Folder) -> None:
    long = {"custom_id": "long", "body": {"prompt": "a" * 10, "max_tokens": 600}}
    large = {"custom_id": "large", "body": {"prompt": "a" * 10, "max_tokens": 300}}
    folder.write([ask(0), "nonsense", long, ask(1), large, ask(1), {"custom_id": "n", "body": {"prompt": "a", "n": 2}}])
    tokens = 128 * folder.llm.model.kv_bytes_per_token("fp32")
    done = folder.finish(kv_capacity=float(tokens))
    assert folder.texts == {f"r{n}": alone(folder, n) for n in range(2)}
    found = {None: "invalid_json", "long": "context_length_exceeded", "large": "context_length_exceeded"}
    assert folder.faults == found | {"r1": "duplicate_custom_id", "n": "unsupported_value"}
    assert (done.answered, done.aside) == (2, 5)
    assert str(done).endswith(f"; 5 set aside, see {done.errors}")
    folder.write([large])
    folder.out.unlink()
    with pytest.raises(CapacityError, match="needs a KV cache of 309 tokens"):
        folder.finish(kv_capacity=float(tokens))


def test_a_job_beside_500_malformed_lines_ends_with_500_named(folder: Folder) -> None:
    bad = ["{", '{"custom_id": 3}', '{"custom_id": "x%d", "body": 3}', '{"custom_id": "y%d", "body": {"prompt": []}}']
    lines: list[Any] = [bad[n % 4] % n if n % 4 > 1 else bad[n % 4] for n in range(500)]
    folder.write([*lines[:250], *(ask(number) for number in range(24)), *lines[250:]])
    assert (folder.finish().answered, len(folder.texts)) == (24, 24)
    named = [json.loads(line) for line in (folder.path / "answers.errors.jsonl").read_bytes().splitlines()]
    numbers = [each["error"]["line"] for each in named]
    assert numbers == [*range(1, 251), *range(275, 525)]
    assert all(each["error"]["message"] for each in named)


def test_a_file_that_is_not_there_is_named_and_leaves_nothing(folder: Folder) -> None:
    with pytest.raises(WorkloadError, match=r"requests file .*none.jsonl' does not exist"):
        folder.llm.generate_file(folder.path / "none.jsonl", out=folder.out)
    assert not folder.out.exists()


def test_other_requests_or_another_model_do_not_come_into_the_same_file(folder: Folder) -> None:
    folder.finish()
    with pytest.raises(WorkloadError, match=r"was made by tiny|was made by model-fp32-fp32, not by model-bf16-bf16"):
        LLM(folder.path / "model").generate_file(folder.path / "requests.jsonl", out=folder.out)
    folder.write([ask(number) for number in range(3)])
    with pytest.raises(WorkloadError, match="does not ask"):
        folder.finish()
    with pytest.raises(WorkloadError, match="is no answer of a job"):
        folder.finish(out=folder.path / "requests.jsonl")
    assert len((folder.path / "requests.jsonl").read_text().splitlines()) == 3


def kill_at_random(folder: Folder, drawn: random.Random) -> int:
    """Start the job, kill it once it has answered some more requests, and tell how many are answered."""
    before = len(folder.lines)
    more = drawn.randint(0, REQUESTS // (KILLS + 1) - 1)
    job = folder.start()
    while job.poll() is None and (not folder.out.exists() or folder.out.read_bytes().count(b"\n") < before + more):
        time.sleep(0.01)
    time.sleep(drawn.random() * 0.2)
    job.send_signal(signal.SIGKILL)
    job.wait()
    return folder.out.read_bytes().count(b"\n")


@pytest.mark.slow
def test_a_job_that_is_killed_again_and_again_ends_with_the_same_texts(tmp_path: Path) -> None:
    asked = [ask(number) for number in range(REQUESTS)]
    undisturbed, killed = (Folder(tmp_path / name, asked) for name in ("undisturbed", "killed"))
    drawn = random.Random(0)
    answered = [kill_at_random(killed, drawn) for _ in range(KILLS)]
    assert answered[-1] < REQUESTS
    done = killed.finish()
    assert undisturbed.finish().answered == done.answered == REQUESTS
    assert done.before >= answered[-1] - 1
    assert killed.texts == undisturbed.texts
    assert killed.faults == {}


@pytest.mark.slow
def test_a_request_that_takes_its_process_with_it_is_set_aside_at_last(folder: Folder) -> None:
    """Those that were served beside it are answered as ever."""
    starts = 0
    while folder.start("r5").wait():
        starts += 1
        assert starts <= 2 * answering.DEATHS
    assert starts == 2 * answering.DEATHS
    assert set(folder.texts) == {f"r{number}" for number in range(24)} - {"r5"}
    assert folder.faults == {"r5": "engine_died"}


def test_a_request_with_which_the_engine_fails_is_set_aside_and_the_others_are_answered(
    folder: Folder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The engine is begun again without it: those that were under way are served one after the other."""
    embed = forward.Forward.embed
    poison = folder.llm.tokenizer.encode("q")[0]
    lines = [
        line
        for line in map(ask, range(40))
        if "q" not in json.dumps(line["body"]["messages"] if "messages" in line["body"] else line["body"]["prompt"])
    ]
    asked = [*lines[:6], {"custom_id": "bad", "body": {"prompt": "copy:qq=", "max_tokens": 4}}, *lines[6:12]]
    folder.write(asked)
    sane = folder.finish(out=folder.path / "sane.jsonl")
    assert sane.answered == 13

    def failing(self: Any, part: int, ids: Any) -> None:
        if list(ids).count(poison) > 1:
            raise ZeroDivisionError("struck")
        embed(self, part, ids)

    monkeypatch.setattr(forward.Forward, "embed", failing)
    done = folder.finish()
    assert (done.answered, done.aside, folder.faults) == (12, 1, {"bad": "engine_failed"})
    assert not (folder.path / "answers.jsonl.begun").exists()


def test_an_engine_that_fails_with_everybody_is_no_fault_of_theirs(
    folder: Folder, monkeypatch: pytest.MonkeyPatch
) -> None:
    def failing(*_: Any) -> None:
        raise ZeroDivisionError("struck")

    monkeypatch.setattr(forward.Forward, "embed", failing)
    with pytest.raises(ZeroDivisionError, match="struck"):
        folder.finish()
    monkeypatch.undo()
    assert folder.finish().answered == 24


def test_who_interrupts_a_job_is_told_how_far_it_is_and_it_goes_on(
    folder: Folder, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    look = answering.Answering._collect

    def interrupted(self: Any) -> None:
        look(self)
        if self._answers_so_far() >= 5:
            raise KeyboardInterrupt

    monkeypatch.setattr(answering.Answering, "_answers_so_far", lambda self: len(folder.lines), raising=False)
    monkeypatch.setattr(answering.Answering, "_collect", interrupted)
    with pytest.raises(KeyboardInterrupt):
        folder.finish()
    answered = len(folder.lines)
    assert 5 <= answered < 24
    assert f"{answered} requests are answered; the same job, begun again, goes on." in capsys.readouterr().err
    monkeypatch.undo()
    assert folder.finish().before == answered


def test_only_so_many_requests_are_read_ahead(folder: Folder, monkeypatch: pytest.MonkeyPatch) -> None:
    most: Counter[str] = Counter()
    look = answering.Answering._collect

    def watched(self: Any) -> None:
        most["under way"] = max(most["under way"], len(self._under_way))
        look(self)

    monkeypatch.setattr(answering.Answering, "_collect", watched)
    folder.finish(together=3)
    assert most["under way"] == 6


def test_the_public_names_lead_here(folder: Folder) -> None:
    assert wb.LLM is LLM
    assert generate.finish.__doc__ == "See `LLM.generate_file`."
