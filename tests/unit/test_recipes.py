"""The checkpoints that make-checkpoint makes have the sizes that are said of them."""

import pytest

from workbench.engine.synthesize import RECIPES, write_checkpoint
from workbench.errors import CheckpointError
from workbench.models import checkpoint


@pytest.mark.parametrize(("name", "gigabytes"), [("mix-s", 0.228), ("mix-b", 3.03), ("qwen-s", 0.2535)])
def test_size(name, gigabytes):
    assert RECIPES[name].params * 2 / 1e9 == pytest.approx(gigabytes, rel=0.005)


def test_another_model_is_never_overwritten(tmp_path):
    (tmp_path / "config.json").write_text("{}", encoding="utf-8")
    with pytest.raises(CheckpointError, match="holds another model; give an empty folder"):
        write_checkpoint(RECIPES["mix-s"], tmp_path)
    assert (tmp_path / "config.json").read_text(encoding="utf-8") == "{}"


def test_a_checkpoint_is_the_same_for_the_same_seed_and_made_once(tmp_path):
    from dataclasses import replace

    tiny = replace(RECIPES["mix-s"], num_hidden_layers=1, hidden_size=32, intermediate_size=16, vocab_size=64)
    first, second = (write_checkpoint(tiny, tmp_path / folder, seed=3) for folder in "ab")
    other = write_checkpoint(tiny, tmp_path / "c", seed=4)
    file = "model-00001.safetensors"
    assert (first / file).read_bytes() == (second / file).read_bytes() != (other / file).read_bytes()
    written = (first / file).stat().st_mtime_ns
    write_checkpoint(tiny, first, seed=3)
    assert (first / file).stat().st_mtime_ns == written
    assert checkpoint(first).params == tiny.params
