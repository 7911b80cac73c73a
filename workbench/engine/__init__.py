"""The live engine (HOW FAST, measured): a clock that executes plans with torch and the kernels of `workbench.kernels`.

It uses no GPU yet: the gpu lane computes on the CPU with threads of its own, and the link is a real copy by the data
mover.
"""

from workbench.engine.lanes.process import sleepy_openmp

with sleepy_openmp():
    import torch as _torch  # noqa: F401

from workbench.engine.calibration.calibrate import calibrate
from workbench.engine.live import LiveRun, RunState, run, start
from workbench.engine.session import End, Session, Ticket, Told
from workbench.engine.tiny_model.synthesize import make_checkpoint

__all__ = [
    "End",
    "LiveRun",
    "RunState",
    "Session",
    "Ticket",
    "Told",
    "calibrate",
    "make_checkpoint",
    "run",
    "start",
]
