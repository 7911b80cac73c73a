"""RMSNorm, one program per row."""

from .mode import tl, triton


@triton.jit
def rms_norm(x, weight, out, stride, M: tl.constexpr, EPS: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    inside = columns < M
    values = tl.load(x + row * stride + columns, mask=inside, other=0.0)
    wide = values.to(tl.float32)
    scaled = wide * (1.0 / tl.sqrt(tl.sum(wide * wide, axis=0) / M + EPS))
    gain = tl.load(weight + columns, mask=inside, other=0.0)
    rounded = scaled.to(out.dtype.element_ty).to(tl.float32)
    tl.store(out + row * M + columns, (rounded * gain.to(tl.float32)).to(out.dtype.element_ty), mask=inside)
