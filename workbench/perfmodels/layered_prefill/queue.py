"""Requests that arrive at random, served by chunked or layered prefill: latencies, traffic, capacity under an SLO."""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from workbench.core.energy import EnergyModel
from workbench.core.latency import Slo, attainment
from workbench.models import ModelConfig
from workbench.perfmodels.coverage import Coverage
from workbench.perfmodels.domain import Array, at_least, caches_alike, positive, whole
from workbench.perfmodels.layered_prefill.traffic import layer_groups
from workbench.workload.lengths import Gamma, whole_lengths

_MOST_TOKENS = 1 << 17  # tokens of one iteration of the longest prompts; coverage does not grow beyond this


@dataclass(frozen=True)
class IterationTime:
    """Time of one iteration: bytes / bandwidth + per_token x tokens + fixed; tokens count by their share of the layers.

    Parameters
    ----------
    bandwidth : float
        Rate at which experts and KV cache are read [B/s].
    per_token, fixed : float
        Time per token, and fixed time of an iteration [s].

    Raises
    ------
    ValueError
        If the bandwidth is not positive and finite, or a time negative, infinite or no number.
    """

    bandwidth: float
    per_token: float
    fixed: float

    def __post_init__(self) -> None:
        positive("bandwidth", self.bandwidth, "give bytes per second")
        for name in ("per_token", "fixed"):
            at_least(name, getattr(self, name), 0, mend="give seconds")


@dataclass(frozen=True)
class Arrivals:
    """Requests in the order of their arrival: time [s], prompt and output tokens, lists or arrays.

    Raises
    ------
    ValueError
        If there is no request, the lists differ in length, times are negative, infinite or fall, or lengths are no
        whole numbers from 1 to 2**40.
    """

    time: Array
    prompt: NDArray[np.int64]
    output: NDArray[np.int64]

    def __post_init__(self) -> None:
        time = at_least("time", self.time, 0, mend="give seconds")
        prompt = whole_lengths(self.prompt, "prompt")
        output = whole_lengths(self.output, "output")
        if not (time.size and time.ndim == 1 and time.shape == prompt.shape == output.shape):
            raise ValueError(
                "Arrivals must have one time, prompt and output per request, at least one of each, not the shapes "
                f"{time.shape}, {prompt.shape} and {output.shape}; give lists as long as each other."
            )
        early = np.flatnonzero(np.diff(time) < 0)
        if early.size:
            before = time[early[0]]
            after = time[early[0] + 1]
            raise ValueError(f"time must not fall, but {after:g} follows {before:g}; sort the requests by arrival.")
        for name, lengths in (("prompt", prompt), ("output", output)):
            whole(name, lengths, mend="give tokens")
        for name, value in (("time", time), ("prompt", prompt), ("output", output)):
            object.__setattr__(self, name, value)

    @classmethod
    def draw(
        cls, rate: float, requests: int, *, prompt: tuple[float, float], output: tuple[float, float], seed: int
    ) -> Arrivals:
        """Poisson arrivals with gamma-distributed lengths of given mean and standard deviation; synthetic.

        Raises
        ------
        ValueError
            If rate, mean or deviation is not positive, or `requests` no whole number from 1.
        """
        gap = 1.0 / float(positive("rate", rate, "give requests per second"))
        count = int(whole("requests", requests, mend="give how many to draw"))
        rng = np.random.default_rng(seed)

        times: Array = np.cumsum(rng.exponential(gap, count))
        return cls(times, Gamma(*prompt).draw(rng, count), Gamma(*output).draw(rng, count))


@dataclass(frozen=True)
class Served:
    """Outcome of the requests.

    Attributes
    ----------
    ttft, end_to_end, worst_gap : ndarray, shape (requests,)
        Times from arrival to the first and to the last token, and longest gap between two tokens, 0 if there is none
        [s].
    gaps : ndarray
        Every gap of every request [s].
    seconds, expert_bytes, kv_bytes, tokens : float
        Time from start to end [s]; bytes read from GPU memory [B]; prompt plus output tokens.
    iterations : int
    """

    ttft: Array
    end_to_end: Array
    worst_gap: Array
    gaps: Array
    seconds: float
    expert_bytes: float
    kv_bytes: float
    tokens: float
    iterations: int

    def attainment(self, slo: Slo) -> float:
        """Share of the requests that met the SLO."""
        return attainment(self.ttft, self.worst_gap, slo)

    def joules_per_token(self, energy: EnergyModel, model: ModelConfig) -> float:
        """Energy per prompt and output token [J]; everything but experts is read once per iteration."""
        read = self.expert_bytes + self.kv_bytes + self.iterations * model.always_bytes
        return float(energy.joules(self.seconds, read, 2.0 * model.active_params * self.tokens)) / self.tokens


def serve(
    arrivals: Arrivals,
    model: ModelConfig,
    time: IterationTime,
    coverage: Coverage,
    *,
    layered: bool,
    granularity: int = 512,
) -> Served:
    """Play the iterations of one server, first come first served, with KV memory to spare.

    Chunked: each iteration takes up to `granularity` prompt tokens from the head of the queue, of several requests if
    they fit. Layered: there is one in-flight prefill, which waiting requests join while their sum stays within
    `granularity`; in every iteration it passes one of G groups of layers. Prompts longer than granularity x layers take
    several passes. All decodes pass all layers in every iteration.

    Raises
    ------
    ValueError
        If granularity is no whole number from 1.

    Notes
    -----
    This model has one calibrated time per iteration; `simulate` plays every task instead.
    """
    caches_alike("the queue's model", model)
    most = int(whole("granularity", granularity, mend="give tokens, for example 512"))
    share = np.asarray(coverage(np.arange(_MOST_TOKENS + 1)))
    kv_token = model.kv_bytes_per_token(model.dtype)
    prompt = arrivals.prompt.tolist()
    output = arrivals.output.tolist()
    running = _Running(model, prompt, output)
    prefill: _Layered | _Chunked = _Layered(model.num_hidden_layers, most) if layered else _Chunked(most)
    count = len(prompt)
    clock = 0.0
    read = 0.0
    kv_read = 0.0
    first = np.zeros(count, dtype=np.int64)
    durations: list[float] = []
    clocks: list[float] = []
    decodes: list[int] = []
    waiting: list[int] = []
    arrived = 0
    while arrived < count or waiting or running or prefill.busy:
        if not (waiting or running or prefill.busy):
            clock = max(clock, float(arrivals.time[arrived]))
        while arrived < count and arrivals.time[arrived] <= clock:
            waiting.append(arrived)
            arrived += 1
        tokens, fraction, done = prefill.step(waiting, prompt)
        decode = len(running)
        mixed = share[min(decode + tokens, _MOST_TOKENS)]
        alone = share[min(decode, _MOST_TOKENS)]
        size = model.routed_bytes * (fraction * mixed + (1.0 - fraction) * alone)
        kv = running.context * kv_token
        seconds = (size + kv) / time.bandwidth + time.per_token * (fraction * tokens + decode) + time.fixed
        clock += seconds
        read = read + size
        kv_read = kv_read + kv
        durations.append(seconds)
        clocks.append(clock)
        decodes.append(decode)
        now = len(durations)
        running.advance(now)
        for request in done:
            first[request] = now
            if output[request] > 1:
                running.add(request, now)
    last = first + arrivals.output - 1
    lasting = np.array(durations)
    ended = np.array(clocks)
    # Decodes pass every iteration, so each gap between two tokens of a request is one iteration's duration.
    worst = np.array([lasting[a:b].max(initial=0.0) for a, b in zip(first, last, strict=True)])
    return Served(
        ttft=ended[first - 1] - arrivals.time,
        end_to_end=ended[last - 1] - arrivals.time,
        worst_gap=worst,
        gaps=np.repeat(lasting, decodes),
        seconds=clock - float(arrivals.time[0]),
        expert_bytes=read,
        kv_bytes=kv_read,
        tokens=float(arrivals.prompt.sum() + arrivals.output.sum()),
        iterations=len(durations),
    )


class _Running:
    """Requests that decode, and the KV entries that their next step reads."""

    def __init__(self, model: ModelConfig, prompt: Sequence[int], output: Sequence[int]) -> None:
        self._prompt = prompt
        self._output = output
        self._window = model.sliding_window
        self._windowed = model.windowed_layers / model.num_hidden_layers
        self._held = 0  # entries of all running requests in the cache
        self._near = 0  # entries of all running requests within the window
        self._growing = 0  # requests that do not fill the window yet
        self._filled: list[int] = []  # iterations after which one of these fills it
        self._ends: list[tuple[int, int]] = []  # last decode iteration and number of each request

    def __len__(self) -> int:
        return len(self._ends)

    @property
    def context(self) -> float:
        """Entries that one step of all requests reads, mean over the layers."""
        return (1.0 - self._windowed) * self._held + self._windowed * self._near

    def add(self, request: int, now: int) -> None:
        """Decode a request from the next iteration on."""
        prompt = self._prompt[request]
        end = now + self._output[request] - 1
        heapq.heappush(self._ends, (end, request))
        self._held = self._held + prompt
        self._near = self._near + min(prompt, self._window)
        if prompt < self._window:
            self._growing += 1
            heapq.heappush(self._filled, min(now + self._window - prompt, end))

    def advance(self, now: int) -> None:
        """Write the entries of an iteration, and remove the requests that end with it."""
        self._held = self._held + len(self._ends)
        self._near = self._near + self._growing
        while self._filled and self._filled[0] == now:
            heapq.heappop(self._filled)
            self._growing -= 1
        while self._ends and self._ends[0][0] == now:
            _, gone = heapq.heappop(self._ends)
            last = self._prompt[gone] + self._output[gone] - 1
            self._held = self._held - last
            self._near = self._near - min(last, self._window)


class _Chunked:
    """Chunked prefill: the prompt tokens at the head of the queue, up to one chunk per iteration."""

    def __init__(self, chunk: int) -> None:
        self._chunk = chunk
        self._left = 0
        self.busy = False

    def step(self, waiting: list[int], prompt: Sequence[int]) -> tuple[int, float, list[int]]:
        """Prefill tokens of this iteration, the share of the layers they pass, requests whose prefill ends."""
        room = self._chunk
        done = []
        while room and waiting:
            left = self._left or prompt[waiting[0]]
            taken = min(room, left)
            room = room - taken
            self._left = left - taken
            if not self._left:
                done.append(waiting.pop(0))
        return self._chunk - room, 1.0, done


class _Layered:
    """Layered prefill: one in-flight prefill, which passes one group of layers per iteration."""

    def __init__(self, layers: int, granularity: int) -> None:
        self._layers = layers
        self._granularity = granularity
        self._requests: list[int] = []
        self._passes: list[tuple[int, int]] = []  # tokens and remaining groups of each pass to come
        self._groups = 1

    @property
    def busy(self) -> bool:
        """True while a prefill is in flight."""
        return bool(self._passes)

    def step(self, waiting: list[int], prompt: Sequence[int]) -> tuple[int, float, list[int]]:
        """Prefill tokens of this iteration, the share of the layers they pass, requests whose prefill ends."""
        if not self._passes and waiting:
            self._admit(waiting, prompt)
        if not self._passes:
            return 0, 0.0, []
        tokens, left = self._passes[0]
        fraction = 1.0 / self._count(tokens)
        self._passes[0] = (tokens, left - 1)
        if left == 1:
            self._passes.pop(0)
        return tokens, fraction, [] if self._passes else self._requests

    def _admit(self, waiting: list[int], prompt: Sequence[int]) -> None:
        self._requests = [waiting.pop(0)]
        total = prompt[self._requests[0]]
        while waiting and total + prompt[waiting[0]] <= self._granularity:
            total += prompt[waiting[0]]
            self._requests.append(waiting.pop(0))
        most = self._granularity * self._layers
        sizes = [min(most, total - start) for start in range(0, total, most)]
        self._passes = [(size, self._count(size)) for size in sizes]

    def _count(self, tokens: int) -> int:
        return int(layer_groups(tokens, self._layers, granularity=self._granularity))
