"""CPU attention kernels on a paged KV cache, in Numba: flash-decode and the append that feeds it.

Each op is a wrapper that validates, a kernel that computes (one thread, GIL released), the work it declares, and a
float64 or bit-exact reference. `warm_up()` compiles everything, so that compile time is never measured.
"""

from .flash_decode import flash_decode, flash_decode_reference, flash_decode_work, warm_up
from .kv_cache import append_kv, append_kv_reference, append_kv_work

__all__ = [
    "append_kv",
    "append_kv_reference",
    "append_kv_work",
    "flash_decode",
    "flash_decode_reference",
    "flash_decode_work",
    "warm_up",
]
