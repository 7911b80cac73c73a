"""One law for all doors, drawn from the table of doors: `law_of_doors.py` says it."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.examples import examples
from tests.kernels.doors import DISPATCHED, DOORS, WAYS_TO_PACK, without_a_door
from tests.kernels.law_of_doors import check, drawn
from workbench import kernels

CALLS = 40
"""Drawn calls per door."""
MEASURES = {"copy_rate", "link_rates", "matmul_rate", "multiply_add"}
SAYS = {"cpu_family", "has_products", "features", "fits_few_rows", "numa_nodes", "empty_in_huge_pages", "parameters"}
STORED = {"experts_in_rows", "fp8_weights", "int4_codes", "int4_weights", "mxfp4_weights", "pack_int4", "pack_mxfp4"}
"""Formats of weights: `test_stored_formats`, `test_fused_moe_cpu` and `test_experts_in_rows` have their oracles."""
COMPILES = {"warm_up_experts"}


@pytest.mark.parametrize("name", DOORS | DISPATCHED)
@examples(CALLS)
@given(st.randoms(use_true_random=False))
def test_any_call_gives_the_answer_of_float64_or_an_error_of_ours(name, random):
    check(drawn((DOORS | DISPATCHED)[name], random))


def test_every_op_has_a_door_in_the_table():
    assert without_a_door() == []


def test_every_other_name_is_a_type_a_measure_or_told():
    others = MEASURES | SAYS | STORED | COMPILES | WAYS_TO_PACK
    for name in kernels.__all__:
        is_type = isinstance(getattr(kernels, name), type)
        told = name.endswith(("_work", "_reference"))
        assert name in DOORS or name in others or is_type or told
