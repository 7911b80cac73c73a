"""RMSNorm and LayerNorm, one program per row."""

from ..backend.mode import tl, triton


@triton.jit
def rms_norm(
    x,
    residual,
    weight,
    out,
    total,
    stride,
    residual_stride,
    M: tl.constexpr,
    EPS: tl.constexpr,
    ADDED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    inside = columns < M
    wide = tl.load(x + row * stride + columns, mask=inside, other=0.0).to(tl.float32)
    if ADDED:
        wide += tl.load(residual + row * residual_stride + columns, mask=inside, other=0.0).to(tl.float32)
        added = wide.to(total.dtype.element_ty)
        tl.store(total + row * M + columns, added, mask=inside)
        wide = added.to(tl.float32)
    scaled = wide * (1.0 / tl.sqrt(tl.sum(wide * wide, axis=0) / M + EPS))
    gain = tl.load(weight + columns, mask=inside, other=0.0)
    rounded = scaled.to(out.dtype.element_ty).to(tl.float32)
    tl.store(out + row * M + columns, (rounded * gain.to(tl.float32)).to(out.dtype.element_ty), mask=inside)


@triton.jit
def layer_norm(
    x, weight, bias, out, stride, M: tl.constexpr, EPS: tl.constexpr, BIASED: tl.constexpr, BLOCK: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    inside = columns < M
    wide = tl.load(x + row * stride + columns, mask=inside, other=0.0).to(tl.float32)
    middle = tl.where(inside, wide - tl.sum(wide, axis=0) / M, 0.0)
    scaled = middle * (1.0 / tl.sqrt(tl.sum(middle * middle, axis=0) / M + EPS))
    scaled *= tl.load(weight + columns, mask=inside, other=0.0).to(tl.float32)
    if BIASED:
        scaled += tl.load(bias + columns, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + row * M + columns, scaled.to(out.dtype.element_ty), mask=inside)
