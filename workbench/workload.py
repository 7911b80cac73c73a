"""Requests to serve: prompt and output lengths, and token ids where a model is to run them."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from workbench.catalogue import Catalogue
from workbench.errors import WorkloadError
from workbench.tokenizer import BYTES, Tokenizer

Lengths = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Sampling:
    """How a request's tokens are chosen; temperature 0 is greedy. The same seed gives the same tokens in any batch."""

    temperature: float = 0.0
    top_p: float = 1.0
    seed: int = 0

    def __post_init__(self) -> None:
        if self.temperature < 0 or not math.isfinite(self.temperature):
            raise WorkloadError(f"temperature must be 0 (greedy) or positive, not {self.temperature}.")
        if not 0 < self.top_p <= 1:
            raise WorkloadError(f"top_p must lie in (0, 1], not {self.top_p}; 1 keeps every token.")
        if not 0 <= self.seed < 2**64:
            raise WorkloadError(f"seed must be a number of 64 bits without a sign, not {self.seed}.")


@dataclass(frozen=True)
class Request:
    """One prompt, given as token ids, and the exact number of tokens to generate for it."""

    prompt: tuple[int, ...]
    output_len: int
    sampling: Sampling = field(default_factory=Sampling)


@dataclass(frozen=True, eq=False)
class Workload:
    """A pile of requests, served offline in this order.

    Attributes
    ----------
    name : str
    prompt_len, output_len : ndarray (requests,) int64
    requests : tuple of Request
        Empty where only the lengths are known; `run` needs the token ids.
    synthetic : bool
        True where the lengths were drawn from a distribution and not recorded.
    """

    name: str
    prompt_len: Lengths
    output_len: Lengths
    requests: tuple[Request, ...] = ()
    synthetic: bool = False

    def __post_init__(self) -> None:
        if not len(self.prompt_len):
            raise WorkloadError(f"workload {self.name!r} has no requests; give at least one.")
        for what, lengths in (("prompt", self.prompt_len), ("output", self.output_len)):
            if lengths.min() < 1:
                worst = int(lengths.argmin())
                raise WorkloadError(
                    f"request {worst} of workload {self.name!r} has {what} length {lengths[worst]}; the least is 1."
                )

    def __len__(self) -> int:
        return len(self.prompt_len)

    def __str__(self) -> str:
        drawn = " (synthetic)" if self.synthetic else ""
        means = f"mean prompt {self.prompt_len.mean():.4g}, mean output {self.output_len.mean():.4g}"
        return f"{self.name}: {len(self)} requests, {means}{drawn}"

    __repr__ = __str__

    @classmethod
    def of(cls, requests: Iterable[Request], *, name: str = "requests") -> Workload:
        """A workload of requests with token ids."""
        requests = tuple(requests)
        for number, request in enumerate(requests):
            if not isinstance(request.output_len, int | np.integer):
                raise WorkloadError(f"request {number} has output_len={request.output_len!r}; give a whole number.")
        return cls(
            name,
            np.array([len(request.prompt) for request in requests], dtype=np.int64),
            np.array([request.output_len for request in requests], dtype=np.int64),
            requests,
        )

    @classmethod
    def lengths(cls, prompt: int | Sequence[int], output: int | Sequence[int], requests: int | None = None) -> Workload:
        """A workload of lengths only, for `bound` and `simulate`.

        Parameters
        ----------
        prompt, output : int or sequence of int
            Length of every request, or of each [tokens].
        requests : int, optional
            Their number, where both lengths are single numbers.
        """
        given = {np.asarray(lengths).size for lengths in (prompt, output) if np.ndim(lengths)}
        counts = given | ({requests} if requests is not None else set()) or {1}
        if len(counts) > 1 or min(counts) < 1:
            found = " and ".join(map(str, sorted(counts)))
            raise WorkloadError(f"a workload needs at least one request, not {found}; give lengths of one number.")
        size = counts.pop()
        prompts, outputs = (np.broadcast_to(np.asarray(x, dtype=np.int64), size).copy() for x in (prompt, output))
        return cls("lengths", prompts, outputs)

    @classmethod
    def from_jsonl(cls, path: str | Path, *, output_len: int = 32, tokenizer: Tokenizer = BYTES) -> Workload:
        """Requests from a file with one JSON object per line.

        Keys: ``prompt`` (text, encoded by the tokenizer: its UTF-8 bytes unless a checkpoint's is given) or ``tokens``
        (ids); optional ``output_len`` (else the argument), ``temperature``, ``top_p`` and ``seed``.

        Raises
        ------
        WorkloadError
            If the file or one of its lines is malformed, or has text without a token; the line number is named.
        """
        path = Path(path)
        numbered = [(number, line) for number, line in enumerate(_lines(path), 1) if line.strip()]
        parsed = (_parse(f"{path.name}:{number}", line, output_len, tokenizer) for number, line in numbered)
        return cls.of(parsed, name=path.stem)

    @classmethod
    def from_text(
        cls,
        path: str | Path,
        *,
        requests: int,
        output_len: int,
        tokenizer: Tokenizer = BYTES,
    ) -> Workload:
        """The first `requests` non-empty lines of a text file as prompts, repeated from the top if there are fewer."""
        path = Path(path)
        prompts = [line for line in _lines(path) if line.strip()]
        if not prompts or requests < 1:
            raise WorkloadError(f"{path.name} with requests={requests} gives no prompt; both must be at least one.")
        chosen = (prompts[index % len(prompts)] for index in range(requests))
        return cls.of((Request(tokenizer.encode(text), output_len) for text in chosen), name=path.stem)


def byte_tokens(text: str) -> tuple[int, ...]:
    """Token ids of a text under the byte tokenizer: its UTF-8 bytes, 0 to 255."""
    return BYTES.encode(text)


def _lines(path: Path) -> list[str]:
    """Lines of a UTF-8 file; only newlines end them, not the other separators that a prompt may contain."""
    if not path.is_file():
        raise WorkloadError(f"workload file {str(path)!r} does not exist; give the path of a text file.")
    try:
        return path.read_text(encoding="utf-8").split("\n")
    except UnicodeDecodeError as error:
        raise WorkloadError(f"workload file {path.name} is not UTF-8 text ({error.reason}); convert it.") from error


def _parse(where: str, line: str, output_len: int, tokenizer: Tokenizer) -> Request:
    try:
        entry = json.loads(line)
    except ValueError as error:
        raise WorkloadError(f"{where} is not valid JSON ({error}); write one object per line.") from error
    if not isinstance(entry, Mapping) or ("prompt" in entry) == ("tokens" in entry):
        raise WorkloadError(f"{where} must be an object with either 'prompt' (text) or 'tokens' (a list of ids).")
    unknown = set(entry).difference(("prompt", "tokens", "output_len", "temperature", "top_p", "seed"))
    if unknown:
        raise WorkloadError(f"{where} has the unknown key {sorted(unknown)[0]!r}; remove it.")
    if "prompt" in entry:
        prompt = _encode(_typed(entry, "prompt", str, where), tokenizer, where)
    else:
        prompt = tuple(_typed(entry, "tokens", list, where))
    if not prompt or not all(type(token) is int and token >= 0 for token in prompt):
        raise WorkloadError(f"{where} needs a prompt of at least one token, each id a non-negative integer.")
    if "output_len" in entry:
        output_len = _typed(entry, "output_len", int, where)
    return Request(prompt, output_len, _sampling(entry, where))


def _encode(text: str, tokenizer: Tokenizer, where: str) -> tuple[int, ...]:
    try:
        return tokenizer.encode(text)
    except WorkloadError as error:
        raise WorkloadError(f"{where}: {error}") from None


def _sampling(entry: Mapping[str, Any], where: str) -> Sampling:
    given = {key: entry[key] for key in ("temperature", "top_p", "seed") if key in entry}
    for key in given:
        _typed(entry, key, int if key == "seed" else (int, float), where)
    try:
        return Sampling(**given)
    except WorkloadError as error:
        raise WorkloadError(f"{where}: {error}") from None


def _typed(entry: Mapping[str, Any], key: str, kind: type | tuple[type, ...], where: str) -> Any:
    if not isinstance(entry[key], kind) or isinstance(entry[key], bool):
        names = kind.__name__ if isinstance(kind, type) else "number"
        raise WorkloadError(f"{where} has {key}={entry[key]!r}; it must be of type {names}.")
    return entry[key]


@dataclass(frozen=True)
class LengthDistribution:
    """Prompt lengths of a data set of which only mean and maximum are published.

    A log-normal with that mean whose 99.9 % quantile is the maximum, truncated there: synthetic, and marked so.
    """

    name: str
    mean: float
    maximum: int

    def sample(self, requests: int, output_len: int, *, seed: int = 0) -> Workload:
        """Draw prompt lengths; every request generates `output_len` tokens."""
        if requests < 1:
            raise WorkloadError(f"{self.name}.sample needs at least one request, not {requests}.")
        quantile = 3.0902  # standard normal, 99.9 %
        sigma = quantile - math.sqrt(quantile**2 - 2 * math.log(self.maximum / self.mean))
        location = math.log(self.mean) - sigma**2 / 2
        generator = np.random.default_rng(seed)
        drawn = np.exp(generator.normal(location, sigma, requests))
        while (beyond := drawn > self.maximum).any():
            drawn[beyond] = np.exp(generator.normal(location, sigma, int(beyond.sum())))
        prompts = np.maximum(1, np.rint(drawn)).astype(np.int64)
        return Workload(self.name, prompts, np.full(requests, output_len, dtype=np.int64), synthetic=True)


def _from_catalogue(name: str, table: dict[str, Any]) -> LengthDistribution:
    return LengthDistribution(name, table["prompt_mean"], table["prompt_max"])


workloads: Catalogue[LengthDistribution] = Catalogue("workloads.toml", _from_catalogue)
