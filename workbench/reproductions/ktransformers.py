"""Computation of KTransformers' printed values: deferral in a layer, kernels, sockets, speed on its two machines."""

from __future__ import annotations

from dataclasses import replace
from itertools import chain

from workbench.core.units import parse_bytes
from workbench.hardware import Machine, machines
from workbench.hardware.processors import processors
from workbench.models import ModelConfig, models
from workbench.perfmodels import ktransformers as kt
from workbench.perfmodels.ktransformers import LayerTimes
from workbench.perfmodels.ktransformers.hybrid_speed import (
    HybridMachine,
    Numa,
    decode_speed,
    deferred_experts,
    numa_bandwidth,
)
from workbench.reproductions.rows import Inputs, Value, published

BF16_BYTES = 2.0
_FORMATS = {2.0: "bf16", 1.0: "int8", 0.5: "int4"}


def profile() -> LayerTimes:
    """The layer that the paper profiled, as shares of its time without deferral."""
    layer = published("ktransformers")["layer"]
    return LayerTimes.from_utilisation(
        cpu=layer["cpu"], gpu=layer["gpu"], shared=layer["shared_of_gpu"], idle=layer["idle"]
    )


def in_bytes(name: str, size: float) -> ModelConfig:
    """A model as it was deployed, with `size` bytes per weight."""
    return replace(models[name], expert_dtype=_FORMATS[size], other_dtype=_FORMATS[size])


def remote_under_load() -> float:
    """Bandwidth of the other socket's memory while both sockets read across [B/s].

    It follows from the times of Fiddler's layer on one socket and on both, where half of the reads are remote:
    t_both / t_one = (1/2 + 1/2 B/B_remote) / 2. The printed rate across sockets was measured without that load.
    """
    text = published("ktransformers")
    layer = text["numa_layer"]
    share = float(layer["both_ms"] / layer["one_ms"])
    return parse_bytes(text["host"]["local"]) / (4 * share - 1)


def machine(gpu: str) -> HybridMachine:
    """The paper's host, calibrated to the one layer that it profiled: DeepSeek-V3 in BF16 on the A100."""
    text = published("ktransformers")
    host = text["host"]
    layer = text["layer"]
    calibrated_on, *_ = host["gpus"]
    bare = HybridMachine(
        gpu=processors[calibrated_on],
        sockets=host["sockets"],
        local=parse_bytes(host["local"]),
        remote=remote_under_load(),
        tile_flops=host["tile_flops"],
        vector_flops=host["vector_flops"],
    )
    model = in_bytes(layer["model"], BF16_BYTES)
    seconds = (1 - layer["outside_layers"]) / layer["decode_tok_s"] / model.moe_layers
    shares = profile()
    of_layer = (shares.attention, shares.shared, shares.routed, shares.sync)
    measured = LayerTimes(*(seconds * share for share in of_layer))
    return replace(bare.calibrated(model, measured), gpu=processors[gpu])


def played_machine() -> Machine:
    """The same host and A100 for `simulate`: the catalogue's, slowed to the rates that the profiled layer implies.

    Submission and waiting are the fixed times of the two transfers, one half in each.
    """
    nominal = machines["ktransformers-a100"]
    profiled = machine(published("ktransformers")["host"]["gpus"][0])
    shares = {"gpu": profiled.gpu_efficiency, "cpu": profiled.cpu_efficiency}
    how = {f"{lane}.bandwidth": f"{share:.1%} of it, as the profiled layer implies" for lane, share in shares.items()}
    return replace(
        nominal,
        name="ktransformers-a100, as profiled",
        gpu=replace(nominal.gpu, bandwidth=nominal.gpu.bandwidth * profiled.gpu_efficiency),
        cpu=replace(nominal.cpu, bandwidth=nominal.cpu.bandwidth * profiled.cpu_efficiency),
        link=replace(nominal.link, overhead=profiled.sync / 2),
        sources=nominal.sources_with(how) | {"link.overhead": "half of what the profiled layer spends on handing over"},
    )


def _size(given: Inputs) -> Value:
    """Parameters in 10^9, or a count."""
    model = models[given["model"]]
    sizes = {
        "total": model.params / 1e9,
        "gpu": (model.params - model.routed_params) / 1e9,
        "cpu": model.routed_params / 1e9,
        "layers": model.moe_layers,
        "experts": model.num_local_experts,
        "top_k": model.num_experts_per_tok,
    }
    return sizes[given["size"]]


def _largest_change(given: Inputs) -> Value:
    """Largest change of any score in the accuracy table [points]."""
    table = published("ktransformers")["accuracy"]
    pairs = zip(chain(*table["all_immediate"]), chain(*table["deferred"]), strict=True)
    return float(max(abs(after - before) for before, after in pairs))


def _quotient(given: Inputs) -> Value:
    return float(given["of"] / given["over"])


def _kernel(given: Inputs) -> Value:
    return str(kt.choose_kernel(given["tokens"]).kernel.value)


def _numa_layer(given: Inputs) -> Value:
    """Time to read one layer's routed experts at the printed bandwidths, with pages and threads on any socket [ms]."""
    host = published("ktransformers")["host"]
    model = in_bytes(given["model"], BF16_BYTES)
    local = parse_bytes(host["local"])
    remote = parse_bytes(host["remote"])
    chosen = model.num_experts_per_tok
    rate = numa_bandwidth(Numa.OBLIVIOUS, sockets=given["sockets"], local=local, remote=remote, top_k=chosen)
    return 1e3 * float(chosen * model.expert_params * model.expert_bytes / rate)


def _numa_gain(given: Inputs) -> Value:
    host = published("ktransformers")["host"]
    local = parse_bytes(host["local"])
    remote = remote_under_load()
    aware, unaware = (
        numa_bandwidth(kind, sockets=host["sockets"], local=local, remote=remote, top_k=given["top_k"])
        for kind in (Numa.TENSORS, Numa.OBLIVIOUS)
    )
    return float(aware / unaware)


def _reduction(given: Inputs) -> Value:
    return 100 * float(kt.time_reduction(profile(), given["deferred"], top_k=given["top_k"]))


def _busy(given: Inputs) -> Value:
    cpu, gpu = kt.layer_utilisation(profile(), given["deferred"], top_k=given["top_k"])
    return 100 * float({"CPU": cpu, "GPU": gpu}[given["processor"]])


def _both_busy(given: Inputs) -> Value:
    """Share of the layer in which the shared experts run beside the routed ones."""
    return 100 * profile().shared


def _fewest(given: Inputs) -> Value:
    shares = profile()
    hidden = shares.attention + shares.sync
    one = shares.routed / given["top_k"]
    return float(kt.experts_to_defer(hidden, one, top_k=given["top_k"]))


def _end_to_end(given: Inputs) -> Value:
    gain = kt.time_reduction(profile(), given["deferred"], top_k=given["top_k"])
    outside = published("ktransformers")["layer"]["outside_layers"]
    return 100 * float(kt.end_to_end_speedup(gain, outside) - 1)


def _deferred(given: Inputs) -> Value:
    return deferred_experts(in_bytes(given["model"], given["bytes"]), machine(given["gpu"]))


def _decode(given: Inputs) -> Value:
    model = in_bytes(given["model"], BF16_BYTES)
    return float(decode_speed(model, machine(given["gpu"]), deferred=given["deferred"]))


def _largest_gain(given: Inputs) -> Value:
    """Largest gain in decode speed by deferral, over all three models on both GPUs [%]."""
    text = published("ktransformers")
    full, small = (machine(gpu) for gpu in text["host"]["gpus"])
    deployed = [(name, BF16_BYTES, full) for name in text["deferral"]["deferred_bf16"]]
    deployed += [(name, size, small) for name, size in text["deferral"]["quantised_bytes"].items()]
    gains = []
    for name, size, where in deployed:
        model = in_bytes(name, size)
        plain, deferred = (decode_speed(model, where, deferred=count) for count in (0, deferred_experts(model, where)))
        gains.append(deferred / plain - 1)
    return 100 * float(max(gains))


COMPUTE = {
    "kt.table1": _size,
    "kt.table2": _largest_change,
    "kt.fig3.peak": _quotient,
    "kt.fig3.gain": _quotient,
    "kt.switch": _kernel,
    "kt.numa": _numa_gain,
    "kt.numa.layer": _numa_layer,
    "kt.reduction": _reduction,
    "kt.busy": _busy,
    "kt.overlap": _both_busy,
    "kt.Dmin": _fewest,
    "kt.e2e": _end_to_end,
    "kt.deferred.bf16": _deferred,
    "kt.deferred.quantised": _deferred,
    "kt.decode": _decode,
    "kt.gain": _largest_gain,
}
