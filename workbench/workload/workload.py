"""Workloads, the requests to serve: prompt and output lengths, and token ids if a model is to run them."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from reprlib import repr as short
from typing import Any

import numpy as np
import numpy.typing as npt

from workbench.core.catalogue import Catalogue
from workbench.core.errors import WorkloadError
from workbench.core.units import is_number, is_whole
from workbench.workload.lengths import Counts, Gamma, Histogram, LengthDistribution, Lengths, LogNormal, whole_lengths
from workbench.workload.prompt_files import lines, parse_request
from workbench.workload.request import Request
from workbench.workload.tokenizer import BYTES, Tokenizer

Times = npt.NDArray[np.float64]
AT_ONCE: Times = np.empty(0)
AT_ONCE.flags.writeable = False
TO_THE_LAST: Lengths = np.empty(0, dtype=np.int64)
TO_THE_LAST.flags.writeable = False


@dataclass(frozen=True, eq=False)
class Workload:
    """Requests that are served in this order, all there at the start or arriving one after the other.

    Attributes
    ----------
    name : str
    prompt_len, output_len : ndarray (requests,) int64
    requests : tuple of Request
        Requests with token ids, which `run` needs; empty if only the lengths are known.
    synthetic : bool
        True if the lengths were drawn from a distribution and not recorded.
    source : str
        Source of the distribution, and the form in which it was drawn.
    arrival : ndarray (requests,) float64
        Time of each arrival after the start, in ascending order; empty if all are there at once [s].
    ends : ndarray (requests,) int64
        Tokens with which each request ends, from 1 to its `output_len`; empty if none is known to end before. No
        scheduler sees them: it has to expect `output_len` tokens of each.
    """

    name: str
    prompt_len: Lengths
    output_len: Lengths
    requests: tuple[Request, ...] = ()
    synthetic: bool = False
    source: str = ""
    arrival: Times = field(default_factory=lambda: AT_ONCE)
    ends: Lengths = field(default_factory=lambda: TO_THE_LAST)

    def __post_init__(self) -> None:
        shapes = np.shape(self.prompt_len), np.shape(self.output_len)
        if len(shapes[0]) != 1 or shapes[0] != shapes[1]:
            counts = " and ".join(
                f"{np.size(x)} {w}" for x, w in ((self.prompt_len, "prompts"), (self.output_len, "outputs"))
            )
            raise WorkloadError(f"workload {self.name!r} has {counts}; give one of each per request.")
        if not len(self.prompt_len):
            raise WorkloadError(f"workload {self.name!r} has no requests; give at least one.")
        for what in ("prompt", "output"):
            lengths = whole_lengths(getattr(self, f"{what}_len"), what)
            object.__setattr__(self, f"{what}_len", lengths)
            if lengths.min() < 1:
                worst = int(lengths.argmin())
                raise WorkloadError(
                    f"request {worst} of workload {self.name!r} has {what} length {lengths[worst]}; the least is 1."
                )
        lengths_of = [len(request.prompt) for request in self.requests]
        if self.requests and not np.array_equal(lengths_of, self.prompt_len):
            raise WorkloadError(f"requests of workload {self.name!r} have other lengths; use Workload.of(requests).")
        self._check_arrival()
        self._check_ends()

    def _check_arrival(self) -> None:
        try:
            given = np.asarray(self.arrival)
        except ValueError:  # rows of unlike length
            given = np.empty(1, dtype=object)
        if given.size and given.dtype.kind not in "iuf":
            raise WorkloadError(f"arrivals of workload {self.name!r} are no seconds: {short(self.arrival)}.")
        times = given.astype(np.float64)
        object.__setattr__(self, "arrival", times)
        if times.shape not in ((0,), self.prompt_len.shape):
            raise WorkloadError(f"workload {self.name!r} has {times.size} arrivals of {len(self)} requests; give all.")
        if not np.isfinite(times).all() or times.min(initial=0) < 0 or (np.diff(times) < 0).any():
            raise WorkloadError(
                f"arrivals of workload {self.name!r} must be seconds from 0 on in ascending order; sort the requests."
            )

    def _check_ends(self) -> None:
        ends = whole_lengths(self.ends, "generated")
        object.__setattr__(self, "ends", ends)
        if ends.shape not in ((0,), self.prompt_len.shape):
            raise WorkloadError(f"workload {self.name!r} has {ends.size} ends of {len(self)} requests; give all.")
        wrong = np.flatnonzero((ends < 1) | (ends > self.output_len)) if len(ends) else ends
        if len(wrong):
            worst = int(wrong[0])
            raise WorkloadError(
                f"request {worst} of workload {self.name!r} ends with token {ends[worst]}; give 1 to "
                f"{self.output_len[worst]}, its output length."
            )

    def __len__(self) -> int:
        return len(self.prompt_len)

    @property
    def generated_len(self) -> Lengths:
        """Tokens that each request generates as far as is known: its end, or else its output length."""
        return self.ends if len(self.ends) else self.output_len

    @property
    def may_end(self) -> bool:
        """True if a request may end before its output length."""
        return bool(len(self.ends)) or any(request.sampling.may_end for request in self.requests)

    @cached_property
    def mean_len(self) -> tuple[int, int]:
        """Means of the prompt and the output lengths, rounded [tokens]."""
        return round(self.prompt_len.mean()), round(self.output_len.mean())

    @cached_property
    def longest(self) -> int:
        """The first of the requests with most tokens, prompt and output together."""
        return int((self.prompt_len + self.output_len).argmax())

    @cached_property
    def as_asked(self) -> Workload:
        """The workload as its schedulers see it: nobody knows when a request will end."""
        return replace(self, ends=TO_THE_LAST) if len(self.ends) else self

    @cached_property
    def as_served(self) -> Workload:
        """A workload that asks for no more tokens than this one generates."""
        return replace(self, output_len=self.ends, ends=TO_THE_LAST) if len(self.ends) else self

    def __str__(self) -> str:
        drawn = " (synthetic)" if self.synthetic else ""
        means = f"mean prompt {self.prompt_len.mean():.4g}, mean output {self.output_len.mean():.4g}"
        online = f", arriving within {self.arrival[-1]:.4g} s" if len(self.arrival) else ""
        ended = f", mean end {self.ends.mean():.4g}" if len(self.ends) else ""
        return f"{self.name}: {len(self)} requests, {means}{ended}{online}{drawn}"

    __repr__ = __str__

    def arriving(
        self, *, rate: float | None = None, at: Sequence[float] | Times | None = None, seed: int = 0
    ) -> Workload:
        """The same requests, arriving one after the other.

        Parameters
        ----------
        rate : float, optional
            Requests per second of a Poisson process that is drawn with `seed`.
        at : sequence of float, optional
            Seconds after the start at which each request arrives, as a trace has them.

        Raises
        ------
        WorkloadError
            If not exactly one of `rate` and `at` is given, the rate is not positive, or the times are not in order.
        """
        if (rate is None) == (at is None):
            raise WorkloadError("arriving takes either a rate of requests per second or the times, at=[...].")
        if rate is not None:
            if not (is_number(rate) and 0 < rate < math.inf):
                raise WorkloadError(f"a rate must be a positive number of requests per second, not {rate!r}.")
            # A random stream of its own, so that with the same seed gaps do not depend on lengths.
            gaps = np.random.default_rng((seed, 1)).exponential(1 / rate, len(self))
            return replace(self, arrival=np.cumsum(gaps))
        times: Any = at
        if not np.size(times):
            raise WorkloadError(f"workload {self.name!r} has {len(self)} requests and no arrivals; give all.")
        return replace(self, arrival=times)

    def ending(self, *, at: Sequence[int] | Lengths) -> Workload:
        """The same requests, each ending with a token that no scheduler knows before it has come.

        All readers take it: `simulate` and `run` let the requests go there, `bound` and predictions count no more.

        Parameters
        ----------
        at : sequence of int
            Tokens that each request generates, from 1 to its output length. Those of a run are
            ``[len(tokens) for tokens in result.tokens]``.

        Raises
        ------
        WorkloadError
            If there is not one end for each request, or one is no whole number from 1 to the output length.
        """
        if not np.size(at):
            raise WorkloadError(f"workload {self.name!r} has {len(self)} requests and no ends; give all.")
        return replace(self, ends=whole_lengths(at, "generated"))

    def stopping(self, *, at: Sequence[int]) -> Workload:
        """The same requests, each ending with the first token that is one of these, if it samples one.

        Only `run` has tokens: `simulate` and `bound` let each request go on to its output length, unless they are told
        its end by `ending`.

        Parameters
        ----------
        at : sequence of int
            Token ids, such as ``wb.eos_token_ids(model)``.

        Raises
        ------
        WorkloadError
            If the requests have no tokens, or one of the ids is none.
        """
        if not self.requests:
            raise WorkloadError(f"workload {self.name!r} has lengths but no tokens to stop at; use ending(at=lengths).")
        if not isinstance(at, Sequence):
            raise WorkloadError(f"stopping takes a sequence of token ids, not {short(at)}; give at=[...].")
        stops = tuple(at)
        requests = (replace(each, sampling=replace(each.sampling, stop_token_ids=stops)) for each in self.requests)
        return replace(self, requests=tuple(requests))

    @classmethod
    def of(cls, requests: Iterable[Request], *, name: str = "requests") -> Workload:
        """A workload of requests with token ids."""
        requests = tuple(requests)
        for number, request in enumerate(requests):
            if not isinstance(request, Request):
                raise WorkloadError(
                    f"request {number} is no Request but {request!r}; give Request(prompt, output_len)."
                )
            if not is_whole(request.output_len):
                raise WorkloadError(f"request {number} has output_len={request.output_len!r}; give a whole number.")
        return cls(
            name,
            np.array([len(request.prompt) for request in requests], dtype=np.int64),
            whole_lengths([request.output_len for request in requests], "output"),
            requests,
        )

    @classmethod
    def lengths(cls, prompt: int | Sequence[int], output: int | Sequence[int], requests: int | None = None) -> Workload:
        """A workload of lengths only, for `bound` and `simulate`.

        Parameters
        ----------
        prompt, output : int or sequence of int
            One length for all requests, or one for each [tokens].
        requests : int, optional
            Number of requests, if both lengths are single numbers.
        """
        prompts = whole_lengths(prompt, "prompt")
        outputs = whole_lengths(output, "output")
        given = {lengths.size for lengths in (prompts, outputs) if lengths.ndim}
        counts = given | ({_positive(requests, "lengths")} if requests is not None else set()) or {1}
        if len(counts) > 1 or min(counts) < 1:
            found = " and ".join(map(str, sorted(counts)))
            raise WorkloadError(f"a workload needs at least one request, not {found}; give lengths of one number.")
        size = counts.pop()
        return cls("lengths", np.broadcast_to(prompts, size).copy(), np.broadcast_to(outputs, size).copy())

    @classmethod
    def from_jsonl(cls, path: str | Path, *, output_len: int = 32, tokenizer: Tokenizer = BYTES) -> Workload:
        """Read requests from a file with one JSON object per line.

        Keys: ``prompt`` (text, encoded by the tokenizer: its UTF-8 bytes unless a checkpoint's is given) or ``tokens``
        (ids); optional ``output_len`` (else the argument), the fields of `Sampling`, and in every line or in none
        ``arrival`` (seconds after the start).

        Raises
        ------
        WorkloadError
            If the file or one of its lines is malformed, or has text without a token; the line number is named.
        """
        path = Path(path)
        numbered = [(number, line) for number, line in enumerate(lines(path), 1) if line.strip()]
        parsed = [parse_request(f"{path.name}:{number}", line, output_len, tokenizer) for number, line in numbered]
        times: Any = [time for _, time in parsed if time is not None]
        return replace(cls.of((request for request, _ in parsed), name=path.stem), arrival=times)

    @classmethod
    def from_text(
        cls,
        path: str | Path,
        *,
        requests: int,
        output_len: int,
        tokenizer: Tokenizer = BYTES,
    ) -> Workload:
        """Take the first `requests` non-empty lines of a text file as prompts, repeating them if there are fewer."""
        path = Path(path)
        prompts = [line for line in lines(path) if line.strip()]
        if not prompts or not _is_count(requests):
            raise WorkloadError(f"{path.name} with requests={requests} gives no prompt; both must be at least one.")
        chosen = (prompts[index % len(prompts)] for index in range(requests))
        return cls.of((Request(tokenizer.encode(text), output_len) for text in chosen), name=path.stem)

    @classmethod
    def from_histogram(
        cls,
        histogram: str | Path | Counts,
        *,
        requests: int,
        output_len: int | None = None,
        seed: int = 0,
    ) -> Workload:
        """Draw the lengths of requests from given counts.

        Parameters
        ----------
        histogram : str, Path or mapping
            Counts by prompt length, such as ``{98: 20, 450: 1}``, or by (prompt, output); or a CSV file whose first
            line is ``prompt,count`` or ``prompt,output,count``.
        requests : int
            Number of requests to draw, with probabilities in proportion to the counts.
        output_len : int, optional
            Output length of every request; needed if the histogram has none, and not allowed otherwise.
        seed : int

        Raises
        ------
        WorkloadError
            If the histogram is malformed, output lengths are missing or given twice, or there are no requests.
        """
        if isinstance(histogram, Mapping):
            name = "histogram"
            table = Histogram.of(histogram)
        else:
            name = Path(histogram).stem
            table = Histogram.read(histogram)
        if table.knows_outputs == (output_len is not None):
            known = "has output lengths" if table.knows_outputs else "has no output lengths"
            raise WorkloadError(f"{name!r} {known} and output_len is {output_len}; give exactly one of them.")
        drawn = table.draw(np.random.default_rng(seed), _positive(requests, name))
        outputs = drawn[:, 1] if output_len is None else np.full(requests, whole_lengths(output_len, "output"))
        source = f"drawn from a histogram of {len(table.lengths)} rows, seed {seed}"
        return cls(name, drawn[:, 0], outputs, synthetic=True, source=source)


def byte_tokens(text: str) -> tuple[int, ...]:
    """Token ids of a text under the byte tokenizer: its UTF-8 bytes, 0 to 255."""
    return BYTES.encode(text)


def _is_count(requests: object) -> bool:
    return is_whole(requests) and bool(requests >= 1)


def _positive(requests: int, name: str) -> int:
    if not _is_count(requests):
        raise WorkloadError(f"{name} needs at least one request, not {requests!r}; give a whole number.")
    return requests


@dataclass(frozen=True)
class PublishedWorkload:
    """A data set of which only statistics are published; workloads drawn from them are marked as synthetic.

    Attributes
    ----------
    name : str
    prompt : LengthDistribution
    output : LengthDistribution or tuple of int
        Distribution of output lengths, or the fixed lengths of the publication.
    source : str
    """

    name: str
    prompt: LengthDistribution
    output: LengthDistribution | tuple[int, ...]
    source: str

    def sample(self, requests: int, output_len: int | None = None, *, seed: int = 0) -> Workload:
        """Draw lengths; the same seed draws the same ones.

        Parameters
        ----------
        requests : int
        output_len : int, optional
            Output length of every request; by default drawn too, or the only length that the publication has.
        seed : int

        Raises
        ------
        WorkloadError
            If there are no requests, or several output lengths were published and none is given.
        """
        generator = np.random.default_rng(seed)
        prompts = self.prompt.draw(generator, _positive(requests, self.name))
        if output_len is None and not isinstance(self.output, tuple):
            outputs = self.output.draw(generator, requests)
            how = f"; outputs: {self.output}"
        else:
            outputs = np.full(requests, whole_lengths(self._fixed(output_len), "output"))
            how = ""
        source = f"{self.source}; prompts: {self.prompt}{how}; seed {seed}"
        return Workload(self.name, prompts, outputs, synthetic=True, source=source)

    def _fixed(self, output_len: int | None) -> int:
        if output_len is not None:
            return output_len
        published = self.output if isinstance(self.output, tuple) else ()
        if len(published) != 1:
            raise WorkloadError(
                f"{self.name} was published with output lengths {', '.join(map(str, published))}; "
                "say which with output_len=..."
            )
        return published[0]

    def __str__(self) -> str:
        if isinstance(self.output, tuple):
            outputs = f"{' or '.join(map(str, self.output))} tokens"
        else:
            outputs = str(self.output)
        return f"{self.name}: prompts {self.prompt}; outputs {outputs}"


def _fitted(table: Mapping[str, float]) -> LengthDistribution:
    """The distribution that fits the catalogue's statistics."""
    if "std" in table:
        return Gamma(table["mean"], table["std"], table.get("max", math.inf))
    return LogNormal(table["mean"], table["max"])


def _from_catalogue(name: str, table: dict[str, Any]) -> PublishedWorkload:
    output = _fitted(table["output"]) if "output" in table else tuple(table["outputs"])
    return PublishedWorkload(name, _fitted(table["prompt"]), output, table["source"]["all"])


workloads: Catalogue[PublishedWorkload] = Catalogue("workloads.toml", _from_catalogue)
