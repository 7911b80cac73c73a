"""What the bench of shares compares: placements of one question on one slow link, and ratios of their own kind."""

import pytest

from tests.builders import small_machine, tiny_model
from workbench.bench.live import shares
from workbench.bench.live.shares import SHARES, Way
from workbench.simulate import simulate

MODEL = tiny_model(4)
MACHINE = small_machine(h2d=1e6)


def test_shares_of_the_weights_stay_on_a_link_that_binds() -> None:
    ways = shares._shares(MODEL, MACHINE, 2)
    assert [way.scenario.memory.weights_on_gpu for way in ways] == list(SHARES)
    assert [way.limit for way in ways] == [1 / (1 - share) for share in SHARES]
    gains = [ways[0].simulated / way.simulated for way in ways]
    assert gains == sorted(gains)
    assert 1 < gains[-1] <= ways[-1].limit


def test_the_most_used_experts_are_those_of_the_counted_run() -> None:
    counted = simulate(shares._scenario(shares.STREAMED, MODEL, MACHINE, 2), shares.SCHEDULE)
    object.__setattr__(counted, "expert_counts", ((1, 5, 2, 2),) * 4)
    chosen, kept = shares._used(MODEL, MACHINE, 2, counted)
    sets = {stage.op.name for stage in kept.scenario.stages if stage.op.subset is not None}
    assert sets == {"experts[1 most used]", "experts[~1 most used]"}
    assert kept.simulated < chosen.simulated


def test_each_placement_is_compared_with_the_first_of_its_kind() -> None:
    of = shares._scenario(shares.STREAMED, MODEL, MACHINE, 2)
    ways = [Way(f"{share:.0%}", of, 1 / (1 - share), 4.0, [4.0 - share]) for share in SHARES]
    ways += [Way("chosen", of, None, 3.0, [3.0, 3.2]), Way("used", of, None, 1.5, [2.0, 1.6])]
    found = shares._ratios(ways)
    assert list(found) == ["10% / 0%, speed", "20% / 0%, speed", "30% / 0%, speed", "used / chosen, speed"]
    assert found["20% / 0%, speed"]["median"] == pytest.approx(4.0 / 3.8)
    used = found["used / chosen, speed"]
    assert (used["median"], used["min"], used["max"]) == pytest.approx((3.1 / 1.8, 1.5, 2.0))
    assert used["simulated"] == 2.0
    assert "limit" not in used
