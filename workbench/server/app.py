"""The routes of the server, and the errors that they answer with."""

from __future__ import annotations

import secrets
import time

from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp

from workbench.core.errors import EngineError, RequestError
from workbench.engine import Session
from workbench.jobs.bodies import Asked, BodyReader, Kind, parse_object
from workbench.jobs.llm import LLM, MAX_TOKENS
from workbench.server.feed import Feed
from workbench.server.guard import Guard, body_of, error_response
from workbench.server.reply import Reply

MOST_WAITING = 1024
"""Requests that wait or are served; a further one is refused."""


def make_app(llm: LLM, session: Session, token: str, port: int, *, max_tokens: int = MAX_TOKENS) -> ASGIApp:
    """The application, behind its guard.

    Parameters
    ----------
    llm : LLM
    session : Session
        The model, loaded.
    token : str
        Token that every request has to bring.
    port : int
        Port at which it listens.
    max_tokens : int
        Most tokens of an answer where the request says nothing.
    """
    routes = _Routes(llm, session, max_tokens)
    app = Starlette(
        routes=[
            Route("/health", routes.health),
            Route("/v1/models", routes.models),
            Route("/v1/models/{name}", routes.one_model),
            Route(Kind.CHAT.value, routes.chat, methods=["POST"]),
            Route(Kind.TEXT.value, routes.text, methods=["POST"]),
        ],
        exception_handlers={RequestError: _refused, HTTPException: _no_route, Exception: _failed},
    )
    return Guard(app, token, port)


async def _refused(request: Request, error: Exception) -> Response:
    if not isinstance(error, RequestError):
        raise error
    return error_response(str(error), error.status, error.param, error.code)


async def _no_route(request: Request, error: Exception) -> Response:
    status = error.status_code if isinstance(error, HTTPException) else 500
    paths = ", ".join(kind.value for kind in Kind)
    return error_response(f"{request.method} {request.url.path} is not served; see {paths}, /v1/models.", status)


async def _failed(request: Request, error: Exception) -> Response:
    return error_response(f"the server failed ({type(error).__name__}); see what it printed.", 500)


class _Routes:
    """The routes, which share a model and a session."""

    def __init__(self, llm: LLM, session: Session, max_tokens: int) -> None:
        self._session = session
        self._reader = BodyReader(llm, max_tokens=max_tokens, longest=session.longest)
        self._llm = llm
        self._began = int(time.time())
        self._under_way = set[Feed]()

    async def health(self, request: Request) -> Response:
        """200 while requests are answered, else 503."""
        failure = self._session.failure
        if failure is not None:
            return error_response(f"the engine failed ({type(failure).__name__}); start the server again.", 503)
        used = {"used_blocks": self._session.used_blocks, "blocks": self._session.blocks}
        return JSONResponse({"status": "ok", "requests": len(self._under_way), **used})

    async def models(self, request: Request) -> Response:
        """The list with the one model that is there."""
        return JSONResponse({"object": "list", "data": [self._model()]})

    async def one_model(self, request: Request) -> Response:
        """The model, by its name."""
        name = request.path_params["name"]
        if name != self._llm.model.name:
            raise RequestError(
                f"there is no model {name[:80]!r} here; give {self._llm.model.name!r}.",
                "model",
                code="model_not_found",
                status=404,
            )
        return JSONResponse(self._model())

    def _model(self) -> dict[str, object]:
        return {
            "id": self._llm.model.name,
            "object": "model",
            "created": self._began,
            "owned_by": "moe-workbench",
            "max_model_len": self._session.longest,
        }

    async def chat(self, request: Request) -> Response:
        """An answer to a conversation."""
        return await self._answer(Kind.CHAT, request)

    async def text(self, request: Request) -> Response:
        """A text that follows a prompt."""
        return await self._answer(Kind.TEXT, request)

    async def _answer(self, kind: Kind, request: Request) -> Response:
        raw = await body_of(request)
        asked = await run_in_threadpool(self._read, kind, raw)
        if len(self._under_way) >= MOST_WAITING:
            raise RequestError(
                f"{MOST_WAITING} requests wait already; try again later.", code="too_many_requests", status=429
            )
        if asked.tokens > self._session.longest:
            raise asked.too_long(self._session.longest)
        try:
            feed = Feed(self._session, asked.request)
        except EngineError as error:
            raise RequestError(str(error), code="engine_failed", status=503) from None
        self._under_way.add(feed)
        return Reply(self._llm, asked, feed, self._under_way)

    def _read(self, kind: Kind, raw: bytes) -> Asked:
        return self._reader.read(kind, parse_object(raw), seed=secrets.randbits(63))
