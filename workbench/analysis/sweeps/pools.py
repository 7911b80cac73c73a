"""Processes that read points: an embedded pool without a server, and executors that users bring."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable
from concurrent.futures import BrokenExecutor, Executor, Future
from typing import TYPE_CHECKING, Any, Protocol

from workbench.analysis.sweeps.reading import Rows
from workbench.core.errors import SweepError
from workbench.simulate.loading import loader

if TYPE_CHECKING:
    from concurrent.futures import ProcessPoolExecutor


class Pool(Protocol):
    """Something that reads chunks of points elsewhere."""

    window: int
    """Most chunks that are handed over at once."""

    def submit(self, call: Callable[..., Rows], *args: Any) -> Future[Rows]:
        """Hand a call over."""

    def renew(self) -> None:
        """Start new processes after one was killed.

        Raises
        ------
        SweepError
            If that cannot be done.
        """

    def stop(self) -> None:
        """End at once, whatever is going on."""


class Embedded:
    """So many processes of this computer, which begin afresh, and end with this process.

    Raises
    ------
    SweepError
        If no process can be started.
    """

    def __init__(self, workers: int) -> None:
        self._workers = workers
        self.window = 2 * self._workers
        self._pool = self._started()

    def submit(self, call: Callable[..., Rows], *args: Any) -> Future[Rows]:
        """See `Pool.submit`."""
        return self._pool.submit(call, *args)

    def renew(self) -> None:
        """See `Pool.renew`."""
        self.stop()
        self._pool = self._started()

    def stop(self) -> None:
        """See `Pool.stop`."""
        _kill(self._pool)

    def close(self) -> None:
        """End the processes, which have nothing to do."""
        self._pool.shutdown()

    def _started(self) -> ProcessPoolExecutor:
        import multiprocessing
        from concurrent.futures import ProcessPoolExecutor

        context = multiprocessing.get_context("spawn")
        pool = ProcessPoolExecutor(self._workers, mp_context=context, initializer=begin)
        try:
            calls = [pool.submit(os.getpid) for _ in range(self._workers)]  # each starts a process
            calls[0].result()
        except BaseException as error:
            _kill(pool)
            if not isinstance(error, BrokenExecutor | OSError):
                raise
            raise SweepError(
                f"no process can be started ({error}); in a script, put what it does under "
                "`if __name__ == '__main__':`."
            ) from error
        return pool


def _kill(pool: ProcessPoolExecutor) -> None:
    """End the processes of a pool, whatever they do, and what waits for them."""
    for process in list((pool._processes or {}).values()):
        process.kill()
    pool.shutdown(cancel_futures=True)


class Brought:
    """An executor that the user brings and ends; one that is broken cannot be renewed."""

    window = 64

    def __init__(self, executor: Executor) -> None:
        self._executor = executor
        self._handed = set[Future[Rows]]()

    def submit(self, call: Callable[..., Rows], *args: Any) -> Future[Rows]:
        """See `Pool.submit`."""
        future = self._executor.submit(call, *args)
        self._handed.add(future)
        future.add_done_callback(self._handed.discard)
        return future

    def renew(self) -> None:
        """See `Pool.renew`."""
        raise SweepError(
            f"{type(self._executor).__name__} is broken: one of its processes was killed; make another one and call "
            "sweep again, which goes on with the points that are missing."
        )

    def stop(self) -> None:
        """See `Pool.stop`: calls that have not begun are taken back."""
        for future in list(self._handed):
            future.cancel()


def begin() -> None:
    """Prepare a process of the embedded pool: it leaves interrupts and progress to the one that started it."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    os.environ["TQDM_DISABLE"] = "1"
    threading.Thread(target=_end_with_parent, daemon=True).start()
    loader().load_if_kept()


def _end_with_parent() -> None:
    """End when the process that started this one has ended, also if it was killed."""
    import multiprocessing

    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)
