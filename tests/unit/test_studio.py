"""The state behind a view: what messages do to wiring and settings, and what is shown of them."""

import gc
import json
import math
import sys
import time
import weakref
from collections import defaultdict
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

import workbench as wb
from tests.builders import small_machine, tiny_model, tiny_model_of, tiny_scenario
from tests.systems import LIGHTNING, MIXED, PIPELINES, VSL
from workbench.core.energy import Energy
from workbench.core.errors import CapacityError, EngineError, ScheduleError, StoppedError
from workbench.core.quiet import OTHERS
from workbench.core.result import Source
from workbench.core.units import format_bytes, format_seconds, four_digits
from workbench.engine import RunState
from workbench.engine.engine import UnderWay
from workbench.hardware.assembly import machine as assembled
from workbench.hardware.profile import Profile
from workbench.pipeline import Pipeline, Stack, code_of, connected, cpu, gpu, load, offload
from workbench.schedules import CGOPipe, FlexGenS4, Overlap, Sequential, VSLPipe, contenders
from workbench.serving import Progress, fits
from workbench.serving.ledger import Ledger
from workbench.serving.task_cost import profile_shape
from workbench.simulate.loading import loader
from workbench.stages import ExpertSet, Op, Work, attention, combine, experts, moe, out_proj, qkv, route, shared_experts
from workbench.widgets.parts import newest
from workbench.widgets.parts.words import digits, roughly
from workbench.widgets.state import drawing
from workbench.widgets.state import predictions as predicted
from workbench.widgets.state.controls import KV_CAPACITY, MICRO_BATCHES, Controls
from workbench.widgets.state.drawing import Drawing, _Garbage, _Points
from workbench.widgets.state.figures import figure
from workbench.widgets.state.pace import Course, Earlier, Pace
from workbench.widgets.state.predictions import Predictions, Refused, _wired
from workbench.widgets.state.runs import Planned, Runs, prediction_of, spread, swept
from workbench.widgets.state.settings import Settings
from workbench.widgets.state.studio import Studio, _changed
from workbench.widgets.state.variants import Variants
from workbench.widgets.state.wirings import _SYSTEMS, presets


class Desk:
    """A studio whose publications are kept."""

    def __init__(self, scenario=None, schedules=(), names=None):
        self.shown = {}
        self.count = {}
        scenario = scenario or tiny_scenario(pipeline=VSL, requests=6)
        offered = tuple(schedules) or contenders(scenario.stack)
        self.studio = Studio(scenario, offered, names or {}, self.publish, lambda *_: None, lambda _: None)

    def publish(self, **parts):
        json.dumps(parts)  # what cannot be sent fails here
        self.shown |= parts
        self.count |= {name: self.count.get(name, 0) + 1 for name in parts}

    def say(self, do, **more):
        self.studio.answer({"do": do, **more})
        return self

    def drawn(self):
        assert self.studio.drawing.wait(60)
        return self.shown

    @property
    def pipeline(self):
        return self.studio.settings.pipeline

    def control(self, name):
        controls = [each for group in self.shown["settings"]["groups"] for each in group["controls"]]
        return next(each for each in controls if each["name"] == name)


@pytest.fixture
def desk():
    made = Desk()
    yield made
    made.studio.close()


def cards(shown):
    return [each for each in shown["wiring"]["ranges"][0]["chain"] if each["kind"] == "card"]


def test_everything_is_shown_at_the_start(desk):
    shown = desk.drawn()
    assert set(shown) == {"settings", "wiring", "code", "variants", "live", "figures", "lanes", "curves"}
    assert [card["name"] for card in cards(shown)][:2] == ["qkv", "prefill_attention"]
    assert shown["wiring"]["fault"] is None
    assert all(row.get("gen_tok_s") or row["why"] for row in shown["figures"]["rows"])
    assert shown["figures"]["rows"][0]["source"] == "bound"


def test_a_rate_reads_the_same_in_the_table_and_in_the_explanation():
    rates = (296.3, 8083.0, 10_715.0, 31_994.0)
    assert [digits(rate) for rate in rates] == ["296", "8,083", "10,720", "31,990"]
    assert [four_digits(rate) for rate in rates[2:]] == [digits(rate) for rate in rates[2:]]


def test_a_precision_that_the_gpu_has_no_rate_for_is_mended_by_one_that_it_has(desk):
    desk.drawn()
    card = wb.machine(gpu="rtx-5090", cpu="xeon-8380", memory="256GB")
    desk.studio._change(desk.studio.settings.on_machine(card).on_model(tiny_model(dtype="fp32")))
    figures = desk.drawn()["figures"]
    assert "has no known FLOP rate for fp32" in figures["problem"]
    (mend,) = figures["mends"]
    assert mend["label"] == "Use bf16 weights and KV"
    desk.say("fix", id=mend["id"])
    assert desk.drawn()["figures"]["problem"] == ""
    assert (desk.studio.settings.memory.weights, desk.studio.settings.memory.kv) == ("bf16", "bf16")


def test_formats_of_weights_and_kv_are_chosen():
    scenario = tiny_scenario(pipeline=VSL, requests=6, model=wb.models["mixtral-8x7b"], machine=wb.machines["a40"])
    desk = Desk(scenario, [VSLPipe()])
    (weights, held), whole = (desk.control("weights"), desk.control("kv")), desk.studio.predictions
    assert weights["value"] == held["value"] == "the model's own: bf16"
    before = desk.studio.settings
    desk.say("pin").say("set", name="weights", value="experts in int4, the rest as it is").say("pin")
    desk.say("set", name="kv", value="fp32").say("pin")
    now = desk.studio.settings
    assert (now.memory.weights, now.memory.kv) == ("int4", "fp32")
    assert (desk.control("weights")["value"], desk.control("kv")["value"]) == (
        "experts in int4, the rest as it is",
        "fp32",
    )
    assert now.kv_tokens == before.kv_tokens
    assert now.kv_capacity == 2 * before.kv_capacity
    streamed = [whole.ledger(each).gpu["weight slots"] for each in (before, now)]
    assert streamed[1] < 0.35 * streamed[0]
    abouts = [each["about"] for each in desk.shown["variants"]]
    assert abouts[0].startswith("weights in the model's own format, KV in bf16")
    assert abouts[1].startswith("weights in int4, KV in bf16")
    assert abouts[2].startswith("weights in int4, KV in fp32")
    desk.drawn()
    reasons = {each["label"]: each["why"] for each in desk.control("weights")["options"]}
    assert [label for label, why in reasons.items() if "has no known FLOP rate" in why] == ["fp16"]
    desk.say("set", name="model", value="qwen3-30b-a3b")
    assert desk.control("weights")["value"] == "the model's own: bf16"
    desk.studio.close()


def test_experts_of_another_format_than_the_rest_may_be_brought_into_it():
    desk = Desk(tiny_scenario(pipeline=VSL, requests=6))
    controls = desk.studio.controls
    settings = desk.studio.settings.on_model(wb.models["gpt-oss-120b"])
    options = controls["weights"].options(settings)
    assert list(options)[:3] == ["the model's own: mxfp4 (experts) and bf16", "fp32", "bf16"]
    given = settings.on(memory=replace(settings.memory, weights="bf16", kv="bf16"))
    assert controls["weights"].plain(given, lambda _: None)["value"] == "bf16"
    assert controls["kv"].plain(given, lambda _: None)["value"] == "the model's own: bf16"
    stored = given.on(model=replace(tiny_model(dtype="bf16"), formats=(("experts", 0.6),)))
    assert list(controls["weights"].options(stored))[:3] == ["the model's own: as stored", "fp32", "bf16"]
    plain = given.on(model=tiny_model(dtype="bf16"))
    assert controls["weights"].plain(plain, lambda _: None)["value"] == "the model's own: bf16"
    desk.studio.close()


def test_the_sizes_of_memories_are_told_where_there_are_no_figures(desk):
    before = desk.drawn()["settings"]["memory"]
    assert not desk.shown["settings"]["shared"]
    assert "computed by" not in desk.shown["lanes"]["tracks"][0]["title"]
    desk.say("set", name="machine", value=desk.control("machine")["options"][-1]["value"]).say("clear")
    machine = desk.studio.settings.limited
    shown = desk.shown["settings"]["memory"]
    assert desk.drawn()["figures"]["ledger"] == []
    assert shown == {"gpu": format_bytes(machine.gpu.memory), "cpu": format_bytes(machine.cpu.memory)}
    assert shown != before
    desk.say("undo").say("undo")
    assert desk.shown["settings"]["memory"] == before


def test_figures_are_those_of_plain_calls(desk):
    shown = desk.drawn()
    settings = desk.studio.settings
    simulated = wb.simulate(settings.scenario(), settings.schedule)
    (row,) = (row for row in shown["figures"]["rows"] if row["chosen"])
    assert row["gen_tok_s"] == digits(simulated.gen_tok_s)
    bound = wb.bound(settings.scenario(), settings.schedule)
    assert row["of_bound"] == pytest.approx(simulated.gen_tok_s / bound.gen_tok_s)


def test_a_card_on_the_other_lane_takes_its_transfers_along(desk):
    place = next(card["path"] for card in cards(desk.shown) if card["name"] == "decode_attention")
    desk.say("place", range=0, path=place, device="gpu")
    assert not [each for each in desk.shown["wiring"]["ranges"][0]["chain"] if each["kind"] == "move"]
    assert desk.pipeline == PIPELINES["all_gpu"].__class__(PIPELINES["all_gpu"].chain, VSL.fetches)


def test_a_card_placed_in_a_slot_of_the_other_lane_is_one_step_of_the_history(desk):
    names = [card["name"] for card in cards(desk.shown)]
    out_proj, experts_ = (card["path"] for card in cards(desk.shown) if card["name"] in ("out_proj", "experts"))
    desk.say("place", range=0, path=out_proj, device="cpu", to=experts_)
    moved = [(card["name"], card["device"]) for card in cards(desk.shown)]
    assert moved[moved.index(("out_proj", "cpu")) + 1][0] == "experts"
    assert desk.shown["wiring"]["undo"] == 1
    desk.say("undo")
    assert [card["name"] for card in cards(desk.shown)] == names


def test_costs_stand_on_the_cards(desk):
    desk.drawn()
    chain = desk.shown["wiring"]["ranges"][0]["chain"]
    assert all(card["seconds"] > 0 for card in cards(desk.shown))
    assert all(each["bytes"] > 0 for each in chain if each["kind"] == "move")


def test_undo_goes_back_to_the_beginning_and_redo_returns(desk):
    start = desk.studio.settings
    place = next(card["path"] for card in cards(desk.shown) if card["name"] == "experts")
    desk.say("place", range=0, path=place, device="cpu")
    moved = desk.studio.settings
    desk.say("set", name="output_len", value=0)
    desk.say("undo").say("undo").say("undo")
    assert desk.studio.settings == start
    assert desk.shown["wiring"]["undo"] == 0
    desk.say("redo")
    assert desk.studio.settings == moved


def test_a_slider_that_moves_on_is_one_step_of_the_history(desk):
    for place in (0, 1, 2, 3):
        desk.say("set", name="output_len", value=place)
    assert desk.shown["wiring"]["undo"] == 1


def test_a_schedule_that_refuses_a_wiring_gives_way_and_returns():
    desk = Desk(schedules=[VSLPipe(), *contenders(VSL)])
    place = next(card["path"] for card in cards(desk.shown) if card["name"] == "decode_attention")
    desk.say("place", range=0, path=place, device="gpu")
    assert desk.studio.settings.schedule == Overlap()
    assert desk.drawn()["figures"]["problem"] == ""
    place = next(card["path"] for card in cards(desk.shown) if card["name"] == "decode_attention")
    desk.say("place", range=0, path=place, device="cpu")
    assert desk.studio.settings.schedule == VSLPipe()
    assert desk.pipeline == VSL
    desk.studio.close()


def test_an_empty_canvas_leads_to_a_layer_by_its_mends(desk):
    desk.say("clear")
    assert desk.pipeline == Pipeline()
    assert desk.shown["wiring"]["fault"]["text"]
    for _ in range(20):
        fault = desk.shown["wiring"]["fault"]
        if fault is None:
            break
        assert fault["unfinished"]
        desk.say("mend", id=fault["mends"][0]["id"])
    assert desk.shown["wiring"]["fault"] is None
    assert desk.drawn()["figures"]["problem"] == ""


def test_what_each_range_lacks_is_offered_and_added(desk):
    place = next(card["path"] for card in cards(desk.shown) if card["name"] == "out_proj")
    desk.say("cut", range=0, layer=1)
    desk.say("remove", range=1, path=place)
    whole, lacks = desk.shown["wiring"]["lacks"]
    assert whole == []
    (lack,) = lacks
    labels = [mend["label"] for mend in lack["mends"]]
    assert (lack["op"], labels) == ("out_proj", ["Add out_proj on the GPU", "Add out_proj on the CPU"])
    desk.say("mend", id=lack["mends"][0]["id"])
    assert desk.shown["wiring"]["lacks"] == [[], []]
    assert desk.pipeline.ranges[0].pipeline == desk.pipeline.ranges[1].pipeline
    desk.say("remove", range=1, path=[0])
    assert desk.shown["wiring"]["fault"]
    assert desk.shown["wiring"]["lacks"] == []


def test_what_is_in_a_wrong_place_is_no_matter_of_finishing(desk):
    place = next(card["path"] for card in cards(desk.shown) if card["name"] == "out_proj")
    desk.say("shift", range=0, path=place, to=[0])
    fault = desk.shown["wiring"]["fault"]
    assert fault["mends"][0]["label"].startswith("Move ")
    assert not fault["unfinished"]


def test_a_wiring_that_cannot_be_keeps_the_view_alive(desk):
    place = next(card["path"] for card in cards(desk.shown) if card["name"] == "qkv")
    desk.say("remove", range=0, path=place)
    shown = desk.drawn()
    assert shown["figures"]["problem"] == shown["wiring"]["fault"]["text"]
    assert not shown["live"]["can"]
    desk.say("undo")
    assert desk.drawn()["figures"]["problem"] == ""


@pytest.mark.parametrize("name", presets())
def test_every_system_is_wired_from_the_palette(name, desk):
    """Cards are added in the order of the data, on their devices; transfers come by themselves."""
    desk.say("clear")
    wanted = presets()[name]
    assert connected(wanted) == wanted
    for index, stage in enumerate(wanted.stages):
        length = len(desk.pipeline.chain)
        desk.say("add", range=0, op=stage.op.name, device=stage.device.value, to=[length])
        assert len(desk.pipeline.stages) == index + 1
    for item in wanted.fetches:
        desk.say("fetch", range=0, name=item.name, on=True)
    assert desk.pipeline == wanted
    same = [each["name"] for each in desk.shown["wiring"]["presets"] if each["same"]]
    assert same == [other for other in _SYSTEMS if presets().get(other) == wanted]
    assert name in same


def test_opening_a_system_chooses_its_schedule(desk):
    desk.say("open", name="CGOPipe")
    assert desk.pipeline == CGOPipe.example
    assert desk.studio.settings.schedule == CGOPipe()


def test_code_and_wiring_are_one(desk):
    assert desk.shown["code"]["text"] == code_of(VSL)
    desk.say("code", text=code_of(LIGHTNING))
    assert desk.pipeline == LIGHTNING
    before = desk.pipeline
    desk.say("code", text="layer = gpu(qvk)")
    assert desk.pipeline == before
    assert "qkv" in desk.shown["code"]["error"]
    assert desk.shown["code"]["line"] == 1


def test_code_that_is_no_pipeline_stays_until_the_wiring_changes(desk):
    desk.say("code", text="layer = gpu(qvk)")
    typed = desk.shown["code"]
    desk.say("set", name="output_len", value=0)
    assert desk.shown["code"] == typed
    desk.say("open", name="CGOPipe")
    assert desk.shown["code"]["error"] == ""
    desk.say("undo")
    assert desk.shown["code"]["error"] == ""


def test_weights_of_one_card_stay_on_the_gpu(desk):
    place = next(card["path"] for card in cards(desk.shown) if card["name"] == "experts")
    desk.say("option", range=0, path=place, name="fetch", value="resident")
    stored = {card["name"]: card["stored"] for card in cards(desk.shown)}
    assert stored["experts"] == "resident"
    assert stored["qkv"] == "streamed"


def test_experts_in_two_sets(desk):
    place = next(card["path"] for card in cards(desk.shown) if card["name"] == "experts")
    desk.say("option", range=0, path=place, name="experts", value=":2")
    (some,) = (stage for stage in desk.pipeline.stages if stage.op.plain is experts)
    assert some.op.name == "experts[:2]"
    assert any(stage.op.plain is combine for stage in desk.pipeline.stages)


def test_experts_are_split_over_both_devices(desk):
    places = {card["name"]: card for card in cards(desk.shown)}
    assert {name: card["split"] for name, card in places.items() if card["split"]} == {"experts": ":2"}
    desk.say("split", range=0, path=places["experts"]["path"])
    (fork,) = (each for each in desk.shown["wiring"]["ranges"][0]["chain"] if each["kind"] == "fork")
    halves = [card for arm in fork["arms"] for card in arm if card["kind"] == "card"]
    assert [(card["name"], card["device"]) for card in halves] == [("experts[:2]", "gpu"), ("experts[~:2]", "cpu")]
    assert not any(card["split"] for card in halves)
    assert [card["about"].partition(";")[0] for card in halves] == ["experts 0 to 1 of 4", "experts 2 to 3 of 4"]
    assert desk.shown["wiring"]["fault"] is None
    assert desk.drawn()["figures"]["problem"] == ""
    assert next(each for each in desk.shown["wiring"]["palette"] if each["name"] == "experts")["placed"]
    desk.say("option", range=0, path=halves[1]["path"], name="experts", value=":1")
    assert [stage.op.name for stage in desk.pipeline.stages if stage.op.plain is experts] == [
        "experts[~:1]",
        "experts[:1]",
    ]
    assert desk.drawn()["figures"]["problem"] == ""


@pytest.mark.parametrize(
    "written, told",
    [
        ("4", "'4' names no experts; write a range such as :2, ~:2 for all others, the name of an ExpertSet, or all."),
        ("", "'' names no experts"),
        (":x", "':x' names no experts"),
        (":0", "':0' leaves all or none of the 4 experts out"),
        ("~:4", "'~:4' leaves all or none of the 4 experts out"),
    ],
)
def test_experts_that_are_none_are_refused_at_the_field_and_the_old_value_stays(desk, written, told):
    place = next(card["path"] for card in cards(desk.shown) if card["name"] == "experts")
    desk.say("option", range=0, path=place, name="experts", value=":2")
    before = desk.pipeline
    desk.say("option", range=0, path=place, name="experts", value=written)
    assert desk.pipeline == before
    assert desk.shown["wiring"]["refused"].startswith(told)
    desk.say("option", range=0, path=place, name="experts", value="~:2")
    assert desk.shown["wiring"]["refused"] == ""
    assert [stage.op.name for stage in desk.pipeline.stages if stage.op.plain is experts] == ["experts[~:2]"]


@pytest.mark.parametrize(
    ("chosen", "value", "excluded"),
    [
        (None, None, set()),
        ("defer", 1, {"rows", "experts"}),
        ("skip", 1, {"rows", "experts"}),
        ("rows", "decode", {"defer", "skip", "experts"}),
        ("experts", ":2", {"defer", "skip", "rows"}),
    ],
)
def test_options_that_another_excludes_stay_with_the_reason(chosen, value, excluded):
    desk = Desk(tiny_scenario(pipeline=PIPELINES["all_cpu"], model=replace(tiny_model(), num_experts_per_tok=3)))
    place = next(card["path"] for card in cards(desk.shown) if card["name"] == "experts")
    if chosen is not None:
        desk.say("option", range=0, path=place, name=chosen, value=value)
    options = next(card["options"] for card in cards(desk.shown) if card["name"].startswith("experts"))
    assert {option["name"] for option in options} == {"defer", "skip", "rows", "experts"}
    assert {option["name"] for option in options if option["why"]} == excluded
    others = {"defer": 1, "skip": 1, "rows": "prefill", "experts": "~:1"}
    for name in excluded:
        before, fault = desk.pipeline, desk.shown["wiring"]["fault"]
        desk.say("option", range=0, path=place, name=name, value=others[name])
        wired = desk.shown["wiring"]
        assert wired["refused"] or (wired["fault"] and wired["fault"]["text"] != (fault or {}).get("text"))
        if desk.pipeline != before:
            desk.say("undo")
    desk.studio.close()


def test_of_a_set_of_some_rows_the_set_can_be_changed():
    before = gpu(qkv, attention, out_proj, route)
    arms = gpu(experts[:2].prefill) | gpu(experts[:2].decode) | gpu(experts[2:])
    desk = Desk(tiny_scenario(pipeline=before >> arms >> gpu(combine)))
    (fork,) = (each for each in desk.shown["wiring"]["ranges"][0]["chain"] if each["kind"] == "fork")
    card = fork["arms"][1][0]
    reasons = {option["name"]: option["why"] for option in card["options"] if option["name"] in ("rows", "experts")}
    assert reasons == {"rows": "Not for a set of experts: choose all of them.", "experts": ""}
    desk.say("option", range=0, path=card["path"], name="experts", value=":1")
    assert "experts[:1].decode" in [stage.op.name for stage in desk.pipeline.stages]
    desk.studio.close()


def test_a_set_its_rest_and_the_users_own_sets_are_offered():
    desk = Desk(names={"hot": ExpertSet("mine", [[0, 1]])})
    options = next(card["options"] for card in cards(desk.shown) if card["name"] == "experts")
    (which,) = (option for option in options if option["name"] == "experts")
    assert which["choices"] == ["all", ":2", "~:2", "hot", "~hot"]
    desk.studio.close()


def test_times_say_the_batch_that_they_are_of(desk):
    desk.drawn()
    known = wb.costs(desk.studio.settings.scenario())
    told = f"with {digits(known.prefills)} prompt tokens and {digits(known.decodes)} decodes."
    assert desk.shown["wiring"]["times"].endswith(told)
    desk.say("clear")
    assert desk.shown["wiring"]["times"] == ""


def test_a_card_says_that_it_has_the_shared_experts_too(desk):
    assert not any(card["shared"] for card in cards(desk.shown))
    model = tiny_model_of("shared")
    beside = Desk(tiny_scenario(pipeline=VSL, requests=6, model=model))
    assert [card["name"] for card in cards(beside.shown) if card["shared"]] == ["experts"]
    place = next(card["path"] for card in cards(beside.shown) if card["name"] == "experts")
    beside.say("add", range=0, op="shared_experts", device="gpu", to=place)
    assert not any(card["shared"] for card in cards(beside.shown))
    beside.say("undo").say("split", range=0, path=place)
    assert [card["name"] for card in cards(beside.shown) if card["shared"]] == ["combine"]
    beside.studio.close()


def test_layers_are_cut_and_merged(desk):
    desk.say("cut", range=0, layer=1)
    assert isinstance(desk.pipeline, Stack)
    assert [each["title"] for each in desk.shown["wiring"]["ranges"]] == ["layer 0", "layers 1 to 3"]
    desk.say("merge", range=0)
    assert desk.pipeline == VSL or desk.pipeline == VSL[:]


def test_an_operation_of_the_notebook_is_in_the_palette():
    own = Op("gate", ("x",), ("h2",), work=lambda rows, model, precision: wb.stages.Work(1.0, 1.0))
    desk = Desk(names={"my_gate": own})
    entry = next(each for each in desk.shown["wiring"]["palette"] if each["name"] == "my_gate")
    assert entry["own"]
    desk.say("add", range=0, op="my_gate", device="gpu", to=[0])
    assert desk.pipeline.stages[0].op == own
    assert "my_gate" in desk.shown["code"]["text"]
    desk.studio.close()


def test_too_large_a_cache_comes_with_the_change_that_fits():
    scenario = tiny_scenario(pipeline=PIPELINES["all_gpu"], requests=6)
    desk = Desk(scenario)
    last = len(desk.control("kv_capacity")["steps"]) - 1
    memory = desk.control("gpu_memory")
    desk.say("set", name="gpu_memory", value=0)
    desk.say("set", name="kv_capacity", value=last)
    figures = desk.drawn()["figures"]
    assert memory["at"] == len(memory["steps"]) - 1
    if figures["problem"]:
        assert all(mend["label"].startswith("Use ") for mend in figures["mends"])
        assert not any("=" in mend["label"] or "fetch(" in mend["label"] for mend in figures["mends"])
        if figures["mends"]:
            desk.say("fix", id=figures["mends"][0]["id"])
            assert desk.drawn()["figures"]["problem"] == ""
    desk.studio.close()


def test_a_memory_that_is_too_small_is_told_before_what_would_fit_is_found(monkeypatch):
    found = list[str]()
    search = Ledger.changes.func
    monkeypatch.setattr(Ledger, "changes", property(lambda ledger: found.append("searched") or search(ledger)))
    needed = fits(tiny_scenario(pipeline=VSL, requests=6), VSLPipe()).gpu.total
    desk = Desk(tiny_scenario(pipeline=VSL, requests=6, machine=small_machine(gpu_memory=2 * needed)), [VSLPipe()])
    desk.drawn()
    out, told = desk.studio._out, list[tuple[bool, str, int, int]]()
    searched_before_curves = list[int]()

    def seen(**parts):
        figures = parts.get("figures", {"problem": ""})
        if figures["problem"]:
            told.append((figures["searching"], figures["problem"], len(figures["mends"]), len(found)))
        if "curves" in parts:
            searched_before_curves.append(len(found))
        out(**parts)

    desk.studio._out = seen
    desk.say("set", name="gpu_memory", value=0)
    desk.drawn()
    (searching, cause, offered, searches), (done, reason, mends, _), *_ = told
    assert (searching, offered, searches) == (True, 0, 0)
    assert not done
    assert mends
    assert reason.startswith(f"{cause} It fits with")
    assert searched_before_curves[0] == 0
    desk.studio.close()


def test_what_would_fit_is_offered_before_other_schedules_are_simulated(monkeypatch):
    monkeypatch.setattr(drawing, "loader", lambda: SimpleNamespace(there=True))
    needed = fits(tiny_scenario(pipeline=VSL, requests=6), VSLPipe()).gpu.total
    machine = small_machine(gpu_memory=2 * needed)
    desk = Desk(tiny_scenario(pipeline=VSL, requests=6, machine=machine), [VSLPipe(), Sequential()])
    desk.drawn()
    out, simulation, steps = desk.studio._out, desk.studio.predictions.simulation, list[str]()

    def seen(**parts):
        if parts.get("figures", {}).get("mends"):
            steps.append("offered")
        out(**parts)

    def simulated(settings, schedule, **how):
        steps.append(schedule.name)
        return simulation(settings, schedule, **how)

    desk.studio._out = seen
    monkeypatch.setattr(desk.studio.predictions, "simulation", simulated)
    monkeypatch.setattr(desk.studio.predictions, "bound", lambda _: Refused(CapacityError("nothing fits.")))
    desk.say("set", name="gpu_memory", value=0)
    desk.drawn()
    assert set(steps[: steps.index("offered")]) == {"VSLPipe"}
    assert "Sequential" in steps
    desk.studio.close()


def test_gpu_memory_that_a_slider_has_taken_away_is_offered_back():
    needed = fits(tiny_scenario(pipeline=VSL, requests=6), VSLPipe()).gpu.total
    desk = Desk(tiny_scenario(pipeline=VSL, requests=6, machine=small_machine(gpu_memory=2 * needed)), [VSLPipe()])
    desk.say("set", name="gpu_memory", value=0)
    figures = desk.drawn()["figures"]
    mend = next(mend for mend in figures["mends"] if "of GPU memory" in mend["label"])
    desk.say("fix", id=mend["id"])
    assert desk.drawn()["figures"]["problem"] == ""
    taken = desk.studio.settings
    assert fits(taken.predicted(), taken.schedule).gpu.left == 0
    desk.studio.close()


def test_a_smaller_token_budget_leaves_more_of_the_memory_to_the_cache():
    """A smaller cache alone mends it as well, since it holds fewer requests, whose prompts then need less memory."""
    layer = gpu(qkv, attention, out_proj, route) >> offload >> cpu(experts) >> load >> gpu(combine)
    large = assembled("h100-pcie", "xeon-8480", memory="1TB")
    workload = wb.workloads["rag"].sample(requests=2000, output_len=128, seed=0)
    memory = wb.Memory(kv_capacity="155GB")
    scenario = wb.Scenario(layer, wb.models["deepseek-v3"], large, memory, workload, scheduler=wb.ResourceAware())
    desk = Desk(scenario, [Overlap()])
    figures = desk.drawn()["figures"]
    assert "80 GB of GPU memory and this needs 10" in figures["problem"]
    assert "TB of GPU" not in figures["problem"]
    alone, shared = figures["mends"]
    assert alone["label"].startswith("Use a KV capacity of 8.")
    assert shared["label"] == "Use a token budget of 8,192 and a KV capacity of 59.3GB (now 155 GB)"
    desk.say("fix", id=shared["id"])
    assert not desk.drawn()["figures"]["problem"]
    desk.studio.close()


def test_weights_that_fit_neither_memory_are_offered_streamed_and_smaller():
    layer = gpu(qkv, attention, out_proj, moe)
    small = small_machine(gpu_memory=6e9, host_memory=19e9)
    workload = wb.workloads["rag"].sample(requests=10, output_len=32, seed=0)
    memory = wb.Memory(kv_capacity="400MB")
    scenario = wb.Scenario(layer, wb.models["deepseek-v2-lite"], small, memory, workload, scheduler=wb.ResourceAware())
    desk = Desk(scenario, [Sequential()])
    figures = desk.drawn()["figures"]
    label = figures["mends"][0]["label"]
    assert label == "Use streamed experts and weights in int8 (now bf16)"
    desk.say("fix", id=figures["mends"][0]["id"])
    assert not desk.drawn()["figures"]["problem"]
    desk.studio.close()


def test_of_two_runs_at_the_same_settings_the_last_one_is_in_the_figures(desk):
    settings = desk.studio.settings
    run = wb.simulate(settings.scenario(), settings.schedule)
    for seconds in (1.0, 2.0):
        desk.studio.measured.append((settings, replace(run, source=Source.MEASURED, seconds=seconds)))
    desk.studio.drawing.put(settings)
    rows = [row for row in desk.drawn()["figures"]["rows"] if row["source"] == "measured"]
    assert [row["gen_tok_s"] for row in rows] == [digits(run.generated / 2)]


def test_no_limit_has_a_place_on_the_axis(desk):
    desk.say("axis", name="max_running")
    curves = desk.drawn()["curves"]
    assert curves["at"] == curves["unlimited"]
    desk.say("axis", name="kv_capacity")
    assert desk.drawn()["curves"]["unlimited"] is None


def test_variants_are_compared_and_recalled(desk):
    desk.say("pin")
    first = desk.studio.settings
    desk.say("set", name="schedule", value="VSLPipe")
    desk.say("pin").say("pin")
    assert [each["name"] for each in desk.shown["variants"]] == ["A", "B"]
    best = [each["name"] for each in desk.shown["variants"] if "output tokens/s, simulated" in each["best"]]
    assert len(best) == 1
    desk.say("recall", id=0)
    assert desk.studio.settings == first
    desk.say("unpin", id=0)
    assert [each["name"] for each in desk.shown["variants"]] == ["B"]


def test_variants_say_in_what_they_differ(desk):
    desk.say("pin")
    assert "decode_attention on the CPU" in desk.shown["variants"][0]["about"]
    place = next(card["path"] for card in cards(desk.shown) if card["name"] == "experts")
    desk.say("place", range=0, path=place, device="cpu").say("pin")
    assert [each["about"].partition(" on the CPU")[0] for each in desk.shown["variants"]] == [
        "decode_attention",
        "decode_attention and experts",
    ]
    assert not any("tiny" in each["about"] for each in desk.shown["variants"])


def test_variants_that_differ_in_options_or_in_operations_alone_are_told_apart():
    attended = gpu(qkv, attention, out_proj, route) >> offload
    plain, late = (attended >> cpu(experts, defer=count) >> load >> gpu(combine) for count in (0, 1))
    shared = attended >> cpu(experts) >> load >> gpu(shared_experts) >> gpu(combine)
    settings = Settings.of(tiny_scenario(pipeline=plain), Sequential())
    variants = Variants(Predictions(), list)
    for pipeline in (plain, late, shared):
        variants.pin(settings.on(pipeline=pipeline), "")
    abouts = [each["about"] for each in variants.plain()]
    assert [about.partition(" on the CPU")[0] for about in abouts] == ["experts", "experts (defer=1)", "experts"]
    assert ["shared_experts" in about for about in abouts] == [False, False, True]


def test_figures_that_read_the_same_are_equally_good(desk):
    desk.say("pin").say("set", name="schedule", value="VSLPipe").say("pin")
    for row in desk.shown["variants"][0]["rows"]:
        texts = {each["rows"][row] for each in desk.shown["variants"]}
        best = sum(row in each["best"] for each in desk.shown["variants"])
        assert best == (len(texts) > 1), row


def test_among_variants_of_several_models_none_is_the_best(desk):
    desk.say("pin").say("set", name="model", value="mixtral-8x7b").say("pin")
    assert [each["best"] for each in desk.shown["variants"]] == [[], []]


def test_a_variant_tells_what_was_measured_of_it_and_why_there_is_no_figure():
    settings = Settings.of(tiny_scenario(pipeline=VSL, requests=6), VSLPipe())
    tight = settings.on(gpu_memory=settings.gpu_memory / 1e6)
    result = replace(wb.simulate(settings.scenario(), VSLPipe()), seconds=1.0, source=Source.MEASURED)
    variants = Variants(Predictions(), lambda: [(settings, result)])
    variants.pin(settings, "")
    variants.pin(tight, "")
    run, none = (each["rows"] for each in variants.plain())
    assert run["output tokens/s, measured"] == digits(result.generated)
    for source in ("simulated", "measured"):
        assert run[f"mean time to first token, {source}"] == format_seconds(result.ttft)
    for energy, told in ((Energy(1.0, "model of an A100"), None), (Energy(result.generated, "RAPL"), "1 J/token")):
        counted = replace(result, energy=energy)
        other = Variants(Predictions(), lambda: [(settings, counted)])  # noqa: B023
        other.pin(settings, "")
        assert other.plain()[0]["rows"].get("energy, measured") == told
        assert figure(counted, "VSLPipe", result, chosen=False)["energy"] == (told or "")
    assert "output tokens/s, measured" not in none
    assert "output tokens/s, simulated" not in none
    assert "limited by" not in none
    assert "of GPU memory and this needs" in none["does not run"]


@pytest.mark.parametrize(
    "others, told", [(0.12, "measured while other programs took 12 % of the cores"), (OTHERS, None)]
)
def test_a_variant_tells_the_load_under_which_it_was_measured(others, told):
    settings = Settings.of(tiny_scenario(pipeline=VSL, requests=6), VSLPipe())
    result = replace(wb.simulate(settings.scenario(), VSLPipe()), source=Source.MEASURED, others=others)
    variants = Variants(Predictions(), lambda: [(settings, result)])
    variants.pin(settings, "")
    notes = {name: note for name, note in variants.plain()[0]["notes"].items() if not name.endswith(" memory")}
    assert notes == ({"output tokens/s, measured": told} if told else {})


def test_a_variant_tells_the_largest_parts_of_each_memory():
    settings = Settings.of(tiny_scenario(pipeline=VSL, requests=6), VSLPipe())
    variants = Variants(Predictions(), list)
    variants.pin(settings, "")
    ledger = fits(settings.scenario(), VSLPipe())
    for name, account in (("GPU memory", ledger.gpu), ("host memory", ledger.host)):
        first, second = sorted(account.entries, key=lambda entry: entry.bytes)[:-3:-1]
        told = f"{first.name} {format_bytes(first.bytes)}, {second.name} {format_bytes(second.bytes)}"
        assert variants.plain()[0]["notes"][name] == told


def test_curves_go_over_another_setting(desk):
    desk.drawn()
    assert desk.shown["curves"]["axis"] == "kv_capacity"
    desk.say("axis", name="link")
    curves = desk.drawn()["curves"]
    assert curves["axis"] == "link"
    assert curves["x"]["unit"] == "B/s"
    bound = next(each for each in curves["lines"] if each["kind"] == "bound")
    rates = [y for _, y in bound["points"]]
    assert rates == sorted(rates)


def test_no_simulated_point_lies_above_the_bound(desk):
    curves = desk.drawn()["curves"]
    bound = dict(map(tuple, next(each for each in curves["lines"] if each["kind"] == "bound")["points"]))
    for each in curves["lines"]:
        if each["kind"] == "simulated":
            assert all(y <= bound[x] * (1 + 1e-9) for x, y in each["points"])


def test_messages_that_mean_nothing_change_nothing(desk):
    before = desk.studio.settings
    desk.say("no such thing").say("fix", id=7).say("recall", id=7).say("mend", id=7)
    assert desk.studio.settings == before


def test_new_settings_overtake_old_ones(desk):
    started = time.monotonic()
    for place in range(12):
        desk.say("set", name="output_len", value=place)
    assert time.monotonic() - started < 20
    shown = desk.drawn()
    (row,) = (row for row in shown["figures"]["rows"] if row["chosen"])
    simulated = wb.simulate(desk.studio.settings.scenario(), desk.studio.settings.schedule)
    assert row["gen_tok_s"] == digits(simulated.gen_tok_s)


def test_a_sweep_is_spread_over_what_works(desk):
    chosen = spread(KV_CAPACITY, desk.studio.settings, 5)
    assert len(chosen) == 5
    capacities = [value for _, value in chosen]
    assert capacities == sorted(capacities)


# ------------------------------------------------------------------------------------------------- long simulations


def long_runs(**more):
    """Many requests in a small cache, the short ones first."""
    prompts = np.sort(np.random.default_rng(1).integers(8, 400, 8_000))
    scenario = tiny_scenario(pipeline=VSL, requests=6)
    workload = wb.Workload("sorted", prompts, np.full(8_000, 64))
    each = scenario.model.kv_bytes_per_token("bf16")
    return scenario.on(workload=workload, memory=wb.Memory(kv_capacity=4_000 * each, **more))


def test_a_sample_stands_for_all_requests_and_stays_below_the_bound(monkeypatch):
    monkeypatch.setattr(predicted, "FULL", 1e3)  # a slow computer has time for it too
    settings = Settings.of(long_runs(), VSLPipe())
    predictions = Predictions()
    pace = 4 * predicted.SOON / predictions.bound(settings).iterations  # a quarter of the requests is in time
    noted = lambda settings, *_: predictions._paces.__setitem__((_wired(settings), True), pace)  # noqa: E731
    monkeypatch.setattr(predictions, "_note_pace", noted)
    noted(settings)
    soon = predictions.simulation(settings, VSLPipe(), soon=True)
    assert int(soon.facts["requests"]) < 8_000
    whole = wb.simulate(settings.predicted(), VSLPipe()).gen_tok_s
    rate = predictions.of_all(soon, settings.on(schedule=VSLPipe()))
    assert rate == pytest.approx(whole, rel=0.06)
    assert rate <= predictions.bound(settings).gen_tok_s


def test_the_same_question_has_the_same_sample_for_an_answer_until_the_whole_is_known():
    settings = Settings.of(long_runs(), VSLPipe())
    predictions = Predictions()
    predictions._paces[_wired(settings), True] = 4 * predicted.SOON / predictions.bound(settings).iterations
    soon = predictions.simulation(settings, VSLPipe(), soon=True)
    assert int(soon.facts["requests"]) < 8_000
    predictions._paces[_wired(settings), True] = 1.0
    assert predictions.simulation(settings, VSLPipe(), soon=True) is soon
    predictions._simulations[settings] = whole = replace(soon)
    assert predictions.simulation(settings, VSLPipe(), soon=True) is whole


def test_a_row_of_a_sample_tells_no_times():
    settings = Settings.of(long_runs(), VSLPipe())
    predictions = Predictions()
    found = predictions.simulation(settings, VSLPipe(), soon=True)
    rate = predictions.of_all(found, settings)
    row = figure(found, "VSLPipe", predictions.bound(settings), chosen=True, rate=rate)
    assert (row["ttft"], row["tbt"], row["seconds"]) == ("", "", "")
    assert 0 < row["of_bound"] <= 1


def test_a_sample_is_small_where_even_one_that_fills_the_cache_would_take_long(monkeypatch):
    settings = Settings.of(long_runs(), VSLPipe())
    predictions = Predictions()
    monkeypatch.setattr(predictions, "_note_pace", lambda *_: None)
    predictions._paces[_wired(settings), True] = 1.0
    found = predictions.simulation(settings, VSLPipe(), soon=True)
    assert found.facts["requests"] == "1"


def test_a_sample_that_takes_longer_than_its_pace_says_is_made_smaller(monkeypatch):
    settings = Settings.of(long_runs(), VSLPipe())
    predictions = Predictions()
    asked = list[int]()
    monkeypatch.setattr(predictions, "_simulated", lambda settings, _: asked.append(settings.sample) or told(settings))

    def told(settings):
        predictions._paces[_wired(settings), True] = 10 ** -(6 - len(asked))
        return Refused(ScheduleError("found")) if settings.sample == 1 else None

    assert predictions.simulation(settings, VSLPipe(), soon=True).why == "found"
    assert asked == sorted(asked, key=lambda sample: -(sample or 8_000))
    assert asked[-1] == 1


def test_a_simulation_that_is_stopped_among_prompts_tells_a_pace():
    settings = Settings.of(tiny_scenario(pipeline=VSL, requests=6), VSLPipe())
    predictions = Predictions()
    whole = wb.simulate(settings.predicted(), VSLPipe())
    least = predictions.bound(settings).iterations
    half = replace(whole, stopped=True, generated=0, processed=whole.processed // 2)
    predictions._note_pace(settings, half, 1.0)
    assert predictions._paces.get((_wired(settings), True)) == pytest.approx(4 / least, rel=0.2)
    predictions._note_pace(settings, replace(whole, stopped=True, generated=0, processed=0), 10.0)
    assert predictions._paces.get((_wired(settings), True)) == pytest.approx(10.0)


def test_a_simulation_that_is_overtaken_ends_and_is_not_kept():
    settings = Settings.of(long_runs(), VSLPipe())
    predictions = Predictions()
    with pytest.raises(StoppedError):
        predictions.simulation(settings, VSLPipe(), until=lambda: True)
    found = predictions.simulation(settings, VSLPipe(), soon=True)
    assert not found.stopped


def test_refusals_depend_on_no_memory():
    settings = Settings.of(tiny_scenario(pipeline=VSL, requests=6), FlexGenS4())
    predictions = Predictions()
    told = predictions.refused(settings)
    assert isinstance(told.error, ScheduleError)
    assert predictions.refused(settings.on(kv_tokens=1.0, gpu_memory=1.0)) is told
    assert predictions.refused(settings.on(schedule=VSLPipe(), kv_tokens=1.0)) is None


@pytest.mark.parametrize(
    ("share", "small", "kinds"),
    [(1 / 4, False, [("VSLPipe", "sample")]), (1e-4, False, []), (1e-4, True, [("VSLPipe", "sample")])],
)
def test_curves_with_points_of_samples_say_so_and_leave_small_ones_out(share, small, kinds, monkeypatch):
    monkeypatch.setattr(predicted, "FULL", predicted.SOON)
    settings = Settings.of(long_runs(), VSLPipe())
    predictions = Predictions()
    pace = predicted.SOON / share / predictions.bound(settings).iterations
    monkeypatch.setattr(predictions, "_note_pace", lambda *_: None)
    monkeypatch.setattr(predictions, "_simulated", lambda asked, _: predictions._asking(wb.simulate)(asked))
    predictions._paces[_wired(settings), True] = pace
    drawing = Drawing(predictions, lambda _: [], list, list, Earlier, lambda _: None, lambda *_: None)
    points = _Points({}, defaultdict(list), {})
    drawing._add_point(points, "VSLPipe", settings, 1.0, lambda: False, small=small)
    assert [(name, points.kind(name)) for name in points.of] == kinds
    assert points.sampled == {name: [1.0] for name, _ in kinds}


@pytest.mark.parametrize("number", [4, 6])
def test_a_sample_of_more_requests_stands_for_quick_questions_too(monkeypatch, number):
    settings = Settings.of(tiny_scenario(pipeline=VSL, requests=6), VSLPipe())
    predictions = Predictions()
    monkeypatch.setattr(predictions, "_note_pace", lambda *_: None)
    monkeypatch.setattr(predictions, "_sample", lambda _, longest: 1 if longest == predicted.SOON else number)
    assert predictions.simulation(settings, VSLPipe(), soon=True).facts["requests"] == "1"
    more = predictions.simulation(settings, VSLPipe())
    assert more.facts["requests"] == str(number)
    assert predictions.simulation(settings, VSLPipe(), soon=True) is more


def test_curves_are_busy_until_those_of_all_requests_are_drawn(monkeypatch):
    settings = Settings.of(tiny_scenario(pipeline=VSL, requests=6), VSLPipe())
    predictions = Predictions()
    monkeypatch.setattr(predictions, "_sample", lambda _, longest: 1 if longest == predicted.SOON else 0)
    shown = list[dict]()
    publish = lambda **parts: shown.append(parts["curves"]) if "curves" in parts else None  # noqa: E731
    drawing = Drawing(predictions, lambda _: [VSLPipe()], list, list, Earlier, lambda _: None, publish)
    drawing._draw(settings, lambda: False)
    last, before = shown[-1], shown[-2]
    assert (before["busy"], last["busy"]) == (True, False)
    sampled = [next(line["sampled"] for line in each["lines"] if line["name"] == "VSLPipe") for each in (before, last)]
    assert [last["at"] in each for each in sampled] == [True, False]


def test_nothing_large_is_kept_of_a_simulation():
    settings = Settings.of(tiny_scenario(pipeline=VSL, requests=6), VSLPipe())
    found = Predictions().simulation(settings, VSLPipe())
    assert not found.timeline
    assert not found.steps.seconds


# ---------------------------------------------------------------------------------------------------- the history


def slid(desk, name, place):
    desk.say("set", name=name, value=place)
    return desk.studio.settings


def test_an_edit_keeps_the_settings_of_the_schedule():
    desk = Desk(schedules=[CGOPipe(), *contenders(VSL)])
    moved = slid(desk, "micro_batches", 5)
    assert moved.schedule.micro_batches != CGOPipe().micro_batches
    desk.say("fetch", range=0, name="weights", on=False)
    desk.say("fetch", range=0, name="weights", on=True)
    assert desk.studio.settings.schedule == moved.schedule
    desk.studio.close()


def test_undo_takes_the_wanted_schedule_back_too(desk):
    first = desk.studio.settings.schedule
    desk.say("set", name="schedule", value="Overlap").say("undo")
    place = next(card["path"] for card in cards(desk.shown) if card["name"] == "experts")
    desk.say("place", range=0, path=place, device="cpu")
    assert desk.studio.settings.schedule == first


def test_another_choice_leaves_the_settings_of_a_schedule():
    desk = Desk(schedules=[CGOPipe(), *contenders(VSL)])
    moved = slid(desk, "micro_batches", 5).schedule
    desk.say("set", name="schedule", value="VSLPipe")
    rows = [row["name"] for row in desk.drawn()["figures"]["rows"]]
    assert moved.name in rows
    assert CGOPipe().name not in rows
    desk.say("set", name="schedule", value=moved.name)
    assert desk.studio.settings.schedule == moved
    desk.studio.close()


def test_options_that_a_mend_sets_are_kept_and_its_capacity_is_no_longer_a_suitable_one():
    settings = Settings.of(tiny_scenario(pipeline=VSL, requests=6), VSLPipe()).on(suited=True)
    scenario = settings.scenario()
    assert _changed(settings, scenario, CGOPipe(9)).suited
    less = scenario.on(memory=replace(scenario.memory, kv_capacity="4MB"))
    changed = _changed(settings, less, CGOPipe(9))
    assert not changed.suited
    offered = Controls(settings, (VSLPipe(), CGOPipe(), CGOPipe(8)))
    assert CGOPipe(9) in offered.schedules(changed.on(schedule=VSLPipe()))
    assert {CGOPipe(9), CGOPipe(8)} < set(offered.schedules(changed.on(schedule=CGOPipe(8))))


def test_a_curve_over_an_option_of_schedules_is_one_line_for_each():
    """Each schedule that has the option takes the values of the axis; the others are level."""
    desk = Desk(schedules=[Sequential(), CGOPipe(), *contenders(VSL)])  # CGOPipe takes no single micro-batch
    loader().load()
    desk.say("axis", name="micro_batches")
    lines = desk.drawn()["curves"]["lines"]
    names = {line["name"] for line in lines}
    assert names <= {row["name"] for row in desk.shown["figures"]["rows"]} | {"bound"}
    (drawn,) = (line for line in lines if line["name"] == Sequential().name)
    settings = desk.studio.settings
    assert not desk.shown["figures"]["problem"]
    assert min(count for count, _ in drawn["points"]) == 1
    for count, rate in drawn["points"]:
        under = settings.on(schedule=Sequential(micro_batches=int(count)))
        assert rate == wb.simulate(under.scenario(), under.schedule).gen_tok_s
    desk.studio.close()


def test_prices_are_those_of_the_simulation_that_is_explained(desk):
    figures = desk.drawn()["figures"]
    settings = desk.studio.settings
    simulated = wb.shadow_prices(settings.scenario(), settings.schedule, wb.simulate)
    assert figures["prices_of"] == "simulated"
    gains = [each["gain"] for each in figures["prices"]]
    assert gains == sorted((gain for _, gain, _ in simulated.rows()), reverse=True)


def test_one_button_makes_the_settings_run_here(monkeypatch):
    """The model, the machine, the lengths and the number of requests, as one step of the history."""
    model = replace(tiny_model(), name="at hand", path=Path("a checkpoint"), max_position_embeddings=64)
    monkeypatch.setattr(
        "workbench.widgets.state.controls.models_offered", lambda own: {own.name: own, "at hand": model}
    )
    monkeypatch.setattr("workbench.widgets.state.studio._BRIEF", 1e-3)
    desk = Desk(tiny_scenario([40, 200] * 1000, 40, pipeline=VSL))
    assert desk.shown["live"]["here"] == "Use at hand on this computer, with requests for it"
    assert not desk.shown["live"]["can"]
    desk.say("here")
    now = desk.studio.settings
    assert now.model == model
    assert now.machine.is_local
    assert 1 <= now.requests < 2000
    assert desk.shown["live"]["can"]
    assert desk.shown["live"]["here"] == ""
    assert desk.shown["wiring"]["undo"] == 1
    assert desk.control("machine")["note"].startswith("Its CPU computes both lanes")
    assert desk.shown["settings"]["shared"]
    assert desk.drawn()["lanes"]["tracks"][0]["title"].endswith(", gpu computed by the CPU")
    desk.say("undo").say("clear").say("here")
    now = desk.studio.settings
    assert now.model == model
    assert now.machine.is_local
    assert not now.pipeline.stages
    assert 1 <= now.requests < 2000
    assert now.prompt_len < 40
    desk.studio.close()


def test_here_tells_what_is_wrong_with_the_wiring_for_its_model(monkeypatch):
    model = replace(tiny_model(), name="at hand", path=Path("a checkpoint"))
    large = replace(tiny_model(), name="large", num_experts_per_tok=3)
    monkeypatch.setattr(
        "workbench.widgets.state.controls.models_offered", lambda own: {own.name: own, "at hand": model}
    )
    desk = Desk(tiny_scenario(pipeline=PIPELINES["all_cpu"], requests=6, model=large))
    place = next(card["path"] for card in cards(desk.shown) if card["name"] == "experts")
    desk.say("option", range=0, path=place, name="defer", value=2)
    assert desk.shown["wiring"]["fault"] is None
    desk.say("here")
    fault = desk.shown["wiring"]["fault"]
    assert fault["text"].startswith(
        "cpu(experts, defer=2) leaves none of the 2 experts that a token of at hand chooses"
    )
    assert fault["path"] == place
    assert desk.studio.settings.model == model
    mend = fault["mends"][0]
    assert mend["label"] == "Defer 1"
    desk.say("mend", id=mend["id"])
    assert desk.shown["wiring"]["fault"] is None
    assert desk.shown["live"]["can"]
    desk.studio.close()


def test_here_tells_what_refuses_its_settings_beside_a_small_memory(monkeypatch):
    model = replace(tiny_model(), name="at hand", path=Path("a checkpoint"))
    monkeypatch.setattr(
        "workbench.widgets.state.controls.models_offered", lambda own: {own.name: own, "at hand": model}
    )
    desk = Desk(tiny_scenario(pipeline=PIPELINES["all_gpu"], requests=6), [CGOPipe()])
    before = desk.studio.settings
    desk.say("here")
    assert desk.studio.settings == before
    with pytest.raises(ScheduleError) as error:
        CGOPipe().lower(PIPELINES["all_gpu"], MIXED)
    assert desk.shown["live"]["why"] == str(error.value)
    desk.studio.close()


def test_shared_experts_that_a_model_does_not_have_cannot_start():
    model = replace(tiny_model(), name="at hand", path=Path("a checkpoint"))
    shared = gpu(qkv, attention, out_proj, route, shared_experts, experts, combine)
    desk = Desk(tiny_scenario(pipeline=shared, requests=6, model=model))
    fault = desk.shown["wiring"]["fault"]
    assert fault["text"] == (
        "gpu(shared_experts) has no experts to compute: at hand has no shared ones; remove the stage."
    )
    assert not desk.shown["live"]["can"]
    mend = fault["mends"][0]
    assert mend["label"] == "Remove shared_experts"
    desk.say("mend", id=mend["id"])
    assert desk.shown["wiring"]["fault"] is None
    desk.studio.close()


def test_a_layer_that_lacks_an_operation_cannot_start():
    model = replace(tiny_model(), name="at hand", path=Path("a checkpoint"))
    local = wb.Machine.local()
    whole = gpu(qkv, attention, out_proj, moe)
    desk = Desk(tiny_scenario(pipeline=whole, requests=6, model=model, machine=local))
    assert desk.shown["live"]["can"]
    desk.say("remove", range=0, path=[3])
    live = desk.shown["live"]
    assert not live["can"]
    assert live["why"] == "A run needs every operation of a layer, and this one is missing: out_proj."
    assert not desk.drawn()["figures"]["problem"]
    desk.studio.close()


def test_an_operation_of_the_user_may_stand_for_one_that_is_missing():
    model = replace(tiny_model(), name="at hand", path=Path("a checkpoint"))
    mine = Op("mine", reads=("attn", "x"), writes=("x",), run=lambda attn, x: x, work=lambda *_: Work(1, 1))
    layer = gpu(qkv, attention, mine, moe)
    scenario = tiny_scenario(pipeline=layer, requests=6, model=model, machine=wb.Machine.local())
    desk = Desk(scenario, names={"mine": mine})
    assert desk.shown["live"]["can"]
    desk.studio.close()


def test_requests_that_are_too_long_can_be_shortened():
    desk = Desk(tiny_scenario([40, 200] * 3, 40, pipeline=VSL))
    short = replace(tiny_model(), max_position_embeddings=64)
    desk.studio._change(desk.studio.settings.on(model=short))
    figures = desk.drawn()["figures"]
    assert "takes 64" in figures["problem"]
    (mend,) = figures["mends"]
    assert mend["label"].startswith("Use prompts of")
    desk.say("fix", id=mend["id"])
    assert not desk.drawn()["figures"]["problem"]
    desk.studio.close()


def test_options_are_greyed_once_the_pictures_are_drawn(desk, monkeypatch):
    refused = {each["value"]: each["why"] for each in desk.drawn() and desk.control("schedule")["options"]}
    assert "attention" in refused["FlexGenS4"]
    asked = []
    monkeypatch.setattr(desk.studio.predictions, "_refused", lambda settings: asked.append(settings.schedule))
    monkeypatch.setattr(desk.studio.drawing, "put", lambda _: None)
    desk.say("set", name="requests", value=0)
    assert {type(schedule) for schedule in asked} <= {type(desk.studio.settings.schedule)}


def test_lanes_of_pinned_variants_stand_below(desk):
    first = desk.studio.settings.schedule.name
    desk.say("pin").say("set", name="schedule", value="Overlap")
    titles = [track["title"] for track in desk.drawn()["lanes"]["tracks"]]
    assert titles[0] == "Overlap, a typical iteration"
    assert titles[1].startswith("pinned A: ")
    assert first in titles[1]
    desk.say("set", name="schedule", value=first)
    assert len(desk.drawn()["lanes"]["tracks"]) == 1
    desk.say("set", name="schedule", value="Overlap")
    desk.say("unpin", id=0)
    assert len(desk.drawn()["lanes"]["tracks"]) == 1


def test_each_lane_chart_has_the_labels_of_its_own_pipeline(desk):
    """One code stands for other operations in the pipeline of a pinned variant."""
    desk.say("pin")
    place = next(card["path"] for card in cards(desk.shown) if card["name"] == "out_proj")
    desk.say("place", range=0, path=place, device="cpu").say("set", name="schedule", value="Overlap")
    now, pinned = desk.drawn()["lanes"]["tracks"]
    assert now["labels"] != pinned["labels"]
    for track in (now, pinned):
        codes = {name[0] for *_, name, _ in track["spans"]}
        assert codes <= {code[0] for code in track["labels"]}
    labels = desk.shown["lanes"]["labels"]
    both = [code for code in now["labels"] if now["labels"][code] != pinned["labels"].get(code, now["labels"][code])]
    assert both
    assert all(labels[code] == f"{now['labels'][code]} / {pinned['labels'][code]}" for code in both)


def test_positions_of_a_slider_stay_while_it_moves(desk):
    steps = desk.control("requests")["steps"]
    slid(desk, "requests", 3)
    assert desk.control("requests")["steps"] == steps
    assert desk.control("requests")["at"] == 3


def test_a_change_that_is_not_offered_any_more_does_nothing(desk):
    desk.say("clear")
    old = desk.shown["wiring"]["fault"]["mends"][0]["id"]
    desk.say("mend", id=old)
    before = desk.pipeline
    desk.say("mend", id=old)
    assert desk.pipeline == before


# --------------------------------------------------------------------------------------------------------- sweeps


def test_a_sweep_over_a_setting_of_the_schedule_runs_different_ones():
    settings = Settings.of(tiny_scenario(pipeline=VSL, requests=40), CGOPipe())
    found = swept(settings, MICRO_BATCHES, 4, [CGOPipe(), VSLPipe()])
    parts = [each.settings.schedule.micro_batches for each in found]
    assert parts == sorted(set(parts))
    assert len(parts) == 4


def test_a_sweep_leaves_out_what_does_not_fit():
    settings = Settings.of(tiny_scenario(pipeline=PIPELINES["all_gpu"], requests=6), Sequential())
    small = settings.on(gpu_memory=settings.machine.gpu.memory / 64)
    for each in swept(small, KV_CAPACITY, 5, [Sequential()]):
        assert fits(each.settings.predicted(), each.settings.schedule)


# ----------------------------------------------------------------------------------------------------------- names


def test_names_that_are_words_do_not_hide_them():
    own = Op("mymoe", ("x",), ("h2",), work=lambda rows, model, precision: Work(1.0, 1.0))
    desk = Desk(names={"moe": own, "layer": ExpertSet("mine", [[0, 1]])})
    desk.say("add", range=0, op="mymoe", device="gpu", to=[0])
    assert desk.pipeline.stages[0].op == own
    before = desk.pipeline
    desk.say("code", text=desk.shown["code"]["text"] + "\n")
    assert desk.shown["code"]["error"] == ""
    assert desk.pipeline == before
    assert next(each for each in desk.shown["wiring"]["palette"] if each["name"] == "mymoe")["placed"]
    desk.studio.close()


def test_sets_of_experts_are_chosen_by_their_variable_or_their_name():
    desk = Desk(names={"hot": ExpertSet("mine", [[0, 1]])})
    for written in ("hot", "mine", "~hot"):
        place = next(card["path"] for card in cards(desk.shown) if card["name"].startswith("experts"))
        desk.say("option", range=0, path=place, name="experts", value=written)
        (some,) = (stage.op.subset for stage in desk.pipeline.stages if stage.op.plain is experts)
        assert (some.name, some.rest) == ("mine", written.startswith("~"))
    desk.studio.close()


# ----------------------------------------------------------------------------------------------------------- runs


class Stopped:
    """A live run that is stopped before its first iteration has ended."""

    state = RunState.STOPPED
    progress = Progress(iterations=0, seconds=0.0)
    error = StoppedError("the reading has ended.")
    under_way = None
    phase = ""

    def stop(self):
        pass

    def wait(self):
        raise EngineError("nothing was measured.")


def published_by(runs_of, settings):
    """What is shown of a run at some settings."""
    shown = []
    runs = runs_of(shown.append)
    runs.allow(settings, "")
    runs.begin(lambda: [Planned(settings, "a run")])
    deadline = time.monotonic() + 20
    while runs.busy and time.monotonic() < deadline:
        time.sleep(0.01)
    return runs, shown


def test_a_run_that_is_stopped_early_has_not_failed(monkeypatch):
    monkeypatch.setattr("workbench.engine.start", lambda *_: Stopped())
    settings = Settings.of(tiny_scenario(pipeline=VSL, requests=6), VSLPipe())
    ended = []

    def runs_of(show):
        return Runs(
            show, lambda *_: None, lambda *told: ended.append(told), lambda: None, lambda *_: math.nan, lambda: None
        )

    runs, shown = published_by(runs_of, settings)
    assert shown[1]["state"] == "loading"
    assert shown[-1]["state"] == "stopped"
    assert shown[-1]["text"] == "after 0 s, before the first iteration; nothing was measured"
    assert not shown[-1]["stale"]
    assert ended == []
    runs.allow(settings.on(requests=5), "")
    assert shown[-1]["stale"]
    runs.allow(settings, "")
    assert not shown[-1]["stale"]


def test_an_engine_that_cannot_be_imported_is_told(monkeypatch):
    monkeypatch.setitem(sys.modules, "workbench.engine", None)
    settings = Settings.of(tiny_scenario(pipeline=VSL, requests=6), VSLPipe())

    def runs_of(show):
        return Runs(show, lambda *_: None, lambda *_: None, lambda: None, lambda *_: math.nan, lambda: None)

    runs, shown = published_by(runs_of, settings)
    assert not runs.busy
    assert shown[-1]["state"] == "failed"
    assert "workbench.engine" in shown[-1]["text"]
    assert shown[-1]["can"]


def test_a_run_that_is_stopped_while_it_waits_never_begins():
    settings = Settings.of(tiny_scenario(pipeline=VSL, requests=6), VSLPipe())

    def runs_of(show):
        runs = Runs(show, lambda *_: None, lambda *_: None, lambda: runs.stop(), lambda *_: math.nan, lambda: None)
        return runs

    _, shown = published_by(runs_of, settings)
    assert shown[-1]["state"] == "stopped"
    assert "before" in shown[-1]["text"]


def test_the_prediction_beside_a_run_says_what_it_rests_on():
    settings = Settings.of(tiny_scenario(pipeline=VSL), VSLPipe())
    assert prediction_of(settings, math.nan) == ""
    assert prediction_of(settings, 12.3) == "; 12.3 simulated for the whole run, without a calibration"
    scenario = settings.scenario()
    profile = Profile(profile_shape(scenario.model, scenario.precision), ())
    calibrated = settings.on(machine=replace(settings.machine, profiles=(profile,)))
    assert prediction_of(calibrated, 12.3) == "; 12.3 simulated for the whole run"


def test_the_time_that_is_left_is_simulated_until_a_run_has_ended_and_then_measured():
    pace = Pace([2.0, 4.0, math.nan])
    assert pace.left(0) == 9.0
    assert pace.left(0, gone=1.0) == 8.0
    pace.end(0, 6.0)
    assert pace.left(1) == 3 * (4.0 + 3.0)
    assert pace.left(2, gone=100.0) == 0.0
    unknown = Pace([math.nan] * 3)
    assert math.isnan(unknown.left(0))
    assert math.isnan(unknown.left(2))
    unknown.end(0, 5.0)
    assert unknown.left(1, gone=1.0) == 9.0


def test_the_time_that_is_left_is_never_less_than_what_the_progress_of_the_run_tells():
    pace = Pace([2.0, 4.0])
    assert pace.left(0, gone=5.0, more=5.0) == 5.0 + 5 * 4.0
    assert pace.left(0, gone=5.0) == 2.5 * 4.0
    assert Pace([math.nan] * 2).left(0, gone=5.0, more=5.0) == 5.0 + 10.0


def test_the_course_of_a_run_tells_its_time_without_pauses():
    course = Course(80, 2.0)
    course.note(None, Progress(total=20), 3.0)
    assert course.left == 0.0
    course.note(UnderWay(1, 80, 2, 4, 0.25, 10.0), Progress(total=20), 13.0)
    assert (course.share, course.taken, course.left) == (0.2, 13.0, 40.0)
    assert course.slower == 5.0
    assert course.whole == 25.0
    ended = UnderWay(1, 80, 4, 4, 0.9, 12.0)
    course.note(ended, Progress(seconds=12.0, iterations=1, prefill=40, total=20), 1000.0)
    assert course.share == 0.4
    course.note(None, Progress(seconds=12.0, iterations=1, prefill=80, total=20), 1000.0)
    assert (course.share, course.taken) == (0.8, 15.0)
    assert math.isnan(Course(80, math.nan).whole)


def test_the_wait_for_the_first_request_counts_once_and_says_nothing_of_the_pace():
    course = Course(80, 200.0, wait=100.0)
    course.note(None, Progress(total=20), 60.0)
    assert course.taken == 60.0
    course.note(UnderWay(1, 80, 2, 4, 0.25, 10.0), Progress(total=20), 113.0)
    assert (course.before, course.taken, course.left) == (3.0, 113.0, 40.0)
    assert course.whole == 0.75
    course.note(None, Progress(seconds=112.0, iterations=1, prefill=80, total=20), 115.0)
    assert (course.before, course.taken, course.left) == (3.0, 115.0, pytest.approx(3.0))


def test_runs_are_expected_to_take_what_is_simulated_or_the_pace_of_an_earlier_one():
    assert (Earlier().seconds(4.0), str(Earlier())) == (4.0, "as simulated")
    earlier = Earlier(2.0, 11.2)
    assert earlier.seconds(4.0) == pytest.approx(46.8)
    assert str(earlier) == "at the pace of the last one: 2 s to start, then 11 times as long as simulated"


def test_times_are_told_roughly():
    assert [roughly(each) for each in (0.2, 89.0, 90.0, 5000.0, 7000.0)] == ["1 s", "89 s", "2 min", "83 min", "2 h"]


def test_curves_tell_how_long_a_run_takes_around_the_present_value(desk):
    curves = desk.drawn()["curves"]
    settings = desk.studio.settings
    assert curves["takes"].keys() == {each.name for each in desk.studio.controls.schedules(settings)}
    assert curves["paced"] == "as simulated"
    (line,) = (each for each in curves["lines"] if each["name"] == settings.schedule.name)
    near = [rate for x, rate in line["points"] if 1 / 16 <= x / curves["at"] <= 16]
    tokens = settings.requests * settings.output_len
    assert curves["takes"][line["name"]] == pytest.approx(sum(tokens / rate for rate in near) / len(near))


def test_a_whole_that_takes_too_long_is_not_asked_for_again_and_again():
    """Quick samples, or a single request, are asked for as a sample of all, which has a pace of its own."""
    settings = Settings.of(long_runs(), VSLPipe())
    predictions = Predictions()
    predictions._paces[_wired(settings), True] = 1.0
    predictions._paces[_wired(settings), False] = 1e-12
    assert predictions._sample(settings, predicted.SOON) == settings.requests
    assert predictions._sample(settings.on(requests=1), predicted.SOON) == 1


@pytest.fixture
def soon_at_rest(monkeypatch):
    """Drawings are at rest after a moment, and nothing else collects."""
    monkeypatch.setattr(newest, "_QUIET", 0.05)
    monkeypatch.setattr(drawing, "_GARBAGE", _Garbage())
    before = gc.get_threshold()
    gc.set_threshold(10**9, 10, 10)
    yield
    gc.set_threshold(*before)


def drawings(draw):
    made = Drawing(Predictions(), lambda _: [], list, list, Earlier, lambda _: None, lambda *_: None)
    made._draw = draw
    return made


def test_no_collection_of_all_garbage_until_drawings_are_at_rest(soon_at_rest):
    """Those of another view, too; one that fails or is overtaken as well."""
    settings = Settings.of(tiny_scenario(pipeline=VSL), VSLPipe())
    before = gc.get_threshold()
    seen = list[tuple[int, ...]]()
    other = drawings(lambda *_: None)

    def draw(*_):
        other.put(settings)
        assert other.wait(20)
        seen.append(gc.get_threshold())
        raise StoppedError("overtaken.")

    made = drawings(draw)
    made.put(settings)
    assert made.wait(20)
    assert eventually(lambda: gc.get_threshold() == before)
    assert seen[0][:2] == before[:2]
    assert seen[0][2] > 1_000_000
    made.close()
    other.close()


@pytest.mark.parametrize("closed", [False, True])
def test_garbage_of_drawings_is_collected_at_rest(soon_at_rest, monkeypatch, closed):
    if closed:
        monkeypatch.setattr(newest, "_QUIET", 60.0)
    settings = Settings.of(tiny_scenario(pipeline=VSL), VSLPipe())
    gone = list[weakref.ref]()

    def draw(*_):
        cycle = Cycle()
        cycle.own = cycle
        gone.append(weakref.ref(cycle))

    made = drawings(draw)
    made.put(settings)
    assert made.wait(20)
    if closed:
        made.close()
    assert eventually(lambda: gone[0]() is None)
    gc.set_threshold(10**9, 20, 20)
    made.close()
    made._worker._thread.join(20)
    assert gc.get_threshold() == (10**9, 20, 20)


def eventually(true):
    due = time.monotonic() + 20
    while not true() and time.monotonic() < due:
        time.sleep(0.01)
    return true()


class Cycle:
    """An object that only a collection frees."""


def test_a_sweep_measures_around_the_present_value_and_at_it(monkeypatch):
    monkeypatch.setattr("workbench.widgets.state.runs._NEAR", 2)
    settings = Settings.of(tiny_scenario(pipeline=VSL), VSLPipe())
    axis = Controls(settings, (VSLPipe(),))["kv_capacity"]
    settings = settings.on(kv_tokens=axis.steps(settings)[-5].value * 1.01)
    values = [value for _, value in spread(axis, settings, 5)]
    assert len(set(values)) == 5
    assert values == sorted(values)
    assert settings.kv_tokens in values
    assert all(settings.kv_tokens / 2 <= value <= 2 * settings.kv_tokens for value in values)
    assert min(step.value for step in axis.steps(settings)) < settings.kv_tokens / 2
    micro = Controls(settings, (VSLPipe(),))["micro_batches"]
    assert spread(micro, settings, 5) == []


def test_a_schedule_that_stands_in_for_the_wanted_one_says_so(desk):
    desk.say("set", name="schedule", value="VSLPipe")
    assert "note" not in desk.control("schedule")
    place = next(card["path"] for card in cards(desk.shown) if card["name"] == "out_proj")
    desk.say("remove", range=0, path=place)
    assert desk.studio.settings.schedule == Overlap()
    note = "in the place of VSLPipe, until the wiring is one that it takes"
    assert desk.control("schedule")["note"] == note
    capacity = desk.control("kv_capacity")
    desk.say("set", name="kv_capacity", value=capacity["at"] - 1)
    assert desk.control("schedule")["note"] == note
    desk.say("undo").say("undo")
    assert "note" not in desk.control("schedule")
    assert desk.studio.settings.schedule == VSLPipe()
