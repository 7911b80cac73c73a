"""Texts with which a request ends, looked for in the text of its tokens."""

from __future__ import annotations

from collections.abc import Sequence

from workbench.workload.tokenizer import Tokenizer

_BYTES = 4
"""Most bytes of a character in UTF-8, and so the most tokens that spell it."""
_SILENT = 8
"""Tokens decoded beyond those that can spell a text: some have none, such as ids that only fill up a vocabulary."""
_HALF = "\ufffd"
"""What a decoder makes of a character whose last bytes are still to come."""


def spells(tokens: Sequence[int], stop: Sequence[str], tokenizer: Tokenizer) -> bool:
    """True if generated tokens spell one of the texts, which ends with the latest of them.

    Only the last tokens are decoded, so that a long text is not read again with each of them. Where they spell it, all
    are: some decoders write the first token otherwise.
    """
    reach = _BYTES * max(map(len, stop)) + _SILENT
    latest = tokenizer.decode(tokens[-reach:]).rstrip(_HALF)
    return any(text in latest for text in stop) and before(tokenizer.decode(tokens), stop) is not None


def before(text: str, stop: Sequence[str]) -> str | None:
    """The text before the first of these texts that it has; None if it has none."""
    places = [text.index(end) for end in stop if end in text]
    return text[: min(places)] if places else None
