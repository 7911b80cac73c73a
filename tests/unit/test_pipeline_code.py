"""Pipelines as code: what a cell says, and what is read from one."""

import pytest

from tests.builders import OWN
from tests.systems import PIPELINES, VSL, split
from workbench.core.errors import PipelineError
from workbench.pipeline import Pipeline, code_of, cpu, fetch, gpu, load, offload, pipeline_of
from workbench.stages import (
    ExpertSet,
    Op,
    attention,
    combine,
    decode_attention,
    experts,
    kv,
    moe,
    out_proj,
    prefill_attention,
    qkv,
    route,
    weights,
)

HOT = ExpertSet("hot", ((0, 3), (1, 2)))
WHOLE = gpu(qkv, attention, out_proj, moe)


def lines_of(pipeline, **given) -> list[str]:
    """The lines of a cell behind its imports."""
    return code_of(pipeline, **given).partition("\n\n")[2].splitlines()


def test_a_cell_imports_what_it_uses_and_assigns_the_layer():
    assert code_of(VSL) == (
        "from workbench.pipeline import (\n"
        "    cpu, fetch, gpu, load, offload,\n"
        ")\n"
        "from workbench.stages import (\n"
        "    decode_attention, moe, out_proj, prefill_attention, qkv,\n"
        "    weights,\n"
        ")\n"
        "\n"
        "layer = (\n"
        "    fetch(weights)\n"
        "    | gpu(qkv, prefill_attention)\n"
        "    >> offload\n"
        "    >> cpu(decode_attention)\n"
        "    >> load\n"
        "    >> gpu(out_proj, moe)\n"
        ")\n"
    )


@pytest.mark.parametrize(
    "pipeline, lines",
    [
        (Pipeline(), ["layer = Pipeline()"]),
        (fetch(kv), ["layer = fetch(kv)"]),
        (WHOLE, ["layer = gpu(qkv, attention, out_proj, moe)"]),
        (gpu(qkv) | cpu(route), ["layer = gpu(qkv) | cpu(route)"]),
        (gpu(qkv)[:3] + cpu(qkv)[3:], ["layer = gpu(qkv)[:3] + cpu(qkv)[3:]"]),
        (
            PIPELINES["ktransformers"],
            [
                "layer = (",
                "    gpu(qkv, attention, out_proj, route)",
                "    >> (",
                "        gpu(shared_experts)",
                "        | offload >> cpu(experts, defer=3) >> load",
                "    )",
                "    >> gpu(combine)",
                ")",
            ],
        ),
        (
            fetch(experts[2:].weights) | gpu(experts[:2], experts[2:]),
            ["layer = (", "    fetch(experts[2:].weights)", "    | gpu(experts[:2], experts[2:])", ")"],
        ),
        (gpu(experts[HOT]), ['hot = ExpertSet("hot", [[0, 3], [1, 2]])', "layer = gpu(experts[hot])"]),
    ],
)
def test_the_lines_of_a_cell(pipeline, lines):
    assert lines_of(pipeline) == lines


def test_weights_of_a_set_that_nobody_knows_cannot_be_written():
    with pytest.raises(PipelineError, match="neither in the pipeline nor among the given names"):
        code_of(fetch(experts[HOT].decode.weights))
    assert lines_of(fetch(experts[HOT].decode.weights), names={"few": ~HOT}) == [
        "layer = fetch(experts[~few].decode.weights)"
    ]


def test_a_set_and_the_rest_of_it_share_one_definition():
    cell = code_of(split(slice(None, 2)))
    assert 'experts_2 = ExpertSet(":2", bounds=(0, 2))' in cell
    assert "experts[experts_2]" in cell
    assert "experts[~experts_2]" in cell


def test_two_sets_of_one_name_get_names_of_their_own():
    other = ExpertSet("hot", ((1,),))
    stack = gpu(experts[HOT])[:1] + gpu(experts[other])[1:]
    assert lines_of(stack)[:2] == ['hot = ExpertSet("hot", [[0, 3], [1, 2]])', 'hot_2 = ExpertSet("hot", [[1]])']
    assert pipeline_of(code_of(stack)) == stack


def test_long_rows_of_experts_fill_their_lines():
    large = gpu(experts[ExpertSet("large", (range(256), range(256)))])
    lines = code_of(large).splitlines()
    assert max(map(len, lines)) <= 60
    assert len(lines) < 75
    assert pipeline_of("\n".join(lines)) == large


def test_what_the_user_defined_stands_under_its_name():
    names = {"mine": OWN, "few": HOT, "gpu": OWN, "not a name": OWN}
    pipeline = gpu(OWN, experts[~HOT])
    assert lines_of(pipeline, names=names) == ["layer = gpu(mine, experts[~few])"]
    assert pipeline_of(code_of(pipeline, names), names) == pipeline


def test_an_operation_under_no_name_is_written_with_a_comment():
    odd = Op("a b", ("x",), ("x",))
    lines = lines_of(gpu(odd))
    assert lines == ["# define a_b before this: your Op('a b', ...)", "layer = gpu(a_b)"]


@pytest.mark.parametrize("name", ["gpu", "3", "for", "a b"])
def test_the_name_must_be_one_of_a_new_variable(name):
    with pytest.raises(PipelineError, match="is no name for a new variable"):
        code_of(WHOLE, name=name)


@pytest.mark.parametrize(
    "text, pipeline",
    [
        ("gpu(qkv, attention, out_proj, moe)", WHOLE),
        ("mine = (qkv, attention)\nlayer = gpu(mine, out_proj, *moe)", WHOLE),
        (
            "a = gpu(qkv)\nb = c = offload >> cpu(decode_attention)\n\nlayer = a >> b  # joined",
            gpu(qkv) >> offload >> cpu(decode_attention),
        ),
        ("fetch(weights) | gpu(qkv) >> offload", fetch(weights) | gpu(qkv) >> offload),
        ("(gpu(qkv) | cpu(route)) >> load", (gpu(qkv) | cpu(route)) >> load),
        ("import workbench as wb\nfrom workbench.stages import qkv as first\ngpu(first)", gpu(qkv)),
        ("hot = ExpertSet('hot', table=[(0, 3), (1, 2)])\ngpu(experts[~hot].prefill)", gpu(experts[~HOT].prefill)),
        ("cold = ~ExpertSet.of_slice(slice(2))\ngpu(experts[cold])", gpu(experts[~ExpertSet.of_slice(slice(2))])),
        ("gpu(experts[-2:])", gpu(experts[-2:])),
        ("cpu(experts, defer=2, skip=1)", cpu(experts, defer=2, skip=1)),
        ("fetch(experts.chosen, kv) | gpu(experts)", fetch(experts.chosen, kv) | gpu(experts)),
        ("p = gpu(qkv)\np[:2] + p[2:-1] + p[-1:]", gpu(qkv)[:2] + gpu(qkv)[2:-1] + gpu(qkv)[-1:]),
        ("Pipeline() >> load", load),
        ("gpu(route, combine, experts[:2])", gpu(route, combine, experts[:2])),
    ],
)
def test_a_cell_is_read_as_python_runs_it(text, pipeline):
    assert pipeline_of(text) == pipeline


@pytest.mark.parametrize(
    "text, line, words",
    [
        ("", 1, "the cell is empty"),
        ("\ngpu(qkv", 2, "this is no Python"),
        ("\n\ngpu(qvk)", 3, "'qvk' is not known; did you mean qkv?"),
        ("gpu(zz)", 1, "assign it in a line above, or define the operation in a cell before"),
        ("from workbench.stages import qvk", 1, "workbench.stages has no qvk to wire with; did you mean qkv?"),
        ("import os", 1, "only imports from workbench.pipeline and workbench.stages are read here"),
        ("from . import qkv", 1, "only imports from workbench.pipeline"),
        ("x = 3", 1, "the last line gives a number, not a pipeline"),
        ("gpu(qkv) >> attention", 1, "operators join pipelines, not attention; place it first"),
        ("gpu(qkv) * gpu(route)", 1, "this operator is no part of a pipeline"),
        ("gpu(qkv, defer=3)", 1, "gpu(...) takes no defer=; it takes skip="),
        ("fetch(kv, **x)", 1, "takes no **="),
        ("fetch(qkv)", 1, "fetch takes weights, kv"),
        ("gpu(qkv.weigths)", 1, "qkv has no .weigths; did you mean weights?"),
        ("gpu.__globals__", 1, "gpu has no .__globals__"),
        ("qkv.run", 1, "qkv has no .run"),
        ("~gpu(qkv)", 1, "~ takes a set of experts, not a pipeline"),
        ("offload[3]", 1, "a pipeline takes a range of layers"),
        ("weights[:2]", 1, "not behind weights"),
        ("gpu(qkv)(3)", 1, "a pipeline is not called"),
        ("Pipeline(qkv)", 1, "Pipeline() takes nothing here"),
        ("[gpu(a) for a in moe]", 1, "is no part of a pipeline"),
        ("for a in moe: pass", 1, "a line that is no assignment is not read"),
        ("a.b = gpu(qkv)", 1, "a pipeline is assigned to one name"),
        ("gpu(*qkv)", 1, "* takes a tuple of operations, not qkv"),
        ("gpu(qkv) + gpu(qkv)", 1, "+ puts ranges of layers behind one another"),
        ("p = gpu(qkv)\np[:2] + p[3:]", 2, "leave out layer 2"),
        ("layer = (\n    gpu(qkv)\n    >> cpu(route, attention)\n)", 3, "Put offload between them"),
        ("ExpertSet('hot')", 1, "has no rows"),
        ("ExpertSet()", 1, "cannot be read"),
        ("gpu(experts[2])", 1, "experts[...] takes a range or an ExpertSet"),
    ],
)
def test_what_is_no_pipeline_is_refused_with_its_line(text, line, words):
    with pytest.raises(PipelineError) as refused:
        pipeline_of(text)
    assert refused.value.line == line
    assert str(refused.value).startswith(f"line {line}: ") or not text
    assert words in str(refused.value)


@pytest.mark.parametrize(
    "text",
    [
        "layer = " + "(" * 5000 + "gpu(qkv)" + ")" * 5000,
        "layer = " + "~" * 50_000 + "hot",
        "layer = " + " >> ".join(["load"] * 12_000),
        "gpu(" * 150 + ")" * 150,
        "a = gpu(qkv)\n" + "a = a | a\n" * 60,
        "a = (qkv,)\n" + "a = (a, a)\n" * 60 + "gpu(a)",
        "p = gpu(qkv)\n" + "p[:1] + " * 1100 + "p[1:]",
        "gpu(experts[0x" + "f" * 90_000 + ":])",
        "gpu(experts[" + "9" * 5000 + ":])",
        "# " + "a" * 100_000,
        "gpu(qkv)\0",
    ],
)
def test_texts_that_would_take_long_are_refused(text):
    with pytest.raises(PipelineError):
        pipeline_of(text)


def test_large_numbers_are_read():
    assert pipeline_of(f"gpu(experts[:{10**30}])") == gpu(experts[: 10**30])


def test_nothing_of_a_cell_is_run(tmp_path):
    mark = tmp_path / "mark"
    for text in (f"open({str(mark)!r}, 'w')", f"gpu(qkv) if open({str(mark)!r}, 'w') else 0", "exec('1')"):
        with pytest.raises(PipelineError):
            pipeline_of(text)
    assert not mark.exists()


def test_a_word_keeps_its_meaning_whatever_the_user_calls_so():
    assert pipeline_of("gpu(qkv)", {"qkv": OWN}) == gpu(qkv)
    assert pipeline_of("gpu(combine, prefill_attention)", {}) == gpu(combine, prefill_attention)
    assert pipeline_of("cpu(decode_attention)") == cpu(decode_attention)
    assert pipeline_of("fetch(weights) | offload") == fetch(weights) | offload
