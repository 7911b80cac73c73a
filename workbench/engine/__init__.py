"""HOW FAST, for real: the wall clock. The only importer of torch and of the kernels.

A GPU is not used yet: the gpu lane is torch on the CPU with threads of its own, the link a real copy by the data mover.
"""

import os

# Idle pool threads must not spin on a core that another lane needs; libgomp reads both once, when torch loads it.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")
os.environ.setdefault("GOMP_SPINCOUNT", "0")

from workbench.engine.live import LiveRun, RunState, run, start
from workbench.engine.synthesize import make_checkpoint

__all__ = ["LiveRun", "RunState", "make_checkpoint", "run", "start"]
