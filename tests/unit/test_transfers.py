"""Where the transfers go that a chain needs."""

import pytest

from tests.systems import PIPELINES, split
from workbench.pipeline import Fork, Pipeline, connected, cpu, gpu, load, offload, resolve
from workbench.pipeline.transfers import bare
from workbench.stages import (
    Move,
    Op,
    Place,
    RowClass,
    Stage,
    attention,
    combine,
    decode_attention,
    experts,
    moe,
    out_proj,
    prefill_attention,
    qkv,
    route,
    shared_experts,
)

GPU, CPU = Place.GPU, Place.CPU


def on(device: Place, *ops: Op) -> tuple[Stage, ...]:
    return tuple(Stage(op, device) for op in ops)


def test_a_transfer_stands_before_the_first_stage_that_reads_what_is_elsewhere():
    chain = (*on(GPU, qkv), *on(CPU, decode_attention), *on(GPU, prefill_attention, out_proj, *moe))
    assert str(connected(Pipeline(chain))) == (
        "gpu(qkv) >> offload >> cpu(decode_attention) >> gpu(prefill_attention) >> load >> "
        "gpu(out_proj, route, experts, combine)"
    )


def test_what_the_next_layer_reads_first_comes_at_the_end():
    chain = (*on(CPU, qkv), *on(GPU, *attention, out_proj, *moe))
    assert connected(Pipeline(chain)) == cpu(qkv) >> load >> gpu(attention, out_proj, moe) >> offload


def test_an_arm_ends_with_what_stages_behind_the_fork_read():
    bare_ = Pipeline(bare(PIPELINES["ktransformers"].chain))
    assert bare_.chain[5] == Fork((on(GPU, shared_experts), (Stage(experts, CPU, 3),)))
    assert connected(bare_) == PIPELINES["ktransformers"]


def test_each_arm_brings_what_it_reads():
    both = Pipeline(
        (*on(GPU, qkv), Fork((on(CPU, prefill_attention), on(CPU, decode_attention))), *on(GPU, out_proj, *moe))
    )
    one_more = (
        gpu(qkv)
        >> (offload >> cpu(prefill_attention) >> load | offload >> cpu(decode_attention) >> load)
        >> gpu(out_proj, moe)
    )
    assert connected(both) == one_more
    resolve(one_more)


def test_transfers_that_stand_elsewhere_are_put_where_they_belong():
    eager = gpu(qkv) >> offload >> gpu(prefill_attention) >> cpu(decode_attention) >> load >> gpu(out_proj, moe)
    assert str(connected(eager)).startswith("gpu(qkv, prefill_attention) >> offload >> cpu(decode_attention) >> load")


def test_a_transfer_stands_before_a_fork_where_an_arm_alone_would_move_nothing():
    """The residual stream is never written again, so in later layers it is on both devices already."""
    keys = Op("keys", ("x",), ("k", "v"))
    keeper = Op("keeper", ("k", "v"), ("y",), keeps_kv=True)
    beside = Op("beside", ("x",), ("aside",))
    chain = (*on(GPU, keys), Fork((on(CPU, keeper), on(CPU, beside))))
    assert connected(Pipeline(chain)) == gpu(keys) >> offload >> (cpu(keeper) | cpu(beside))


def test_stages_that_no_transfer_helps_stay_as_they_are():
    chain = (*on(GPU, out_proj), *on(CPU, experts))
    assert connected(Pipeline(chain)).chain == chain


@pytest.mark.parametrize("chain", [(), (Move(CPU),), (Fork(((Move(CPU),), (Move(GPU),))),)])
def test_of_transfers_alone_nothing_is_left(chain):
    assert connected(Pipeline(chain)).chain == ()


def test_a_fork_of_one_arm_and_an_arm_that_is_a_fork_are_dissolved():
    inner = Fork((on(GPU, route), on(GPU, shared_experts)))
    assert bare((Fork((on(GPU, qkv), (Move(CPU),))),)) == on(GPU, qkv)
    assert bare((Fork((on(GPU, qkv), (inner,))),)) == (Fork((on(GPU, qkv), *inner.arms)),)


def test_rows_that_two_arms_write_apart_join_behind_the_fork():
    """Prefill rows are written on the GPU, decode rows on the CPU, whose arm alone ends with a transfer."""
    apart = split(slice(None, 2))
    rows = Pipeline(
        (
            *on(GPU, qkv, *attention, out_proj, route),
            Fork((on(GPU, experts.prefill), on(CPU, experts.decode))),
            *on(GPU, combine),
        )
    )
    assert [len(arm) for arm in connected(rows).chain[5].arms] == [1, 3]
    assert [len(arm) for arm in apart.chain[5].arms] == [1, 3]
    assert {buffer_rows for _, carried in resolve(connected(rows)).carries for buffer_rows in carried} == {
        ("h", RowClass.DECODE),
        ("gates", RowClass.DECODE),
        ("routed", RowClass.DECODE),
    }
    assert load.chain == (Move(GPU),)
