"""The checkpoints that make-checkpoint makes have the sizes that are said of them."""

from dataclasses import replace

import pytest

from workbench.core.errors import CheckpointError
from workbench.engine.tiny_model import synthesize
from workbench.engine.tiny_model.synthesize import RECIPES, write_checkpoint
from workbench.models import checkpoint

SIZES = {"mix-s": 0.228, "mix-b": 3.03, "mix-w": 12.47, "qwen-s": 0.2535, "deepseek-s": 0.22}


@pytest.mark.parametrize(("name", "gigabytes"), SIZES.items())
def test_size(name, gigabytes):
    assert RECIPES[name].params * 2 / 1e9 == pytest.approx(gigabytes, rel=0.005)


def test_another_model_is_never_overwritten(tmp_path):
    (tmp_path / "config.json").write_text("{}", encoding="utf-8")
    with pytest.raises(CheckpointError, match="holds another model; give an empty folder"):
        write_checkpoint(RECIPES["mix-s"], tmp_path)
    assert (tmp_path / "config.json").read_text(encoding="utf-8") == "{}"


def test_a_checkpoint_is_the_same_for_the_same_seed_and_made_once(tmp_path):
    tiny = replace(RECIPES["mix-s"], num_hidden_layers=1, hidden_size=32, intermediate_size=16, vocab_size=64)
    first, second = (write_checkpoint(tiny, tmp_path / folder, seed=3) for folder in "ab")
    other = write_checkpoint(tiny, tmp_path / "c", seed=4)
    file = "model-00001.safetensors"
    assert (first / file).read_bytes() == (second / file).read_bytes() != (other / file).read_bytes()
    written = (first / file).stat().st_mtime_ns
    write_checkpoint(tiny, first, seed=3)
    assert (first / file).stat().st_mtime_ns == written
    assert checkpoint(first).params == tiny.params


@pytest.mark.parametrize("files", [0, 1, 2, 3])
def test_killed_over_another_seeds_files_it_leaves_no_checkpoint_and_the_next_call_mends_it(
    files, tmp_path, monkeypatch
):
    """No mixture of two seeds' weights ever loads, whenever it was killed."""
    tiny = replace(RECIPES["mix-s"], num_hidden_layers=3, hidden_size=32, intermediate_size=16, vocab_size=64)
    folder = write_checkpoint(replace(tiny, num_hidden_layers=5), tmp_path / "a", seed=1)
    written, save = [], synthesize.save_file

    def save_some(tensors, file, metadata):
        if len(written) == files:
            raise KeyboardInterrupt
        written.append(file)
        save(tensors, file, metadata)

    with monkeypatch.context() as patch:
        patch.setattr(synthesize, "save_file", save_some)
        with pytest.raises(KeyboardInterrupt):
            write_checkpoint(tiny, folder, seed=2)
    with pytest.raises(CheckpointError, match=r"has no config\.json"):
        checkpoint(folder)
    fresh = write_checkpoint(tiny, tmp_path / "b", seed=2)
    write_checkpoint(tiny, folder, seed=2)
    found, expected = ({file.name: file.read_bytes() for file in place.iterdir()} for place in (folder, fresh))
    assert found == expected
