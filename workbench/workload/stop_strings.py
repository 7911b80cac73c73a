"""Texts with which a request ends, looked for in the text of its tokens."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from workbench.workload.request import Sampling
from workbench.workload.tokenizer import Tokenizer

_BYTES = 4
"""Most bytes of a character in UTF-8, and so the most tokens that spell it."""
_SILENT = 8
"""Tokens decoded beyond those that can spell a text: some have none, such as ids that only fill up a vocabulary."""
HALF = "\ufffd"
"""Made by a decoder of a character whose last bytes are still to come."""


def stops(tokens: Sequence[int], how: Sampling, tokenizer: Callable[[], Tokenizer], *, start: int = 0) -> bool:
    """True if the latest token is one that a request stops at, or completes a text that it stops at.

    Generated tokens begin at `start`. The tokenizer is asked for only where there are such texts.
    """
    return tokens[-1] in how.stop_token_ids or (bool(how.stop) and spells(tokens[start:], how.stop, tokenizer()))


def text_of(tokens: Sequence[int], how: Sampling, tokenizer: Tokenizer) -> str:
    """The text of all tokens, before a stop token or a text at which it stops."""
    ended = bool(tokens) and tokens[-1] in how.stop_token_ids
    text = tokenizer.decode(tokens[:-1] if ended else tokens)
    cut = before(text, how.stop)
    return text if cut is None else cut


def spells(tokens: Sequence[int], stop: Sequence[str], tokenizer: Tokenizer) -> bool:
    """True if generated tokens spell one of the texts, which ends with the latest of them.

    Only the last tokens are decoded, so that a long text is not read again with each of them. Where they spell it, all
    are: some decoders write the first token otherwise.
    """
    reach = _BYTES * max(map(len, stop)) + _SILENT
    latest = tokenizer.decode(tokens[-reach:]).rstrip(HALF)
    return any(text in latest for text in stop) and before(tokenizer.decode(tokens), stop) is not None


def before(text: str, stop: Sequence[str]) -> str | None:
    """The text before the first of these texts that it has; None if it has none."""
    places = [text.index(end) for end in stop if end in text]
    return text[: min(places)] if places else None
