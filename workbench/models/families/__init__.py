"""The model families that are understood: one file each, named after its ``model_type``.

A file that is added here is found by itself, by the readers and by the tests of all families.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Mapping
from typing import Any

from workbench.models.family import Family


def _families() -> dict[str, Family]:
    names = sorted(module.name for module in pkgutil.iter_modules(__path__))
    found: list[Family] = [importlib.import_module(f"{__name__}.{name}").FAMILY for name in names]
    return {family.model_type: family for family in found}


FAMILIES = _families()
"""Every family by its ``model_type``. Nothing of their layers is left out: parameters are within 0.5 % of what
transformers builds."""
RUNNABLE = {family.architecture: family for family in FAMILIES.values() if family.architecture}
"""The families that `run` executes, by the name of their class in transformers."""


def runnable_family(config: Mapping[str, Any]) -> Family | None:
    """The family that a ``config.json`` names, if `run` executes it."""
    named = config.get("architectures") or [config.get("model_type")]
    for family in RUNNABLE.values():
        if named in [[name] for name in (family.architecture, family.model_type, *family.other_names)]:
            return family
    return None
