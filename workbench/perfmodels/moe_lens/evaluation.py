"""MoE-Lens' own evaluation: its 36 settings, and the prediction of Stage 2 for each."""

from __future__ import annotations

import tomllib
from dataclasses import dataclass
from typing import Any

from workbench.core.catalogue import data_path
from workbench.core.units import parse_bytes
from workbench.perfmodels.moe_lens.stage1 import weight_pass_seconds
from workbench.perfmodels.moe_lens.stage2 import Eq12, Life, Stage2, admission_rate, stage2


@dataclass(frozen=True)
class Setting:
    """A model, a KV capacity and a workload of equal lengths on MoE-Lens' host.

    Attributes
    ----------
    model, workload : str
    kv_bytes : float
        KV capacity [B].
    prompt_len, output_len, requests : int
        p, g [tokens] and K.
    kv_blocks, block : int
        N, and b [tokens].
    pass_seconds : float
        delta [s].
    pass_tokens : float
        n_it [tokens/iteration].
    """

    model: str
    workload: str
    kv_bytes: float
    prompt_len: int
    output_len: int
    requests: int
    kv_blocks: int
    block: int
    pass_seconds: float
    pass_tokens: float

    def predict(self, *, eq12: Eq12 = Eq12.MENDED, life: Life = Life.INCLUSIVE) -> Stage2:
        """Stage 2's prediction for this setting; see `stage2`."""
        return stage2(
            self.prompt_len,
            self.output_len,
            self.requests,
            self.kv_blocks,
            block=self.block,
            pass_seconds=self.pass_seconds,
            pass_tokens=self.pass_tokens,
            eq12=eq12,
            life=life,
        )


def evaluation_settings() -> tuple[Setting, ...]:
    """All settings of MoE-Lens' evaluation: three models, two KV capacities, six workloads.

    Returns
    -------
    tuple of Setting
        In the order model, capacity, workload, output length.

    Notes
    -----
    MoE-Lens, section 8. Prompts have their mean length. The paper states neither block size nor n_it; both are chosen,
    for the reasons that the file of the catalogue gives.
    """
    tables = tomllib.loads(data_path("catalogue/moe_lens.toml").read_text(encoding="utf-8"))
    return tuple(
        _setting(tables["host"], (model, tables["models"][model]), kv, (workload, tables["workloads"][workload]), place)
        for model in tables["models"]
        for kv in tables["host"]["kv"]
        for workload in tables["workloads"]
        for place in range(len(tables["workloads"][workload]["outputs"]))
    )


def _setting(
    host: dict[str, Any], model: tuple[str, dict[str, Any]], kv: str, workload: tuple[str, dict[str, Any]], place: int
) -> Setting:
    (model_name, sizes) = model
    (workload_name, lengths) = workload
    prompt = lengths["prompt"]
    output = lengths["outputs"][place]
    block = host["block"]
    capacity = parse_bytes(kv)
    blocks = int(capacity // (block * sizes["kv_bytes_per_token"]))
    stated = lengths.get("requests", {}).get(kv)
    carried = output * float(admission_rate(prompt, output, blocks, block))
    return Setting(
        model=model_name,
        workload=workload_name,
        kv_bytes=capacity,
        prompt_len=prompt,
        output_len=output,
        requests=stated[place] if stated else int(5 * carried),
        kv_blocks=blocks,
        block=block,
        pass_seconds=float(weight_pass_seconds(parse_bytes(sizes["weights"]), parse_bytes(host["link"]))),
        pass_tokens=sizes["pass_tokens"],
    )
