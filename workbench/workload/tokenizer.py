"""Tokenizers, from text to token ids and back: a checkpoint's own tokenizer.json, or bytes if it has none."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from workbench.core.errors import CheckpointError, WorkloadError
from workbench.core.records import is_file, is_folder, reason
from workbench.models import ModelConfig, folder_of

if TYPE_CHECKING:
    import tokenizers

_OTHERS = ("tokenizer.model", "tekken.json", "vocab.json", "vocab.txt", "tiktoken.model")
"""Files of tokenizers that are no tokenizer.json."""


class Tokenizer(Protocol):
    """Translates between text and token ids."""

    def encode(self, text: str, *, special: bool = False) -> tuple[int, ...]:
        """Token ids of a text, with the special tokens around it that a prompt has if `special` is set."""
        ...

    def decode(self, tokens: Sequence[int]) -> str:
        """The text of token ids."""
        ...


class ByteTokenizer:
    """A tokenizer whose token ids, 0 to 255, are a text's UTF-8 bytes."""

    def encode(self, text: str, *, special: bool = False) -> tuple[int, ...]:
        """Token ids of a text; there are no special ones."""
        return tuple(text.encode("utf-8"))

    def decode(self, tokens: Sequence[int]) -> str:
        """The text of token ids; invalid UTF-8 and ids that are no bytes become the replacement character."""
        known = bytes(token if 0 <= token < 256 else 0xFF for token in tokens)
        return known.decode("utf-8", errors="replace")


BYTES = ByteTokenizer()


class CheckpointTokenizer:
    """The tokenizer.json of a checkpoint."""

    def __init__(self, name: str, tokenizer: tokenizers.Tokenizer) -> None:
        self._name = name
        self._tokenizer = tokenizer
        named = getattr(tokenizer.model, "unk_token", None)
        self._unknown = tokenizer.token_to_id(named) if named else None

    def encode(self, text: str, *, special: bool = False) -> tuple[int, ...]:
        """Token ids of a text.

        Parameters
        ----------
        text : str
        special : bool
            Add the special tokens that the tokenizer puts around a prompt, such as a first one.

        Raises
        ------
        WorkloadError
            If some of the text is no token of this tokenizer, or the tokenizer contradicts itself.
        """
        try:
            found = self._tokenizer.encode(text, add_special_tokens=special)
        except UnicodeEncodeError:
            raise
        except Exception as error:  # the library raises nothing narrower
            raise WorkloadError(
                f"the tokenizer of {self._name!r} cannot encode {text[:40]!r} ({reason(error)}); "
                "fetch its tokenizer.json again."
            ) from error
        if self._unknown in found.ids:
            begin, end = found.offsets[found.ids.index(self._unknown)]
            raise WorkloadError(
                f"text {text[:40]!r} has {text[begin:end]!r}, the tokenizer of {self._name!r} has no token for it; "
                "remove it, or give token ids."
            )
        return tuple(found.ids)

    def decode(self, tokens: Sequence[int]) -> str:
        """The text of token ids.

        Raises
        ------
        WorkloadError
            If one is no number of 32 bits.
        """
        strange = [token for token in tokens if not 0 <= token < 2**32]
        if strange:
            raise WorkloadError(f"the tokenizer of {self._name!r} has no token {strange[0]}; give ids below 2**32.")
        return str(self._tokenizer.decode(list(tokens), skip_special_tokens=False))


def load_tokenizer(model: ModelConfig | str | Path) -> Tokenizer:
    """The tokenizer of a checkpoint: its tokenizer.json, or bytes if it has none.

    Parameters
    ----------
    model : ModelConfig or str or Path
        A checkpoint, or its folder.

    Raises
    ------
    CheckpointError
        If the file is damaged, the folder does not exist, or it has another tokenizer's files alone.
    """
    folder = folder_of(model)
    if folder is None:
        return BYTES
    if not is_folder(folder):
        raise CheckpointError(f"checkpoint {str(folder)!r} is no folder; give the one that holds tokenizer.json.")
    file = folder / "tokenizer.json"
    if is_file(file):
        return _read(file, file.stat().st_mtime_ns)
    other = next((name for name in _OTHERS if is_file(folder / name)), None)
    if other is not None:
        raise CheckpointError(
            f"checkpoint {folder.name!r} has {other} and no tokenizer.json; make one by "
            "transformers.AutoTokenizer.from_pretrained(folder).save_pretrained(folder)."
        )
    return BYTES


@functools.lru_cache(maxsize=4)
def _read(file: Path, changed: int) -> CheckpointTokenizer:
    """The tokenizer of a file, which is read again once it has changed."""
    import tokenizers

    try:
        return CheckpointTokenizer(file.parent.name, tokenizers.Tokenizer.from_file(str(file)))
    except Exception as error:  # the library raises nothing narrower
        raise CheckpointError(f"{file} is no valid tokenizer ({reason(error)}); fetch it again.") from error
