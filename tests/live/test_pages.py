"""A weight transfer in pages brings what the whole one brings, into one slot, and has arrived with the last page."""

import numpy as np
import pytest

from tests.systems import LIGHTNING
from workbench.core.errors import EngineError
from workbench.engine.devices.host import HostStream
from workbench.engine.model.weights import WeightBuffer, WeightStore
from workbench.models import ModelConfig
from workbench.pipeline.stack_graph import stack_graph
from workbench.schedules.plan import Page
from workbench.stages import Precision, experts


@pytest.mark.parametrize("pages", [1, 2, 3, 7, 1000])
def test_pages_bring_what_the_whole_transfer_brings(pages: int, tiny: ModelConfig) -> None:
    stack = stack_graph(LIGHTNING, tiny)
    store = WeightStore(tiny, Precision("fp32", "fp32"), stack)
    (node,) = stack.streamed(1)
    size = sum(stored.tensor.nbytes for stored in store.sources(0, experts))
    paged, whole = (WeightBuffer(store, stack, size, 2) for _ in range(2))
    arrive(whole.transfer([(1, node)]))
    moved = 0
    for number in range(pages):
        with pytest.raises(EngineError, match="in no slot"):
            paged.get(1, experts)
        transfer = paged.transfer([(1, node)], Page(number, pages))
        begin, end = Page(number, pages).cut(size)
        assert transfer.bytes == end - begin
        moved += transfer.bytes
        arrive(transfer)
    assert moved == size
    for key, tensor in whole.get(1, experts).items():
        assert np.array_equal(tensor, paged.get(1, experts)[key])


def arrive(transfer) -> None:
    transfer.make(HostStream())
    if transfer.arrived:
        transfer.arrived()
