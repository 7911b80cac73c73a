"""Errors that users meet: each names the object, what was expected and the mend, in one sentence."""

from __future__ import annotations

from collections.abc import Callable


class WorkbenchError(Exception):
    """Base of every error this project raises on purpose."""


class PipelineError(WorkbenchError, ValueError):
    """The wiring of stages cannot work: a buffer is read where it is not, or a move would move nothing.

    Parameters
    ----------
    text : str
    path : tuple of int, optional
        Place of the element that causes it, in the chain that was wired; see `workbench.pipeline.Path`.
    line : int, optional
        Line of the text that was read, from 1 on; see `workbench.pipeline.pipeline_of`.
    """

    def __init__(self, text: str, path: tuple[int, ...] | None = None, line: int | None = None) -> None:
        super().__init__(text)
        self.path = path
        self.line = line


class ScheduleError(WorkbenchError, ValueError):
    """The schedule needs another shape of pipeline, or another number of micro-batches."""


class ScenarioError(WorkbenchError, ValueError):
    """Model, machine, memory, workload and scheduler do not go together."""


class CapacityError(WorkbenchError, ValueError):
    """Something does not fit into the memory it was given.

    Parameters
    ----------
    text : str or callable () -> str
        The sentence, or a function that finds it once it is read: the nearest changes that fit take a search.
    """

    def __init__(self, text: str | Callable[[], str]) -> None:
        super().__init__(text)

    def __str__(self) -> str:
        (text,) = self.args
        return text if isinstance(text, str) else str(text())

    def __reduce__(self) -> tuple[type[CapacityError], tuple[str]]:
        return type(self), (str(self),)


class WorkloadError(WorkbenchError, ValueError):
    """A request or a workload file is malformed."""


class RequestError(WorkloadError):
    """A request in the form of OpenAI's API is malformed, or asks for something that is not there.

    Parameters
    ----------
    text : str
    param : str, optional
        The key of its body that is wrong.
    code : str
        One word for programs.
    status : int
        Status of HTTP, from 400 on.
    """

    def __init__(self, text: str, param: str | None = None, *, code: str = "invalid_value", status: int = 400) -> None:
        super().__init__(text)
        self.param = param
        self.code = code
        self.status = status


class CheckpointError(WorkbenchError, ValueError):
    """A checkpoint is missing, damaged, unsafe or of an unknown architecture."""


class CatalogueError(WorkbenchError, KeyError):
    """No entry of that name in the catalogue."""

    def __str__(self) -> str:
        return str(self.args[0])


class ResultError(WorkbenchError, ValueError):
    """A result says what cannot be, or a file holds none."""


class EngineError(WorkbenchError, RuntimeError):
    """The live engine cannot do, or did not do, what the plan says."""


class StoppedError(WorkbenchError):
    """A run was stopped on request."""


class SweepError(WorkbenchError, RuntimeError):
    """The processes that read the points of a sweep cannot be started, or are gone."""
