"""CPU kernels in Numba: decode attention and append on a paged KV cache, experts, router, norms, rotations, gates.

Each operation has a wrapper that validates operands, a kernel that computes with the GIL released, declared work, and a
reference that is exact or in float64. Router, norms, rotations and gates are twins of operations of `kernels_triton`,
which declares their work and references. Decorators of `declarations.py` declare operations. `features()` returns the
code path of this computer; `warm_up()` and `warm_up_experts()` compile kernels, so that compile time is not measured.
"""

from .attention.decode import decode_attention, decode_attention_reference, decode_attention_work, warm_up
from .attention.kv_cache import (
    append_kv,
    append_kv_reference,
    append_kv_work,
    copy_blocks,
    copy_blocks_reference,
    copy_blocks_work,
)
from .attention.mla_decode import mla_decode, mla_decode_reference
from .ceilings import multiply_add, read_blocks, read_memory
from .declarations import Operation, operations, public_names
from .experts.fused_moe import fused_moe, fused_moe_reference, fused_moe_work, warm_up_experts
from .experts.in_place import experts_in_place, experts_of_blocks
from .experts.nodes import NodeExperts, experts_by_node, numa_nodes
from .experts.packing.in_rows import QuantisedRows, experts_in_rows
from .experts.packing.rounded import pack_experts
from .experts.packing.stored import pack_int4, pack_mxfp4
from .experts.weights import Format, PackedExperts
from .few_rows.decode import PagedDecode
from .few_rows.experts import FewExperts
from .few_rows.layer import Decodes, FewLayer, FewLayers
from .few_rows.linear import FewLinear
from .few_rows.operands import fits_few_rows
from .few_rows.qkv import FewQkv
from .few_rows.route import FewRoute
from .machine.cpu import cpu_family
from .machine.features import CodePath, Features, features
from .machine.huge_pages import empty_in_huge_pages
from .machine.parameters import Parameters, parameters
from .rows.gated import gated
from .rows.rms_norm import add_rms_norm, rms_norm
from .rows.rope import rope
from .rows.route import route
