"""The server, asked by OpenAI's own client, by 64 at once, by readers that go away, and by nonsense."""

import asyncio
import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.examples import examples
from tests.talking import talking
from workbench.engine import Session, engine
from workbench.jobs.llm import LLM

httpx = pytest.importorskip("httpx")
openai = pytest.importorskip("openai")
uvicorn = pytest.importorskip("uvicorn")

from workbench.server import app as app_module  # noqa: E402
from workbench.server import guard  # noqa: E402
from workbench.server.app import make_app  # noqa: E402

TOKEN = "secret"


class Running:
    """A server, and clients of it."""

    def __init__(self, llm: LLM, session: Session, port: int) -> None:
        self.llm = llm
        self.session = session
        self.port = port
        self.url = f"http://127.0.0.1:{port}"
        self.http = httpx.Client(base_url=self.url, headers={"Authorization": f"Bearer {TOKEN}"}, timeout=60)
        self.client = openai.OpenAI(base_url=f"{self.url}/v1", api_key=TOKEN, max_retries=0, timeout=60)

    def health(self) -> dict[str, Any]:
        found: dict[str, Any] = httpx.get(f"{self.url}/health").json()
        return found


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    llm = LLM(talking(tmp_path_factory.mktemp("models") / "tiny-moe"), weights="fp32", kv="fp32")
    with socket.create_server(("127.0.0.1", 0)) as listener, llm.open(longest=400, together=16) as session:
        session.wait()
        port = listener.getsockname()[1]
        app = make_app(llm, session, TOKEN, port)
        running = uvicorn.Server(uvicorn.Config(app, log_level="critical", lifespan="off"))
        thread = threading.Thread(target=running.run, kwargs={"sockets": [listener]})
        thread.start()
        until(lambda: running.started)
        yield Running(llm, session, port)
        running.should_exit = True
        thread.join(30)
        assert not thread.is_alive()


def until(true: Callable[[], bool], seconds: float = 30.0) -> None:
    end = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < end
        time.sleep(0.005)


@pytest.fixture(autouse=True)
def nothing_left_behind(server: Running) -> Iterator[None]:
    """After each test no request is served and no block is held."""
    yield
    until(lambda: server.health()["requests"] == 0)
    until(lambda: server.health()["used_blocks"] == 0)
    assert server.session.failure is None


SORT = [{"role": "sort", "content": "plmku"}]


def test_openais_client_gets_whole_answers(server: Running) -> None:
    (model,) = server.client.models.list().data
    assert model.id == server.client.models.retrieve("tiny-moe").id == "tiny-moe"
    chat = server.client.chat.completions.create(
        model="tiny-moe", messages=SORT, max_tokens=12, stop="\n", logprobs=True
    )
    (choice,) = chat.choices
    assert (choice.message.content, choice.message.role, choice.finish_reason) == ("klmpu", "assistant", "stop")
    assert (chat.usage.prompt_tokens, chat.usage.completion_tokens, chat.usage.total_tokens) == (7, 6, 13)
    assert "".join(each.token for each in choice.logprobs.content) == "klmpu\n"
    text = server.client.completions.create(model="tiny-moe", prompt="sort:plmku=", max_tokens=3, logprobs=2)
    assert (text.choices[0].text, text.choices[0].finish_reason) == ("klm", "length")
    assert [len(best) for best in text.choices[0].logprobs.top_logprobs] == [2, 2, 2]


def test_openais_client_gets_texts_as_they_come(server: Running) -> None:
    how = {"model": "tiny-moe", "max_tokens": 20, "stop": ["\n", "mq"], "stream": True}
    usage = {"stream_options": {"include_usage": True}}
    chunks = list(server.client.chat.completions.create(messages=SORT, logprobs=True, **how, **usage))
    *texts, last, counts = chunks
    assert len(texts) > 3
    assert "".join(chunk.choices[0].delta.content for chunk in texts) == "klmpu"
    assert texts[0].choices[0].delta.role == "assistant"
    assert (last.choices[0].finish_reason, last.choices[0].delta.content) == ("stop", None)
    assert (counts.choices, counts.usage.completion_tokens) == ([], 6)
    told = [chunk.choices[0].logprobs.content for chunk in texts[1:] if chunk.choices[0].logprobs]
    assert "".join("".join(each.token for each in some) for some in told) == "klmpu\n"
    assert len({chunk.id for chunk in chunks}) == 1
    plain = list(server.client.completions.create(prompt="sort:plmku=", **how))
    assert "".join(chunk.choices[0].text for chunk in plain) == "klmpu"
    assert len(plain) > 3
    assert plain[-1].choices[0].finish_reason == "stop"


def test_streamed_or_whole_the_same_seed_gives_the_same_text(server: Running) -> None:
    def draw(seed: int | None, stream: bool) -> str:
        body = {"prompt": "copy:abc=", "max_tokens": 30, "temperature": 2.0, "seed": seed, "stream": stream}
        answer = server.client.completions.create(model="tiny-moe", **body)
        return "".join(chunk.choices[0].text for chunk in answer) if stream else str(answer.choices[0].text)

    assert draw(5, False) == draw(5, True) != draw(6, True)
    assert draw(None, False) != draw(None, False)


def test_64_clients_at_once_get_what_each_gets_alone(server: Running) -> None:
    words = [f"{chr(97 + n % 26)}{chr(97 + n // 3)}xq{'abc'[n % 3]}" for n in range(64)]

    async def ask(client: Any, number: int) -> str:
        body = {"model": "tiny-moe", "messages": [{"role": "reverse", "content": words[number]}], "max_tokens": 12}
        if number % 2:
            stream = await client.chat.completions.create(stream=True, **body)
            return "".join([chunk.choices[0].delta.content or "" async for chunk in stream])
        return str((await client.chat.completions.create(**body)).choices[0].message.content)

    async def all_of_them(together: bool) -> list[str]:
        async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key=TOKEN, max_retries=0, timeout=120) as client:
            if together:
                return list(await asyncio.gather(*(ask(client, number) for number in range(64))))
            return [await ask(client, number) for number in range(0, 64, 7)]

    together = asyncio.run(all_of_them(True))
    assert together[::7] == asyncio.run(all_of_them(False))
    assert len(set(together)) > 50


@pytest.fixture
def slow(monkeypatch: pytest.MonkeyPatch) -> None:
    execute = engine.Engine.execute

    def later(self: Any, *given_: Any) -> Any:
        time.sleep(0.03)
        return execute(self, *given_)

    monkeypatch.setattr(engine.Engine, "execute", later)


LONG = {"prompt": "copy:" + "abc" * 40, "max_tokens": 250, "ignore_eos": True}


@pytest.mark.usefixtures("slow")
@pytest.mark.parametrize("stream", [True, False])
def test_who_hangs_up_frees_the_blocks(server: Running, stream: bool) -> None:
    """The other one is served on."""
    staying = threading.Thread(target=lambda: found.append(server.http.post("/v1/completions", json=SHORT).json()))
    found: list[Any] = []
    with socket.create_connection(("127.0.0.1", server.port)) as going:
        body = json.dumps(LONG | {"stream": stream}).encode()
        head = f"POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1:{server.port}\r\nAuthorization: Bearer {TOKEN}\r\n"
        going.sendall(head.encode() + b"Content-Length: %d\r\n\r\n" % len(body) + body)
        until(lambda: server.session.used_blocks >= 8)
        staying.start()
        until(lambda: server.health()["requests"] == 2)
    until(lambda: server.health()["requests"] == 1)
    until(lambda: 0 < server.session.used_blocks <= 4)
    staying.join(30)
    assert found[0]["usage"]["completion_tokens"] == 30


SHORT = {"prompt": "sort:cab=", "max_tokens": 30}


def test_only_who_has_the_token_comes_in(server: Running) -> None:
    wrong = ["", "Bearer", "Bearer wrong", f"Basic {TOKEN}", TOKEN, f"Bearer {TOKEN}x", "Bearer é"]
    for header in wrong:
        for path in ("/v1/models", "/v1/completions", "/nothing"):
            answer = httpx.post(server.url + path, headers={"Authorization": header.encode()}, json=SHORT)
            assert (answer.status_code, answer.json()["error"]["code"]) == (401, "invalid_api_key")
            assert answer.headers["WWW-Authenticate"] == "Bearer"
    with pytest.raises(openai.AuthenticationError):
        openai.OpenAI(base_url=f"{server.url}/v1", api_key="wrong", max_retries=0).models.list()
    assert httpx.get(f"{server.url}/health").status_code == 200


def test_a_page_under_another_name_is_refused(server: Running) -> None:
    for host in ("evil.example", f"evil.example:{server.port}", "127.0.0.1", f"127.0.0.1:{server.port + 1}", ""):
        answer = server.http.get("/v1/models", headers={"Host": host})
        assert (answer.status_code, answer.json()["error"]["code"]) == (403, "wrong_host")
    assert server.http.get("/v1/models", headers={"Host": f"localhost:{server.port}"}).status_code == 200
    with socket.create_connection(("127.0.0.1", server.port)) as bare:
        bare.sendall(b"GET /health HTTP/1.0\r\n\r\n")
        assert bare.recv(100).split()[1] == b"403"


def test_a_body_that_is_too_large_is_refused(server: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(guard, "LARGEST_BODY", 1000)
    for content in (b"x" * 2000, iter([b"x" * 600, b"x" * 600])):
        answer = server.http.post("/v1/completions", content=content)
        assert (answer.status_code, answer.json()["error"]["code"]) == (413, "body_too_large")
    assert server.http.post("/v1/completions", json=SHORT).status_code == 200


def test_too_many_at_once_are_told_to_come_again(server: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(app_module, "MOST_WAITING", 0)
    answer = server.http.post("/v1/completions", json=SHORT)
    assert (answer.status_code, answer.json()["error"]["code"]) == (429, "too_many_requests")


@pytest.mark.parametrize(
    ("body", "status", "code"),
    [
        ({"prompt": "a", "n": 2}, 400, "unsupported_value"),
        ({"prompt": "a", "max_tokens": 400}, 400, "context_length_exceeded"),
        ({"prompt": "a" * 400}, 400, "context_length_exceeded"),
        ({"prompt": "a", "model": "gpt"}, 404, "model_not_found"),
        ({"prompt": "\ud800"}, 400, "invalid_value"),
        ({"prompt": "a", "\ud800": 1}, 400, "unknown_parameter"),
    ],
)
def test_what_cannot_be_served_is_refused_by_name(
    body: dict[str, Any], status: int, code: str, server: Running
) -> None:
    answer = server.http.post("/v1/completions", content=json.dumps(body).encode())
    assert (answer.status_code, answer.json()["error"]["code"]) == (status, code)
    assert answer.json()["error"]["type"] == "invalid_request_error"


def test_what_the_template_quotes_does_no_harm(server: Running) -> None:
    raw = json.dumps({"messages": [{"role": "\ud800", "content": "a"}]}).encode()
    assert server.http.post("/v1/chat/completions", content=raw).status_code == 400


@pytest.mark.parametrize(("method", "path", "status"), [("GET", "/nothing", 404), ("GET", "/v1/completions", 405)])
def test_what_is_not_served_is_told(method: str, path: str, status: int, server: Running) -> None:
    answer = server.http.request(method, path)
    assert answer.status_code == status
    assert "is not served; see /v1/chat/completions" in answer.json()["error"]["message"]
    assert server.http.get("/v1/models/gpt").status_code == 404


ANY = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(st.characters(), max_size=6),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(["role", "content", "x"]), inner),
    max_leaves=6,
)
KEYS = ["prompt", "messages", "max_tokens", "n", "stream", "stop", "seed", "temperature", "logprobs", "model", "é"]
BODIES = st.dictionaries(st.sampled_from(KEYS), ANY).map(lambda body: json.dumps(body).encode())


@examples(200)
@given(
    path=st.sampled_from(["/v1/completions", "/v1/chat/completions"]),
    content=st.binary(max_size=40) | BODIES | ANY.map(lambda value: json.dumps(value).encode()),
)
def test_nonsense_gets_an_error_of_its_own(path: str, content: bytes, server: Running) -> None:
    answer = server.http.post(path, content=content)
    if answer.status_code == 200:
        sane = json.loads(content)
        assert "prompt" in sane or "messages" in sane
    else:
        assert 400 <= answer.status_code < 500
        assert answer.json()["error"]["message"]
