"""The answer to one request, whole or as a stream of events; if its reader goes away, the request is cancelled."""

from __future__ import annotations

import asyncio
import json
import secrets
import time
from collections.abc import AsyncIterator
from typing import Any

from starlette.responses import JSONResponse, Response
from starlette.types import Receive, Scope, Send

from workbench.core.errors import EngineError
from workbench.engine import End
from workbench.jobs.bodies import Asked, Kind
from workbench.jobs.completions import AnswerWriter, usage
from workbench.jobs.llm import LLM
from workbench.server.feed import Feed
from workbench.server.guard import error_body, error_response
from workbench.server.text import TextStream

_EVENTS = [(b"content-type", b"text/event-stream; charset=utf-8"), (b"cache-control", b"no-cache")]


class Reply(Response):
    """The response to one request.

    Parameters
    ----------
    llm : LLM
    asked : Asked
    feed : Feed
        The tokens of its request.
    among : set of Feed
        Feeds that are open; this one is taken out at the end.
    """

    def __init__(self, llm: LLM, asked: Asked, feed: Feed, among: set[Feed]) -> None:
        self.background = None
        self._asked = asked
        self._feed = feed
        self._among = among
        self._writer = AnswerWriter(llm)
        self._text = TextStream(llm.tokenizer, asked.request.sampling.stop)
        self._identity = secrets.token_hex(12)
        self._created = int(time.time())

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the answer, unless its reader goes away before."""
        send_it = self._send_events if self._asked.stream else self._send_whole
        sending = asyncio.ensure_future(send_it(scope, receive, send))
        gone = asyncio.ensure_future(_gone(receive))
        try:
            await asyncio.wait({sending, gone}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            self._feed.close()
            self._among.discard(self._feed)
            went = gone.done()
            sending.cancel()
            gone.cancel()
            outcome, _ = await asyncio.gather(sending, gone, return_exceptions=True)
        if isinstance(outcome, Exception) and not went:
            raise outcome

    async def _send_whole(self, scope: Scope, receive: Receive, send: Send) -> None:
        feed = self._feed
        try:
            async for _ in feed:
                pass
        except EngineError as error:
            await error_response(str(error), 503, code="engine_failed")(scope, receive, send)
            return
        end = feed.end or End.LENGTH
        body = self._writer.answer(self._asked, self._identity, self._created, feed.tokens, feed.logprobs, end)
        await JSONResponse(body)(scope, receive, send)

    async def _send_events(self, scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": _EVENTS})
        try:
            async for event in self._events():
                await send({"type": "http.response.body", "body": _event(event), "more_body": True})
            last = b"data: [DONE]\n\n"
        except EngineError as error:
            last = _event(error_body(str(error), 503, code="engine_failed"))
        await send({"type": "http.response.body", "body": last, "more_body": False})

    async def _events(self) -> AsyncIterator[dict[str, Any]]:
        feed = self._feed
        chat = self._asked.kind is Kind.CHAT
        if chat:
            yield self._chunk({"delta": {"role": "assistant", "content": ""}})
        told = 0  # tokens whose log probabilities were sent
        start = 0
        async for token in feed:
            if feed.end is None:
                piece = self._text.add(token)
            else:
                piece = self._text.end(self._writer.text(self._asked.request.sampling, feed.tokens))
            if piece or (feed.end is not None and feed.logprobs):
                logprobs = None
                if feed.logprobs:
                    some = slice(told, None)
                    kind = self._asked.kind
                    logprobs = self._writer.logprobs(kind, feed.tokens[some], feed.logprobs[some], start)
                yield self._chunk({"delta": {"content": piece}} if chat else {"text": piece}, logprobs)
                told = len(feed.tokens)
                start += len(piece)
        yield self._chunk({"delta": {}} if chat else {"text": ""}, end=feed.end)
        if self._asked.usage:
            yield {**self._head, "choices": [], "usage": usage(self._asked, len(feed.tokens))}

    @property
    def _head(self) -> dict[str, Any]:
        return self._writer.head(self._asked, self._identity, self._created, chunk=True)

    def _chunk(
        self, piece: dict[str, Any], logprobs: dict[str, Any] | None = None, end: End | None = None
    ) -> dict[str, Any]:
        reason = None if end is None else end.value
        choice = {"index": 0, **piece, "logprobs": logprobs, "finish_reason": reason}
        return {**self._head, "choices": [choice], **({"usage": None} if self._asked.usage else {})}


def _event(value: dict[str, Any]) -> bytes:
    return b"data: " + json.dumps(value, ensure_ascii=False).encode("utf-8") + b"\n\n"


async def _gone(receive: Receive) -> None:
    """Return once the reader has gone away."""
    while (await receive())["type"] != "http.disconnect":
        pass
