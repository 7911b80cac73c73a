"""Scenarios: a pipeline with the model, machine, memory, workload and scheduler that it is read for.

Every reader takes a scenario and a schedule. `record` saves, loads and compares scenarios.
"""

from workbench.scenario.memory import Memory
from workbench.scenario.scenario import Scenario

__all__ = ["Memory", "Scenario"]
