"""Stages with which a model has nothing to compute."""

from __future__ import annotations

from workbench.models import ModelConfig
from workbench.stages.ops import Stage, add_shared, shared_experts


def lacks_shared(stage: Stage, model: ModelConfig) -> str:
    """The sentence on a stage of shared experts that the model does not have; empty for any other stage."""
    if stage.op not in (shared_experts, add_shared) or model.unrouted_params:
        return ""
    return f"{stage} has no experts to compute: {model.name} has no shared ones; remove the stage."


def leaves_none(stage: Stage, model: ModelConfig) -> str:
    """The sentence on a stage that defers or skips every expert of a token; empty for any other stage."""
    chosen = model.num_experts_per_tok
    if stage.defer + stage.skip < chosen:
        return ""
    return (
        f"{stage} leaves none of the {chosen} experts that a token of {model.name} chooses; give at most {chosen - 1} "
        "in all."
    )
