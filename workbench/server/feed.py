"""The tokens of one request, from the engine's threads to the server's own."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator

from workbench.core.errors import EngineError
from workbench.core.result import TokenLogprobs
from workbench.engine import End, Session, Told
from workbench.workload import Request


class Feed:
    """A request of a session, whose tokens are awaited.

    Parameters
    ----------
    session : Session
    request : Request

    Raises
    ------
    CapacityError
        If the request is too long.
    EngineError
        If the session has ended.

    Attributes
    ----------
    tokens, logprobs : list
        Tokens so far, and their log probabilities where the request asks for them.
    end : End or None
        Reason for which the request has ended; None until then.
    """

    def __init__(self, session: Session, request: Request) -> None:
        self.tokens = list[int]()
        self.logprobs = list[TokenLogprobs]()
        self.end: End | None = None
        self._session = session
        self._loop = asyncio.get_running_loop()
        self._told: asyncio.Queue[Told | BaseException] = asyncio.Queue()
        self._ticket = session.ask(request, self._tell)

    def _tell(self, told: Told | BaseException) -> None:
        """Hand on what an engine's thread tells; once the server has ended nobody listens."""
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(self._told.put_nowait, told)

    async def __aiter__(self) -> AsyncIterator[int]:
        """Every token as it comes, to the last.

        Raises
        ------
        EngineError
            If the session ends before.
        """
        while self.end is None:
            told = await self._told.get()
            if isinstance(told, BaseException):
                raise EngineError(f"the request was not finished, since {told}") from told
            self.tokens.append(told.token)
            if told.logprobs is not None:
                self.logprobs.append(told.logprobs)
            self.end = told.end
            yield told.token

    def close(self) -> None:
        """Await no further token: the request is cancelled, unless it has ended."""
        self._session.cancel(self._ticket)
