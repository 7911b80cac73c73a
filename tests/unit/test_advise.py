"""Advice: its rows keep the laws of time and memory, its best is the best, and more GPU memory never makes it worse."""

import time
from dataclasses import replace
from pathlib import Path

import pytest

import workbench as wb
from tests.builders import small_machine, tiny_model, tiny_model_of
from workbench.__main__ import main
from workbench.analysis.advise import best
from workbench.analysis.advise.loads import Load
from workbench.analysis.advise.placements import placements
from workbench.core.errors import CapacityError, ScenarioError, WorkloadError
from workbench.models import ModelConfig
from workbench.serving.prepared import price

SHORT = {"prompt": 20, "output": 4, "batch": 4}
SLOW_CPU = {"gpu": 1e11, "hbm": 1e10, "cpu": 1e10, "dram": 1e9, "h2d": 1e9, "d2h": 1e9}
SMALL_GPU = 2e6
LARGE_GPU = 1e7
"""GPU memories in which some of a model of `small` has room, and all of it [B]."""


def small(kind: str = "plain") -> ModelConfig:
    """A model whose weights take more room than its activations: 3 to 4 MB."""
    model = replace(tiny_model_of(kind, 6), num_local_experts=16)
    return replace(model, moe_intermediate_size=320) if model.moe_intermediate_size else model


def advised(gpu_memory: float, model: ModelConfig | None = None, **given: float) -> wb.Advice:
    return wb.advise(model or small(), small_machine(**SLOW_CPU, gpu_memory=gpu_memory), **(SHORT | given))


def names(advice: wb.Advice) -> set[str]:
    return {row.known_as.partition(" ")[0] for row in advice.rows}


@pytest.fixture(scope="module", params=["plain", "all"])
def advice(request: pytest.FixtureRequest) -> wb.Advice:
    return advised(SMALL_GPU, small(request.param))


@pytest.fixture(scope="module")
def whole() -> wb.Advice:
    return advised(LARGE_GPU)


@pytest.fixture(scope="module")
def mixtral() -> wb.Advice:
    return wb.advise(wb.models["mixtral-8x7b"], wb.machines["a40"], prompt=64, output=8, batch=4)


# ----------------------------------------------------------------------------------------------------------- the laws


def check_rows(advice: wb.Advice) -> None:
    fitting = [row for row in advice.rows if row.fits]
    assert fitting
    for row in fitting:
        assert row.ledger.gpu.left >= 0
        assert row.ledger.host.left >= 0
        assert 0 < row.simulated.gen_tok_s <= row.bound.gen_tok_s * (1 + 1e-9)
    for row in advice.rows:
        assert row.fits == (row.tightest.left >= 0)
        assert row.fits == (row.simulated is not None) == (row.bound is not None)
    for requests, chosen in ((1, advice.best_single), (advice.rows[-1].requests, advice.best_batch)):
        assert chosen in advice.rows
        assert chosen.requests == requests
        assert chosen.tok_s == max(row.tok_s for row in fitting if row.requests == requests)


def test_rows_keep_bound_and_memory_and_the_best_is_the_best(advice: wb.Advice) -> None:
    check_rows(advice)


def test_so_do_rows_of_a_known_model_and_machine(mixtral: wb.Advice) -> None:
    check_rows(mixtral)


def test_every_number_of_a_row_can_be_had_from_its_scenario(advice: wb.Advice) -> None:
    for row in (advice.best_single, advice.best_batch):
        assert wb.simulate(row.scenario, row.schedule).gen_tok_s == row.tok_s
        assert wb.bound(row.scenario, row.schedule).gen_tok_s == row.bound.gen_tok_s
        assert str(wb.fits(row.scenario, row.schedule)) == str(row.ledger)


def test_advising_twice_gives_the_same() -> None:
    first, second = (advised(SMALL_GPU, batch=1) for _ in range(2))
    assert str(first) == str(second)
    assert first._repr_html_() == second._repr_html_()


@pytest.mark.parametrize("requests", [1, 20])
def test_more_gpu_memory_never_makes_the_best_worse(requests: int) -> None:
    rate = 0.0
    workload = wb.Workload.lengths(20, 4, requests)
    for memory in (5e5, 1e6, 1.5e6, SMALL_GPU, 3e6, LARGE_GPU):
        machine = small_machine(**SLOW_CPU, gpu_memory=memory)
        chosen = best(Load(small(), machine, workload, None).rows())
        found = chosen.tok_s if chosen else 0.0
        assert found >= rate * (1 - 1e-9)
        rate = found
    assert chosen.placement == "everything on the GPU"


# ------------------------------------------------------------------------------------------------------- the placements


def test_a_share_is_the_largest_that_fits_the_gpu(advice: wb.Advice) -> None:
    """A step further is short of GPU memory, for every placement that has steps."""
    found = 0
    for row in (row for row in advice.rows if row.fits and row.at_once == row.requests):
        load = Load(advice.model, advice.machine, row.scenario.workload, None)
        for placement in placements(advice.model):
            steps = [step for step in placement.steps if placement.layout(step).what == row.placement]
            if not steps or placement.schedule != row.schedule or steps[0] == placement.steps[-1]:
                continue
            further = load._at(placement, steps[0] + 1)
            assert further.ledger.gpu.left < 0, row.placement
            found += 1
    assert found >= 3


def test_what_fits_the_gpu_whole_is_not_shared(whole: wb.Advice, advice: wb.Advice) -> None:
    assert whole.best_single.placement == "everything on the GPU"
    assert names(whole).isdisjoint({"DeepSpeed", "FlexGen", "MoE-Lens", "MoE-Lightning"})
    assert not [row for row in whole.rows if row.known_as.startswith(("llama.cpp -ncmoe", "KTransformers --"))]
    assert {"DeepSpeed", "FlexGen", "MoE-Lens", "MoE-Lightning", "FastDecode"} <= names(advice)


def test_llama_cpps_own_fit_leaves_as_many_layers_on_the_cpu() -> None:
    """Its tools/fit-params/README.md, read 26 Nov 2026: Qwen3-30B-A3B in f16 with 24077 MiB free and a context of 4096.

    It overflows 34 of 48 layers, the last of them in part.
    """
    machine = wb.machine("rtx-4090", "epyc-9654", memory="128GB")
    free = replace(machine, gpu=replace(machine.gpu, memory=24077 * 2.0**20))
    model = wb.models["qwen3-30b-a3b"]
    load = Load(model, free, wb.Workload.lengths(4064, 32), None)
    (placement,) = (each for each in placements(model) if "ncmoe" in each.layout(each.steps[0]).known_as)
    on_cpu = int(load._row(placement).known_as.rpartition(" ")[2])
    assert abs(on_cpu - 34) <= 1


@pytest.mark.parametrize("sizes", [{"layers": 1}, {"num_local_experts": 2}, {"first_k_dense_replace": 4}])
def test_a_model_too_small_to_be_shared_has_fewer_rows(sizes: dict[str, int]) -> None:
    """With one layer, two experts or no experts at all some placements have no step between all and nothing."""
    assert advised(LARGE_GPU, tiny_model(**sizes), batch=1).rows[0].fits
    assert advised(1e5, tiny_model(**sizes), batch=1).rows


def test_a_batch_that_the_cache_cannot_hold_is_served_in_parts() -> None:
    advice = advised(SMALL_GPU, batch=300)
    parts = [row for row in advice.rows if row.fits and row.at_once < row.requests]
    assert parts
    for row in parts:
        assert row.requests == 300
        assert len(row.scenario.workload) == row.at_once
        assert f"{row.at_once} at a time" in str(advice)
        one_more = row.scenario.on(workload=wb.Workload.lengths(20, 4, row.at_once + 1))
        assert one_more.kv_blocks < (row.at_once + 1) * -(-23 // 16)


def test_shared_experts_stay_on_the_gpu_where_routed_ones_are_on_the_cpu() -> None:
    advice = advised(SMALL_GPU, small("shared"))
    for known_as in ("llama.cpp -cmoe", "KTransformers"):
        row = next(row for row in advice.rows if row.known_as == known_as)
        (stage,) = (stage for stage in row.scenario.stages if stage.op.name == "shared_experts")
        assert stage.device.value == "gpu"


def test_an_iteration_takes_enough_tokens_however_few_weights_stream(advice: wb.Advice) -> None:
    streaming = [row for row in advice.rows if "streamed" in row.placement]
    assert streaming
    for row in streaming:
        own = row.scenario.on(scheduler=replace(row.scenario.scheduler, token_budget=None))
        asked = row.scenario.scheduler.token_budget
        assert (asked or price(own, row.schedule).token_budget) >= 2048


# ----------------------------------------------------------------------------------------------- what hardware is worth


def test_more_hardware_is_worth_what_a_simulation_of_it_gives(mixtral: wb.Advice) -> None:
    worth = {one.resource: one.gain for one in mixtral.worth_single}
    assert set(worth) == {"GPU memory", "CPU and DRAM speed", "link speed", "GPU speed"}
    assert all(gain >= 1 - 1e-9 for gain in worth.values())
    machine = mixtral.machine
    twice = replace(machine, gpu=replace(machine.gpu, memory=2 * machine.gpu.memory))
    richer = wb.advise(mixtral.model, twice, prompt=64, output=8, batch=1)
    assert worth["GPU memory"] == pytest.approx(richer.best_single.tok_s / mixtral.best_single.tok_s)
    assert mixtral.worth_single[0].placement == richer.best_single.placement


def test_where_only_the_gpu_works_only_a_faster_gpu_is_worth_anything(whole: wb.Advice) -> None:
    worth = {one.resource: one.gain for one in whole.worth_batch}
    assert worth == pytest.approx({"GPU memory": 1, "CPU and DRAM speed": 1, "link speed": 1, "GPU speed": 2})


# --------------------------------------------------------------------------------------------------------- what is said


def test_where_nothing_fits_the_nearest_change_is_told_and_makes_it_fit() -> None:
    machine = small_machine(**SLOW_CPU, gpu_memory=SMALL_GPU, host_memory=2e5)
    advice = wb.advise(small(), machine, **SHORT)
    assert advice.best_single is None
    assert advice.best_batch is None
    assert advice.worth_single == advice.worth_batch == ()
    changes = [(change.factor, change) for row in advice.rows if row.requests == 1 for change in row.ledger.changes]
    _, nearest = min(changes, key=lambda pair: pair[0])
    assert f"Nothing fits. Nearest change: {nearest} with " in str(advice)
    assert wb.fits(nearest.scenario, nearest.schedule)


def test_text_and_html_have_every_row_with_its_numbers(mixtral: wb.Advice) -> None:
    text = str(mixtral)
    page = mixtral._repr_html_()
    for row in mixtral.rows:
        lines = [line for line in text.splitlines() if all(cell in line for cell in row.cells())]
        (line,) = (line for line in lines if f"  {row.placement}  " in f" {line}")
        assert all(f">{cell}</td>" in page for cell in row.cells() if cell)
        assert ("short" in line) == (not row.fits)
    assert text.count("\n*  ") == 2
    assert "bound tok/s  simulated tok/s  first token  then tok/s each" in text


def test_names_are_escaped_in_html() -> None:
    advice = advised(LARGE_GPU, replace(small(), name="<b>"), batch=1)
    assert advice.title.startswith("<b>")
    assert "<b>" not in advice._repr_html_()


def test_what_cannot_be_priced_is_told_with_the_reason() -> None:
    machine = wb.machine("t4", "epyc-9654", memory="64GB")
    advice = wb.advise(wb.models["olmoe-1b-7b"], machine, weights="fp16", prompt=64, output=4, batch=2)
    assert {row.scenario.precision.kv for row in advice.rows} == {"fp16"}
    assert ("everything on the CPU", dict(advice.refused)["experts on the CPU"]) in advice.refused
    assert "everything on the CPU. epyc-9654 has no known FLOP rate for fp16" in str(advice)


def test_formats_of_weights_are_read_back() -> None:
    advice = advised(LARGE_GPU, tiny_model(hidden_size=128, intermediate_size=128), weights="int8")
    assert {row.scenario.weight_formats for row in advice.rows} == {"int8 (experts) and bf16"}
    assert "int8 (experts) and bf16" in advice.title


@pytest.mark.parametrize(
    ("given", "kind", "words"),
    [
        (
            {"model": "mixtral-8x7b"},
            ScenarioError,
            "takes a ModelConfig, not 'mixtral-8x7b'; give one such as of wb.models",
        ),
        ({"machine": "a40"}, ScenarioError, "takes a Machine, not 'a40'; give one such as of wb.machines"),
        ({"batch": 0}, ScenarioError, "batch=0 is no number of requests"),
        ({"batch": True}, ScenarioError, "batch=True is no number of requests"),
        ({"prompt": 0}, WorkloadError, "the least is 1"),
        ({"output": 1.5}, WorkloadError, "whole number"),
        ({"prompt": 5000}, ScenarioError, "tiny takes 4096. Shorten it by"),
        ({"weights": "q4"}, CapacityError, "use 'fp32', 'bf16'"),
    ],
)
def test_bad_input_is_refused(given: dict[str, object], kind: type[Exception], words: str) -> None:
    known = {"model": tiny_model(), "machine": small_machine(), **SHORT}
    with pytest.raises(kind, match=words):
        wb.advise(**(known | given))


def test_one_request_alone_is_its_own_batch() -> None:
    advice = advised(SMALL_GPU, batch=1)
    assert advice.best_single is advice.best_batch
    assert str(advice).count("Best: ") == 1
    assert names(advice).isdisjoint({"FlexGen", "MoE-Lens", "MoE-Lightning", "FastDecode"})


@pytest.mark.alone
def test_advice_takes_less_than_five_seconds() -> None:
    began = time.process_time()  # it is one thread's work, of which others on the cores take nothing
    wb.advise(wb.models["gpt-oss-120b"], wb.machine("rtx-4090", "epyc-9654", memory="128GB"))
    assert time.process_time() - began < 5


# ---------------------------------------------------------------------------------------------------------- the command

SMALL = ("--prompt", "64", "--output", "4", "--batch", "2")


def test_the_command_prints_the_advice(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["advise", "--model", "olmoe-1b-7b", "--gpu", "rtx-4090", "--cpu", "epyc-9654", "--memory", "64GB", *SMALL]
    assert main(words) == 0
    machine = wb.machine("rtx-4090", "epyc-9654", memory="64GB")
    asked = wb.advise(wb.models["olmoe-1b-7b"], machine, prompt=64, output=4, batch=2)
    assert capsys.readouterr().out == f"{asked}\n"


def test_the_command_tells_how_long_a_drive_reads_the_weights(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["advise", "--model", "olmoe-1b-7b", "--machine", "a40", "--drive", "nvme-pcie4-x4", *SMALL]
    assert main(words) == 0
    seconds = 2 * wb.models["olmoe-1b-7b"].params / wb.drives["nvme-pcie4-x4"].number
    assert capsys.readouterr().out.endswith(f"\nnvme-pcie4-x4 reads the weights in {seconds:.3g} s at best.\n")


def test_the_command_takes_a_chip_with_both_and_memory_by_channels(capsys: pytest.CaptureFixture[str]) -> None:
    parts = (["--gpu", "m3-max"], ["--gpu", "rtx-4090", "--cpu", "ryzen-7950x", "--memory", "64GB ddr5-6000 x2"])
    for given in parts:
        assert main(["advise", "--model", "olmoe-1b-7b", *given, *SMALL]) == 0
        assert f" on {given[1]}" in capsys.readouterr().out


def test_the_command_reads_a_config_and_a_saved_machine(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    saved = small_machine(**SLOW_CPU).save(tmp_path / "machine.json")
    model = wb.data_path("models/tiny-moe")
    for given in (model, model / "config.json"):
        assert main(["advise", "--model", str(given), "--machine", str(saved), "--weights", "bf16", *SMALL]) == 0
        assert capsys.readouterr().out.startswith("tiny-moe, ")


def test_the_command_reads_a_gguf_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("gguf")
    from tests.gguf_files import mixtral

    path = mixtral(tmp_path / "small.gguf")
    assert (
        main(["advise", "--model", str(path), "--machine", "a40", "--prompt", "8", "--output", "2", "--batch", "1"])
        == 0
    )
    said = capsys.readouterr().out
    assert said.startswith(f"{wb.model(path).name}, ")
    assert "everything on the GPU" in said


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("--model mixtral --machine a40", "did you mean 'mixtral-8x7b'?"),
        ("--model mixtral-8x7b --machine a41", "machines.toml has no entry 'a41'"),
        ("--model mixtral-8x7b", "advise needs a machine: give --machine NAME, or --gpu, --cpu and --memory."),
        ("--model mixtral-8x7b --machine a40 --gpu l4", "--machine a40 has all its parts; leave out --gpu."),
        ("--model mixtral-8x7b --gpu l4 --cpu xeon-8380", "say what its host has, such as memory='512GB'"),
        ("--model mixtral-8x7b --machine pyproject.toml", "pyproject.toml is no machine record"),
    ],
)
def test_the_command_says_in_one_line_what_is_missing(
    capsys: pytest.CaptureFixture[str], words: str, said: str
) -> None:
    assert main(["advise", *words.split()]) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert said in line


def test_a_chip_with_one_memory_is_not_told_to_divide_the_work():
    """GPU and CPU read the same DRAM: rows in which both do would count its bandwidth twice."""
    advice = wb.advise(wb.models["qwen3-30b-a3b"], wb.machine("m4-max"), weights="int8")
    assert {row.placement for row in advice.rows} == {"everything on the GPU", "everything on the CPU"}
    assert "read one memory" in str(advice)
    assert len(advice.worth_single) == 1
