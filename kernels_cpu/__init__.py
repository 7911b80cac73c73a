"""CPU kernels in Numba: decode attention on a paged KV cache, the append that feeds it, and routed experts.

Each op is a wrapper that validates, a kernel that computes (GIL released), the work it declares, and a float64 or
bit-exact reference. `features()` tells the code path of this computer, `warm_up()` compiles, so that compile time is
never measured.
"""

from .ceilings import multiply_add, read_blocks, read_memory
from .expert_mlp import expert_mlp, expert_mlp_reference, expert_mlp_work
from .expert_nodes import NodeExperts, numa_nodes, pack_by_node
from .expert_weights import Format, PackedExperts, pack_experts
from .features import CodePath, Features, features
from .flash_decode import flash_decode, flash_decode_reference, flash_decode_work, warm_up
from .huge_pages import empty_in_huge_pages
from .kv_cache import append_kv, append_kv_reference, append_kv_work
from .mla_decode import mla_decode, mla_decode_reference
from .team import side_by_side

__all__ = [
    "CodePath",
    "Features",
    "Format",
    "NodeExperts",
    "PackedExperts",
    "append_kv",
    "append_kv_reference",
    "append_kv_work",
    "empty_in_huge_pages",
    "expert_mlp",
    "expert_mlp_reference",
    "expert_mlp_work",
    "features",
    "flash_decode",
    "flash_decode_reference",
    "flash_decode_work",
    "mla_decode",
    "mla_decode_reference",
    "multiply_add",
    "numa_nodes",
    "pack_by_node",
    "pack_experts",
    "read_blocks",
    "read_memory",
    "side_by_side",
    "warm_up",
]
