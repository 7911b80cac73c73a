"""Finds every schedule of this package: a module that is added needs no other entry."""

from __future__ import annotations

import functools
import importlib
import pkgutil
from pathlib import Path

from workbench.schedules.base import Schedule


@functools.cache
def every_schedule() -> tuple[type[Schedule], ...]:
    """The schedule classes of this package, by name; each has an `example`, a pipeline that it takes."""
    found = dict[str, type[Schedule]]()
    for module in pkgutil.iter_modules([str(Path(__file__).parent)]):
        loaded = importlib.import_module(f"workbench.schedules.{module.name}")
        for thing in vars(loaded).values():
            if isinstance(thing, type) and issubclass(thing, Schedule) and thing.example is not None:
                found[thing.__name__] = thing
    return tuple(found[name] for name in sorted(found))
