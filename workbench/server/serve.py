"""The server itself: a model is loaded, an address is printed, and requests are answered until Ctrl-C."""

from __future__ import annotations

import secrets
import socket

from workbench.core.errors import EngineError
from workbench.jobs.llm import LLM, MAX_TOKENS, TOGETHER

LONGEST = 4096
"""Most tokens of a request, unless the user says or the model takes fewer."""
HOST = "127.0.0.1"
_FAREWELL = 5
"""Seconds that answers under way have after Ctrl-C."""


def serve(
    llm: LLM,
    *,
    port: int = 8000,
    longest: int | None = None,
    together: int = TOGETHER,
    kv_capacity: str | float | None = None,
    max_tokens: int = MAX_TOKENS,
) -> None:
    """Answer requests to ``/v1/completions`` and ``/v1/chat/completions`` until Ctrl-C.

    Only programs on this computer reach it, and only with the token that is printed.

    Parameters
    ----------
    llm : LLM
    port : int
        0 takes one that is free.
    longest : int, optional
        Most tokens of a request, prompt and answer together; by default 4096, or as many as the model takes.
    together : int
        Most requests that run at once; further ones wait.
    kv_capacity : str or float, optional
        See `LLM.open`.
    max_tokens : int
        Most tokens of an answer where the request says nothing.

    Raises
    ------
    EngineError
        If starlette or uvicorn is missing, or a live run is under way in this process.
    OSError
        If the port is taken.
    CapacityError
        If the model does not fit this computer.
    """
    try:
        import uvicorn

        from workbench.server.app import make_app
    except ModuleNotFoundError as error:
        raise EngineError(f"the server needs {error.name}; pip install 'moe-workbench[serve]'.") from error
    with socket.create_server((HOST, port)) as listener:
        port = listener.getsockname()[1]
        most = longest or min(LONGEST, llm.longest)
        with llm.open(most, together=together, kv_capacity=kv_capacity) as session:
            session.wait()
            token = secrets.token_urlsafe(24)
            app = make_app(llm, session, token, port, max_tokens=max_tokens)
            print(f"{llm.model.name} at http://{HOST}:{port}/v1 with the token {token}", flush=True)
            config = uvicorn.Config(
                app,
                log_level="warning",
                lifespan="off",
                ws="none",
                proxy_headers=False,
                server_header=False,
                timeout_graceful_shutdown=_FAREWELL,
            )
            uvicorn.Server(config).run(sockets=[listener])
