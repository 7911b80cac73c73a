"""A computer with a card is measured, calibrated, predicted and run, on a simulated card whose times mean nothing."""

from dataclasses import replace
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import pytest

import workbench as wb
from tests.device.rehearsal import Rehearsal, RehearsedDriver, rehearsed
from tests.device.streams import Adversary
from tests.live.conftest import MakeModel
from tests.live.test_stacks import ASKED
from tests.live.world import TINY, WIRED, longest, machine, scenario
from workbench.core.errors import CapacityError, EngineError, ScenarioError
from workbench.engine.calibration import beside, calibrate
from workbench.engine.calibration.card import Sizes, measure_card
from workbench.engine.calibration.timed import Shape
from workbench.engine.devices import opening
from workbench.engine.session import Session
from workbench.hardware import Machine
from workbench.hardware.profile import Cores
from workbench.models import ModelConfig
from workbench.schedules import Sequential
from workbench.serving import prepare
from workbench.serving.capacity import ledger

MEMORY = 1 << 34
CARD = Cores.beside_card(2)
SHAPES = (Shape(1, 5), Shape(2, 9), Shape(0, 0, 4, 19), Shape(0, 0, 7, 35))
TOGETHER = (Shape(0, 0, 4, 32), Shape(2, 8, 3, 16))
WARM = (Shape(1, 8), Shape(0, 0, 64, 256))


def simulated(limit: float | None = None) -> RehearsedDriver:
    return rehearsed(Adversary(), total=MEMORY, limit=limit)


class OneCard:
    """Makes drivers of one simulated card: engines of a calibration are there at once."""

    def __init__(self) -> None:
        self._card = Rehearsal(Adversary(), total=MEMORY)

    def __call__(self, limit: float | None = None) -> RehearsedDriver:
        return RehearsedDriver(limit, cuda=self._card, name="sim")


@pytest.fixture(scope="module")
def model(make_model: MakeModel) -> ModelConfig:
    return make_model(replace(TINY, name="for-cards", head_dim=16), 3)


@pytest.fixture(scope="module")
def measured() -> Machine:
    return measure_card(simulated(), Sizes(1 << 16, 1 << 16, 32, 64))


def calibrated_on(measured: Machine, model: ModelConfig, folder: Path) -> Machine:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Machine, "local", classmethod(lambda cls, device="cpu", refresh=False: measured))
        patch.setattr(calibrate, "cache_path", lambda name: folder / name)
        patch.setattr(opening, "CudaDriver", OneCard())
        patch.setattr(beside, "_STREAMED", 1 << 20)
        patch.setattr(calibrate, "SECONDS", 0.0)
        patch.setattr(calibrate, "LEAST_ROUNDS", 1)
        for name, shapes in {"SHAPES": SHAPES, "TOGETHER": TOGETHER, "WARM": WARM}.items():
            patch.setattr(calibrate, name, shapes)
        return calibrate.calibrate(model, device="cuda")


@pytest.fixture(scope="module")
def calibrated(model: ModelConfig, measured: Machine, tmp_path_factory: pytest.TempPathFactory) -> Machine:
    return calibrated_on(measured, model, tmp_path_factory.mktemp("records"))


@pytest.fixture
def on_card(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(opening, "CudaDriver", simulated)


def test_a_card_has_a_memory_of_its_own_and_takes_no_cores(measured: Machine) -> None:
    assert measured.has_card
    assert not measured.shares_cores
    assert measured.gpu.memory == MEMORY
    assert min(measured.gpu.bandwidth, measured.cpu.bandwidth, measured.link.h2d, measured.link.d2h) > 0
    assert dict(measured.rates)["link, both directions at once, GB/s each"] > 0


def test_operations_are_timed_on_the_card_and_on_the_cpu(calibrated: Machine) -> None:
    (profile,) = calibrated.profiles
    there = {time.op for time in profile.ops if time.threads == 0}
    here = {time.op for time in profile.ops if time.threads}
    whole = {"embed", "qkv", "prefill_attention", "decode_attention", "out_proj", "route", "experts", "combine", "head"}
    assert there == whole
    assert here == {"decode_attention", "experts"}
    assert all(max(time.seconds) > 0 or time.per_context > 0 for time in profile.ops)


def test_latent_attention_is_timed_too(made: Any, measured: Machine, tmp_path: Path) -> None:
    """Its weights stay where they are, and those of experts arrive or stay."""
    (profile,) = calibrated_on(measured, made("deepseek_v3, packed"), tmp_path).profiles
    timed = {(time.op, time.threads == 0, time.resident) for time in profile.ops}
    assert {("qkv", True, True), ("prefill_attention", True, False), ("decode_attention", False, False)} <= timed
    assert {("experts", True, False), ("experts", False, True), ("shared_experts", True, True)} <= timed
    assert ("qkv", True, False) not in timed


def test_a_saved_machine_has_its_card_still(calibrated: Machine, tmp_path: Any) -> None:
    assert Machine.load(calibrated.save(tmp_path / "machine.json")) == calibrated


@pytest.mark.parametrize("name", ["vslpipe", "experts_on_cpu", "all_gpu"])
def test_one_machine_is_read_three_ways(name: str, model: ModelConfig, calibrated: Machine, on_card: None) -> None:
    of = scenario(model, ASKED, WIRED[name], tokens=longest(ASKED) + 20, block=8).on(machine=calibrated)
    least = wb.bound(of, Sequential(2))
    predicted = wb.simulate(of, Sequential(2))
    assert 0 < least.seconds <= predicted.seconds * (1 + 1e-9)
    ran = wb.run(of, Sequential(2))
    assert ran.backend.startswith("gpu lane on rehearsal")
    assert wb.run(of, Sequential(2), device="cpu").tokens == ran.tokens


def test_a_card_has_no_second_run_beside_it(model: ModelConfig) -> None:
    of = scenario(model, ASKED).on(machine=replace(machine(), cores=CARD))
    with pytest.raises(EngineError, match="on a card has it for itself; leave alongside out, or give device='cpu'"):
        wb.run(of, Sequential(), alongside=True)


@pytest.mark.parametrize("device, said", [("cuda", "torch finds no GPU here"), ("tpu", "no device 'tpu'")])
def test_a_device_that_is_not_there_is_refused(device: str, said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    with pytest.raises(ScenarioError, match=said):
        Machine.local(device=device)


def test_a_model_whose_plans_do_not_fit_the_card_together_is_refused(
    model: ModelConfig, measured: Machine, monkeypatch: pytest.MonkeyPatch, tmp_path: Any
) -> None:
    """Each of them alone would."""
    whole = calibrate._scenario(measured, model, None, None)
    kinds = calibrate._kinds(measured).items()
    plans = [(whole.on(pipeline=calibrate._pipeline(kind, model)), how) for kind, how in kinds]
    needed = [ledger(prepare(*plan)).gpu.total for plan in plans]
    small = replace(measured, gpu=replace(measured.gpu, memory=(max(needed) + sum(needed)) / 2))
    monkeypatch.setattr(Machine, "local", classmethod(lambda cls, device="cpu", refresh=False: small))
    monkeypatch.setattr(calibrate, "cache_path", lambda name: tmp_path / name)
    with pytest.raises(CapacityError, match=r"calibrating on rehearsal takes .* of memory; simulate with the rates"):
        calibrate.calibrate(model, device="cuda")


PROMPTS = ["sort:plmku=", "reverse:agjyxd="]


@pytest.mark.parametrize("memory, lanes", [("8GB", {"gpu"}), ("1.2MB", {"gpu", "cpu"})])
def test_texts_from_a_card_are_the_cpus(
    memory: str, lanes: set[str], measured: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where the model does not fit the card, its experts are on the CPU; a session serves there too."""
    folder = wb.data_path("models/tiny-moe")
    want = wb.LLM(folder, device="cpu").generate(PROMPTS, max_tokens=7)
    here = measured.limit(gpu_memory=memory)
    monkeypatch.setattr(Machine, "local", classmethod(lambda cls, device="cpu", refresh=False: here))
    drivers = list[RehearsedDriver]()

    def kept(limit: float) -> RehearsedDriver:
        drivers.append(simulated(limit))
        return drivers[-1]

    monkeypatch.setattr(opening, "CudaDriver", kept)
    llm = wb.LLM(folder, device="cuda")
    assert llm.generate(PROMPTS, max_tokens=7) == want
    scenario = llm.planned(64, together=2)
    assert {stage.device.value for stage in scenario.pipeline.stages} == lanes
    told = SimpleQueue[Any]()
    with Session(scenario, Sequential()) as session:
        session.ask(wb.Request(llm.tokenizer.encode(PROMPTS[0]), 7), told.put)
        assert [told.get(timeout=60).token for _ in range(7)] == [*want[0].tokens]
    assert len(drivers) == 2
    assert not any(driver.cuda.memory.used or driver.cuda.memory.pinned for driver in drivers)


def test_a_device_that_llm_does_not_know_is_refused_at_once() -> None:
    with pytest.raises(EngineError, match="LLM has no device 'gpu'; give 'cpu' or 'cuda'"):
        wb.LLM(wb.data_path("models/tiny-moe"), device="gpu")
