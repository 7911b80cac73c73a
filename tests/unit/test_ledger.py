"""What goes into each memory: hand-computed ledgers, limits that no iteration exceeds, and changes that make it fit."""

import pickle
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

import workbench as wb
from tests.builders import (
    KINDS,
    UNLIKE,
    enough_experts,
    scenarios,
    small_machine,
    tiny_model,
    tiny_model_of,
    tiny_scenario,
)
from tests.examples import examples
from tests.systems import PIPELINES
from workbench.core.errors import CapacityError
from workbench.core.units import parse_bytes
from workbench.hardware import machines
from workbench.perfmodels import bound
from workbench.pipeline import cpu, fetch, fetched, gpu, load, offload, ranges_of
from workbench.scenario import Memory
from workbench.scheduler.block_manager import BlockManager
from workbench.scheduler.resource_aware import ResourceAware
from workbench.schedules import Overlap, Sequential, VSLPipe
from workbench.schedules.base import Step
from workbench.serving import capacity, fits, prepare
from workbench.serving.capacity import embedding_bytes, held_buffers, largest_batch, ledger, roomy, streaming
from workbench.serving.ledger import Account, Entry, Ledger
from workbench.serving.prepared import price
from workbench.simulate import simulate
from workbench.stages import (
    Place,
    Precision,
    RowClass,
    attention,
    buffer_bytes,
    combine,
    experts,
    head,
    moe,
    out_proj,
    qkv,
    route,
    shared_experts,
    weights,
)

MODEL = tiny_model()
M, Q, KV, F, V = 64, 64, 32, 96, 128
EMBEDDING = (2 * V + 1) * M * 2
LAYER = MODEL.layer_params * 2
SLOT = LAYER + (M * (Q + 2 * KV) + M) * 2  # a whole layer, and what the next one begins with
ANGLES = 1000 * 4 * 16 * 4  # cosines and sines of a head's 16 dims, for as many positions as the cache has tokens
CACHE = 1000 * 4 * MODEL.kv_bytes_per_token("bf16")
EXPERTS = 2 * (2 * (3 * F + 2 * M)) + 2 * M  # gate, up, product and rows in and out of both choices, and the sum
HEAD = (4 + 2) * V + (8 + 4) * M
ATTENTION = 8 * (Q + KV) + 2 * Q  # queries and output, keys and values in fp32, and the output in bf16

HAND = {  # tokens of the batch times what each has on the GPU, and on the host
    "vslpipe": (8 * (2 * (M + Q + 2 * KV + Q + M + M) + 16), 8 * 2 * (Q + 2 * KV + Q)),
    "flexgen_s4": (8 * (2 * (M + Q + 2 * KV + Q + M + M) + 16), 8 * 2 * 2 * KV),
    "all_gpu": (8 * (2 * (M + Q + 2 * KV + Q + M + M) + 16), 0),
    "all_cpu": (8 * 2 * M, 8 * (2 * (M + Q + 2 * KV + Q + M + M) + 16)),
}


@pytest.mark.parametrize("name", HAND)
def test_activations_are_the_buffers_of_the_largest_batch(name):
    """One request of 8 + 4 tokens: no iteration has more than its prompt."""
    found = fits(tiny_scenario(8, 4, 1, pipeline=PIPELINES[name]), Sequential())
    assert (found.gpu["activations"], found.host["activations"]) == HAND[name]


def test_a_ledger_by_hand():
    found = fits(tiny_scenario(8, 4, 1), VSLPipe())
    assert found
    gpu, host = found.gpu, found.host
    assert (gpu["weights"], gpu["weight slots"], gpu["KV cache"]) == (EMBEDDING, 2 * SLOT, 0)
    assert gpu["largest operation"] == 8 * EXPERTS
    assert gpu["RoPE angles"] == ANGLES
    assert host["RoPE angles"] == 0
    assert gpu.total == EMBEDDING + 2 * SLOT + ANGLES + HAND["vslpipe"][0] + 8 * EXPERTS
    assert gpu.left == 1e9 - gpu.total
    assert (host["weights"], host["KV cache"]) == (4 * LAYER, CACHE)
    assert host["largest operation"] == 8 * ATTENTION
    assert host.total == 4 * LAYER + CACHE + HAND["vslpipe"][1] + 8 * ATTENTION


def test_each_gpu_of_a_node_holds_the_activations():
    scenario = tiny_scenario(8, 4, 1)
    node = scenario.on(machine=replace(scenario.machine, gpu=scenario.machine.gpu.times(4)))
    found = fits(node, VSLPipe()).gpu
    assert (found["activations"], found.capacity) == (4 * HAND["vslpipe"][0], 4e9)
    assert found["weights"] == EMBEDDING


def test_a_tied_head_is_one_table():
    tied = replace(MODEL, tie_word_embeddings=True)
    scenario = tiny_scenario(model=tied)
    assert embedding_bytes(scenario.model, scenario.precision) == (V + 1) * M * 2


def test_resident_weights_and_cache_count_where_they_live():
    found = fits(tiny_scenario(pipeline=PIPELINES["all_gpu"]), Sequential())
    assert found.gpu["weights"] == EMBEDDING + 4 * LAYER
    assert found.gpu["KV cache"] == CACHE
    assert (found.gpu["weight slots"], found.host.total) == (0, 0)


def test_many_requests_that_emit_make_the_head_the_largest_operation():
    wide = replace(MODEL, vocab_size=100_000)
    found = fits(tiny_scenario(1, 4, 50, model=wide), Sequential())
    assert found.gpu["largest operation"] == 50 * (6 * 100_000 + 12 * M)


@pytest.mark.parametrize("schedule", [Sequential(), VSLPipe()], ids=str)
@pytest.mark.parametrize("name", PIPELINES)
@pytest.mark.parametrize("kind", sorted(set(KINDS) - set(UNLIKE)))
def test_weights_slots_and_cache_of_every_kind_of_model_are_the_models_own(kind, name, schedule):
    """All weights once, wherever they live; slots for the largest transfer; the cache as wide as the model's."""
    if isinstance(schedule, VSLPipe) and name != "vslpipe":
        return
    model = enough_experts(tiny_model_of(kind), PIPELINES[name])
    found = fits(tiny_scenario(model=model, pipeline=PIPELINES[name]), schedule)
    vectors = model.attention_vectors
    norms = model.num_hidden_layers * (2 * M + vectors) * model.other_bytes + 2 * M
    assert found.gpu["weights"] + found.host["weights"] == pytest.approx(model.weight_bytes + norms)
    assert found.gpu["KV cache"] + found.host["KV cache"] == 4 * 1000 * 4 * model.kv_elements * 2
    if "fetch(weights" in str(PIPELINES[name]):
        routed = model.num_local_experts * model.expert_params
        largest = routed * model.expert_bytes + (model.layer_params + vectors - routed) * model.other_bytes
        begin = (model.attention_in_params + vectors + M) * model.other_bytes if isinstance(schedule, VSLPipe) else 0
        if model.dense_layers:  # VSLPipe's transfer of layer 0 and the begin of layer 1 may be the larger one or not
            assert 2 * largest - 1 < found.gpu["weight slots"] < 2 * (largest + begin) + 1
        else:
            assert found.gpu["weight slots"] == pytest.approx(2 * (largest + begin))


def test_a_slot_for_what_layers_without_experts_have_most_of():
    """All that is streamed is the network that every token passes, which is larger where it is the whole layer's."""
    model = replace(tiny_model_of("shared"), first_k_dense_replace=1)
    pipeline = fetch(shared_experts.weights) | gpu(qkv, attention, out_proj, route, experts, shared_experts, combine)
    slot = 3 * M * F * 2
    assert 3 * M * model.shared_expert_intermediate_size * 2 < slot
    found = fits(tiny_scenario(model=model, pipeline=pipeline), Sequential())
    assert found.gpu["weight slots"] == 2 * slot
    assert found.host["weights"] == slot + 3 * (3 * M * 24 * 2)


def test_latent_attention_holds_expanded_rows_of_prompts_and_absorbed_ones_of_decodes():
    """One request of 8 + 4 tokens: all of its prompt, and what the one decode has more than a token of it."""
    model = tiny_model_of("latent")
    heads, latent, rope, value = 4, 16, 4, 8
    prompt = M + heads * 16 + latent + rope + heads * value + M + M  # x, q, k and v, attn, h, routed
    decode = prompt + heads * (latent + rope - 16) + heads * (latent - value)
    found = fits(tiny_scenario(8, 4, 1, model=model, pipeline=PIPELINES["all_gpu"]), Sequential())
    assert found.gpu["activations"] == 8 * (2 * prompt + 16) + 2 * (decode - prompt)
    assert found.gpu["KV cache"] == 1000 * 4 * 4 * (latent + rope) * 2


def test_the_largest_operation_can_be_the_network_that_every_token_passes():
    found = fits(tiny_scenario(8, 4, 1, model=replace(tiny_model_of("dense"), intermediate_size=9600)), Sequential())
    assert found.gpu["largest operation"] == 8 * (2 * M + 3 * 2 * 9600)
    wide = replace(tiny_model_of("shared"), shared_expert_intermediate_size=9600)
    assert fits(tiny_scenario(8, 4, 1, model=wide), Sequential()).gpu["largest operation"] == 8 * (2 * M + 3 * 2 * 9600)


def test_fetched_kv_is_that_of_one_part():
    """8 requests hold 3 blocks each in the end: all of them in one part, or two of them in one of four."""
    few = tiny_scenario(9, 4, 8, pipeline=PIPELINES["flexgen_s4"])
    block = 4 * MODEL.kv_bytes_per_token("bf16") // 4  # of one layer
    assert fits(few, Sequential()).gpu["fetched KV"] == 24 * block
    assert fits(few, Sequential(micro_batches=4)).gpu["fetched KV"] == 6 * block


def test_the_reserve_is_kept_free():
    scenario = tiny_scenario(8, 4, 1)
    total = fits(scenario, VSLPipe()).gpu.total
    just = scenario.on(machine=small_machine(gpu_memory=total))
    assert fits(just, VSLPipe())
    kept = just.on(memory=replace(just.memory, gpu_reserve="1kB"))
    assert fits(kept, VSLPipe()).gpu["reserve"] == 1000
    assert fits(kept, VSLPipe()).gpu.left == -1000
    assert fits(just.on(memory=replace(just.memory, host_reserve="1kB")), VSLPipe())
    with pytest.raises(CapacityError, match="gpu_reserve"):
        Memory("1GB", gpu_reserve=-1)


@pytest.mark.parametrize("read", [bound, simulate, prepare])
def test_one_byte_less_is_refused_by_every_reader_with_the_ledgers_words(read):
    total = fits(tiny_scenario(), VSLPipe()).gpu.total
    assert read(tiny_scenario(machine=small_machine(gpu_memory=total)), VSLPipe())
    short = tiny_scenario(machine=small_machine(gpu_memory=total - 1))
    with pytest.raises(CapacityError) as error:
        read(short, VSLPipe())
    assert str(error.value) == fits(short, VSLPipe()).verdict


def test_changes_are_searched_for_only_where_they_are_read(monkeypatch):
    searched = list[str]()
    monkeypatch.setattr(capacity, "_more_memory", lambda *_: searched.append("searched") or ())
    short = tiny_scenario(machine=small_machine(gpu_memory=fits(tiny_scenario(), VSLPipe()).gpu.total - 1))
    with pytest.raises(CapacityError) as error:
        prepare(short, VSLPipe())
    assert searched == []
    assert "of GPU memory and this needs" in str(error.value)
    assert str(pickle.loads(pickle.dumps(error.value))) == str(error.value)
    assert searched == ["searched"]


def test_it_is_told_line_by_line():
    found = fits(tiny_scenario(), VSLPipe())
    text = str(found)
    assert "weight slots" in text
    rows = found.rows()
    assert {line.index(row[1]) for line, row in zip(text.splitlines(), rows, strict=False)} == {len("host  ")}
    assert "2 of 189 kB" in text
    assert text.splitlines()[-1] == found.verdict
    assert "are left" in found.verdict
    assert found._repr_html_().count("<tr>") == len(found.rows()) + 2


# -------------------------------------------------------------------------------------------- no iteration exceeds it


@examples(60)
@given(scenarios())
def test_no_iteration_has_more_tokens_requests_or_blocks_than_the_largest_batch(case):
    scenario, schedule = case
    prepared, workload = prepare(scenario, schedule), scenario.workload
    largest = largest_batch(scenario, schedule, prepared.token_budget)
    longest = int((workload.prompt_len + workload.output_len).max())
    block = scenario.memory.kv_block
    blocks = BlockManager(scenario.kv_blocks, block, len(workload), longest)
    queue = scenario.scheduler.open(workload, blocks, prepared.token_budget, prepared.layers)
    queue.add(np.arange(len(workload)), workload.prompt_len, workload.output_len)
    found = fits(scenario, schedule)
    accounts = {Place.GPU: found.gpu, Place.CPU: found.host}
    while (batch := queue.next()) is not None:
        parts = prepared.lowering.plan(batch, Step.MIDDLE).parts
        before = [part.starts[part.starts > 0] for part in parts]
        assert batch.rows.tokens <= largest.tokens
        assert len(batch) <= largest.requests
        assert max(part.rows.tokens for part in parts) <= largest.part_tokens
        read = [np.concatenate((part.context + 1, start)) for part, start in zip(parts, before, strict=True)]
        assert max(int((-(-tokens // block)).sum()) for tokens in read) <= largest.part_blocks + 1e-9
        for device, account in accounts.items():
            assert held_by(batch.rows, device, prepared) <= account["activations"]
        queue.complete(batch)


def held_by(rows, device, prepared):
    """Bytes of the buffers of a batch on a device, rows of prompts and of decodes as wide as they are."""
    model, precision = prepared.scenario.model, prepared.scenario.precision
    return sum(
        count * buffer_bytes(buffer, model, precision, row_class)
        for buffer in held_buffers(prepared.lowering.stack)[device]
        for row_class, count in ((RowClass.PREFILL, rows.prefill), (RowClass.DECODE, rows.decode))
    )


def test_the_largest_batch_is_met():
    """All prompts at once, where budget and cache allow it; else the budget, the cache, or the longest prompt."""

    def tokens(**limits):
        scenario = tiny_scenario([8, 8, 40], [4, 4, 4], **limits)
        return largest_batch(scenario, Sequential(), scenario.scheduler.token_budget).tokens

    assert tokens(token_budget=1000) == 56
    assert tokens(token_budget=50) == 50
    assert tokens(token_budget=10) == 40
    assert tokens(token_budget=1000, blocks=13) == 52
    assert tokens(token_budget=10, blocks=13) == 43  # preempted, the longest prefills its first three outputs too


def test_the_largest_batch_holds_no_more_requests_than_may_run():
    """Two of the three longest prompts, and where the cache is too small for all, of what they hold at their ends."""

    def largest(most, blocks=1000):
        scenario = tiny_scenario([8, 8, 40], [4, 4, 4], blocks=blocks, scheduler=ResourceAware(max_running=most))
        return largest_batch(scenario, Sequential(), 1000)

    assert [largest(most)[:2] for most in (1, 2, 3, 9, None)] == [(40, 1), (48, 2), (56, 3), (56, 3), (56, 3)]
    assert largest(2, blocks=16).tokens == 43 + 11


def test_the_blocks_of_one_part_leave_the_others_their_least():
    """A sequence has 2 blocks at most, and 2 at least when it decodes: beyond 2 of 12, one of two parts reads half."""
    scenario = tiny_scenario([4] * 20, [5] * 20, blocks=12, token_budget=1000)
    assert largest_batch(scenario, VSLPipe(), 1000).part_blocks == 2 + 10 / 2


# --------------------------------------------------------------------------------------------- what would make it fit


def one_step_less(change, scenario, schedule):
    """The same change made 1 % smaller, or by one step less where the steps are larger: (scenario, schedule)."""
    new, name = change.scenario, change.code.split("=")[0]
    if name == "kv_capacity":
        per_block = new.memory.kv_block * new.model.kv_bytes_per_token(new.precision.kv)
        gone = scenario.kv_blocks - new.kv_blocks
        blocks = new.kv_blocks + max(1, gone // 100)
        return new.on(memory=replace(new.memory, kv_capacity=blocks * per_block)), schedule
    if name == "token_budget":
        now, budget = largest_batch(scenario, schedule, price(scenario, schedule).token_budget), new.scheduler
        more = budget.token_budget + max(1, (now.tokens - budget.token_budget) // 100)
        return new.on(scheduler=replace(budget, token_budget=more)), schedule
    if name == "micro_batches":
        return new, replace(schedule, micro_batches=change.schedule.micro_batches - 1)
    if name == "weights" or name.startswith("fetch("):
        return scenario, schedule  # there is no step between
    machines = (scenario.machine, new.machine)
    gpu, host = ([getattr(machine, lane).memory for machine in machines] for lane in ("gpu", "cpu"))
    machine = replace(
        new.machine,
        gpu=replace(new.machine.gpu, memory=gpu[0] + 0.99 * (gpu[1] - gpu[0])),
        cpu=replace(new.machine.cpu, memory=host[0] + 0.99 * (host[1] - host[0])),
    )
    return new.on(machine=machine), schedule


def with_memory(scenario, gpu, host):
    """The same scenario on a machine with these memories."""
    machine = scenario.machine
    machine = replace(machine, gpu=replace(machine.gpu, memory=gpu), cpu=replace(machine.cpu, memory=max(1.0, host)))
    return scenario.on(machine=machine)


SHARES = st.one_of(
    st.tuples(st.floats(0.3, 0.999), st.just(1.0)),
    st.tuples(st.just(1.0), st.floats(0.3, 0.999)),
    st.tuples(st.floats(0.05, 1.1), st.floats(0.05, 1.1)),
)


@examples(200)
@given(scenarios(), SHARES)
def test_a_change_makes_it_fit_and_a_smaller_one_does_not(case, shares):
    scenario, schedule = case
    ample = fits(scenario, schedule)
    tight = with_memory(scenario, shares[0] * ample.gpu.total, shares[1] * ample.host.total)
    found = fits(tight, schedule)
    assert bool(found) == (found.gpu.left >= 0 and found.host.left >= 0)
    assert not (found and found.changes)
    assert [change.factor for change in found.changes] == sorted(change.factor for change in found.changes)
    assume(not found)
    for change in found.changes:
        assert fits(change.scenario, change.schedule), change
        assert not ledger(price(*one_step_less(change, tight, schedule))), change


@pytest.mark.parametrize("blocks", [3, 4, 5, 17, 600, 998, 999])
def test_the_cache_proposed_is_the_largest_that_fits(blocks):
    """What the host has beside 1000 blocks for those of so many: less than one block too little is one block fewer."""
    scenario = tiny_scenario(8, 4, 1)
    total, one = fits(scenario, VSLPipe()).host.total, CACHE / 1000
    tight = with_memory(scenario, 1e9, total - (1000 - blocks) * one + 0.5 * one)
    (cache,) = (change for change in fits(tight, VSLPipe()).changes if "kv_capacity" in change.code)
    assert cache.scenario.kv_blocks == blocks
    assert cache.factor == 1000 / blocks


@pytest.mark.parametrize("tokens", [8, 9, 50, 158, 159])
def test_the_budget_proposed_is_the_largest_that_fits(tokens):
    """With one part, activations and the experts' working space are in proportion to the tokens."""
    scenario = tiny_scenario([8] * 20, [4] * 20)
    per_token = HAND["vslpipe"][0] / 8 + EXPERTS
    fixed = EMBEDDING + 2 * LAYER + ANGLES
    tight = with_memory(scenario, fixed + (tokens + 0.5) * per_token, 1e10)
    (budget,) = (change for change in fits(tight, Sequential()).changes if "token_budget" in change.code)
    assert budget.scenario.scheduler.token_budget == tokens
    assert str(budget) == f"token_budget={tokens} (now up to 160 tokens per iteration)"


@pytest.mark.parametrize(
    ("memory", "schedule", "named"),
    [
        ({"host_memory": 4 * LAYER + CACHE / 2}, VSLPipe(), "kv_capacity"),
        ({"gpu_memory": EMBEDDING + 2 * SLOT + ANGLES + 60_000}, VSLPipe(), "token_budget"),
        ({"gpu_memory": EMBEDDING + 2 * LAYER + ANGLES + 250_000}, Sequential(), "micro_batches"),
        ({"gpu_memory": EMBEDDING + 2 * SLOT - 1}, VSLPipe(), "of GPU memory"),
        ({"host_memory": 4 * LAYER}, VSLPipe(), "of host memory"),
    ],
)
def test_each_kind_of_change_is_proposed_where_it_helps(memory, schedule, named):
    scenario = tiny_scenario([8] * 20, [4] * 20, machine=small_machine(**memory))
    assert any(named in change.code for change in fits(scenario, schedule).changes)


def test_a_smaller_type_is_proposed_where_weights_do_not_fit():
    model = tiny_model(dtype="fp32")
    total = fits(tiny_scenario(model=model), VSLPipe()).gpu.total
    found = fits(
        tiny_scenario(model=model, machine=small_machine(gpu_memory=ANGLES + 0.6 * (total - ANGLES))), VSLPipe()
    )
    (change,) = (change for change in found.changes if "weights=" in change.code)
    assert str(change) == "weights='bf16' (now fp32)"
    assert change.scenario.precision == Precision("bf16", "fp32")


@pytest.mark.parametrize(("left", "form"), [(0.7, "int8"), (0.4, "int4")])
def test_rounded_experts_are_proposed_where_they_alone_fit(left, form):
    model = tiny_model(hidden_size=64, intermediate_size=640)
    total = fits(tiny_scenario(model=model), VSLPipe()).gpu.total
    found = fits(
        tiny_scenario(model=model, machine=small_machine(gpu_memory=ANGLES + left * (total - ANGLES))), VSLPipe()
    )
    (change,) = (change for change in found.changes if "weights=" in change.code)
    assert str(change) == f"weights={form!r} (now bf16)"
    assert fits(change.scenario, VSLPipe()).gpu.left >= 0


@pytest.mark.parametrize("item", [experts.weights, weights])
def test_streaming_is_proposed_where_weights_do_not_fit(item):
    """The routed experts alone where that is enough, else all weights; also in each range of a stack."""
    pipeline = PIPELINES["all_gpu"]
    streamed = tiny_scenario(pipeline=fetched(pipeline, item, True), model=tiny_model(16, intermediate_size=512))
    machine = small_machine(gpu_memory=fits(streamed, Overlap()).gpu.total)
    for wired in (pipeline, pipeline[:2] + pipeline[2:]):
        ample = streamed.on(pipeline=wired)
        (change,) = (each for each in fits(ample.on(machine=machine), Overlap()).changes if "fetch" in each.code)
        assert str(change) == f"fetch({item.name}) (now kept on the GPU)"
        assert all(each.pipeline.fetches == (item,) for each in ranges_of(change.scenario.pipeline))
        assert fits(change.scenario, Overlap())


def test_streaming_tells_that_batches_shrink_with_it():
    machine = wb.machine(gpu="rtx-5090", cpu="xeon-8380", memory="256GB")
    large = wb.Scenario(
        gpu(qkv, attention, out_proj, moe),
        wb.models["mixtral-8x7b"],
        machine,
        wb.Memory(kv_capacity="15GB"),
        wb.Workload.lengths(2000, 700, 128),
        wb.ResourceAware(),
    )
    found = fits(large, Sequential())
    (change,) = (each for each in found.changes if "fetch" in each.code)
    tokens = largest_batch(large, Sequential(), price(large, Sequential()).token_budget).tokens
    then = largest_batch(change.scenario, Sequential(), price(change.scenario, Sequential()).token_budget).tokens
    assert then < tokens / 2
    assert change.now == f"kept on the GPU; batches are up to {then:,} tokens then, not {tokens:,}"


def test_streaming_takes_the_place_of_what_streams_already_and_leaves_the_cpus_experts():
    """Of a stack whose first layers have their experts on the CPU, the others' experts are streamed."""
    there = gpu(qkv, attention, out_proj, route) >> offload >> cpu(experts) >> load >> gpu(combine)
    mixed = there[:2] + PIPELINES["all_gpu"][2:]
    found = ranges_of(streaming(mixed, experts.weights))
    assert [each.pipeline.fetches for each in found] == [(), (experts.weights,)]
    some = fetched(PIPELINES["all_gpu"], experts.weights, True)
    assert streaming(some, weights).fetches == (weights,)


def test_no_type_is_proposed_that_would_make_the_smallest_weights_larger():
    """With bf16 the wide embedding would fit, but 4-bit experts would be four times as large: not a smaller type."""
    model = replace(tiny_model_of("quantised", dtype="fp32"), vocab_size=100_000)
    total = fits(tiny_scenario(model=model), VSLPipe()).gpu.total
    found = fits(tiny_scenario(model=model, machine=small_machine(gpu_memory=0.9 * total)), VSLPipe())
    assert fits(tiny_scenario(model=model).on(memory=Memory("1MB", weights="bf16")), VSLPipe()).gpu.total < 0.9 * total
    assert found.changes
    assert not any("weights=" in change.code for change in found.changes)


def test_memory_that_is_more_than_the_catalogues_says_so():
    a40 = machines["a40"]
    needed = fits(tiny_scenario(machine=small_machine(gpu_memory=1e3)), VSLPipe())
    tight = replace(a40, gpu=replace(a40.gpu, memory=1e3))
    raised = roomy(tight, needed)
    assert raised.gpu.memory == needed.gpu.total
    assert raised.sources["gpu.memory"] == f"raised to what is needed, from 1 kB: {a40.sources['gpu.memory']}"
    assert raised.sources["cpu.memory"] == a40.sources["cpu.memory"]


def test_nothing_single_helps_where_both_memories_are_short():
    found = fits(tiny_scenario(machine=small_machine(gpu_memory=1e3, host_memory=1e3)), VSLPipe())
    assert not found.changes
    assert "No single change" in found.verdict
    assert "of GPU memory and this needs" in found.verdict
    assert "of host memory and this needs" in found.verdict


@examples(50)
@given(scenarios(), st.floats(0.2, 0.99))
def test_the_capacity_that_is_printed_fits_when_pasted(case, share):
    scenario, schedule = case
    total = fits(scenario, schedule).host.total
    assume(total)
    tight = scenario.on(machine=replace(scenario.machine, cpu=replace(scenario.machine.cpu, memory=share * total)))
    for change in fits(tight, schedule).changes:
        if change.code.startswith("kv_capacity="):
            pasted = parse_bytes(change.code.split("'")[1])
            assert fits(tight.on(memory=replace(tight.memory, kv_capacity=pasted)), schedule)


def test_everything_the_pipelines_compute_has_its_working_space():
    ops = {stage.op for pipeline in PIPELINES.values() for stage in pipeline.stages} | {shared_experts, head}
    assert {op.name for op in ops if op.working is None} == {"combine"}  # elementwise
    assert np.isfinite([op.working_bytes(MODEL, Precision("bf16", "bf16")) for op in ops]).all()


def test_memory_that_is_filled_to_the_last_byte_fits():
    full = Account("GPU", (Entry("weights", 10.0),), 10.0)
    short = Account("GPU", (Entry("weights", 11.0),), 10.0)
    host = Account("host", (Entry("KV cache", 5.0),), 5.0)
    assert Ledger("m", full, host)
    verdict = Ledger("m", short, host).verdict
    assert verdict.startswith("'m' has 10.0 B of GPU memory and this needs 11.0 B, 1.0 B too much (100 % weights).")
    assert "host memory" not in verdict
