"""The built-in operations that the engine computes, each by the method of `Ops` of that name."""

from workbench.stages import (
    Op,
    combine,
    experts,
    out_proj,
    prefill_attention,
    qkv,
    route,
    shared_experts,
)

OPERATIONS: dict[Op, str] = {
    op: op.name for op in (qkv, prefill_attention, out_proj, route, experts, shared_experts, combine)
}
"""Methods by operation, which its variants share. `decode_attention` is not here: it belongs to the KV cache. Nor are
users' operations: they bring their own functions."""
