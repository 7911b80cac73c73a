"""Finds every scheduler of this package: a module that is added needs no other entry."""

from __future__ import annotations

import importlib
import pkgutil
from pathlib import Path
from typing import Any

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
