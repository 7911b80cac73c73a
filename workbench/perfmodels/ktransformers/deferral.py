"""KTransformers: one decode layer's timeline with deferred experts, their number, and the choice of the CPU kernel."""

from __future__ import annotations

import enum
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from workbench.core.timeline import Span, Timeline
from workbench.perfmodels.domain import Array, Number, at_least, positive, whole, within

_VECTOR_TOKENS = 4  # up to this many the vector kernel is faster, KTransformers Figure 7 and section 3.2
_LEAST_IMMEDIATE = 2  # section 4.2: with fewer the model's answers change too much


@dataclass(frozen=True)
class LayerTimes:
    """Times of one MoE layer in decode, in seconds or as shares of the layer without deferral.

    Attributes
    ----------
    attention : float
        GPU: attention, norms and router (A).
    shared : float
        GPU: shared experts, beside the routed ones (S).
    routed : float
        CPU: all k routed experts (R).
    sync : float
        Submission and synchronisation (x).
    """

    attention: float
    shared: float
    routed: float
    sync: float

    def __post_init__(self) -> None:
        for name in ("attention", "shared", "sync"):
            at_least(name, getattr(self, name), 0, mend="give a time")
        positive("routed", self.routed, "give the CPU's time for all routed experts")

    @classmethod
    def from_utilisation(cls, *, cpu: float, gpu: float, shared: float, idle: float) -> LayerTimes:
        """Times from a profile: the shares of a layer in which CPU and GPU are busy, both idle, and shared experts run.

        Notes
        -----
        KTransformers section 4.2: routed and shared experts run at the same time, everything else one after another.
        """
        return cls(attention=gpu * (1.0 - shared), shared=gpu * shared, routed=cpu, sync=idle)


def layer_time(times: LayerTimes, deferred: ArrayLike, *, top_k: int) -> Number:
    """Time of one layer in the steady state of decode, in the unit of `times`.

        T(D) = max(R, A + max(S, x + (k - D) R / k))

    Parameters
    ----------
    times : LayerTimes
    deferred : array_like of int
        D, experts per token whose result is added one layer later.
    top_k : int
        k.

    Raises
    ------
    ValueError
        If k is no whole number from 1, or D none from 0 to k - 1.

    Notes
    -----
    KTransformers section 4.2, with the shared experts as a floor of what attention waits for. The CPU works on
    deferred experts while the GPU computes the next layer's attention; experts of a layer take equal times.
    """
    later = _deferred(deferred, top_k)
    waited = np.maximum(times.shared, times.sync + (top_k - later) * times.routed / top_k)
    time: Number = np.maximum(times.routed, times.attention + waited)
    return time


def _deferred(deferred: ArrayLike, top_k: int) -> Array:
    """D as an array, after the check that so many of the k experts can be deferred."""
    most = float(whole("top_k", top_k, "give the experts per token")) - 1
    later = within("deferred", deferred, 0, most, mend="keep at least one expert immediate")
    return whole("deferred", later, "give experts", low=0)


def layer_utilisation(times: LayerTimes, deferred: ArrayLike, *, top_k: int) -> tuple[Number, Number]:
    """Shares of the time in which CPU and GPU are busy [1]: R / T(D) and (A + S) / T(D).

    Raises
    ------
    ValueError
        If k is no whole number from 1, or D none from 0 to k - 1.
    """
    time = layer_time(times, deferred, top_k=top_k)
    return times.routed / time, (times.attention + times.shared) / time


def time_reduction(times: LayerTimes, deferred: ArrayLike, *, top_k: int) -> Number:
    """Share of a layer's time that deferral saves [1]: 1 - T(D) / T(0).

    Raises
    ------
    ValueError
        If k is no whole number from 1, or D none from 0 to k - 1.
    """
    return 1.0 - layer_time(times, deferred, top_k=top_k) / layer_time(times, 0, top_k=top_k)


def end_to_end_speedup(reduction: ArrayLike, outside: ArrayLike) -> Number:
    """Speed-up of a whole token when only its MoE layers get shorter [1]: 1 / (f + (1 - f) (1 - reduction)).

    Parameters
    ----------
    reduction : array_like
        Reduction of one layer's time, 0 to 1.
    outside : array_like
        f, share of the time spent outside MoE layers.

    Raises
    ------
    ValueError
        If one of them is not between 0 and 1, or nothing would be left.

    Notes
    -----
    Amdahl's law; 3 to 5 % outside reconcile the paper's 26 % per layer with its 33 % end to end.
    """
    gone = within("reduction", reduction, 0, 1, mend="give 1 - new time / old time")
    rest = within("outside", outside, 0, 1, mend="give a share of the time")
    left = np.asarray(rest + (1.0 - rest) * (1.0 - gone))
    return 1.0 / positive("time that is left", left, "give a smaller reduction or a share outside")


def experts_to_defer(gpu_time: ArrayLike, expert_time: ArrayLike, *, top_k: ArrayLike) -> Number:
    """Fewest experts to defer so that the CPU never waits, at least two staying immediate [experts].

        D = min(ceil((A + x) / (R / k)), k - 2)

    Parameters
    ----------
    gpu_time : array_like
        A + x, in any unit of time.
    expert_time : array_like
        R / k, in the same unit.
    top_k : array_like
        k.

    Raises
    ------
    ValueError
        If a time is negative, an expert takes none, or k is no whole number from 2.

    Notes
    -----
    KTransformers sections 4.2 and 6.3. A larger D changes the model's answer more and gains nothing.
    """
    hidden = at_least("gpu_time", gpu_time, 0, mend="give attention plus synchronisation")
    one = positive("expert_time", expert_time, "give the CPU's time for one expert")
    mend = "give the experts per token of a model that can keep two immediate"
    most = whole("top_k", top_k, mend, low=_LEAST_IMMEDIATE)
    deferred: Number = np.minimum(np.ceil(hidden / one), most - _LEAST_IMMEDIATE)
    return deferred


def deferral_outputs(
    start: Any,
    shared: Sequence[Callable[[Any], Any]],
    experts: Sequence[Sequence[Callable[[Any], Any]]],
    *,
    deferred: int,
) -> list[Any]:
    """Output of every MoE layer's block if the lowest-scored experts come one layer late; the output is the next input.

        O_1 = I + S(I) + imm(I);  O_k = I_k + S_k(I_k) + imm_k(I_k) + def_{k-1}(I_{k-1});  the last layer defers none

    Parameters
    ----------
    start : number or array
        I_1, of any type that can be added.
    shared : sequence of callable
        S of each layer.
    experts : sequence of sequence of callable
        The chosen experts of each layer, highest router score first, gate weights included.
    deferred : int
        D, how many from the end of each layer's list are deferred.

    Raises
    ------
    ValueError
        If there is no layer, the lists differ in length, or D is no whole number from 0 to k - 1.

    Notes
    -----
    KTransformers section 4.1. Dense layers are not in the chain.
    """
    if not shared or len(shared) != len(experts):
        raise ValueError(
            f"shared and experts must name the same layers, not {len(shared)} and {len(experts)}; add them."
        )
    held = int(_deferred(deferred, min(len(chosen) for chosen in experts)))
    outputs: list[Any] = []
    hidden = start
    late = None
    for layer, (always, chosen) in enumerate(zip(shared, experts, strict=True)):
        now = len(chosen) - (held if layer < len(shared) - 1 else 0)
        output = hidden + always(hidden)
        for expert in chosen[:now]:
            output = output + expert(hidden)
        if late is not None:
            output = output + late
        late = None
        for expert in chosen[now:]:
            late = expert(hidden) if late is None else late + expert(hidden)
        outputs.append(output)
        hidden = output
    return outputs


def decode_timeline(times: LayerTimes, layers: int, *, deferred: int, top_k: int) -> Timeline:
    """One token through a chain of MoE layers, task by task: lanes gpu and cpu, times in the unit of `times`.

    The CPU runs immediate and then deferred experts of a layer; attention of layer k + 1 waits for immediate and
    shared experts of layer k and for deferred ones of layer k - 1. The last layer defers none.

    Raises
    ------
    ValueError
        If layers or k is no whole number from 1, or D none from 0 to k - 1.

    Notes
    -----
    KTransformers Figure 10.
    """
    count = int(whole("layers", layers, "give the MoE layers"))
    _deferred(deferred, top_k)
    one = times.routed / top_k
    spans = []
    gpu_free = cpu_free = immediate_end = older_late = late = 0.0
    for layer in range(count):
        begin = max(gpu_free, immediate_end, older_late)
        attended = begin + times.attention
        gpu_free = attended + times.shared
        held = deferred if layer < count - 1 else 0
        start = max(cpu_free, attended + times.sync)
        immediate_end = start + (top_k - held) * one
        older_late = late
        late = immediate_end + held * one
        cpu_free = late
        spans += [Span("gpu", f"A {layer}", begin, attended), Span("gpu", f"S {layer}", attended, gpu_free)]
        spans.append(Span("cpu", f"I {layer}", start, immediate_end))
        if held:
            spans.append(Span("cpu", f"D {layer}", immediate_end, late))
    labels = {"A": "attention", "S": "shared experts", "I": "immediate experts", "D": "deferred experts"}
    return Timeline(spans, labels)


class Kernel(enum.Enum):
    """CPU kernels for an expert's matrices: with vectors, or with tiles of a matrix unit."""

    VECTOR = "AVX512"
    TILE = "AMX"


class KernelChoice(NamedTuple):
    """Choice of a kernel for each expert and call: true for the tile kernel."""

    tile: NDArray[np.bool_] | np.bool_

    @property
    def kernel(self) -> Kernel:
        """The kernel of a single expert."""
        return Kernel.TILE if bool(self.tile) else Kernel.VECTOR


def choose_kernel(tokens_per_expert: ArrayLike) -> KernelChoice:
    """Choose the kernel by arithmetic intensity: vectors up to 4 tokens per expert and call, tiles above.

    Raises
    ------
    ValueError
        If a number of tokens is negative.

    Notes
    -----
    KTransformers section 3.2. Intensity in FLOP per byte of BF16 weights equals the tokens per expert.
    """
    tokens = at_least("tokens_per_expert", tokens_per_expert, 0, mend="give the tokens routed to one expert")
    return KernelChoice(np.greater(tokens, _VECTOR_TOKENS))


def switch_prompt(experts: ArrayLike, top_k: ArrayLike) -> Number:
    """Shortest prompt whose experts get 4 tokens each on average [tokens]: ceil(4 E / k); above it tiles are faster.

    Raises
    ------
    ValueError
        If E or k is below 1, or k above E.
    """
    chosen = at_least("top_k", top_k, 1, mend="give the experts per token")
    count = at_least("experts", experts, 1, mend="give the routed experts of one layer")
    if np.any(chosen > count):
        raise ValueError(f"top_k must be at most the number of experts, not {top_k!r} of {experts!r}; swap them.")
    prompt: Number = np.ceil(_VECTOR_TOKENS * count / chosen)
    return prompt
