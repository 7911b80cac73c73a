"""The best policy of MoE-Lightning's model for a job, and how it changes with the machine."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from workbench.core.errors import CapacityError
from workbench.core.units import format_bytes, format_seconds
from workbench.hardware import Machine
from workbench.perfmodels.domain import Array, Number, plain
from workbench.perfmodels.moe_lightning.model import Estimate, Job, Mode, Policy, check, estimate
from workbench.perfmodels.moe_lightning.policy_memory import cpu_peak, cpu_room, fits, gpu_peaks, gpu_room

_EVERY = 64
"""Candidates for mu and for N/mu are all whole numbers up to here, then spaced by `_SPACING`."""
_SPACING = 1.03
_TIE = 1e-9
"""Throughputs this close to the best count as equal; of equal policies on the same devices the smallest batch wins."""
_ARTIFACT_STEP = 32
"""The public optimiser tries mu = 1, 2, 3, 4 and then every 32nd."""
_FLAT = 0.01
"""Throughputs this close to the best count as good as it: the model's own error is far larger."""
_WIDE = 1.25
"""If the largest batch as good as the best is this many times the smallest, the best is a plateau."""


@dataclass(frozen=True)
class Found:
    """The best policy, its estimate, and the bytes that it needs of both memories [B].

    Attributes
    ----------
    batches, micro_batches : tuple of (float, float)
        Smallest and largest N and mu of the policies tried whose throughput is within 1 % of the best.
    """

    policy: Policy
    estimate: Estimate
    gpu_peak: float
    cpu_peak: float
    batches: tuple[float, float]
    micro_batches: tuple[float, float]

    @property
    def plateau(self) -> bool:
        """True if very different batches or micro-batches are as good, so that the best one says little about them."""
        return any(most >= _WIDE * least for least, most in (self.batches, self.micro_batches))

    def __str__(self) -> str:
        """The policy in words: ``2,048 sequences in micro-batches of 128; ...``."""
        flat = "The best is a plateau: within 1 % of it lie {:,.0f} to {:,.0f} sequences".format(*self.batches)
        others = "in micro-batches of {:,.0f} to {:,.0f}".format(*self.micro_batches)
        return f"{self._best}\n{flat} {others}." if self.plateau else self._best

    @property
    def _best(self) -> str:
        policy = self.policy
        layer = self.estimate.layer
        attention, experts = ("GPU" if on_gpu else "CPU" for on_gpu in (policy.gpu_attention, policy.gpu_experts))
        return (
            f"{policy.batch:,.0f} sequences in micro-batches of {policy.micro_batch:,.0f}; decode attention on the "
            f"{attention}, experts on the {experts}; {policy.weights_on_gpu:.2%} of the experts' weights and "
            f"{policy.kv_on_gpu:.2%} of the KV cache stay on the GPU.\n{self.estimate.gen_tok_s:.4g} output tok/s: a "
            f"layer of decode takes {format_seconds(float(layer.seconds))}, which is what the {layer.binding()} needs. "
            f"{format_bytes(self.gpu_peak)} of GPU memory and {format_bytes(self.cpu_peak)} of CPU memory."
        )


def search(job: Job, mode: Mode = Mode.FULL) -> Found:
    """The policy with the highest throughput that both memories can hold.

    All pairs of mu and N/mu are evaluated at once, for attention and experts on either device (ARTIFACT: attention on
    the CPU, experts on the GPU). Shares of weights and KV follow from the memory that is left (`with_shares`).

    Parameters
    ----------
    job : Job
    mode : Mode

    Raises
    ------
    CapacityError
        If not even one sequence fits.
    ValueError
        If `mode` is no Mode.

    Notes
    -----
    MoE-Lightning, section 4.2, which solves a mixed-integer program instead. mu and N/mu are tried 3 % apart beyond
    64, and every one around the best of these.
    """
    tried = _among(job, *_candidates(job, mode), mode)
    if not tried:
        least = Policy(1, 1)
        raise CapacityError(
            f"{job.model.name} needs {format_bytes(float(max(gpu_peaks(job, least, mode))))} of GPU memory and "
            f"{format_bytes(float(cpu_peak(job, least)))} of CPU memory for one sequence; the policy may use "
            f"{format_bytes(gpu_room(job))} and {format_bytes(cpu_room(job))} of {job.machine.name}. "
            "Give it more memory, shorter prompts or more gpus."
        )
    around = [] if mode is Mode.ARTIFACT else _among(job, *_around(_best(tried)), mode)
    return _found(job, _best(around or tried), [*tried, *around], mode)


def tensor_parallel(job: Job, degrees: Sequence[int], mode: Mode = Mode.PAPER) -> Array:
    """Throughput of the best policy for every number of GPUs in the node [tok/s].

        m_g, B_g, P_g -> times the degree;  B_cg, B_c, P_c, m_c stay

    Parameters
    ----------
    job : Job
        Its own `gpus` is replaced.
    degrees : sequence of int
    mode : Mode

    Raises
    ------
    CapacityError
        If a degree cannot hold one sequence.
    ValueError
        If a degree is below 1, or `mode` no Mode.

    Notes
    -----
    MoE-Lightning, section 4.3. GPUs share one link to the host; communication between them is left out.
    """
    return np.array([float(search(replace(job, gpus=gpus), mode).estimate.gen_tok_s) for gpus in degrees])


def with_shares(job: Job, policy: Policy, mode: Mode = Mode.FULL, *, kv_whole: bool = False) -> Policy:
    """The policy with as much of the weights, and then of the KV cache, in GPU memory as fits.

    A byte of GPU memory saves more link time if it holds weights than if it holds KV: a weight is read in every step,
    KV only once it has been written, and two layers of weights are in GPU memory in any case. Keeping the whole KV
    cache resident is a separate case, because it needs no buffers: with `kv_whole` it comes first.

    Parameters
    ----------
    job : Job
    policy : Policy
        Its own shares are ignored.
    mode : Mode
    kv_whole : bool
        Put the whole cache on the GPU first (A_g = 1).

    Raises
    ------
    ValueError
        If the policy is outside the domain, or `mode` no Mode.

    Notes
    -----
    The peaks are linear in either share, so the largest share that fits is found by interpolation. If not even a share
    of 0 fits, shares are 0 and `fits` is false.
    """
    zero = np.zeros(np.broadcast_shapes(*(np.shape(value) for value in policy)))
    bare = policy._replace(weights_on_gpu=zero, kv_on_gpu=zero + (1.0 if kv_whole else 0.0))
    check(bare)
    experts = np.asarray(policy.gpu_experts)
    weights = experts * _largest(job, bare, bare._replace(weights_on_gpu=zero + experts), mode)
    placed = bare._replace(weights_on_gpu=weights)
    if kv_whole:
        return placed._replace(weights_on_gpu=plain(weights), kv_on_gpu=plain(zero + 1.0))
    almost = np.asarray(policy.gpu_attention) * (1 - 1e-6)  # with the last sequence's KV there would be no buffers
    share = almost * _largest(job, placed, placed._replace(kv_on_gpu=zero + almost), mode)
    return placed._replace(weights_on_gpu=plain(weights), kv_on_gpu=plain(share))


def least_weights(job: Job, policy: Policy, mode: Mode = Mode.FULL) -> float:
    """Smallest share of the weights in GPU memory that neither slows one policy down nor overfills the CPU's memory.

    `search` fills GPU memory; if the link does not bind, fewer weights give the same throughput.

    Parameters
    ----------
    job : Job
    policy : Policy
        Number only, and one that fits.
    mode : Mode

    Raises
    ------
    CapacityError
        If the policy itself does not fit.
    ValueError
        If the policy is outside the domain, or `mode` no Mode.

    Notes
    -----
    Throughput rises with the share, and the need of CPU memory falls, so bisection finds it, to 1e-6.
    """
    if not fits(job, policy, mode):
        raise CapacityError(f"the policy does not fit into {job.machine.name}; search for one that does.")
    enough = float(estimate(job, policy, mode).gen_tok_s) * (1 - _TIE)

    def suffices(share: float) -> bool:
        less = policy._replace(weights_on_gpu=share)
        return bool(fits(job, less, mode)) and float(estimate(job, less, mode).gen_tok_s) >= enough

    low = 0.0
    high = float(policy.weights_on_gpu)
    if suffices(low):
        return low
    while high - low > 1e-6:
        middle = (low + high) / 2
        low, high = (low, middle) if suffices(middle) else (middle, high)
    return high


def _largest(job: Job, none: Policy, whole: Policy, mode: Mode) -> Array:
    """Largest share that the GPU memory holds, where policy `none` has the share 0 and policy `whole` has 1."""
    share: Array = np.ones(np.shape(none.weights_on_gpu))
    for low, high in zip(gpu_peaks(job, none, mode), gpu_peaks(job, whole, mode), strict=True):
        room = gpu_room(job) - np.asarray(low)
        slope = np.asarray(high) - np.asarray(low)
        share = np.minimum(share, np.divide(room, slope, out=np.where(room >= 0, 1.0, 0.0), where=slope > 0))
    clipped: Array = np.clip(share, 0.0, 1.0)
    return clipped


class _Tried(NamedTuple):
    """Policies of one placement that fit, as arrays, and their throughputs [tok/s]."""

    policies: Policy
    rates: Array

    def best(self) -> tuple[float, Policy]:
        """The highest throughput, and the smallest batch that reaches it."""
        equal = (self.rates >= self.rates.max() * (1 - _TIE)).nonzero()[0]
        place = equal[np.argmin(np.asarray(self.policies.batch)[equal])]
        return float(self.rates[place]), Policy(*(float(np.asarray(value)[place]) for value in self.policies))


def _among(job: Job, micro: Array, count: Array, mode: Mode) -> list[_Tried]:
    """The pairs of mu and N/mu that fit, for every placement in which any fits."""
    tried: list[_Tried] = []
    for on_gpu, experts in [(0, 1)] if mode is Mode.ARTIFACT else product((0, 1), (0, 1)):
        for kv_whole in (False, True) if on_gpu else (False,):
            policy = with_shares(job, Policy(micro * count, micro, on_gpu, experts), mode, kv_whole=kv_whole)
            fitting = fits(job, policy, mode)
            if fitting.any():
                kept = _take(policy, fitting.nonzero()[0])
                tried.append(_Tried(kept, np.asarray(estimate(job, kept, mode).gen_tok_s)))
    return tried


def _best(tried: Sequence[_Tried]) -> Policy:
    """The policy with the highest throughput over all placements."""
    return max((one.best() for one in tried), key=lambda best: best[0])[1]


def _candidates(job: Job, mode: Mode) -> tuple[Array, Array]:
    """Pairs of mu and N/mu to try, up to the number of sequences that the memories could hold without anything else."""
    smallest, next_one = (float(max(gpu_peaks(job, Policy(n, n), mode))) for n in (1, 2))
    most_micro = max(1, int((gpu_room(job) - smallest) / (next_one - smallest)) + 1)
    per_sequence = (job.prompt_len + job.output_len) * job.kv_per_token * job.model.num_hidden_layers
    most = max(1, int((gpu_room(job) + cpu_room(job)) / per_sequence) + 1)
    if mode is Mode.ARTIFACT:
        steps = np.arange(4 + _ARTIFACT_STEP, most_micro + 1, _ARTIFACT_STEP, dtype=np.float64)
        micros = np.concatenate(([1.0, 2.0, 3.0, 4.0], steps))
        counts = np.arange(1.0, most + 1)
    else:
        micros = _spaced(min(most, most_micro))
        counts = _spaced(most)
    columns = [counts[: np.searchsorted(counts, most / micro, side="right")] for micro in micros]
    return np.repeat(micros, [len(column) for column in columns]), np.concatenate(columns)


def _around(policy: Policy) -> tuple[Array, Array]:
    """All pairs of mu and N/mu between the candidates next to a policy's."""
    sides = []
    for value in (policy.micro_batch, np.asarray(policy.batch) / policy.micro_batch):
        reach = np.floor(float(value) * (_SPACING - 1)) + 1 if value > _EVERY else 0.0
        sides.append(np.arange(float(value) - reach, float(value) + reach + 1))
    micro, count = np.meshgrid(*sides, indexing="ij")
    return micro.ravel(), count.ravel()


def _spaced(most: int) -> Array:
    """Whole numbers from 1: all up to `_EVERY`, then `_SPACING` apart, and `most` itself."""
    steps = int(np.log(max(most / _EVERY, 1.0)) / np.log(_SPACING))
    beyond = np.rint(_EVERY * _SPACING ** np.arange(1, steps + 1))
    numbers: Array = np.unique(np.concatenate((np.arange(1.0, min(most, _EVERY) + 1), beyond, [float(most)])))
    return numbers


def _take(policy: Policy, places: npt.NDArray[np.intp]) -> Policy:
    shape = np.shape(policy.batch)
    return Policy(*(np.broadcast_to(np.asarray(value, dtype=np.float64), shape)[places] for value in policy))


def _found(job: Job, policy: Policy, tried: Sequence[_Tried], mode: Mode) -> Found:
    """A policy with its estimate, the memory that it needs, and the range of the policies that are as good."""
    expected = estimate(job, policy, mode)
    batches = []
    micro_batches = []
    for one in tried:
        flat = one.rates >= float(expected.gen_tok_s) * (1 - _FLAT)
        batches.append(np.asarray(one.policies.batch)[flat])
        micro_batches.append(np.asarray(one.policies.micro_batch)[flat])
    batch = np.concatenate(batches)
    micro = np.concatenate(micro_batches)
    gpu = float(max(gpu_peaks(job, policy, mode)))
    return Found(policy, expected, gpu, float(cpu_peak(job, policy)), _ends(batch), _ends(micro))


def _ends(values: Array) -> tuple[float, float]:
    return float(values.min()), float(values.max())


@dataclass(frozen=True, eq=False)
class PolicyMap:
    """Best policies over links and hosts; arrays have a row per CPU scale and a column per link.

    Attributes
    ----------
    links : ndarray
        Host-to-device bandwidth [B/s].
    cpu_scales : ndarray
        Factors on the host's memory, memory bandwidth and FLOP rates.
    gen_tok_s : ndarray
        Throughput of the best policy [tok/s].
    gpu_attention, gpu_experts, kv_on_gpu : ndarray
        A_g, F_g and r_c.
    weights_on_gpu : ndarray
        The least r_w that this throughput needs (`least_weights`).
    """

    links: Array
    cpu_scales: Array
    gen_tok_s: Array
    gpu_attention: Array
    gpu_experts: Array
    kv_on_gpu: Array
    weights_on_gpu: Array


def policy_map(job: Job, links: Number, cpu_scales: Number, mode: Mode = Mode.PAPER) -> PolicyMap:
    """Best policy for every link and every scale of the host.

    Parameters
    ----------
    job : Job
        The job; its machine has scale 1, and the link is replaced in both directions.
    links : array
        Bandwidths [B/s].
    cpu_scales : array
        Factors on the CPU's memory, bandwidth and FLOP rates.
    mode : Mode

    Raises
    ------
    CapacityError
        If a machine cannot hold one sequence.
    ValueError
        If a bandwidth or a factor is not positive, or `mode` no Mode.

    Notes
    -----
    MoE-Lightning, section 6.3 and Fig. 10, whose machine is scaled in the same way.
    """
    columns = np.atleast_1d(np.asarray(links, float))
    rows = np.atleast_1d(np.asarray(cpu_scales, float))
    for name, values in (("links", columns), ("cpu_scales", rows)):
        if not np.all(values > 0):
            raise ValueError(f"{name} has {values.min():g}; give positive numbers only.")
    fields = ("gen_tok_s", "gpu_attention", "gpu_experts", "kv_on_gpu", "weights_on_gpu")
    maps = {field: np.empty((len(rows), len(columns))) for field in fields}
    for row, scale in enumerate(rows):
        for column, link in enumerate(columns):
            here = replace(job, machine=_scaled(job.machine, link, scale))
            best = search(here, mode)
            maps["gen_tok_s"][row, column] = best.estimate.gen_tok_s
            maps["gpu_attention"][row, column] = best.policy.gpu_attention
            maps["gpu_experts"][row, column] = best.policy.gpu_experts
            maps["kv_on_gpu"][row, column] = best.policy.kv_on_gpu
            maps["weights_on_gpu"][row, column] = least_weights(here, best.policy, mode)
    return PolicyMap(links=columns, cpu_scales=rows, **maps)


def _scaled(machine: Machine, link: float, scale: float) -> Machine:
    cpu = machine.cpu
    flops = tuple((dtype, rate * scale) for dtype, rate in cpu.flops)
    cpu = replace(cpu, memory=cpu.memory * scale, bandwidth=cpu.bandwidth * scale, flops=flops)
    return replace(machine, cpu=cpu, link=replace(machine.link, h2d=link, d2h=link))
