"""Dask's processes on this computer as an executor: encrypted, and reached from this computer alone."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import Executor
from contextlib import contextmanager

from workbench.core.errors import SweepError

_HERE = "127.0.0.1"


@contextmanager
def local_dask(workers: int = 2) -> Iterator[Executor]:
    """Start Dask on this computer, and end it behind the body; it needs the extra ``[dask]``.

    Scheduler, workers and their pages listen on the loopback only, and all messages are encrypted with certificates
    that are made for this one cluster. For a cluster of several computers start Dask yourself with its `Security`, and
    give ``client.get_executor()``.

    Parameters
    ----------
    workers : int
        Number of processes, each with one thread.

    Raises
    ------
    SweepError
        If Dask or the library of its encryption is not installed.

    Examples
    --------
    >>> with local_dask(workers=2) as executor:  # doctest: +SKIP
    ...     sweep(scenario, VSLPipe(), over=..., executor=executor)
    """
    try:
        from distributed import Client, LocalCluster
        from distributed.security import Security

        security = Security.temporary()
    except ImportError as error:
        raise SweepError(f"Dask is missing ({error}); pip install 'moe-workbench[dask]' installs it.") from error
    address = f"{_HERE}:0"
    cluster = LocalCluster(
        n_workers=workers,
        threads_per_worker=1,
        host=_HERE,
        protocol="tls://",
        security=security,
        dashboard_address=address,
        worker_dashboard_address=address,
    )
    with cluster, Client(cluster) as client:
        yield client.get_executor()
