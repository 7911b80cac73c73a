"""Public interface of the kernels, usable in any code and without Jupyter.

Its names are collected from the declarations of `kernels_cpu` and `kernels_triton` (`collected.py`). Each operation has
one name for numpy arrays, CPU tensors and GPU tensors. Numba's kernels are imported with the first name that needs
them, torch with the first name or call that needs it, and triton with the first launch.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # a type checker takes the first of two functions of one name
    from workbench.kernels.attention import *  # noqa: F403
    from workbench.kernels.moe import *  # noqa: F403
    from workbench.kernels.rows import *  # noqa: F403

    # isort: split
    from kernels_cpu import *  # type: ignore[assignment]  # noqa: F403
    from kernels_triton import *  # type: ignore[assignment]  # noqa: F403


def __getattr__(name: str) -> Any:
    if name.startswith("_") and name != "__all__":
        raise AttributeError(f"module 'workbench.kernels' has no attribute {name!r}")
    collected = importlib.import_module("workbench.kernels.collected")
    return collected.names() if name == "__all__" else collected.public(name)


def __dir__() -> list[str]:
    names: list[str] = importlib.import_module("workbench.kernels.collected").names()
    return names
