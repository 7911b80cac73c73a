"""Results side by side: the share of the bound, and the difference in words."""

from dataclasses import replace

import matplotlib.pyplot as plt
import pytest

from tests.builders import tiny_scenario
from workbench.analysis.compare import compare
from workbench.core.result import Source
from workbench.perfmodels import bound
from workbench.schedules import Sequential, VSLPipe
from workbench.simulate import Detail, simulate

SCENARIO = tiny_scenario([8] * 6, [5] * 6, blocks=9)
RESULTS = [read(SCENARIO, schedule) for schedule in (Sequential(), VSLPipe()) for read in (bound, simulate)]


def test_rows_stand_in_the_order_given():
    rows = compare(RESULTS).rows()
    assert [row[1] for row in rows] == ["bound", "simulated", "bound", "simulated"]
    assert rows[0][0].startswith("Sequential")
    assert rows[3][0].startswith("VSLPipe")


def test_each_simulation_is_measured_against_the_bound_of_its_own_schedule():
    share = compare(RESULTS).rows()[1][4]
    assert share == f"{RESULTS[1].gen_tok_s / RESULTS[0].gen_tok_s:.0%}"
    assert compare(RESULTS[1:2]).rows()[0][4] == ""


def test_another_question_has_another_bound():
    other = simulate(SCENARIO.on(workload=tiny_scenario([8] * 7, [5] * 7).workload), Sequential())
    assert compare([RESULTS[0], other]).rows()[1][4] == ""


def test_preemptions_are_told_of_runs_and_not_of_bounds():
    rows = compare(RESULTS).rows()
    assert rows[0][7] == ""
    assert int(rows[1][7]) == RESULTS[1].preemptions > 0


def ranking(*results):
    return next(said for said in compare(results).explanations() if said.startswith("Of the "))


def test_schedules_are_ranked_against_the_next_best_and_the_first_one():
    first, last = RESULTS[1], RESULTS[3]
    middle = replace(last, schedule="Other", seconds=last.seconds * 1.5)
    slow = replace(first, seconds=last.seconds * 3)
    near = replace(first, seconds=last.seconds * 1.01)
    begin = "schedules that were simulated, VSLPipe is the fastest"
    assert ranking(slow, middle, last) == (
        f"Of the 3 {begin}: 1.50 times as fast as Other and 3.00 times as fast as {first.schedule}."
    )
    assert ranking(middle, last) == f"Of the 2 {begin}: 1.50 times as fast as Other."
    assert ranking(middle, near, last) == (
        f"Of the 3 {begin}: less than 2 % faster than {first.schedule} and 1.50 times as fast as Other."
    )
    assert ranking(near, last) == f"Of the 2 {begin}, and all are within 2 % of it."


def test_a_schedule_that_ran_again_is_ranked_once_and_one_that_generated_nothing_not_at_all():
    first, last = RESULTS[1], RESULTS[3]
    again = replace(last, seconds=last.seconds * 1.1)
    ranked = ranking(replace(first, seconds=last.seconds * 2), again, last)
    assert ranked.endswith(f"VSLPipe is the fastest: 2.00 times as fast as {first.schedule}.")
    assert not any("the fastest" in said for said in compare([replace(first, generated=0), last]).explanations())


def test_schedules_are_ranked_within_one_question_and_source_only():
    first, last = RESULTS[1], RESULTS[3]
    strangers = [
        replace(first, source=Source.MEASURED),
        replace(first, machine="other"),
        replace(first, facts={**first.facts, "kv": "another"}),
        replace(first, stopped=True),
        RESULTS[0],
        replace(first, schedule=last.schedule),
    ]
    assert not any("the fastest" in said for other in strangers for said in compare([last, other]).explanations())


def test_a_simulation_is_explained_against_its_bound():
    sentence, _ = compare(RESULTS[2:]).explanations()
    assert f"simulated {RESULTS[3].gen_tok_s:.4g} output tok/s, " in sentence
    assert f" of the bound's {RESULTS[2].gen_tok_s:.4g}" in sentence
    assert " limits VSLPipe (simulated " in sentence


def test_processing_more_than_the_bound_is_explained_by_what_is_computed_again():
    least, played = RESULTS[2:]
    assert played.recomputed
    assert played.proc_tok_s > least.proc_tok_s
    assert "computed again after a preemption" in compare([least, played]).explanations()[-1]
    ample = tiny_scenario([8] * 6, [5] * 6)
    assert len(compare([bound(ample, VSLPipe()), simulate(ample, VSLPipe())]).explanations()) == 1


def test_a_measurement_is_explained_against_its_simulation():
    simulated = RESULTS[3]
    busy = {lane: seconds * (3 if lane == "h2d" else 1) for lane, seconds in simulated.busy.items()}
    measured = replace(simulated, source=Source.MEASURED, seconds=2 * simulated.seconds, busy=busy)
    limits, sentence = compare([simulated, measured]).explanations()
    assert f"(measured {measured.gen_tok_s:.4g} output tok/s)" in limits
    assert f"measured {measured.gen_tok_s:.4g} of {simulated.gen_tok_s:.4g} simulated output tok/s, 50 %)" in sentence
    assert ": the link to the GPU (h2d) worked " in sentence


def test_results_of_different_schedules_or_machines_are_not_explained_by_one_another():
    for results in ([RESULTS[0], RESULTS[3]], [RESULTS[2], replace(RESULTS[3], machine="other")]):
        (sentence,) = compare(results).explanations()
        assert f"(simulated {RESULTS[3].gen_tok_s:.4g} output tok/s)" in sentence


def test_the_table_is_text_and_html():
    comparison = compare(RESULTS)
    assert len(str(comparison).splitlines()) == 1 + 4 + 1 + 4
    assert comparison._repr_html_().count("<tr>") == 5
    assert str(comparison) == repr(comparison)


def test_html_escapes_names():
    shown = compare([replace(RESULTS[0], schedule="<script>")])._repr_html_()
    assert "<script>" not in shown
    assert "&lt;script&gt;" in shown


def test_a_frame_has_plain_units():
    frame = compare(RESULTS).to_pandas()
    assert frame["source"].tolist() == ["bound", "simulated", "bound", "simulated"]
    assert frame["seconds"].tolist() == [result.seconds for result in RESULTS]


@pytest.mark.parametrize("nothing", [[], [1, 2], [None]])
def test_nothing_to_compare_is_an_error(nothing):
    with pytest.raises(ValueError, match="at least one Result"):
        compare(nothing)


def test_a_generator_of_results_is_fine():
    assert len(compare(result for result in RESULTS).results) == 4


PREDICTED = replace(RESULTS[3], source=Source.PREDICTED, predictor="A", seconds=RESULTS[3].seconds * 2)


def test_a_prediction_is_told_by_its_distance_to_bound_and_simulation():
    rate, simulated = PREDICTED.gen_tok_s, RESULTS[3].gen_tok_s
    assert rate == simulated / 2
    _, sentence, _ = compare([*RESULTS[2:], PREDICTED]).explanations()
    most = RESULTS[2].gen_tok_s
    assert sentence == (
        f"A predicts {rate:.4g} output tok/s for VSLPipe, {100 * rate / most:.0f} % of the bound ({most:.4g}) and "
        f"50.0 % less than was simulated ({simulated:.4g}); in its equations the link to the GPU (h2d) limits."
    )
    quick = replace(PREDICTED, seconds=RESULTS[2].seconds / 2)
    _, sentence = compare([RESULTS[2], quick]).explanations()
    assert f"200 % of the bound ({most:.4g}, more than is possible)" in sentence
    assert len(compare([PREDICTED]).explanations()) == 1


def test_several_models_stand_side_by_side_in_table_and_picture():
    other = replace(PREDICTED, predictor="B", seconds=PREDICTED.seconds / 3)
    comparison = compare([RESULTS[2], PREDICTED, other, RESULTS[3]])
    assert [row[1] for row in comparison.rows()] == ["bound", "predicted by A", "predicted by B", "simulated"]
    assert [row[4] for row in comparison.rows()][1:3] == [
        f"{result.gen_tok_s / RESULTS[2].gen_tok_s:.0%}" for result in (PREDICTED, other)
    ]
    assert comparison.to_pandas()["predictor"].tolist() == ["", "A", "B", ""]
    ax = comparison.plot()
    widths = [bar.get_width() for bar in ax.patches]
    assert widths == [result.gen_tok_s for result in (RESULTS[2], PREDICTED, other, RESULTS[3])]
    assert len({bar.get_facecolor() for bar in ax.patches}) == 4
    labels = [text.get_text() for text in ax.get_legend().get_texts()]
    assert labels == ["bound", "predicted by A", "predicted by B", "simulated"]
    plt.close(ax.figure)


def test_a_source_of_a_later_schedule_only_is_in_the_legend():
    ax = compare([RESULTS[0], RESULTS[2], RESULTS[3]]).plot()
    assert [text.get_text() for text in ax.get_legend().get_texts()] == ["bound", "simulated"]
    plt.close(ax.figure)


def test_a_run_whose_tasks_are_known_is_explained_by_cause_and_against_the_bound():
    simulated = simulate(SCENARIO, VSLPipe(), detail=Detail.TASK)
    measured = replace(simulated, source=Source.MEASURED, seconds=simulated.seconds + 2.0)
    limits, against_simulation, of_simulation, _ = compare([RESULTS[2], simulated, measured]).explanations()
    assert (
        f": the link to the GPU (h2d) was idle {2e3:.0f} ms more between iterations;" in against_simulation
        or ": the link to the GPU (h2d) was idle 2.00 s more between iterations;" in against_simulation
    )
    assert f"that is {2 / measured.iterations * 1e3:.3g} ms more per iteration" in against_simulation
    for told, result in ((limits, measured), (of_simulation, simulated)):
        share = 100 * result.gen_tok_s / RESULTS[2].gen_tok_s
        rate = f"{result.gen_tok_s:.4g} output tok/s, {share:.0f} % of the bound's {RESULTS[2].gen_tok_s:.4g}"
        assert f"{result.origin} {rate}" in told
