"""HOW FAST, for real: the wall clock. The only importer of torch and of the kernels.

A GPU is not used yet: the gpu lane is torch on the CPU with threads of its own, the link a real copy by the data mover.
"""

import ctypes
import os
import platform

# Idle pool threads must not spin on a core that another lane needs, but an expert is a dozen short regions in a row:
# a bf16 linear (16 x 1024 x 4096, two threads) took 1.28 ms if they sleep at once, 0.97 ms after 1,000 turns, 0.95 ms
# after 100,000 (Zen 4). libgomp reads both once, when torch loads it.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")
os.environ.setdefault("GOMP_SPINCOUNT", "2000")
# Freed memory stays with the process, up to 256 MB: else every buffer of an iteration is mapped and cleared anew
# (1,024 rows 512 wide, queries, keys and values: 10.8 ms so, 6.0 ms when kept; Zen 4).
if platform.libc_ver()[0] == "glibc":
    m_trim_threshold, m_mmap_threshold = -1, -3
    ctypes.CDLL(None).mallopt(m_mmap_threshold, 1 << 26)
    ctypes.CDLL(None).mallopt(m_trim_threshold, 1 << 28)

from workbench.engine.calibration import calibrate
from workbench.engine.live import LiveRun, RunState, run, start
from workbench.engine.synthesize import make_checkpoint

__all__ = ["LiveRun", "RunState", "calibrate", "make_checkpoint", "run", "start"]
