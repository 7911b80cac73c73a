"""The door of the server: who may come in, and how much a request may bring."""

from __future__ import annotations

import hmac
from collections.abc import Mapping
from typing import Any

from starlette.datastructures import Headers
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from workbench.core.errors import RequestError

LARGEST_BODY = 16_000_000
"""Bytes of the largest body."""


def error_body(message: str, status: int, param: str | None = None, code: str | None = None) -> dict[str, Any]:
    """An error in the form of OpenAI's API."""
    kind = "invalid_request_error" if status < 500 else "server_error"
    message = message.encode("utf-8", "backslashreplace").decode("utf-8")  # it may quote halves of characters
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}


def error_response(message: str, status: int, param: str | None = None, code: str | None = None) -> JSONResponse:
    """The response with an error."""
    headers: Mapping[str, str] = {"WWW-Authenticate": "Bearer"} if status == 401 else {}
    return JSONResponse(error_body(message, status, param, code), status, headers)


class Guard:
    """Lets requests pass that name this server as their host and bring its token.

    A page of another site that has its own name resolved to this computer sends that name as the host. ``/health``
    needs no token.

    Parameters
    ----------
    app : ASGI application
    token : str
    port : int
        Port of the server.
    """

    def __init__(self, app: ASGIApp, token: str, port: int) -> None:
        self._app = app
        self._token = token.encode()
        self._hosts = {f"{name}:{port}" for name in ("127.0.0.1", "localhost")}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request."""
        refusal = self._refusal(Headers(scope=scope), str(scope["path"]))
        await (refusal or self._app)(scope, receive, send)

    def _refusal(self, headers: Headers, path: str) -> JSONResponse | None:
        if headers.getlist("host") == [] or not self._hosts.issuperset(headers.getlist("host")):
            named = " or ".join(sorted(self._hosts))
            return error_response(f"this server is {named}; use one of these addresses.", 403, code="wrong_host")
        scheme, _, token = headers.get("authorization", "").partition(" ")
        known = scheme.lower() == "bearer" and hmac.compare_digest(token.strip().encode(), self._token)
        if not known and path != "/health":
            return error_response(
                "the token is missing or wrong; send Authorization: Bearer with the one that the server printed.",
                401,
                code="invalid_api_key",
            )
        return None


async def body_of(request: Request) -> bytes:
    """The body of a request.

    Raises
    ------
    RequestError
        If it is larger than `LARGEST_BODY`, or its sender went away.
    """
    found = bytearray()
    try:
        async for chunk in request.stream():
            found += chunk
            if len(found) > LARGEST_BODY:
                raise RequestError(
                    f"the body is larger than {LARGEST_BODY} bytes; shorten it.", code="body_too_large", status=413
                )
    except ClientDisconnect:
        raise RequestError("the sender went away.", code="disconnected") from None
    return bytes(found)
