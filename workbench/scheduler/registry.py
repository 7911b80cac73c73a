"""Finds every scheduler of this package: a module that is added needs no other entry."""

from __future__ import annotations

import importlib
import pkgutil
from pathlib import Path
from typing import Any

from workbench.core.errors import CatalogueError
from workbench.scheduler.base import Scheduler


def every_scheduler() -> tuple[Scheduler, ...]:
    """One scheduler of each class in this package, by name, made with the settings of its `example`."""
    found = dict[str, Any]()
    for module in pkgutil.iter_modules([str(Path(__file__).parent)]):
        loaded = importlib.import_module(f"workbench.scheduler.{module.name}")
        for thing in vars(loaded).values():
            if isinstance(thing, type) and isinstance(getattr(thing, "example", None), dict):
                found[thing.__name__] = thing
    return tuple(found[name](**found[name].example) for name in sorted(found))


def scheduler_of(name: str) -> Scheduler:
    """The scheduler of a class's name, with the settings of its `example`.

    Raises
    ------
    CatalogueError
        If there is none.
    """
    known = {type(each).__name__: each for each in every_scheduler()}
    if name not in known:
        raise CatalogueError(f"there is no scheduler {name!r}; give {', '.join(known)}.")
    return known[name]
