"""The text of tokens that come one by one is the text of all of them."""

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

import workbench as wb
from tests.examples import examples
from workbench.server.text import TextStream
from workbench.workload.stop_strings import before, spells
from workbench.workload.tokenizer import BYTES, Tokenizer

pytest.importorskip("starlette")


class Spaced:
    """Words, with a space before each but the first, as SentencePiece decodes."""

    def encode(self, text: str, *, special: bool = False) -> tuple[int, ...]:
        raise NotImplementedError

    def decode(self, tokens: Sequence[int]) -> str:
        return " ".join(chr(97 + token % 26) * (1 + token % 3) for token in tokens)


SHIPPED = wb.load_tokenizer(wb.data_path("models/tiny-moe"))
TOKENIZERS: dict[str, tuple[Tokenizer, int]] = {
    "bytes": (BYTES, 300),
    "spaced": (Spaced(), 80),
    "shipped": (SHIPPED, 40),
}


def pieces(tokenizer: Tokenizer, tokens: Sequence[int], stop: Sequence[str]) -> tuple[list[str], str]:
    """What is sent of tokens until they spell a stop text, and the whole text."""
    stream = TextStream(tokenizer, stop)
    found = []
    for number, token in enumerate(tokens, 1):
        ended = bool(stop) and spells(tokens[:number], stop, tokenizer)
        if ended or number == len(tokens):
            text = tokenizer.decode(tokens[:number])
            cut = before(text, stop)
            whole = text if cut is None else cut
            return [*found, stream.end(whole)], whole
        found.append(stream.add(token))
    return found, ""


@pytest.mark.parametrize("name", TOKENIZERS)
@examples(200)
@given(data=st.data())
def test_all_pieces_are_the_whole_text(name: str, data: st.DataObject) -> None:
    tokenizer, vocabulary = TOKENIZERS[name]
    text = data.draw(st.text(max_size=12))
    drawn = data.draw(st.lists(st.integers(0, vocabulary - 1), max_size=20))
    tokens = [*(BYTES.encode(text) if name == "bytes" else ()), *drawn]
    stop = data.draw(st.lists(st.text("ab cé\n", min_size=1, max_size=4), max_size=3))
    found, whole = pieces(tokenizer, tokens, stop)
    assert "".join(found) == whole


def test_a_character_comes_whole_and_at_once() -> None:
    stream = TextStream(BYTES)
    assert [stream.add(byte) for byte in "aé€b".encode()] == ["a", "", "é", "", "", "€", "b"]


def test_what_may_begin_a_stop_text_waits_until_it_is_known() -> None:
    stream = TextStream(BYTES, ["abc", "bd"])
    assert [stream.add(byte) for byte in b"xabxaba"] == ["x", "", "", "abx", "", "", "ab"]
    assert stream.end("xabxaba") == "a"
