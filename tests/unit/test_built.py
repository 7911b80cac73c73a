"""Models that transformers builds on the meta device: their weights, their layers, and what cannot be told."""

import importlib
import json
import subprocess
import sys
from dataclasses import replace

import numpy as np
import pytest
import transformers
from hypothesis import given
from hypothesis import strategies as st

import workbench as wb
from tests.builders import PIPELINES
from tests.model_types import PATH, survey, table
from workbench.core.errors import CheckpointError, ScenarioError
from workbench.core.records import from_plain, to_plain
from workbench.models import LayerKind, ModelConfig
from workbench.models.layers import Counted, Own, Recurrence, Sparse
from workbench.pipeline import cpu, fetch, gpu, load, offload
from workbench.schedules import Sequential
from workbench.stages import (
    Precision,
    Rows,
    attention,
    combine,
    decode_attention,
    experts,
    kv,
    moe,
    out_proj,
    prefill_attention,
    qkv,
    route,
)

BF16 = Precision("bf16", "bf16")
STREAMED = fetch(wb_weights := __import__("workbench.stages", fromlist=["weights"]).weights) | gpu(
    qkv, prefill_attention
) >> offload >> cpu(decode_attention) >> load >> gpu(out_proj, moe)
EXPERTS_ON_CPU = gpu(qkv, attention, out_proj, route) >> offload >> cpu(experts) >> load >> gpu(combine)
