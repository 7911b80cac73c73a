"""Sliders over a function that draws, set in plain Python."""

import base64

import pytest

from workbench.widgets import Sliders


def draw(ax, power=2, colour="red"):
    if power > 4:
        raise ValueError(f"power={power} is <too much>; give at most 4.")
    ax.plot([1, 2, 3], [1, 2**power, 3**power], color=colour)
    return ax


@pytest.fixture
def shown():
    seen = Sliders(draw, power=[1, 2, 3, 5], colour={"warm": "red", "cold": "blue"})
    yield seen
    seen.close()


def png(seen):
    return bytes(seen.picture.value)


def test_controls_start_at_the_functions_own_values_else_in_the_middle(shown):
    assert shown.values == {"power": 2, "colour": "red"}
    assert Sliders(draw, power=[1, 3, 4]).values == {"power": 3}


def test_a_moved_slider_draws_another_picture_and_back_the_same(shown):
    before = png(shown)
    assert before.startswith(b"\x89PNG")
    shown.controls["power"].value = 3
    assert png(shown) != before
    shown.controls["colour"].value = "blue"
    shown.controls["power"].value, shown.controls["colour"].value = 2, "red"
    assert png(shown) == before


def test_labels_are_words_and_numbers_as_one_writes_them():
    seen = Sliders(lambda ax, kv_cache, requests: ax, kv_cache=["35GB", "70GB"], requests=[100, 20_000])
    assert [control.description for control in seen.controls.values()] == ["kv cache", "requests"]
    assert [label for label, _ in seen.controls["requests"].options] == ["100", "20,000"]
    assert [label for label, _ in seen.controls["kv_cache"].options] == ["35GB", "70GB"]


def test_what_cannot_be_drawn_is_told_below_the_controls_until_mended(shown):
    before = png(shown)
    shown.controls["power"].value = 5
    assert "power=5 is &lt;too much&gt;; give at most 4." in shown.said.value
    assert png(shown) == before
    shown.controls["power"].value = 2
    assert shown.said.value == ""


def test_a_start_that_fails_is_raised():
    with pytest.raises(ValueError, match="too much"):
        Sliders(draw, power=[5])
    with pytest.raises(TypeError, match="no argument 'powers'"):
        Sliders(draw, powers=[1, 2])


def test_a_page_without_kernel_has_the_picture(shown):
    bundle = shown._repr_mimebundle_()
    assert base64.b64decode(bundle["image/png"]) == png(shown)
    assert "application/vnd.jupyter.widget-view+json" in bundle


def drawn(ax, n=3, **others):
    ax.plot([n, *others.values()])
    return ax


@pytest.mark.parametrize(
    ("choices", "error", "words"),
    [
        ({"n": []}, ValueError, "n has no choice; give at least one"),
        ({"n": {}}, ValueError, "n has no choice; give at least one"),
        ({"n": 3}, TypeError, "n has the choices 3; give a sequence, or a mapping of labels to values"),
        ({"n": None}, TypeError, "n has the choices None"),
        ({"ax": [1]}, TypeError, "no argument 'ax' for a control to set"),
    ],
)
def test_choices_that_make_no_control_are_refused(choices, error, words):
    with pytest.raises(error, match=words):
        Sliders(drawn, **choices)


def test_any_value_has_a_label():
    values = [1_234_567, 0.25, True, None, (1, 2), "text"]
    control = Sliders(lambda ax, n="text": ax, n=values).controls["n"]
    assert [label for label, _ in control.options] == ["1,234,567", "0.25", "True", "None", "(1, 2)", "text"]


def test_a_function_that_takes_any_arguments_has_controls_for_them():
    assert Sliders(drawn, other=[1, 2, 3]).values == {"other": 2}
