"""Bodies of answers in the form of OpenAI's API, written from a request's tokens."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import Any

from workbench.core.result import TokenLogprobs
from workbench.engine import End
from workbench.jobs.bodies import Asked, Kind
from workbench.jobs.llm import LLM
from workbench.workload import Sampling
from workbench.workload.stop_strings import text_of


class AnswerWriter:
    """Writes the bodies of answers of one model.

    Parameters
    ----------
    llm : LLM
    """

    def __init__(self, llm: LLM) -> None:
        self._llm = llm

    def answer(
        self,
        asked: Asked,
        identity: str,
        created: int,
        tokens: Sequence[int],
        logprobs: Sequence[TokenLogprobs],
        end: End,
    ) -> dict[str, Any]:
        """The body of a whole answer: an object chat.completion, or text_completion."""
        request = asked.request
        text = self.text(request.sampling, tokens)
        choice: dict[str, Any] = {"index": 0, "finish_reason": end.value, "logprobs": None}
        if asked.kind is Kind.CHAT:
            choice["message"] = {"role": "assistant", "content": text, "refusal": None}
        else:
            choice["text"] = text
        if request.sampling.logprobs is not None:
            choice["logprobs"] = self.logprobs(asked.kind, tokens, logprobs)
        return {**self.head(asked, identity, created), "choices": [choice], "usage": usage(asked, len(tokens))}

    def head(self, asked: Asked, identity: str, created: int, *, chunk: bool = False) -> dict[str, Any]:
        """The keys of an answer that say of what it is, whole or one chunk of it."""
        chat = "chat.completion.chunk" if chunk else "chat.completion"
        return {
            "id": f"{'chatcmpl' if asked.kind is Kind.CHAT else 'cmpl'}-{identity}",
            "object": chat if asked.kind is Kind.CHAT else "text_completion",
            "created": created,
            "model": self._llm.model.name,
            "system_fingerprint": self._llm.fingerprint,
        }

    def text(self, how: Sampling, tokens: Sequence[int]) -> str:
        """The text of all tokens, before a stop token or a text at which it stops."""
        return text_of(tokens, how, self._llm.tokenizer)

    def logprobs(
        self, kind: Kind, tokens: Sequence[int], found: Sequence[TokenLogprobs], start: int = 0
    ) -> dict[str, Any]:
        """Log probabilities of tokens, as the API writes them; `start` characters stand before them."""
        if kind is Kind.CHAT:
            return {
                "content": [self._chat_logprobs(*each) for each in zip(tokens, found, strict=True)],
                "refusal": None,
            }
        texts = [self._llm.tokenizer.decode([token]) for token in tokens]
        starts = list(accumulate(map(len, texts[:-1]), initial=start))
        return {
            "tokens": texts,
            "token_logprobs": [each.logprob for each in found],
            "top_logprobs": [self._best(each) for each in found],
            "text_offset": starts,
        }

    def _best(self, found: TokenLogprobs) -> dict[str, float]:
        return {self._llm.tokenizer.decode([token]): value for token, value in found.best}

    def _chat_logprobs(self, token: int, found: TokenLogprobs) -> dict[str, Any]:
        best = [self._of_token(*pair) for pair in found.best]
        return {**self._of_token(token, found.logprob), "top_logprobs": best}

    def _of_token(self, token: int, logprob: float) -> dict[str, Any]:
        text = self._llm.tokenizer.decode([token])
        return {"token": text, "logprob": logprob, "bytes": list(text.encode("utf-8"))}


def usage(asked: Asked, generated: int) -> dict[str, int]:
    """Counts of the tokens of a request."""
    prompt = len(asked.request.prompt)
    return {"prompt_tokens": prompt, "completion_tokens": generated, "total_tokens": prompt + generated}
