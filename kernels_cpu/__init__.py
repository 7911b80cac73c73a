"""CPU kernels in Numba: decode attention on a paged KV cache and the append that feeds it, experts, norms, rotations.

Each op is a wrapper that validates, a kernel that computes (GIL released), the work it declares, and a float64 or
bit-exact reference; norms, rotations and gates are twins of those in Triton, which declare and check them.
`features()` tells the code path of this computer, `warm_up()` compiles, so that compile time is
never measured.
"""

from .attention.flash_decode import flash_decode, flash_decode_reference, flash_decode_work, warm_up
from .attention.kv_cache import append_kv, append_kv_reference, append_kv_work
from .attention.mla_decode import mla_decode, mla_decode_reference
from .ceilings import multiply_add, read_blocks, read_memory
from .experts.expert_mlp import expert_mlp, expert_mlp_reference, expert_mlp_work
from .experts.nodes import NodeExperts, numa_nodes, pack_by_node
from .experts.weights import Format, PackedExperts, experts_in_place, pack_experts
from .machine.features import CodePath, Features, features
from .machine.huge_pages import empty_in_huge_pages
from .rows.gated import gated
from .rows.rms_norm import add_rms_norm, rms_norm
from .rows.rope import rope
from .threads.team import side_by_side

__all__ = [
    "CodePath",
    "Features",
    "Format",
    "NodeExperts",
    "PackedExperts",
    "add_rms_norm",
    "append_kv",
    "append_kv_reference",
    "append_kv_work",
    "empty_in_huge_pages",
    "expert_mlp",
    "expert_mlp_reference",
    "expert_mlp_work",
    "experts_in_place",
    "features",
    "flash_decode",
    "flash_decode_reference",
    "flash_decode_work",
    "gated",
    "mla_decode",
    "mla_decode_reference",
    "multiply_add",
    "numa_nodes",
    "pack_by_node",
    "pack_experts",
    "read_blocks",
    "read_memory",
    "rms_norm",
    "rope",
    "side_by_side",
    "warm_up",
]
