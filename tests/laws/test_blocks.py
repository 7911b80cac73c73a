"""Law 5: KV blocks are conserved, errors included. And every request gets its last token, however short KV is."""

from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.builders import scenarios, tiny_scenario
from tests.examples import examples
from tests.systems import PIPELINES, ids
from workbench.core.errors import CapacityError
from workbench.core.result import Source
from workbench.core.timeline import Timeline
from workbench.scheduler.block_manager import BlockCounts, BlockManager
from workbench.scheduler.registry import every_scheduler
from workbench.scheduler.static import StaticBatching
from workbench.schedules import Sequential, Step, VSLPipe
from workbench.serving import prepare, serve
from workbench.serving.loop import Called
from workbench.simulate import simulate
from workbench.workload import Request, Sampling

SEQUENCES = 6
some = st.lists(st.integers(0, SEQUENCES - 1), unique=True, max_size=SEQUENCES)
operations = st.lists(
    st.tuples(
        st.sampled_from(["allocate", "append", "release"]), some, st.lists(st.integers(0, 30), min_size=6, max_size=6)
    ),
    max_size=40,
)


@examples(200)
@given(st.sampled_from([BlockCounts, BlockManager]), st.integers(1, 12), st.integers(1, 5), operations)
def test_blocks_are_conserved_after_any_sequence_of_operations(account, total, size, todo):
    """And those that are only counted are refused where those with tables are."""
    blocks = account(total, size, SEQUENCES, longest=20)
    model: dict[int, int] = dict.fromkeys(range(SEQUENCES), 0)
    for name, sequences, lengths in todo:
        want = {
            s: {"allocate": -(-n // size), "append": 1, "release": -model[s]}[name]
            for s, n in zip(sequences, lengths, strict=False)
        }
        try:
            if name == "allocate":
                blocks.allocate(ids(*sequences), ids(*lengths[: len(sequences)]))
            else:
                getattr(blocks, name)(ids(*sequences))
        except CapacityError:
            longer = any(model[s] + n > -(-20 // size) for s, n in want.items())
            again = name == "allocate" and any(model[s] for s in sequences)
            assert longer or again or sum(want.values()) > total - sum(model.values()), "refused without a reason"
        else:
            for sequence, change in want.items():
                model[sequence] += change
        blocks.check()
        assert blocks.held.tolist() == list(model.values())
        assert blocks.free + blocks.used == total
        if account is BlockCounts:
            continue
        handed = [block for s in model for block in blocks.table[s, : model[s]].tolist()]
        assert len(handed) == len(set(handed))
        assert set(handed) <= set(range(total))


class Counting:
    """A clock that counts emitted tokens, checks the blocks at every step, and fails, stops or cancels when told."""

    def __init__(
        self, fail_at: int = -1, stops: tuple[int, ...] = (), cancels: tuple[tuple[int, int], ...] = ()
    ) -> None:
        self.stops, self.cancels = stops, cancels
        self.now, self.timeline, self.emitted, self.fail_at = 0.0, Timeline(), Counter(), fail_at
        self.steps, self.covered, self.prefilled, self.running = [], {}, 0, []

    def begin(self, blocks):
        self.blocks = blocks

    def advance(self, queue, record):
        pass

    def execute(self, plan, number, step):
        if number == self.fail_at:
            raise RuntimeError("a stage failed")
        self.blocks.check()
        self.running.append(int(np.count_nonzero(self.blocks.held)))
        for part in plan.parts:
            self.prefilled += int(part.emits.sum())
            for request, start, stop, layers, emits in part:
                held = int(self.blocks.held[request]) * self.blocks.block_size
                assert held >= stop, "blocks for its tokens"
                assert not emits or stop > held - self.blocks.block_size, "and for no more"
                here = layers.start, start
                assert here == (0, 0) or here == self.covered[request], "it goes on where it stopped"
                self.covered[request] = (0, stop) if layers.stop == plan.layers else (layers.stop, start)
                self.emitted[request] += emits
        self.steps.append(step)
        self.now += 1.0
        return {}

    def wait(self, until):
        self.now = max(self.now, until)

    def called(self):
        """Requests of (request, iteration), again and again from there on."""
        return Called(cancelled=tuple(request for request, number in self.cancels if number <= len(self.steps)))

    def over(self):
        return True

    def stopped(self, batch):
        return ids(*(n for n in batch.emitting.tolist() if self.stops and self.emitted[n] == self.stops[n]))

    def expert_bytes(self, plan):
        return 0.0

    def energy(self):
        return None


@examples(80)
@given(scenarios())
def test_every_request_gets_exactly_its_tokens_whatever_the_cache(case):
    scenario, schedule = case
    clock = Counting()
    result = serve(prepare(scenario, schedule), clock, Source.SIMULATED)
    assert [
        clock.emitted[request] for request in range(len(scenario.workload))
    ] == scenario.workload.output_len.tolist()
    assert result.generated == sum(clock.emitted.values())
    assert sum(result.steps.decode) == result.generated - clock.prefilled
    assert len(scenario.workload) <= clock.prefilled <= len(scenario.workload) + result.preemptions
    least = scenario.workload.prompt_len + scenario.workload.output_len - 1
    assert result.processed == int(least.sum()) + result.recomputed
    assert (clock.blocks.free, clock.blocks.used) == (scenario.kv_blocks, 0)
    clock.blocks.check()


@pytest.mark.parametrize("most", [None, 1, 3])
@pytest.mark.parametrize("scheduler", every_scheduler(), ids=repr)
def test_every_scheduler_serves_every_request(scheduler, most):
    scheduler = replace(scheduler, max_running=most)
    prompts, outputs = [9, 2, 14, 5, 7, 2], [3, 6, 1, 8, 2, 4]
    scenario = tiny_scenario(prompts, outputs, blocks=12, block=2, pipeline=PIPELINES["all_gpu"], scheduler=scheduler)
    clock = Counting()
    serve(prepare(scenario, Sequential()), clock, Source.SIMULATED)
    assert [clock.emitted[request] for request in range(6)] == outputs
    assert max(clock.running) <= (most or 6)


@examples(80)
@given(scenarios(), st.integers(1, 6))
def test_no_more_sequences_run_than_may_and_a_limit_that_never_binds_changes_nothing(case, most):
    scenario, schedule = case
    most = scenario.scheduler.max_running or most

    def served(limit):
        clock = Counting()
        limited = scenario.on(scheduler=replace(scenario.scheduler, max_running=limit))
        return serve(prepare(limited, schedule), clock, Source.SIMULATED), max(clock.running)

    free, peak = served(None)
    of_batch = isinstance(scenario.scheduler, StaticBatching)  # limits a batch: some end before others of it begin
    never = len(scenario.workload) if of_batch else peak
    assert served(never)[0].steps == free.steps
    limited, running = served(most)
    assert running <= most
    assert limited.generated == free.generated
    assert limited.iterations >= limited.generated / most


@examples(60)
@given(scenarios(), st.data())
def test_every_request_ends_where_it_stops_and_its_blocks_come_back(case, data):
    """In a run its tokens say where, in a simulation the workload does; no iteration is another one for that."""
    scenario, schedule = case
    stops = tuple(data.draw(st.integers(1, output)) for output in scenario.workload.output_len.tolist())
    told = scenario.on(workload=scenario.workload.ending(at=stops))
    clocks = Counting(stops=stops), Counting()
    asked = scenario.on(workload=replace(scenario.workload, requests=asked_to_stop(scenario)))
    stopped, ended = (
        serve(prepare(of, schedule), clock, Source.SIMULATED) for of, clock in zip((asked, told), clocks, strict=True)
    )
    for clock in clocks:
        assert [clock.emitted[request] for request in range(len(stops))] == list(stops)
        assert (clock.blocks.free, clock.blocks.used) == (scenario.kv_blocks, 0)
        clock.blocks.check()
    assert stopped.generated == ended.generated == sum(stops)
    assert clocks[0].steps == clocks[1].steps
    assert (stopped.steps, stopped.recomputed) == (ended.steps, ended.recomputed)
    assert stopped.processed == int((scenario.workload.prompt_len + stops - 1).sum()) + stopped.recomputed


@examples(80)
@given(scenarios(), st.data())
def test_a_cancelled_request_gets_no_further_token_and_its_blocks_come_back(case, data):
    """Wherever it is: it runs, waits, is in flight, was preempted, has not arrived or is finished."""
    scenario, schedule = case
    count = len(scenario.workload)
    cancels = data.draw(st.lists(st.tuples(st.integers(0, count - 1), st.integers(1, 12)), max_size=count))
    clock, first = Counting(cancels=tuple(cancels)), dict(sorted(cancels, reverse=True))
    found = []
    execute = clock.execute

    def watched(plan, number, step):
        there = {int(request) for part in plan.parts for request in part.requests}
        assert not there & {request for request, since in first.items() if since <= number}
        assert all(clock.blocks.held[request] == 0 for request, since in first.items() if since <= number)
        found.append(number)
        return execute(plan, number, step)

    clock.execute = watched
    result = serve(prepare(scenario, schedule), clock, Source.MEASURED)
    assert result.generated == sum(clock.emitted.values())
    for request, output in enumerate(scenario.workload.output_len.tolist()):
        whole = clock.emitted[request] == output
        assert whole or (request in first and clock.emitted[request] < output)
        assert (request in result.latencies.request) == whole
    missing = sum(clock.emitted[n] < output for n, output in enumerate(scenario.workload.output_len.tolist()))
    assert not any(Step.LAST in step for step in clock.steps[:-1])
    assert Step.LAST in clock.steps[-1] or len(clock.steps) in first.values(), "it was known to be the last"
    assert result.facts.get("cancelled") == (f"{missing} requests" if missing else None)
    assert (clock.blocks.free, clock.blocks.used) == (scenario.kv_blocks, 0)
    clock.blocks.check()


def asked_to_stop(scenario):
    """Requests of the workload's lengths that may stop at a token."""
    lengths = zip(scenario.workload.prompt_len.tolist(), scenario.workload.output_len.tolist(), strict=True)
    return tuple(Request((0,) * prompt, output, Sampling(stop_token_ids=(1,))) for prompt, output in lengths)


@examples(40)
@given(scenarios(), st.integers(0, 20))
def test_blocks_come_back_when_the_clock_raises(case, fail_at):
    scenario, schedule = case
    clock = Counting(fail_at)
    try:
        serve(prepare(scenario, schedule), clock, Source.SIMULATED)
    except RuntimeError:
        assert len(clock.steps) == fail_at
    else:
        assert len(clock.steps) <= fail_at
    clock.blocks.check()
    assert (clock.blocks.free, clock.blocks.used) == (scenario.kv_blocks, 0)


class Losing(Counting):
    """A clock that loses a free block."""

    def execute(self, plan, number, step):
        self.blocks.free -= number == 0
        self.now += 1.0
        return {}


def test_a_block_lost_on_the_way_is_noticed_at_the_end():
    with pytest.raises(CapacityError, match="not conserved"):
        serve(prepare(tiny_scenario([5], [1]), Sequential()), Losing(), Source.SIMULATED)


@examples(25)
@given(scenarios())
def test_the_first_and_only_the_first_iteration_is_the_first_and_so_for_the_last(case):
    scenario, schedule = case
    clock = Counting()
    serve(prepare(scenario, schedule), clock, Source.SIMULATED)
    assert [Step.FIRST in step for step in clock.steps] == [True] + [False] * (len(clock.steps) - 1)
    assert [Step.LAST in step for step in clock.steps] == [False] * (len(clock.steps) - 1) + [True]


@pytest.mark.parametrize("schedule", [Sequential(2), VSLPipe()], ids=str)
def test_the_smallest_cache_serves_one_request_after_the_other(schedule):
    prompts, outputs = [1, 17, 40, 3, 25], [20, 3, 9, 1, 12]
    least = max(-(-(p + g - 1) // 4) for p, g in zip(prompts, outputs, strict=True))
    scenario = tiny_scenario(prompts, outputs, blocks=least, block=4)
    result = simulate(scenario, schedule)
    assert result.generated == sum(outputs)
    assert max(result.steps.used_blocks) <= least


def test_less_memory_means_more_preemption_and_never_another_answer():
    results = [simulate(tiny_scenario([8] * 20, [30] * 20, blocks=n, block=4), VSLPipe()) for n in (10, 30, 60, 1000)]
    assert [result.generated for result in results] == [600] * 4
    assert results[-1].preemptions == 0 < results[1].preemptions
    assert np.all(np.diff([result.seconds for result in results]) < 0)
