"""Triton kernels of the gpu lane: attention, experts and router, norms, rotations, embeddings, logits, sampling.

Each operation has a wrapper that validates operands, a Triton kernel, an implementation in torch for CPU tensors,
declared work, and a reference that is exact or in float64. Decorators of `declarations.py` declare them. Triton is
imported at the first launch of a kernel and reads TRITON_INTERPRET then: to run the kernels on the CPU for tests, set
it before, or pass backend="triton-interpret".
"""

from .attention.decode import decode_attention, decode_attention_reference, decode_attention_work
from .attention.kv_layout import append_kv, gather_kv, gather_kv_work
from .attention.mla_decode import mla_decode, mla_decode_reference, mla_decode_work
from .attention.options import AttentionTiles, Prefix
from .attention.prefill import prefill_attention, prefill_attention_reference, prefill_attention_work
from .backend.backend import Backend
from .backend.ceilings import copy_rate, link_rates, matmul_rate
from .backend.products import has_products
from .declarations import Operation, operations, public_names
from .moe.experts import Activation, Quantised, dequantise, quantise
from .moe.fused_moe import fused_moe, fused_moe_reference, fused_moe_work
from .moe.grouped_gemm import grouped_gemm, grouped_gemm_reference, grouped_gemm_work
from .moe.pairs import Blocks, sort_pairs
from .moe.router import Routing, route, route_reference, route_work, with_shared
from .moe.stored_formats import Int4Order, fp8_weights, int4_codes, int4_weights, mxfp4_weights
from .rows.gated import gated, gated_reference, gated_work
from .rows.layer_norm import layer_norm, layer_norm_reference, layer_norm_work
from .rows.linear import linear, linear_reference, linear_work
from .rows.rms_norm import add_rms_norm, add_rms_norm_work, rms_norm, rms_norm_reference, rms_norm_work
from .rows.rope import rope, rope_reference, rope_work
from .rows.rope_table import Linear, Llama3, LongRope, Yarn, rope_table
from .vocabulary.logprobs import Logprobs, logprobs
from .vocabulary.penalties import penalise
from .vocabulary.sampling import Draws, sample, sample_work
from .vocabulary.vocabulary import embed, embed_work, sampled_logits, sampled_logits_work
