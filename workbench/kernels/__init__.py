"""The public door to the kernels: usable in anybody's code, without Jupyter.

It is made of what `kernels_cpu` and `kernels_triton` declare (`collected.py`): nobody keeps a list of names. Each
operation has one name, for numpy arrays, CPU tensors and GPU tensors. Numba's kernels are imported when one is first
asked for, torch with the first call or name that needs it, and triton when it is first launched.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # of two functions of one name the first counts
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
