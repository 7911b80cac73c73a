"""GPU and CPU memory that a policy of MoE-Lightning needs, and the check that a machine has it."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from workbench.perfmodels.domain import Number, plain
from workbench.perfmodels.moe_lightning.model import Job, Mode, Policy, check, check_mode

_GPU_SHARE = 0.86
_CPU_SHARE = 0.8
"""Shares of the two memories that a policy may fill: margins of the paper's public optimiser, which gives no reason."""
_FUSED_MOE = 1.2
"""Factor on the size of the fused MoE kernel's intermediates, from the same optimiser."""


def gpu_room(job: Job) -> float:
    """Memory of all GPUs that a policy may fill [B]: 0.86 of all of it (public optimiser)."""
    return _GPU_SHARE * job.gpus * job.machine.gpu.memory


def cpu_room(job: Job) -> float:
    """CPU memory that a policy may fill [B]: 0.8 of all of it (public optimiser)."""
    return _CPU_SHARE * job.machine.cpu.memory


def _slots(job: Job) -> int:
    """Number of layers whose streamed weights have room at a time: one is computed with while the next arrives."""
    return min(2, job.model.num_hidden_layers)


def gpu_peaks(job: Job, policy: Policy, mode: Mode = Mode.FULL) -> tuple[Number, Number]:
    """GPU memory that the policy needs at its peak in prefill and in decode [B].

        resident = L W_att + L W_exp r_w + min(2, L) W_exp (1 - r_w)
        prefill  = resident + 1.2 b mu s k (h + 3 h_i) + (2 mu + N) s h b + r_c N s kv + 2 mu s kv/L
        decode   = resident + 2 b h N + r_c N (s + n) kv + [A_g and r_c < 1] 2 mu (s + n) kv/L

    Parameters
    ----------
    job : Job
    policy : Policy
        Number or arrays. Peaks are linear in r_w, and in r_c below 1.
    mode : Mode
        FULL adds embedding and head to the resident weights.

    Raises
    ------
    ValueError
        If the policy is outside the domain, or `mode` no Mode.

    Notes
    -----
    MoE-Lightning, section 4.2 and appendix A.1; the terms are those of its public optimiser, where the residual stream
    of the whole batch stays on the GPU. Activations (all but the experts' own intermediates) are held by each GPU.
    """
    check(policy)
    check_mode(mode)
    batch, micro, on_gpu, _, weights, kv_share = map(np.asarray, policy)
    model = job.model
    s = job.prompt_len
    total = job.prompt_len + job.output_len
    layers = model.num_hidden_layers
    one = job.element
    hidden = model.hidden_size
    held = layers * job.dense_params * one + job.experts_bytes * (layers * weights + _slots(job) * (1 - weights))
    if mode is Mode.FULL:
        held = held + model.vocab_size * hidden * one * (1 if model.tie_word_embeddings else 2)
    chosen = model.num_experts_per_tok
    moe = _FUSED_MOE * one * micro * s * chosen * (job.replicas * hidden + 3 * model.expert_width)
    stream = job.replicas * one * hidden * s * (2 * micro + batch)
    kv = kv_share * batch * job.kv_per_token * layers
    prefill = held + moe + stream + kv * s + 2 * micro * s * job.kv_per_token
    buffers = on_gpu * (kv_share < 1) * 2 * micro * total * job.kv_per_token
    decode = held + job.replicas * 2 * one * hidden * batch + kv * total + buffers
    return plain(prefill), plain(decode)


def cpu_peak(job: Job, policy: Policy) -> Number:
    """CPU memory that the policy needs [B].

        L W_exp (1 - r_w) + (1 - r_c A_g) N (s + n) kv + N s h b + min(2, L) W_exp (1 - r_w)

    Parameters
    ----------
    job : Job
    policy : Policy
        Number or arrays.

    Raises
    ------
    ValueError
        If the policy is outside the domain.

    Notes
    -----
    MoE-Lightning, appendix A.1 and its public optimiser: streamed weights, KV cache, hidden states of the prefill (a
    copy for each GPU), and two layers of pinned memory.
    """
    check(policy)
    batch, _, on_gpu, _, weights, kv_share = map(np.asarray, policy)
    layers = job.model.num_hidden_layers
    s = job.prompt_len
    weight_bytes = (layers + _slots(job)) * job.experts_bytes * (1 - weights)
    kv = (1 - kv_share * on_gpu) * batch * (s + job.output_len) * job.kv_per_token * layers
    return plain(weight_bytes + kv + job.replicas * batch * s * job.model.hidden_size * job.element)


def fits(job: Job, policy: Policy, mode: Mode = Mode.FULL) -> npt.NDArray[np.bool_]:
    """True where both memories hold the policy: peaks at most 0.86 of the GPUs' and 0.8 of the CPU's memory.

    Raises
    ------
    ValueError
        If the policy is outside the domain, or `mode` no Mode.
    """
    gpu = np.maximum(*gpu_peaks(job, policy, mode))
    slack = 1 + 1e-12  # a share of the weights chosen to fill the memory exactly is not refused for its last bit
    cpu = np.asarray(cpu_peak(job, policy))
    return np.asarray((gpu <= gpu_room(job) * slack) & (cpu <= cpu_room(job) * slack))
