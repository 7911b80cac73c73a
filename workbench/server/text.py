"""The text of tokens that come one by one: no half characters, and nothing of a text at which it stops."""

from __future__ import annotations

from collections.abc import Sequence

from workbench.workload.stop_strings import HALF
from workbench.workload.tokenizer import Tokenizer


class TextStream:
    """The text of a request's tokens, piece by piece; all pieces together are its whole text.

    Parameters
    ----------
    tokenizer : Tokenizer
    stop : sequence of str
        Texts at which it stops; what may be the beginning of one is kept back until it is known.

    Notes
    -----
    A few tokens are decoded with those before them, because a decoder may write the first one otherwise, as
    Text Generation Inference does.
    """

    def __init__(self, tokenizer: Tokenizer, stop: Sequence[str] = ()) -> None:
        self._tokenizer = tokenizer
        self._stop = stop
        self._tokens = list[int]()
        self._before = 0  # the first token that is decoded with the new ones
        self._read = 0  # tokens whose text is known
        self._kept = ""
        self._sent = 0

    def add(self, token: int) -> str:
        """The piece that is certain with a further token; often empty."""
        self._tokens.append(token)
        known = self._tokenizer.decode(self._tokens[self._before : self._read])
        longer = self._tokenizer.decode(self._tokens[self._before :])
        if len(longer) <= len(known) or longer.endswith(HALF):
            return ""
        self._kept += longer[len(known) :]
        self._before = self._read
        self._read = len(self._tokens)
        certain = len(self._kept) - max((_begun(self._kept, text) for text in self._stop), default=0)
        piece = self._kept[:certain]
        self._kept = self._kept[certain:]
        self._sent += len(piece)
        return piece

    def end(self, whole: str) -> str:
        """The last piece of the whole text."""
        return whole[self._sent :]


def _begun(text: str, stop: str) -> int:
    """Characters at the end of a text with which a text at which it stops may begin."""
    longest = min(len(text), len(stop) - 1)
    return next((size for size in range(longest, 0, -1) if text.endswith(stop[:size])), 0)
