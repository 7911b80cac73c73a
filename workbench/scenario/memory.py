"""Memory of a scenario: the KV cache's capacity, and the precision of weights, activations and KV."""

from __future__ import annotations

from dataclasses import dataclass, fields

from workbench.core.errors import CapacityError
from workbench.core.units import DTYPE_BYTES, QUANTISED, format_bytes_up, is_number, is_whole, parse_bytes
from workbench.stages import Place


@dataclass(frozen=True, repr=False)
class Memory:
    """KV capacity and precisions of a policy.

    Parameters
    ----------
    kv_capacity : str or float
        Size of the KV cache over all layers [B], such as ``"70GB"``.
    kv_block : int
        Size of a KV block [tokens].
    weights, kv : str, optional
        "fp32", "bf16" or "fp16"; the model's own precision if not given. `run` takes the first two. Weights may also be
        "int8" or "int4": then routed experts, whose sizes must be multiples of 64, are rounded in groups of 128
        columns, or 64 where 128 does not divide the sizes, with a scale in fp32; all else keeps the model's own
        precision.
    weights_on_gpu : float
        Share from 0 to 1 of the weights that `fetch` streams which stays on the GPU, in whole tensors (MoE-Lightning's
        r_w); see `workbench.pipeline.shares`.
    kv_on_gpu : float
        Share from 0 to 1 of the KV cache that stays on the GPU and that ``fetch(kv)`` need not stream, in whole layers
        (MoE-Lightning's r_c).
    gpu_reserve, host_reserve : str or float
        Memory that is kept free for users that are not counted: driver, allocator, other programs [B].

    Raises
    ------
    CapacityError
        If the capacity is not positive, a reserve is negative, the block has no token, a precision is unknown or a
        share is not from 0 to 1.
    """

    kv_capacity: str | float
    kv_block: int = 16
    weights: str | None = None
    kv: str | None = None
    gpu_reserve: str | float = 0.0
    host_reserve: str | float = 0.0
    weights_on_gpu: float = 0.0
    kv_on_gpu: float = 0.0

    def __post_init__(self) -> None:
        try:
            parse_bytes(self.kv_capacity, what="kv_capacity")
            for what in ("gpu_reserve", "host_reserve"):
                if getattr(self, what) != 0:
                    parse_bytes(getattr(self, what), what=what)
        except ValueError as error:
            raise CapacityError(str(error)) from None
        if not is_whole(self.kv_block) or self.kv_block < 1:
            raise CapacityError(f"kv_block is a whole number of tokens, at least 1, not {self.kv_block!r}.")
        object.__setattr__(self, "kv_block", int(self.kv_block))
        floats = tuple(DTYPE_BYTES)
        for what, dtype, known in (("weights", self.weights, (*floats, *QUANTISED)), ("kv", self.kv, floats)):
            if dtype is not None and dtype not in known:
                names = f"{', '.join(map(repr, known[:-1]))} or {known[-1]!r}"
                raise CapacityError(f"Memory({what}={dtype!r}) is not supported; use {names}.")

        for what in ("weights_on_gpu", "kv_on_gpu"):
            share = getattr(self, what)
            if not is_number(share) or not 0 <= share <= 1:
                raise CapacityError(f"Memory({what}={share!r}) is no share; give a number from 0 to 1.")
            object.__setattr__(self, what, float(share))

    def __repr__(self) -> str:
        """The fields, a share only if it is not 0: saved digests of scenarios without shares are made of this text."""
        shares = ("weights_on_gpu", "kv_on_gpu")
        values = {known.name: getattr(self, known.name) for known in fields(self)}
        told = ", ".join(f"{name}={value!r}" for name, value in values.items() if value or name not in shares)
        return f"Memory({told})"

    def reserve(self, device: Place) -> float:
        """Bytes of a device's memory that are kept free [B]."""
        size = self.gpu_reserve if device is Place.GPU else self.host_reserve
        return parse_bytes(size) if size != 0 else 0.0

    def blocks(self, bytes_per_token: float) -> int:
        """Number of whole KV blocks that fit.

        Raises
        ------
        CapacityError
            If not even one fits.
        """
        capacity = parse_bytes(self.kv_capacity)
        count = int(capacity // (self.kv_block * bytes_per_token))
        if not count:
            raise CapacityError(
                f"kv_capacity={self.kv_capacity!r} is smaller than one block of {self.kv_block} tokens, which takes "
                f"{format_bytes_up(self.kv_block * bytes_per_token)}. Give at least that, or a smaller kv_block."
            )
        return count
