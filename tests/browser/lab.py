"""JupyterLab on the loopback with settings of its own, and a browser that drives it."""

from __future__ import annotations

import contextlib
import json
import os
import re
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

# No windowing: a cell scrolled out of view would leave the page. No news: nothing is asked for outside.
SETTINGS = {
    "notebook-extension/tracker": {"windowingMode": "none", "scrollPastEnd": False},
    "apputils-extension/notification": {"fetchNews": "false", "checkForUpdates": False},
}
FLAGS = ("--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking")
FLAGS += ("--disable-component-update", "--disable-sync")
ROOT = Path(__file__).parents[2]
OURS = ("http://127.0.0.1", "ws://127.0.0.1", "data:", "blob:")


@dataclass(frozen=True)
class Server:
    """A running JupyterLab."""

    url: str
    token: str
    root: Path


class Session:
    """A browser's page with a notebook, and what it should not have done."""

    def __init__(self, browser: Any) -> None:
        self.browser = browser
        self.errors: list[str] = []
        self.requests: list[str] = []
        self.asked: Counter[str] = Counter()
        self.page = self.fresh_page()

    def fresh_page(self) -> Any:
        """A new page, watched from its first request on."""
        page = self.browser.new_page()
        page.set_default_timeout(60_000)
        page.on("console", lambda said: self.errors.append(said.text) if said.type == "error" else None)
        page.on("pageerror", lambda error: self.errors.append(str(error)))
        page.on("request", lambda asked: None if asked.url.startswith(OURS) else self.requests.append(asked.url))
        return page

    def said(self, text: str, seconds: float = 60.0) -> str:
        """Wait for a line of output that begins so; the line."""
        line = self.page.locator(".jp-OutputArea-output pre", has_text=re.compile(f"^{text}"))
        line.first.wait_for(timeout=1000 * seconds)
        return str(line.first.inner_text()).strip()

    def cell(self, containing: str) -> Any:
        """The code cell whose code contains a text."""
        editor = self.page.locator(".jp-InputArea-editor", has_text=containing)
        return self.page.locator(".jp-CodeCell", has=editor)

    def run_cell(self, containing: str) -> None:
        """Run the code cell whose code contains a text."""
        self.cell(containing).locator(".jp-InputArea-editor").click()
        self.page.keyboard.press("Control+Enter")

    def ask(self, name: str) -> Any:
        """Run a cell made by `answering`; its answer."""
        self.asked[name] += 1
        self.run_cell(f'turns["{name}"]')
        _, answer = self.said(f"{name}-{self.asked[name]} ").split(" ", maxsplit=1)
        return json.loads(answer)


def answering(name: str, code: str) -> str:
    """A cell of code that ends in an expression for `Session.ask`, which JSON can hold."""
    *before, last = code.strip().splitlines()
    turn = f'turns["{name}"] += 1'
    said = f"print(f\"{name}-{{turns['{name}']}}\", json.dumps({last}))"
    counting = ["import collections, json", 'turns = globals().get("turns") or collections.Counter()', turn]
    return "\n".join([*before, *counting, said])


def chromium() -> str | None:
    """Path of a Chromium or Chrome, or None."""
    found = map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))
    return next((path for path in found if path), None)


@contextlib.contextmanager
def serving(root: Path, private: Path, settings: dict[str, Any] | None = None) -> Iterator[Server]:
    """JupyterLab over `root`, with everything it writes kept in `private`."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    server = Server(f"http://127.0.0.1:{port}", secrets.token_hex(8), root)
    for name, values in {**SETTINGS, **(settings or {})}.items():
        file = private / "settings" / "@jupyterlab" / f"{name}.jupyterlab-settings"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(json.dumps(values))
    folders = {"CONFIG_DIR": "config", "DATA_DIR": "data", "RUNTIME_DIR": "runtime"}
    folders = {f"JUPYTER_{name}": str(private / folder) for name, folder in folders.items()}
    folders |= {f"JUPYTERLAB_{name}_DIR": str(private / name.lower()) for name in ("SETTINGS", "WORKSPACES")}
    env = {**os.environ, **folders, "IPYTHONDIR": str(private / "ipython"), "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "jupyterlab", "--no-browser", "--allow-root", "--ip=127.0.0.1", f"--port={port}"]
    command += ["--ServerApp.port_retries=0", f"--IdentityProvider.token={server.token}"]
    command += [f"--ServerApp.root_dir={root}", "--LabApp.news_url=None"]
    command += ["--LabApp.check_for_updates_class=jupyterlab.NeverCheckForUpdate"]
    with (private / "log").open("w") as log:
        child = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, env=env, start_new_session=True)
    try:
        await_answer(server.url + "/api", child, private / "log")
        yield server
    finally:
        child.send_signal(signal.SIGTERM)
        try:
            child.wait(10)
        except subprocess.TimeoutExpired:
            os.killpg(child.pid, signal.SIGKILL)


def await_answer(url: str, child: subprocess.Popen[bytes], log: Path) -> None:
    for _ in range(600):
        if child.poll() is not None:
            raise RuntimeError(log.read_text())
        try:
            urllib.request.urlopen(url, timeout=1)
        except urllib.error.HTTPError:
            return
        except OSError:
            time.sleep(0.1)
        else:
            return
    raise TimeoutError(log.read_text())


@contextlib.contextmanager
def browsing(profile: Path) -> Iterator[Any]:
    """A headless browser with a profile of its own."""
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch_persistent_context(
            str(profile),
            executable_path=chromium(),
            headless=True,
            args=FLAGS,
            viewport={"width": 1400, "height": 1000},
        )
        yield browser
        browser.close()


def open_notebook(page: Any, server: Server, name: str, cells: Mapping[str, str]) -> None:
    """Write a notebook of these cells, open it and wait until its kernel is idle."""
    empty = {"cell_type": "code", "metadata": {}, "execution_count": None, "outputs": []}
    kernel = {"kernelspec": {"name": "python3", "display_name": "Python 3", "language": "python"}}
    written = [{**empty, "id": key, "source": code.strip()} for key, code in cells.items()]
    content = {"cells": written, "metadata": kernel, "nbformat": 4, "nbformat_minor": 5}
    (server.root / f"{name}.ipynb").write_text(json.dumps(content), encoding="utf-8")
    page.goto(f"{server.url}/lab/workspaces/{name}/tree/{name}.ipynb?token={server.token}")
    page.wait_for_selector(".jp-NotebookPanel:not(.lm-mod-hidden) .jp-Notebook .jp-Cell")
    idle(page)


def idle(page: Any) -> None:
    """Wait until the kernel is idle; the toolbar says so too early, the status bar does not."""
    page.locator("#jp-main-statusbar").get_by_text(re.compile(r"\|\s*Idle")).wait_for()


def choose(page: Any, menu: str, *labels: str) -> None:
    """Choose from one of JupyterLab's menus: labels of menus inside, and that of the command."""
    page.locator("li.lm-MenuBar-item", has_text=re.compile(f"^{menu}$")).click()
    items = [page.locator("li.lm-Menu-item", has=page.get_by_text(label, exact=True)) for label in labels]
    for inside in items[:-1]:
        inside.hover()
    items[-1].click()
