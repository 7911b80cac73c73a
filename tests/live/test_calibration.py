"""`calibrate` measures operations and nothing else, keeps the record, and what it says can be used to predict."""

import math
import time
from contextlib import nullcontext
from dataclasses import astuple, replace
from types import SimpleNamespace

import numpy as np
import pytest

import workbench as wb
from tests.damage import JSON_DAMAGES
from tests.live.world import FAMILIES, QWEN2, TINY, WIRED, machine, requests, scenario
from workbench.core import kept
from workbench.core.errors import EngineError, StoppedError
from workbench.core.quiet import Noise
from workbench.engine.calibration import calibrate as calibration
from workbench.engine.calibration.calibrate import SHAPES, WARM
from workbench.engine.calibration.timed import Shape
from workbench.engine.model.few_rows import MOST
from workbench.engine.model.forward import Forward
from workbench.hardware import Machine
from workbench.models import ModelConfig
from workbench.schedules import Fiddler, KTransformers, Sequential, VSLPipe
from workbench.serving.task_cost import profile_shape
from workbench.stages import Precision, Rows

pytestmark = pytest.mark.alone

OPERATIONS = {
    "embed",
    "qkv",
    "prefill_attention",
    "decode_attention",
    "out_proj",
    "route",
    "experts",
    "combine",
    "head",
}


@pytest.fixture(scope="module")
def quick():
    """One round, here, with the record in a folder of its own."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(calibration, "SECONDS", 0.0)
        patch.setattr(calibration, "LEAST_ROUNDS", 1)
        patch.setattr(Machine, "local", classmethod(lambda cls, device="cpu", refresh=False: machine()))
        yield patch


@pytest.fixture(scope="module")
def folder(tmp_path_factory, quick):
    root = tmp_path_factory.mktemp("records")
    quick.setattr(calibration, "cache_path", lambda name: root / name)
    return root


@pytest.fixture(scope="module")
def calibrated(tiny: ModelConfig, folder) -> Machine:
    return wb.calibrate(tiny)


def test_every_operation_is_timed_with_each_number_of_threads_that_its_lane_may_have(calibrated, tiny):
    profile = calibrated.profile(profile_shape(tiny, Precision("fp32", "fp32")))
    assert profile is not None
    cores = calibrated.cores
    threads = {cores.gpu, cores.cpu, cores.alone}
    assert {(op.op, op.threads) for op in profile.ops} == {(op, n) for op in OPERATIONS for n in threads}
    stay = {op.op for op in profile.ops if op.resident}
    assert stay == {"qkv", "out_proj", "route", "experts"}
    assert {op.op for op in profile.ops if not op.resident} == OPERATIONS
    for op in profile.ops:
        assert op.seconds[-1] + op.per_prompt + op.per_pair > 0
        assert list(op.seconds) == sorted(op.seconds)


def test_overheads_and_rates_are_positive_and_small(calibrated):
    (profile,) = calibrated.profiles
    assert 0 < profile.dispatch < 5e-3
    assert 0 <= profile.iteration < 0.1
    assert 0 <= profile.task < 1e-3
    assert all(0 <= loss < 10 for loss in astuple(profile.contention))
    assert 0 <= profile.others <= 1
    assert 0 < profile.fetch < 0.1
    assert 0 < profile.move < 0.1
    assert 0 < calibrated.cores.mover < 1e-8
    assert profile.resident.experts is not None
    assert all(0 <= loss < 10 for loss in astuple(profile.resident.experts))
    assert profile.in_one_call is None  # rows of the tiny model fill no registers
    low, high = profile.spread
    assert 0 < low < 1 < high < math.inf
    assert all(math.isfinite(rate) and rate > 0 for _, rate in calibrated.rates)


def test_slow_operations_too_are_seen_beside_a_stream(tiny, quick, tmp_path, monkeypatch):
    """A stream that ends before the first call does would tell nothing of how it slows them."""
    compute = Forward.compute

    def slowly(self, stage, *rest):
        if stage.op.name == "experts":
            time.sleep(0.08)
        return compute(self, stage, *rest)

    monkeypatch.setattr(Forward, "compute", slowly)
    monkeypatch.setattr(calibration, "cache_path", lambda name: tmp_path / name)
    monkeypatch.setattr(calibration, "SHAPES", SHAPES[:2] + SHAPES[-3:])
    found = wb.calibrate(tiny, refresh=True)
    assert all(math.isfinite(rate) and rate > 0 for _, rate in found.rates)


def test_few_decodes_are_timed_behind_their_like(tiny, quick, tmp_path, monkeypatch):
    """A run has many such iterations in a row."""
    passes = list[tuple[str, int, Shape]]()
    one = calibration._Bench._pass
    monkeypatch.setattr(calibration._Bench, "_pass", lambda self, *what: passes.append(what) or one(self, *what))
    monkeypatch.setattr(calibration, "cache_path", lambda name: tmp_path / name)
    wb.calibrate(tiny, refresh=True)
    few = {what for what in passes if not what[2].prompts and what[2].decodes <= calibration.FEW}
    assert few
    for what in few:
        assert passes[passes.index(what) + 1] == what


class Filled:
    """Two plans, of which the computer's noise decides which repetitions count."""

    def __init__(self, monkeypatch, *noises: float) -> None:
        monkeypatch.setattr(calibration, "SECONDS", len(noises))
        clock = SimpleNamespace(perf_counter=lambda: float(len(self.made)))  # a pass takes a second
        monkeypatch.setattr(calibration, "time", clock)
        left = iter(map(Noise, noises))
        monkeypatch.setattr(calibration, "listening", lambda: nullcontext(next(left)))
        self.bench = object.__new__(calibration._Bench)
        self.bench._random, self.bench._noise, self.made = np.random.default_rng(0), [], list[tuple[str, int, Shape]]()
        self.bench._pass = lambda *what: (self.made.append(what), len(self.made))[1]
        whats = [("streamed", 1, Shape(1, 1)), ("streamed", 2, Shape(2, 2))]
        self.passes = {what: calibration._Passes() for what in whats}


def test_rounds_go_on_while_there_is_time_and_what_others_disturbed_is_left_out(monkeypatch):
    filled = Filled(monkeypatch, 0.5, 0, 0, 0.5, 0, 0, 0.5, 0.5, 0)
    filled.bench._fill(filled.passes)
    assert [len(seen.quiet) + len(seen.disturbed) for seen in filled.passes.values()] == [4, 4]
    warming = len(WARM) * 2
    assert sorted(one - warming for seen in filled.passes.values() for one in seen.kept) == [2, 3, 5, 6]
    assert filled.bench._others(filled.passes) == 0


def test_the_least_rounds_are_made_however_long_they_take(monkeypatch):
    filled = Filled(monkeypatch, 0, 0, 0, 0, 0, 0)
    monkeypatch.setattr(calibration, "SECONDS", 1.0)
    monkeypatch.setattr(calibration, "LEAST_ROUNDS", 3)
    filled.bench._fill(filled.passes)
    assert [len(seen.quiet) for seen in filled.passes.values()] == [3, 3]


def test_everything_is_warm_before_anything_is_timed(monkeypatch):
    filled = Filled(monkeypatch, 0, 0, 0, 0, 0, 0)
    filled.bench._fill(filled.passes)
    assert filled.made[: 2 * len(WARM)] == [("streamed", n, shape) for n in (1, 2) for shape in WARM]


def test_where_all_is_disturbed_all_is_kept_and_told(monkeypatch):
    passes = calibration._Passes(disturbed=[[]])
    assert passes.kept == [[]]
    filled = Filled(monkeypatch)
    filled.bench._noise += [Noise(0.5), Noise(0.1)]
    assert filled.bench._others(filled.passes) == pytest.approx(0.3)


@pytest.mark.parametrize("quiet", [True, False])
def test_what_was_calibrated_under_load_says_so_and_is_made_again_when_it_is_quiet(
    quiet, calibrated, tiny, tmp_path, monkeypatch, capsys
):
    noises = [0.4, 0.0]
    monkeypatch.setattr(calibration, "cache_path", lambda name: tmp_path / name)
    monkeypatch.setattr(calibration, "_quiet", lambda: quiet)

    def measure(self, shape):
        (profile,) = calibrated.profiles
        return replace(calibrated, profiles=(replace(profile, shape=shape, others=noises.pop(0)),))

    monkeypatch.setattr(calibration._Bench, "measure", measure)
    first = wb.calibrate(tiny)
    assert first.profiles[0].others == 0.4
    assert "calibrated while others took 40% of the cores" in capsys.readouterr().err
    again = wb.calibrate(tiny)
    assert again.profiles[0].others == (0.0 if quiet else 0.4)
    assert wb.calibrate(tiny) == again


@pytest.mark.parametrize("kind", ["mixtral", "qwen2_moe"])
def test_what_layers_in_one_call_save_is_timed_where_there_are_any(kind, make_model, quick, tmp_path, monkeypatch):
    sizes = {"hidden_size": 64, "intermediate_size": 128, "moe_intermediate_size": 128 if kind == "qwen2_moe" else None}
    model = make_model(replace(FAMILIES[kind], name=f"wide-{kind}", **sizes))
    monkeypatch.setattr(calibration, "SHAPES", SHAPES[:2] + SHAPES[-3:])
    monkeypatch.setattr(calibration, "cache_path", lambda name: tmp_path / name)
    (profile,) = wb.calibrate(model).profiles
    assert (profile.in_one_call is None) is (kind == "qwen2_moe")  # which has shared experts
    if profile.in_one_call is not None:
        assert 0 < profile.in_one_call.saved < 5e-3
        assert profile.in_one_call.rows == MOST
        assert profile.in_one_call.entries > 0


def test_shared_experts_are_timed_and_predicted_wherever_they_are(make_model, quick, tmp_path, monkeypatch):
    model = make_model(QWEN2)
    monkeypatch.setattr(calibration, "SHAPES", SHAPES[:2] + SHAPES[-3:])
    monkeypatch.setattr(calibration, "cache_path", lambda name: tmp_path / name)
    found = wb.calibrate(model)
    profile = found.profile(profile_shape(model, Precision("fp32", "fp32")))
    assert {op.op for op in profile.ops} == OPERATIONS | {"shared_experts"}
    for name, schedule in (("shared_beside", KTransformers()), ("experts_on_cpu", Fiddler()), ("vslpipe", VSLPipe())):
        case = scenario(model, requests((9, 20, 3, 40), 6), WIRED[name], on=found)
        assert wb.bound(case, schedule).seconds <= wb.simulate(case, schedule).seconds < 60


def test_the_record_is_dated_kept_and_loads_elsewhere(calibrated, tiny, folder, tmp_path, monkeypatch):
    assert calibrated.measured
    monkeypatch.setattr(calibration, "_quiet", lambda: False)  # however disturbed it was
    monkeypatch.setattr(calibration, "_Bench", None)  # would fail if anything were measured again
    assert wb.calibrate(tiny) == calibrated
    assert Machine.load(calibrated.save(tmp_path / "there.json")) == calibrated


def test_refresh_measures_again(calibrated, tiny, folder, monkeypatch):
    class MeasuredError(Exception):
        pass

    def measure(*_: object) -> None:
        raise MeasuredError

    monkeypatch.setattr(calibration._Bench, "measure", measure)
    with pytest.raises(MeasuredError):
        wb.calibrate(tiny, refresh=True)


def test_a_watcher_is_told_how_much_is_done_and_ends_a_calibration(tiny, quick, tmp_path, monkeypatch):
    monkeypatch.setattr(calibration, "SHAPES", SHAPES[:2] + SHAPES[-3:])
    monkeypatch.setattr(calibration, "cache_path", lambda name: tmp_path / name)
    shares = []

    def watch(share):
        shares.append(share)
        if share > 0.5:
            raise StoppedError("that is enough.")

    with pytest.raises(StoppedError, match="that is enough"):
        wb.calibrate(tiny, watch=watch)
    assert not list(tmp_path.iterdir())
    assert shares == sorted(shares)
    assert shares[0] == 0 < 0.5 < shares[-1] < 0.7
    shares.clear()
    found = wb.calibrate(tiny, watch=shares.append)
    assert found.profiles
    assert shares[-1] == 1


@pytest.mark.parametrize("damage", JSON_DAMAGES)
def test_a_record_that_cannot_be_read_is_measured_again(damage, calibrated, tiny, tmp_path, monkeypatch):
    """And where it cannot be written, the calibration still succeeds."""
    measured = []
    quiet = replace(calibrated, profiles=tuple(replace(each, others=0.0) for each in calibrated.profiles))
    monkeypatch.setattr(calibration, "cache_path", lambda name: tmp_path / "cache" / name)
    monkeypatch.setattr(calibration._Bench, "measure", lambda *_: (measured.append(1), quiet)[1])
    monkeypatch.setattr(kept, "_NOT_WRITTEN", {})
    assert wb.calibrate(tiny) == wb.calibrate(tiny) == quiet
    (record,) = (tmp_path / "cache").iterdir()
    JSON_DAMAGES[damage](record)
    with pytest.warns(RuntimeWarning, match=f"the calibration for {tiny.name!r}"):
        assert wb.calibrate(tiny) == quiet
    assert wb.calibrate(tiny) == quiet
    assert len(measured) == 2


def test_it_sees_no_throughput(tiny, folder, monkeypatch):
    """Law 10: whatever is served is served by tasks that do nothing."""
    clocks = []
    serve = calibration.serve
    monkeypatch.setattr(calibration, "serve", lambda p, clock, s: (clocks.append(type(clock)), serve(p, clock, s))[1])
    monkeypatch.setattr(calibration, "SHAPES", SHAPES[:2] + SHAPES[-4:])
    wb.calibrate(tiny, refresh=True)
    assert set(clocks) == {calibration._Hollow}


def test_predictions_with_it_are_simulated_and_bounded(calibrated, tiny):
    asked = requests((9, 20, 3, 40), 6)
    for schedule in (Sequential(), Sequential(prefetch=True), VSLPipe()):
        case = scenario(tiny, asked, on=calibrated.limit(link=1e9))
        simulated = wb.simulate(case, schedule)
        assert wb.bound(case, schedule).seconds <= simulated.seconds
        assert 0 < simulated.seconds < 60


def test_a_shape_counts_its_rows():
    assert Shape(3, 4).rows == Rows(prefill=12, pairs=30, emits=3)
    assert Shape(0, 0, 5, 7).rows == Rows(decode=5, context=35, emits=5)


def test_without_weights_there_is_nothing_to_calibrate():
    with pytest.raises(EngineError, match="weights"):
        wb.calibrate(replace(TINY, vocab_size=98))
