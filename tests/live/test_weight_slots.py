"""Where several slots hold a layer's weights, operations read those that came last."""

from workbench.engine.model.weights import WeightBuffer, WeightStore
from workbench.models import ModelConfig
from workbench.pipeline import fetch, gpu
from workbench.pipeline.stack_graph import stack_graph
from workbench.stages import Precision, attention, moe, out_proj, qkv, weights


def test_the_newest_copy_is_read(tiny: ModelConfig) -> None:
    """An older one may be overwritten by the next transfer while an operation reads it."""
    pipeline = fetch(weights) | gpu(qkv, attention, out_proj, moe)
    stack = stack_graph(pipeline, tiny)
    store = WeightStore(tiny, Precision("fp32", "fp32"), stack)
    slots = WeightBuffer(store, stack, 4 * tiny.layer_params, 3)
    read = []
    for number in range(8):
        layer = number % 2
        transfer = slots.transfer(tuple((layer, node) for node in stack.streamed(layer)))
        assert transfer.arrived is not None
        transfer.arrived()
        found = slots.get(layer, qkv)
        read.append(next(iter(found.values())).data_ptr())
    assert all(len(set(read[begin : begin + 3])) == 3 for begin in range(6)), "slots take turns"
