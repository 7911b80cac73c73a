"""Settings of a view: the scenario that they make, and what changes of one setting do to others."""

import platform
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

import workbench as wb
from tests.builders import small_machine, tiny_model, tiny_scenario
from tests.systems import PIPELINES, VSL
from workbench.engine.loading.checkpoint import TORCH_DTYPES
from workbench.hardware import Machine
from workbench.hardware.profile import Profile
from workbench.schedules import CGOPipe, Overlap, Sequential, VSLPipe, contenders
from workbench.serving import fits
from workbench.widgets.state.controls import GPU_MEMORY, KV_CAPACITY, LINK, MICRO_BATCHES, SLIDERS, Controls
from workbench.widgets.state.ladders import ladder, nearest, outward
from workbench.widgets.state.offered import (
    HELD,
    in_held_formats,
    machines_offered,
    on_this_computer,
    runnable,
    why_not_live,
    workloads_offered,
)
from workbench.widgets.state.predictions import Predictions
from workbench.widgets.state.settings import Settings, full_link, kv_bytes_per_token, suitable_kv, whole_machine
from workbench.workload import Request, Workload
from workbench.workload.resizing import resized, sizes, with_tokens

RAG = wb.workloads["rag"].sample(requests=50, output_len=16, seed=3)


def server():
    return wb.Scenario(
        VSL,
        model=wb.models["mixtral-8x7b"],
        machine=wb.machine(gpu="rtx-5090", cpu="xeon-8380", memory="256GB"),
        memory=wb.Memory(kv_capacity="20GB"),
        workload=RAG,
        scheduler=wb.ResourceAware(),
    )


def of(scenario, schedule=None):
    return Settings.of(scenario, schedule or VSLPipe())


def test_settings_make_the_scenario_that_they_are_of():
    for scenario in (tiny_scenario(), server(), server().on(machine=server().machine.limit(link="5GB/s"))):
        again = of(scenario).scenario()
        assert list(again.diff(scenario)) in ([], ["memory.kv_capacity"])
        assert again.kv_blocks == scenario.kv_blocks


@pytest.mark.parametrize("share", [1.0, 0.97, 0.5])
def test_a_limit_says_what_the_machine_has_wherever_it_stands(share):
    settings = of(server()).on(link=share * full_link(server().machine), gpu_memory=share * server().machine.gpu.memory)
    link, memory = LINK.plain(settings), GPU_MEMORY.plain(settings)
    assert link["note"] == "of 50.4 GB/s that the machine has"
    assert memory["note"] == "of 32 GB that the machine has"
    assert link["steps"][link["at"]].endswith("GB/s")


def test_limits_are_taken_off_and_put_on_again():
    full = wb.machines["a40"]
    slow = full.limit(link="5GB/s", gpu_memory="20GB")
    assert whole_machine(slow).link == full.link
    assert whole_machine(slow).gpu.memory == full.gpu.memory
    settings = of(server().on(machine=slow))
    assert settings.link == 5e9
    assert settings.limited == slow


def test_a_calibration_stays_where_limits_are_taken_off(monkeypatch):
    local = replace(small_machine(), host=platform.node())
    monkeypatch.setattr(Machine, "local", classmethod(lambda _, device: local))
    calibrated = replace(local, profiles=(Profile("a shape", ()),), measured="today")
    slow = calibrated.limit(link=full_link(local) / 2)
    assert whole_machine(calibrated) == whole_machine(slow) == calibrated
    assert whole_machine(slow).sources == local.sources
    assert whole_machine(local.limit(link=full_link(local) / 2)) == local


def test_another_machine_has_its_own_link_memory_and_cache():
    """A tiny machine's link on a server would predict next to nothing."""
    start = of(tiny_scenario(machine=small_machine())).on(requests=200)
    big = server().machine
    moved = start.on_machine(big).on_model(wb.models["mixtral-8x7b"])
    assert moved.link == min(big.link.h2d, big.link.d2h)
    assert moved.gpu_memory == big.gpu.memory
    assert fits(moved.scenario(), moved.schedule)
    assert wb.simulate(moved.scenario(), moved.schedule).gen_tok_s > 1


def test_another_model_has_its_own_precision_and_tokens():
    settings = of(server().on(memory=wb.Memory(kv_capacity="20GB", weights="fp16", kv="fp16")))
    found = settings.on_model(wb.models["gpt-oss-20b"])
    assert (found.memory.weights, found.memory.kv) == (None, None)
    assert (
        max(max(request.prompt) for request in with_tokens(found.workload, found.model).requests)
        < found.model.vocab_size
    )


@pytest.mark.parametrize("requests", [4, 400])
def test_the_suitable_cache_holds_all_requests_or_is_the_largest_that_fits(requests):
    settings = of(server()).on(requests=requests)
    tokens = suitable_kv(settings)
    workload = settings.scenario().workload
    wanted = (workload.prompt_len + workload.output_len).sum()
    each = kv_bytes_per_token(settings.memory, settings.model)
    assert fits(settings.on(kv_tokens=tokens).scenario(), settings.schedule)
    if tokens < wanted:
        larger = settings.on(kv_tokens=tokens * 2 ** (1 / 4))
        assert not fits(larger.scenario(), settings.schedule), tokens * each


def test_requests_keep_the_spread_of_their_lengths():
    more = resized(RAG, 200, 2 * sizes(RAG)[1], 8)
    assert len(more) == 200
    assert more.prompt_len.mean() == pytest.approx(2 * RAG.prompt_len.mean(), rel=0.01)
    spread = more.prompt_len.std() / more.prompt_len.mean()
    assert spread == pytest.approx(RAG.prompt_len.std() / RAG.prompt_len.mean(), rel=0.02)
    assert (more.output_len == 8).all()


def test_requests_without_a_change_are_those_given():
    assert resized(RAG, *sizes(RAG)) is RAG


def test_fewer_requests_are_the_first_with_their_tokens():
    given = Workload.of([Request((1, 2, 3), 4), Request((5, 6, 7), 4), Request((8, 9, 1), 4)])
    fewer = resized(given, 2, 3, 4)
    assert [request.prompt for request in fewer.requests] == [(1, 2, 3), (5, 6, 7)]
    assert resized(given, 2, 6, 4).requests == ()


def test_more_requests_arrive_at_the_same_rate():
    given = replace(RAG, arrival=np.arange(50) * 2.0)
    more = resized(given, 125, *sizes(given)[1:])
    assert np.allclose(np.diff(more.arrival), 2.0)


def test_tokens_are_drawn_for_lengths_alone_and_fit_the_model():
    drawn = with_tokens(RAG, tiny_model())
    assert [len(request.prompt) for request in drawn.requests] == RAG.prompt_len.tolist()
    assert max(max(request.prompt) for request in drawn.requests) < tiny_model().vocab_size
    assert with_tokens(drawn, tiny_model()) is drawn


def controls_of(settings):
    return Controls(settings, contenders(settings.pipeline))


@pytest.mark.parametrize("slider", SLIDERS, ids=lambda slider: slider.name)
def test_every_position_of_a_slider_is_read_back(slider):
    settings = of(server(), CGOPipe())
    steps = slider.steps(settings)
    for place in {0, len(steps) // 2, len(steps) - 1} if steps else ():
        moved = slider.moved(settings, place)
        assert slider.read(moved) == pytest.approx(steps[place].value)
        assert slider.at(moved) == slider.steps(moved).index(
            next(s for s in slider.steps(moved) if s.value == steps[place].value)
        )


def test_sliders_show_the_value_that_they_begin_with():
    plain = KV_CAPACITY.plain(of(server()))
    assert plain["steps"][plain["at"]] == "20 GB"
    assert LINK.plain(of(server()))["steps"][-1] == "50.4 GB/s"


def test_a_slider_that_means_nothing_is_not_shown():
    names = [each["name"] for group in shown(of(server())) for each in group["controls"]]
    assert "kv_on_gpu" not in names  # no fetch(kv)
    assert "weights_on_gpu" in names


def test_the_slider_of_micro_batches_stays_where_it_is():
    assert MICRO_BATCHES.plain(of(server()))["steps"] == ["–"]
    assert MICRO_BATCHES.plain(of(server()))["note"] == "VSLPipe has none"
    assert len(MICRO_BATCHES.plain(of(server(), CGOPipe()))["steps"]) > 2


def shown(settings):
    return controls_of(settings).plain(settings, Predictions().refused)["groups"]


def test_schedules_that_do_not_take_the_wiring_are_greyed_with_the_reason():
    settings = of(server())
    schedule = next(c for group in shown(settings) for c in group["controls"] if c["name"] == "schedule")
    why = {option["label"]: option["why"] for option in schedule["options"]}
    assert schedule["value"] == "VSLPipe"
    assert why["Overlap"] == ""
    assert "FlexGenS4" in why["FlexGenS4"]
    assert why["KTransformers"]


def test_schedulers_that_cut_prompts_are_greyed_where_attention_cannot_take_pieces():
    settings = of(server())
    scheduler = next(c for group in shown(settings) for c in group["controls"] if c["name"] == "scheduler")
    why = {option["label"]: option["why"] for option in scheduler["options"]}
    assert why["ChunkedPrefill"]
    assert why["ContinuousBatching"] == ""


def test_the_first_model_returns_with_its_own_precision_and_cache():
    start = of(server().on(memory=wb.Memory(kv_capacity="20GB", weights="fp16", kv="fp16")))
    controls = controls_of(start)
    away = controls["model"].moved(start, "gpt-oss-20b")
    assert away.model.name == "gpt-oss-20b"
    assert controls["model"].moved(away, "mixtral-8x7b") == start


def test_an_unknown_choice_changes_nothing():
    settings = of(server())
    assert controls_of(settings)["model"].moved(settings, "no such model") is settings


def test_machines_are_named_by_their_parts():
    labels = list(machines_offered(wb.machines["a40"]))
    assert labels[0].startswith("NVIDIA A40 48 GB + Xeon Platinum 8380")
    assert any(label.startswith("this computer") for label in labels)
    assert not any(label.startswith("moe-lightning") for label in labels)


def test_workloads_have_as_many_requests():
    assert {len(each) for each in workloads_offered(RAG).values()} == {50}


def test_only_a_model_with_weights_on_this_computer_runs():
    assert why_not_live(of(server())) == (
        "A run needs a model whose weights are on this computer (mixtral-8x7b's are not) and this computer as the "
        "machine."
    )


def with_weights(**changes):
    return replace(tiny_model(), path=Path("a checkpoint"), **changes)


def test_settings_for_this_computer_have_requests_that_its_model_takes():
    away = of(server().on(workload=Workload.lengths([400, 4000], 200)))
    found = on_this_computer(away.on_model(with_weights(max_position_embeddings=128)), wb.Machine.local())
    assert found.machine.is_local
    assert found.model.path is not None
    longest = found.scenario().workload
    assert 32 < int((longest.prompt_len + longest.output_len - 1).max()) <= 128
    assert fits(found.scenario(), found.schedule)
    assert why_not_live(found) == ""


def test_a_run_says_which_formats_it_does_not_hold():
    assert tuple(TORCH_DTYPES) == HELD
    away = of(server().on(workload=Workload.lengths([4, 40], 20)))
    here = on_this_computer(away.on_model(with_weights(max_position_embeddings=128)), wb.Machine.local())
    for changes, told in (
        ({"kv": "fp16"}, "kv in fp32 or bf16 (fp16 was chosen)"),
        ({"weights": "fp16", "kv": "bf16"}, "weights in fp32 or bf16 (fp16 was chosen)"),
    ):
        chosen = here.on(memory=replace(here.memory, **changes))
        assert why_not_live(chosen) == f"A run needs {told}."
        held = in_held_formats(chosen)
        assert why_not_live(held) == ""
        assert held.memory.kv == (None if changes["kv"] == "fp16" else "bf16")
    rounded = here.on(memory=replace(here.memory, weights="int4"))
    assert in_held_formats(rounded) == rounded
    assert why_not_live(rounded) == ""


def test_another_format_changes_a_cache_that_suits_and_no_other():
    settings = of(server())
    controls = Controls(settings, ())
    suited = settings.with_suitable_kv()
    assert not controls["kv"].write(settings, "fp32").suited
    assert controls["kv"].write(settings, "fp32").kv_tokens == settings.kv_tokens
    found = controls["kv"].write(suited, "fp32")
    assert found.suited
    assert found.kv_tokens == suitable_kv(found)


def test_the_model_at_hand_comes_before_others_with_weights():
    here = wb.Machine.local()
    one, other = with_weights(name="one"), with_weights(name="other")
    assert runnable(of(server()), [tiny_model(), one, other], here) is one
    assert runnable(of(server()).on(model=other), [one, other], here) is other
    assert runnable(of(server()), [tiny_model()], here) is None
    assert runnable(of(server()), [replace(wb.models["mixtral-8x22b"], path=Path("huge")), one], here) is one


def test_ladders():
    assert ladder(8.0, 4.0, 16.0)[0] == pytest.approx(4.0)
    assert ladder(8.0, 4.0, 16.0)[-1] == pytest.approx(16.0)
    assert nearest((1.0, 2.0, 4.0), 2.9) == 2
    assert outward((1.0, 2.0, 4.0, 8.0), 4.0, 4) == [4.0, 8.0, 2.0, 1.0]


def test_a_schedule_keeps_its_settings_among_those_offered():
    settings = of(server(), Overlap(3, 4))
    controls = controls_of(settings)
    assert Overlap(3, 4) in controls.schedules(settings)
    assert Overlap() not in controls.schedules(settings)
    assert len({each.name for each in controls.schedules(settings)}) == len(controls.schedules(settings))


def test_every_pipeline_of_the_systems_has_settings():
    for pipeline in PIPELINES.values():
        scenario = tiny_scenario(pipeline=pipeline)
        assert Predictions().refused(of(scenario, Sequential())) is None


def test_a_machine_of_ones_own_keeps_its_values_whatever_its_name():
    known = wb.machines["a40"]
    fast = replace(known, link=replace(known.link, h2d=50e9, d2h=50e9))
    large = replace(known, gpu=replace(known.gpu, memory=96e9))
    uneven = replace(known, link=replace(known.link, h2d=10e9))
    for own in (fast, large, uneven):
        assert whole_machine(own) == own
        assert of(server().on(machine=own)).limited == own
