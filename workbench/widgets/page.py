"""The base of every widget that the bundle of the browser draws: its parts, its messages and the cell that made it."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar, NamedTuple
from weakref import WeakSet

import anywidget
import traitlets

from workbench.core.errors import WorkbenchError

_WEB = Path(__file__).parent / "web" / "dist"


class Made(NamedTuple):
    """The cell of a notebook that made a view, and the request to run it; empty outside of notebooks."""

    cell: str = ""
    request: str = ""

    def again_in(self, other: Made) -> bool:
        """True if the other is the same cell, run again."""
        return bool(self.cell) and self.cell == other.cell and self.request != other.request


class Page(anywidget.AnyWidget):
    """A view whose named parts the browser draws, and whose messages it sends.

    Several may be open at once; each keeps what it was set to. A cell that is run again closes what it had opened.
    """

    _esm = (_WEB / "builder.js").read_text(encoding="utf-8")
    _css = (_WEB / "builder.css").read_text(encoding="utf-8")
    _parts: ClassVar[Sequence[str]] = ()
    _opened: ClassVar[WeakSet[Page]] = WeakSet()
    parts: traitlets.List[Any] = traitlets.List().tag(sync=True)
    answered = traitlets.Int(0).tag(sync=True)

    def __init__(self) -> None:
        super().__init__(parts=list(self._parts))
        self._made_by = _running_cell()
        for older in list(Page._opened):
            if older._made_by.again_in(self._made_by):
                older.close()
        self._sending = threading.RLock()
        self._answering = threading.local()

    def _open(self) -> None:
        """Take messages from here on."""
        self.on_msg(self._received)
        Page._opened.add(self)

    def close(self) -> None:
        """Remove the widget from the page."""
        Page._opened.discard(self)
        super().close()

    def _answer(self, message: dict[str, Any]) -> None:
        """Do what a message says."""
        raise NotImplementedError

    def _tell(self, problem: str) -> None:
        """Show what went wrong with a message."""
        raise NotImplementedError

    def _publish(self, **parts: Any) -> None:
        """Show parts, by their names, in one message, so that the browser draws once.

        The answer to a message says in itself that it is one. Observers are called once all parts are set.
        """
        with self._sending, self.hold_sync(), self.hold_trait_notifications():
            for name, value in {**parts, **vars(self._answering)}.items():
                setattr(self, name, value)

    def _received(self, _: object, message: Any, __: object) -> None:
        number = int(message.get("n", 0))
        self._answering.answered = number
        try:
            self._answer(message)
        except WorkbenchError as error:
            self._tell(str(error))
        except Exception as error:  # an exception of a callback would not be shown
            self._tell(f"{type(error).__name__}: {error}")
        finally:
            self.answered = number
            vars(self._answering).clear()


def shell() -> Any:
    """The shell of the notebook, or None."""
    try:
        from IPython import get_ipython
    except ImportError:
        return None
    return get_ipython()


def _running_cell() -> Made:
    """The cell that is running now."""
    parent: dict[str, Any] = getattr(shell(), "get_parent", dict)()
    cell = parent.get("metadata", {}).get("cellId", "")
    return Made(str(cell), str(parent.get("header", {}).get("msg_id", "")))
