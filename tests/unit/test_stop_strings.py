"""Texts at which a request stops: found with the token that completes them, whatever the tokens are made of."""

from collections.abc import Sequence

import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import decoders, models

from tests.examples import examples
from workbench.workload.stop_strings import before, spells
from workbench.workload.tokenizer import BYTES, CheckpointTokenizer, Tokenizer


def of_bytes() -> Tokenizer:
    """Byte-level pieces as GPT-2's: parts of characters, single characters and several."""
    letters = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    pieces = [*sorted(letters), "ab", "ba", "aab", "Ġa", "Ċ", "ĊĊ"]
    made = tokenizers.Tokenizer(models.WordLevel({piece: n for n, piece in enumerate(dict.fromkeys(pieces))}, "a"))
    made.decoder = decoders.ByteLevel()
    return CheckpointTokenizer("bytes", made)


def of_words() -> Tokenizer:
    """Pieces as SentencePiece's: a text's leading space is cut, and unknown characters are bytes."""
    pieces = ["▁a", "▁b", "a", "b", "ab", "▁", "\n", *(f"<0x{byte:02X}>" for byte in range(256))]
    made = tokenizers.Tokenizer(models.WordLevel({piece: n for n, piece in enumerate(pieces)}, "a"))
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    made.decoder = decoders.Sequence(steps)
    return CheckpointTokenizer("words", made)


def of_pieces() -> Tokenizer:
    """Pieces as BERT's: those that go on with a word begin with ##, which the first of a text shows."""
    pieces = ["a", "b", "##a", "##ab", "#", "."]
    made = tokenizers.Tokenizer(models.WordLevel({piece: n for n, piece in enumerate(pieces)}, "a"))
    made.decoder = decoders.WordPiece("##")
    return CheckpointTokenizer("pieces", made)


TOKENIZERS = {"utf-8": (BYTES, 256), "byte-level": (of_bytes(), 260), "sentencepiece": (of_words(), 263)}
TOKENIZERS["wordpiece"] = (of_pieces(), 6)


def first_stop(tokens: Sequence[int], stop: Sequence[str], tokenizer: Tokenizer) -> int | None:
    """Number of tokens whose whole text has one of the texts; characters that are not complete do not count."""
    for count in range(1, len(tokens) + 1):
        text = tokenizer.decode(tokens[:count]).rstrip("\ufffd")
        if any(end in text for end in stop):
            return count
    return None


def found_stop(tokens: Sequence[int], stop: Sequence[str], tokenizer: Tokenizer) -> int | None:
    """The same, token by token, as an engine asks."""
    return next((n for n in range(1, len(tokens) + 1) if spells(tokens[:n], stop, tokenizer)), None)


@pytest.mark.parametrize("name", TOKENIZERS)
@examples(200)
@given(st.data())
def test_a_text_is_found_with_the_token_that_completes_it(name: str, data: st.DataObject) -> None:
    """Of tokens of which a few come often, so that texts are spelled in many ways; the window is far shorter."""
    tokenizer, size = TOKENIZERS[name]
    few = data.draw(st.lists(st.integers(0, size - 1), min_size=1, max_size=4))
    tokens = data.draw(st.lists(st.sampled_from(few), min_size=1, max_size=60))
    text = tokenizer.decode(tokens).replace("\ufffd", "") or "a"
    start = data.draw(st.integers(0, len(text) - 1))
    stop = [text[start : start + data.draw(st.integers(1, 3))], "zzz"]
    assert found_stop(tokens, stop, tokenizer) == first_stop(tokens, stop, tokenizer)


@pytest.mark.parametrize("stop", ["é", "aé", "éb", "\n\n", "€", "😀"])
def test_a_character_of_several_bytes_counts_once_it_is_whole(stop: str) -> None:
    text = f"{20 * 'ü'}{stop}b"
    tokens = text.encode()
    assert found_stop(tokens, [stop], BYTES) == 40 + len(stop.encode())
    assert before(BYTES.decode(tokens), [stop]) == 20 * "ü"


def test_tokens_without_a_text_do_not_hide_it() -> None:
    spelled = of_bytes().encode  # of the alphabet alone
    tokens = [token for byte in "ðŁĺĢ" for token in (*spelled(byte), 9999)]
    assert of_bytes().decode(tokens) == "😀"
    assert found_stop([0] * 30 + tokens, ["😀"], of_bytes()) == 37


def test_what_only_the_beginning_of_a_text_shows_is_not_found_later() -> None:
    assert found_stop([2, 2], ["##"], of_pieces()) == 1
    assert found_stop([0] + 40 * [2], ["##"], of_pieces()) is None


def test_half_a_character_is_no_text() -> None:
    assert not spells("aé".encode()[:-1], ["\ufffd"], BYTES)


@pytest.mark.parametrize(
    ("text", "stop", "rest"),
    [
        ("a.b;c", (";", "."), "a"),
        ("a.b", ("x",), None),
        (".", (".",), ""),
        ("a", (), None),
        ("aXYZ", ("YZ", "XY"), "a"),
    ],
)
def test_a_text_is_cut_before_the_first(text: str, stop: tuple[str, ...], rest: str | None) -> None:
    assert before(text, stop) == rest


def test_a_long_text_is_not_read_again_with_each_token() -> None:
    read: list[int] = []

    class Counting:
        def encode(self, text: str, *, special: bool = False) -> tuple[int, ...]:
            return BYTES.encode(text)

        def decode(self, tokens: Sequence[int]) -> str:
            read.append(len(tokens))
            return BYTES.decode(tokens)

    assert not spells(b"a" * 5000, ["\n\n", "end"], Counting())
    assert sum(read) < 50
