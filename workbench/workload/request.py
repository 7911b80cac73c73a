"""One request: a prompt of token ids, how its tokens are sampled, and when it ends."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from reprlib import repr as short
from typing import TypedDict

from workbench.core.errors import WorkloadError
from workbench.core.units import is_number, is_whole

MOST_PRESENCE = 2.0
"""Largest presence penalty, with either sign, as in vLLM and in OpenAI's API."""


class SamplingOptions(TypedDict, total=False):
    """The fields of `Sampling` as keyword arguments."""

    temperature: float
    top_p: float
    seed: int
    stop_token_ids: Sequence[int]
    top_k: int
    min_p: float
    repetition_penalty: float
    presence_penalty: float
    stop: Sequence[str]
    logprobs: int | None


@dataclass(frozen=True)
class Sampling:
    """Sampling of a request's tokens. The same seed gives the same tokens in any batch.

    Penalties change the logits, also of a greedy request. With a temperature a token is drawn from the most likely
    ones: `top_k` keeps so many, `top_p` of these the fewest that have its share of their probability, and `min_p` of
    these the ones that are likely enough.

    Attributes
    ----------
    temperature : float
        Divisor of the logits; 0 is greedy.
    top_p : float
        Probability that the most likely tokens, from which one is drawn, have together.
    seed : int
    stop_token_ids : tuple of int
        Tokens with which the request ends, and which it keeps; by default it goes on to its output length, whatever it
        samples.
    top_k : int
        Number of the most likely tokens from which one is drawn, of equal ones the first; 0 keeps every token.
    min_p : float
        Least probability of a token from which one is drawn, as a share of the most likely one's, in [0, 1].
    repetition_penalty : float
        Positive factor: logits of tokens that the prompt or the generated tokens have are divided by it where they are
        positive, else multiplied.
    presence_penalty : float
        Number from -2 to 2 that is subtracted from the logits of tokens that have been generated, once for each token.
    stop : tuple of str
        Texts with which the request ends, as soon as its generated tokens spell one of them. The tokens are kept.
    logprobs : int, optional
        Number of the most likely tokens whose log probabilities the result has, beside that of the token itself, for
        each generated token, and of all tokens if there are fewer; by default it has none.

    Notes
    -----
    Names and definitions are those of transformers' logits processors, in their order: repetition penalty (Keskar et
    al., "CTRL", 2019), temperature, top_k, top_p, min_p. vLLM has min_p before top_k. The presence penalty, which
    transformers lacks, is vLLM's and OpenAI's; it comes after the repetition penalty, as in vLLM. Log probabilities are
    of the model's own logits, before penalties and temperature, as vLLM's "raw_logprobs".
    """

    temperature: float = 0.0
    top_p: float = 1.0
    seed: int = 0
    stop_token_ids: tuple[int, ...] = ()
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    stop: tuple[str, ...] = ()
    logprobs: int | None = None

    def __post_init__(self) -> None:
        if not (is_number(self.temperature) and 0 <= self.temperature < math.inf):
            raise WorkloadError(f"temperature must be 0 (greedy) or positive, not {self.temperature!r}.")
        if not (is_number(self.top_p) and 0 < self.top_p <= 1):
            raise WorkloadError(f"top_p must lie in (0, 1], not {self.top_p!r}; 1 keeps every token.")
        if not (is_number(self.min_p) and 0 <= self.min_p <= 1):
            raise WorkloadError(f"min_p must lie in [0, 1], not {self.min_p!r}; 0 keeps every token.")
        if not (is_number(self.repetition_penalty) and 0 < self.repetition_penalty < math.inf):
            raise WorkloadError(
                f"repetition_penalty must be a positive factor, not {self.repetition_penalty!r}; 1 changes nothing."
            )
        if not (is_number(self.presence_penalty) and abs(self.presence_penalty) <= MOST_PRESENCE):
            raise WorkloadError(
                f"presence_penalty must lie in [-2, 2], not {self.presence_penalty!r}; 0 changes nothing."
            )
        if not (is_whole(self.seed) and 0 <= self.seed < 2**64):
            raise WorkloadError(f"seed must be a number of 64 bits without a sign, not {self.seed!r}.")
        object.__setattr__(self, "seed", int(self.seed))
        if not (is_whole(self.top_k) and 0 <= self.top_k < 2**63):
            raise WorkloadError(f"top_k must be a number of tokens, not {self.top_k!r}; 0 keeps every token.")
        object.__setattr__(self, "top_k", int(self.top_k))
        if self.logprobs is not None:
            if not (is_whole(self.logprobs) and 0 <= self.logprobs < 2**63):
                raise WorkloadError(
                    f"logprobs must be a number of tokens, not {self.logprobs!r}; 0 gives the token's own."
                )
            object.__setattr__(self, "logprobs", int(self.logprobs))
        self._check_stops()

    def _check_stops(self) -> None:
        stops = self.stop_token_ids
        if not (isinstance(stops, Sequence) and all(map(_is_token, stops))):
            raise WorkloadError(
                f"stop_token_ids must be token ids, non-negative integers below 2**63, not {short(stops)}; give a "
                "tuple, or () to end with the output length."
            )
        object.__setattr__(self, "stop_token_ids", tuple(map(int, stops)))
        texts = self.stop
        if isinstance(texts, str) or not (isinstance(texts, Sequence) and all(map(_is_text, texts))):
            raise WorkloadError(
                f"stop must be texts of at least one character, not {short(texts)}; give a tuple of them, such as "
                "('\\n',)."
            )
        object.__setattr__(self, "stop", tuple(texts))

    @property
    def penalised(self) -> bool:
        """True if the tokens so far change the logits."""
        return self.repetition_penalty != 1 or self.presence_penalty != 0

    @property
    def may_end(self) -> bool:
        """True if a request may end before its output length."""
        return bool(self.stop_token_ids or self.stop)


@dataclass(frozen=True)
class Request:
    """One prompt, given as token ids, and the number of tokens to generate for it, or until it samples a stop token."""

    prompt: tuple[int, ...]
    output_len: int
    sampling: Sampling = field(default_factory=Sampling)

    def __post_init__(self) -> None:
        if not (isinstance(self.prompt, Sequence) and self.prompt and all(map(_is_token, self.prompt))):
            raise WorkloadError(
                "a prompt must be token ids, at least one token, each id a non-negative integer below 2**63, not "
                f"{short(self.prompt)}; "
                "encode text with a tokenizer, such as byte_tokens(text)."
            )
        if not isinstance(self.sampling, Sampling):
            raise WorkloadError(
                f"sampling must be a Sampling, such as Sampling(temperature=0.7), not {self.sampling!r}."
            )


def _is_token(token: object) -> bool:
    return is_whole(token) and bool(0 <= token < 2**63)


def _is_text(text: object) -> bool:
    return isinstance(text, str) and text != ""
