"""The auto-scheduler against exhaustive search, against the named systems, and by its laws."""

from dataclasses import replace
from itertools import product
from math import inf

import numpy as np
import pytest

import workbench as wb
from tests.builders import small_machine, tiny_model, tiny_scenario
from tests.examples import DEEP
from workbench.analysis.optimize.objective import objective_of
from workbench.analysis.optimize.optimize import optimum_of
from workbench.analysis.optimize.space import Space
from workbench.analysis.optimize.trials import Budget, Trials
from workbench.hardware import Machine
from workbench.scenario import Scenario


class NoBar:
    def update(self) -> None:
        pass


def drawn_machine(random: np.random.Generator, weight_bytes: float) -> Machine:
    """A machine of the kind that the workbench is for: the weights do not fit the GPU, and any lane may bind."""

    def rate(low: float, high: float) -> float:
        return float(np.exp(random.uniform(np.log(low), np.log(high))))

    return small_machine(
        gpu=rate(1e10, 1e12),
        hbm=rate(1e9, 3e10),
        cpu=rate(1e9, 1e11),
        dram=rate(3e8, 1e10),
        h2d=rate(3e7, 3e9),
        d2h=rate(3e7, 3e9),
        gpu_memory=weight_bytes * random.uniform(0.5, 1.2),
        host_memory=weight_bytes * random.uniform(1.5, 4),
    )


def drawn(seed: int) -> Scenario:
    """A small random scenario."""
    random = np.random.default_rng(seed)
    model = replace(tiny_model(int(random.integers(2, 5)), num_local_experts=8), intermediate_size=256)
    count = int(random.integers(4, 40))
    prompt = random.integers(4, 60, count).tolist()
    output = random.integers(2, 16, count).tolist()
    return tiny_scenario(
        prompt,
        output,
        model=model,
        machine=drawn_machine(random, model.weight_bytes),
        blocks=int(random.integers(30, 400)),
        scheduler=wb.ResourceAware(token_budget=None),
    )
