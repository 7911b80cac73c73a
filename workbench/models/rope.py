"""Rotary position embeddings as a ``config.json`` describes them."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from reprlib import repr as short
from typing import Any

from workbench.core.errors import ScenarioError
from workbench.core.units import is_number

_NUMBERS = {
    "partial_rotary_factor": "share",
    "factor": "factor",
    "original_max_position_embeddings": "trained",
    "beta_fast": "fast",
    "beta_slow": "slow",
    "low_freq_factor": "low",
    "high_freq_factor": "high",
    "attention_factor": "amplitude",
    "mscale": "mscale",
    "mscale_all_dim": "mscale_all_dim",
    "short_mscale": "short_mscale",
    "long_mscale": "long_mscale",
}
"""Fields by their keys in ``config.json``."""
KINDS = {
    "default": (),
    "linear": ("factor",),
    "yarn": ("factor", "trained"),
    "llama3": ("factor", "trained"),
    "longrope": ("trained",),
}
"""The kinds of scaling, and the fields that each must have."""


@dataclass(frozen=True)
class Rope:
    """The part of a head that is rotated, and the scaling of its frequencies beyond the trained context.

    Attributes
    ----------
    kind : str
        "default", "linear", "yarn", "llama3" or "longrope".
    share : float
        Share of a head's dims that is rotated.
    factor : float or None
        Factor by which contexts may be longer than trained.
    trained : float or None
        Positions of the training [tokens].
    fast, slow, truncate
        YaRN's ramp: turns within the trained positions, and True if its ends are rounded to whole pairs.
    low, high : float
        Llama 3's ramp.
    amplitude, mscale, mscale_all_dim : float or None
        YaRN's factor of cosines and sines, and DeepSeek's two numbers from which it follows instead.
    short_factor, long_factor : tuple of float
        LongRoPE's divisor of each pair's frequency, for contexts up to the trained ones and beyond.
    short_mscale, long_mscale : float or None
        LongRoPE's factors of cosines and sines in both cases.

    Raises
    ------
    ScenarioError
        If the kind is unknown, or a number is missing or not positive.
    """

    kind: str = "default"
    share: float = 1.0
    factor: float | None = None
    trained: float | None = None
    fast: float = 32.0
    slow: float = 1.0
    truncate: bool = True
    low: float = 1.0
    high: float = 4.0
    amplitude: float | None = None
    mscale: float | None = None
    mscale_all_dim: float | None = None
    short_factor: tuple[float, ...] = ()
    long_factor: tuple[float, ...] = ()
    short_mscale: float | None = None
    long_mscale: float | None = None

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise ScenarioError(f"RoPE of the kind {self.kind!r} is not understood; give one of {', '.join(KINDS)}.")
        for key, name in _NUMBERS.items():
            value = getattr(self, name)
            needed = name in KINDS[self.kind]
            if (value is None and needed) or not (value is None or (is_number(value) and 0 < value < math.inf)):
                raise ScenarioError(f"RoPE of the kind {self.kind!r} has {key}={value!r}; give a positive number.")
        for name in ("short_factor", "long_factor"):
            factors = getattr(self, name)
            good = isinstance(factors, tuple | list) and all(
                is_number(each) and 0 < each < math.inf for each in factors
            )
            if not good or (self.kind == "longrope" and not factors):
                raise ScenarioError(
                    f"RoPE of the kind {self.kind!r} has {name}={short(factors)}; give positive numbers."
                )
            object.__setattr__(self, name, tuple(float(each) for each in factors))
        if self.share > 1:
            raise ScenarioError(f"RoPE has partial_rotary_factor={self.share!r}; give at most 1.")

    @classmethod
    def of(cls, raw: Mapping[str, Any]) -> Rope:
        """RoPE as the object ``rope_parameters`` of a ``config.json`` describes it; other keys of it are not read."""
        given = {name: raw[key] for key, name in _NUMBERS.items() if raw.get(key) is not None}
        given |= {name: raw[name] for name in ("short_factor", "long_factor") if raw.get(name) is not None}
        truncate = raw.get("truncate")
        kind = raw.get("rope_type") or raw.get("type") or "default"
        return cls(str(kind), truncate=True if truncate is None else bool(truncate), **given)

    def longrope(self, positions: int, most: int) -> tuple[tuple[float, ...], float]:
        """LongRoPE's divisors and factor for contexts of so many positions, of the `most` that the model has."""
        trained = self.trained or most
        factor = self.factor or most / trained
        usual = math.sqrt(1 + math.log(factor) / math.log(trained)) if factor > 1 else 1.0
        usual = self.amplitude or usual
        if positions > trained:
            return self.long_factor, self.long_mscale or usual
        return self.short_factor, self.short_mscale or usual

    @property
    def yarn_amplitude(self) -> float:
        """Factor of YaRN's cosines and sines."""
        if self.amplitude is not None:
            return self.amplitude
        if self.mscale and self.mscale_all_dim:
            return self._mscale(self.mscale) / self._mscale(self.mscale_all_dim)
        return self._mscale(1.0)

    @property
    def score_factor(self) -> float:
        """Factor of the attention scores of latent attention (DeepSeek)."""
        if self.kind != "yarn" or not self.mscale_all_dim:
            return 1.0
        return self._mscale(self.mscale_all_dim) ** 2

    def _mscale(self, scale: float) -> float:
        factor = self.factor or 1.0
        return 1.0 if factor <= 1 else 0.1 * scale * math.log(factor) + 1.0


PLAIN = Rope()
"""Every dim rotated, frequencies as they were trained."""
READ = frozenset({*_NUMBERS, "rope_type", "type", "rope_theta", "truncate", "short_factor", "long_factor"})
"""Keys of ``rope_parameters`` that are read."""
