"""The public door to the kernels: usable in anybody's code, without Jupyter."""

from kernels_cpu import append_kv, append_kv_work, flash_decode, flash_decode_work

__all__ = ["append_kv", "append_kv_work", "flash_decode", "flash_decode_work"]
