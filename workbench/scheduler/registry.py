"""Finds every scheduler of this package: a module that is added needs no other entry."""

from __future__ import annotations

import importlib
import pkgutil
from pathlib import Path
from typing import Any

from workbench.scheduler.base import Scheduler


def every_scheduler() -> tuple[Scheduler, ...]:
    """One of each policy that this package's modules define, by name, with the settings that its `example` gives."""
    found = dict[str, Any]()
    for module in pkgutil.iter_modules([str(Path(__file__).parent)]):
        loaded = importlib.import_module(f"workbench.scheduler.{module.name}")
        for thing in vars(loaded).values():
            if isinstance(thing, type) and isinstance(getattr(thing, "example", None), dict):
                found[thing.__name__] = thing
    return tuple(found[name](**found[name].example) for name in sorted(found))
