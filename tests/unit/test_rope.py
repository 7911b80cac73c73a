"""RoPE of a config.json: what is read, what follows, what is refused."""

import math

import pytest
import torch

from kernels_triton import LongRope, rope_table
from workbench.core.errors import ScenarioError
from workbench.models.rope import Rope

LONG = {
    "type": "longrope",
    "original_max_position_embeddings": 16,
    "short_factor": [1.0, 2.0],
    "long_factor": [3.0, 4.0],
    "long_mscale": 1.25,
}


def test_longrope_has_factors_for_contexts_within_the_trained_ones_and_beyond():
    """Ding et al., equation of section 3.3 for the factor where none is given."""
    found = Rope.of(LONG)
    usual = math.sqrt(1 + math.log(64 / 16) / math.log(16))
    assert found.longrope(16, 64) == ((1.0, 2.0), usual)
    assert found.longrope(17, 64) == ((3.0, 4.0), 1.25)


def test_longrope_divides_each_pairs_frequency():
    table = rope_table(4, 3, theta=100.0, scaling=LongRope((2.0, 5.0), attention=1.5))
    angles = torch.arange(3.0)[:, None] * torch.tensor([1 / 2, 1 / 50])
    torch.testing.assert_close(table, 1.5 * torch.cat((angles.cos(), angles.sin()), dim=1))
    with pytest.raises(ValueError, match="LongRope needs 3 factors, one for each pair, not 2"):
        rope_table(6, 3, scaling=LongRope((2.0, 5.0)))


def test_deepseeks_two_numbers_give_the_amplitude_and_the_factor_of_scores():
    raw = {"rope_type": "yarn", "factor": 40, "original_max_position_embeddings": 4096}
    plain = Rope.of(raw)
    assert plain.yarn_amplitude == pytest.approx(0.1 * math.log(40) + 1)
    assert plain.score_factor == 1.0
    both = Rope.of(raw | {"mscale": 1.0, "mscale_all_dim": 1.0})
    assert both.yarn_amplitude == 1.0
    assert both.score_factor == pytest.approx((0.1 * math.log(40) + 1) ** 2)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"type": "dynamic"}, "kind 'dynamic' is not understood"),
        ({"long_factor": []}, "long_factor"),
        ({"short_factor": [1.0, -2.0]}, "short_factor"),
        ({"short_factor": 3}, "short_factor=3"),
        ({"partial_rotary_factor": 1.5}, "partial_rotary_factor=1.5; give at most 1"),
        ({"original_max_position_embeddings": None}, "original_max_position_embeddings=None"),
        ({"long_mscale": "1"}, "long_mscale='1'"),
    ],
)
def test_bad_numbers_are_named(change, words):
    with pytest.raises(ScenarioError, match=words):
        Rope.of(LONG | change)
