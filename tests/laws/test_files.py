"""Any file, however damaged, loads right or gives one clear error of ours: nothing is guessed, and nothing crashes."""

from __future__ import annotations

import copy
import json
import math
import os
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from tests.builders import small_machine, tiny_model, tiny_scenario
from tests.systems import VSL
from workbench.core.catalogue import data_path
from workbench.core.errors import WorkbenchError, WorkloadError
from workbench.core.records import to_plain
from workbench.core.result import Result, TokenLogprobs
from workbench.engine.loading.checkpoint import open_checkpoint
from workbench.engine.tiny_model.synthesize import hf_config, write_checkpoint
from workbench.hardware import Machine
from workbench.hardware.profile import Cores, OpTime, Profile
from workbench.models import ModelConfig, checkpoint, model
from workbench.perfmodels import bound
from workbench.scenario import Scenario
from workbench.schedules import VSLPipe
from workbench.simulate import Detail, simulate
from workbench.workload import Request, Sampling, Workload
from workbench.workload.tokenizer import load_tokenizer

DRAWS = 24
"""Mutations of each kind of file; 400 of each were tried by hand."""
LONGEST = 1200
SAMPLING = Sampling(0.5, 0.9, 7, (4,), top_k=3, min_p=0.1, repetition_penalty=1.2, stop=("end",), logprobs=2)
TINY = ModelConfig("tiny", 2, 32, 24, 4, 2, 8, 4, 2, 97, 512, dtype="fp32")
QWEN = replace(
    TINY,
    name="qwen",
    moe_intermediate_size=20,
    shared_expert_intermediate_size=28,
    architecture="Qwen2MoeForCausalLM",
)
ODD: tuple[Callable[[random.Random, Any], Any], ...] = (
    lambda r, v: None,
    lambda r, v: not v,
    lambda r, v: "",
    lambda r, v: str(v),
    lambda r, v: "<img src=x onerror=alert(1)>" * 50,
    lambda r, v: -v if isinstance(v, int | float) else -1,
    lambda r, v: 0,
    lambda r, v: v + 0.5 if isinstance(v, int | float) else 0.5,
    lambda r, v: r.choice([1, 2, 3, 5, 8, 1000]),
    lambda r, v: r.choice([10**12, 2**31, 2**32 + 1, 2**63, 10**30, 10**400, 1e308]),
    lambda r, v: r.choice([math.nan, math.inf, -math.inf]),
    lambda r, v: [],
    lambda r, v: {},
    lambda r, v: [v],
    lambda r, v: {"value": v},
    lambda r, v: nested(r.choice([3, 60, 500])),
    lambda r, v: v[::-1] if isinstance(v, list | str) else [v, v],
    lambda r, v: v * 2 if isinstance(v, list | str) else v,
    lambda r, v: v[:-1] if isinstance(v, list | str) else v,
)


def nested(depth: int) -> Any:
    """Lists in lists."""
    value: Any = 1
    for _ in range(depth):
        value = [value]
    return value


def places(value: Any) -> Iterator[tuple[Any, Any]]:
    """Every container of a JSON value with each of its keys; long lists by their first entries."""
    keys = list(value) if isinstance(value, dict) else range(min(len(value), 4)) if isinstance(value, list) else []
    for key in keys:
        yield value, key
        yield from places(value[key])


def mutated_json(random_: random.Random, text: str) -> str:
    """A JSON text with one or two values changed, keys renamed or left out."""
    value = copy.deepcopy(json.loads(text))
    for _ in range(random_.choice([1, 1, 1, 2])):
        if not (found := list(places(value))):
            break
        container, key = random_.choice(found)
        how = random_.random()
        if how < 0.1:
            del container[key]
        elif how < 0.2 and isinstance(container, dict):
            container[random_.choice([f"{key}_", key.upper(), "name", "path", "coverage", "__class__"])] = (
                container.pop(key)
            )
        else:
            container[key] = random_.choice(ODD)(random_, container[key])
    return json.dumps(value)


def mutated_bytes(random_: random.Random, raw: bytes) -> bytes:
    """Bytes flipped, cut, repeated, put in, or nothing but brackets."""
    place = random_.randrange(len(raw)) if random_.random() < 0.5 else random_.randrange(min(len(raw), 400))
    changed = bytearray(raw)
    match random_.randrange(6):
        case 0:
            changed[place] ^= 1 << random_.randrange(8)
        case 1:
            del changed[place:]
        case 2:
            changed[place:place] = random_.randbytes(random_.choice([1, 8, 100]))
        case 3:
            changed[place : place + 8] = random_.randbytes(8)
        case 4:
            changed[:8] = random_.choice([2**63, 2**31, 0, len(raw)]).to_bytes(8, "little")
        case _:
            return random_.choice([b"", b"[" * 100_000, b'{"a":' * 5000, b"\x00" * 64, b"\xff\xfe" + raw, raw * 2])
    return bytes(changed)


@dataclass(frozen=True)
class File:
    """A kind of file: its name in a folder, what is loaded of it, and what must hold of what was loaded."""

    name: str
    load: Callable[[Path], Any]
    holds: Callable[[Any, str], None]
    is_json: bool = True


def leaves_are(told: Any, asked: Any, where: str = "") -> None:
    """Every value that a file has is the value that was loaded of it."""
    if isinstance(asked, dict):
        for key, value in asked.items():
            leaves_are(told[key], value, f"{where}.{key}")
    elif isinstance(asked, list):
        assert len(told) == len(asked), where
        for number, value in enumerate(asked):
            leaves_are(told[number], value, f"{where}[{number}]")
    else:
        assert told == asked or (told is None and asked is None) or (told != told and asked != asked), (
            where,
            told,
            asked,
        )
        assert type(told) is type(asked) or {type(told), type(asked)} == {int, float}, (where, told, asked)


def result_holds(found: Result, text: str) -> None:
    asked = json.loads(text)
    for derived in ("format", "gen_tok_s", "proc_tok_s", "utilisation", "source"):
        asked.pop(derived, None)
    asked["timeline"] = [row if len(row) > 5 else [*row, ""] for row in asked["timeline"]]
    told = json.loads(json.dumps(found.to_dict()))
    leaves_are(told, asked)
    assert min(found.generated, found.processed, found.iterations, found.preemptions, found.recomputed) >= 0
    assert found.interval is None or 0 <= found.interval[0] <= found.interval[1]
    assert min(found.busy.values(), default=0) >= 0
    assert 0 <= found.gen_tok_s < math.inf
    assert str(found)
    assert found._repr_html_()


def scenario_holds(found: Scenario, text: str) -> None:
    leaves_are(json.loads(json.dumps(found.to_dict())), json.loads(text))
    assert found._repr_html_()
    if found.model.num_hidden_layers > 100 or len(found.workload) > 100:
        return
    try:
        assert 0 < bound(found, VSLPipe()).seconds < math.inf
    except WorkbenchError as error:
        one_sentence(error)


def machine_holds(found: Machine, text: str) -> None:
    leaves_are(json.loads(json.dumps(to_plain(found))), json.loads(text))
    assert str(found)
    assert found._repr_html_()


def config_holds(found: ModelConfig, text: str) -> None:
    asked = json.loads(text)
    own = ("num_hidden_layers", "hidden_size", "num_attention_heads", "num_key_value_heads", "vocab_size", "head_dim")
    own += ("num_experts_per_tok", "max_position_embeddings", "tie_word_embeddings", "norm_topk_prob", "rms_norm_eps")
    for key in own:
        if asked.get(key) is not None:
            assert getattr(found, key) == asked[key], key
    assert found.coverage == ()
    assert found.params > 0
    assert found._repr_html_()


def weights_hold(found: dict[str, Any], text: str) -> None:
    assert found
    assert all(tensor.isfinite().any() or tensor.numel() for tensor in found.values())


def requests_hold(found: Workload, text: str) -> None:
    lines = [json.loads(line) for line in text.split("\n") if line.strip()]
    assert len(found) == len(lines)
    for request, line in zip(found.requests, lines, strict=True):
        assert request.prompt == tuple(line["tokens"] if "tokens" in line else line["prompt"].encode())
        assert request.output_len == line.get("output_len", 32)
        assert request.sampling.temperature == line.get("temperature", 0.0)
    assert found.arrival.tolist() == [line["arrival"] for line in lines if "arrival" in line]


def tokenizer_holds(found: Any, text: str) -> None:
    try:
        ids = found.encode("copy:ab\n")
    except WorkloadError as error:
        one_sentence(error)
        return
    assert all(type(token) is int for token in ids)
    found.decode(ids)


def weights(folder: Path) -> Any:
    return open_checkpoint(checkpoint(folder))


KINDS = {
    "config to predict": File("config.json", model, config_holds),
    "config to run": File("config.json", checkpoint, config_holds),
    "config of weights": File("config.json", weights, weights_hold),
    "config of Qwen's": File("qwen.json", model, config_holds),
    "index": File("model.safetensors.index.json", weights, weights_hold),
    "safetensors": File("model-00001.safetensors", weights, weights_hold, is_json=False),
    "tokenizer": File("tokenizer.json", load_tokenizer, tokenizer_holds),
    "result": File("result.json", Result.load, result_holds),
    "simulated result": File("simulated.json", Result.load, result_holds),
    "scenario": File("scenario.json", Scenario.load, scenario_holds),
    "scenario of requests": File("asked.json", Scenario.load, scenario_holds),
    "machine": File("machine.json", Machine.load, machine_holds),
    "requests": File("asked.jsonl", Workload.from_jsonl, requests_hold),
}
OF_A_FOLDER = (checkpoint, weights, load_tokenizer)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One good file of each kind."""
    made = write_checkpoint(TINY, tmp_path_factory.mktemp("good"))
    (made / "tokenizer.json").write_bytes(data_path("models/tiny-moe/tokenizer.json").read_bytes())
    (made / "qwen.json").write_text(json.dumps(hf_config(QWEN)))
    ops = tuple(OpTime(op, 1, (1.0, 9.0), (1e-4, 2e-4), per_pair=1e-9) for op in ("qkv", "experts"))
    machine = replace(
        small_machine(),
        cores=Cores.of(4),
        profiles=(Profile("shape", ops),),
        rates=(("read", 1e9),),
        sources={"all": "us"},
    )
    machine.save(made / "machine.json")
    asked = Workload.of([Request((1, 2, 3), 4), Request((5,), 2, SAMPLING)])
    small = tiny_scenario([8, 5, 3], [4, 1, 6], pipeline=VSL, machine=machine, model=tiny_model(2))
    small.save(made / "scenario.json")
    small.on(workload=asked.arriving(at=[0.5, 2.0])).save(made / "asked.json")
    played = simulate(small.on(machine=small_machine()), VSLPipe(), detail=Detail.TASK)
    logprobs = ((TokenLogprobs(-0.5, ((1, -0.5), (4, -1.5))), TokenLogprobs(-2.0)), ())
    replace(played, interval=(1.0, 2.0), tokens=((1, 2), (3,)), logprobs=logprobs).save(made / "simulated.json")
    bound(small.on(machine=small_machine()), VSLPipe()).save(made / "result.json")
    lines = [{"prompt": "a b", "output_len": 3}, {"tokens": [1, 2, 3], **to_plain(SAMPLING)}]
    lines = [{**line, "arrival": 0.5 * number} for number, line in enumerate(lines)]
    (made / "asked.jsonl").write_text("\n".join(map(json.dumps, lines)) + "\n")
    return made


def one_sentence(error: WorkbenchError) -> None:
    message = str(error)
    assert "\n" not in message.strip()
    assert len(message) < LONGEST, message
    assert message.rstrip().endswith(".")


@pytest.mark.parametrize("kind", KINDS)
def test_a_good_file_loads(kind: str, folder: Path) -> None:
    file = KINDS[kind]
    raw = (folder / file.name).read_bytes()
    file.holds(
        file.load(folder if file.load in OF_A_FOLDER else folder / file.name), "" if not file.is_json else raw.decode()
    )


LOADERS: dict[str, Callable[[Path], Any]] = {file.load.__qualname__: file.load for file in KINDS.values()}
LOADERS |= {"histogram": lambda path: Workload.from_histogram(path, requests=1)}
LOADERS |= {"text": lambda path: Workload.from_text(path, requests=1, output_len=1)}


@pytest.mark.parametrize("door", LOADERS)
@pytest.mark.parametrize("what", ["absent", "a folder", "a pipe", "too long a name", "a name with a zero byte"])
def test_what_is_no_file_is_told_in_one_sentence_and_not_waited_for(door: str, what: str, tmp_path: Path) -> None:
    path = tmp_path / "there"
    if what == "a folder":
        path.mkdir()
    elif what == "a pipe":
        os.mkfifo(path)
    elif what == "too long a name":
        path = tmp_path / ("n" * 5000)
    elif what == "a name with a zero byte":
        path = tmp_path / "a\0b"
    if (door, what) == ("load_tokenizer", "a folder"):
        return  # one without tokenizer.json encodes bytes
    with pytest.raises(WorkbenchError) as error:
        LOADERS[door](path)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("kind", KINDS)
def test_a_damaged_file_loads_right_or_says_in_one_sentence_what_is_wrong(kind: str, folder: Path) -> None:
    file = KINDS[kind]
    path = folder / file.name
    good = path.read_bytes()
    refused = 0
    try:
        for draw in range(DRAWS):
            random_ = random.Random(f"{kind} {draw}")
            if file.is_json and draw % 3:
                if path.suffix == ".jsonl":
                    lines = good.decode().splitlines()
                    number = random_.randrange(len(lines))
                    lines[number] = mutated_json(random_, lines[number])
                    raw = "\n".join(lines).encode()
                else:
                    raw = mutated_json(random_, good.decode()).encode()
            else:
                raw = mutated_bytes(random_, good)
            path.unlink()
            path.write_bytes(raw)
            try:
                found = file.load(folder if file.load in OF_A_FOLDER else path)
            except WorkbenchError as error:
                one_sentence(error)
                refused += 1
                continue
            except Exception as error:
                raise AssertionError(f"draw {draw}: {error!r} of {raw[:300]!r}") from error
            try:
                file.holds(found, raw.decode() if file.is_json else "")
            except Exception as error:
                raise AssertionError(f"draw {draw}: {error!r} of {raw[:300]!r}") from error
    finally:
        path.write_bytes(good)
    assert refused > DRAWS // 5
