"""`run`: the wall clock executes every plan on the real model."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from workbench.engine.engine import Engine
from workbench.errors import EngineError
from workbench.result import Result, Source
from workbench.scenario import Scenario
from workbench.schedules.base import Schedule
from workbench.serving import Prepared, prepare, serve


def run(scenario: Scenario, schedule: Schedule) -> Result:
    """Serve the workload on this computer, with the model's weights, and measure.

    Parameters
    ----------
    scenario : Scenario
        Its model comes from `wb.checkpoint`, its machine from `wb.Machine.local`, its requests have token ids.
    schedule : Schedule

    Returns
    -------
    Result
        With source MEASURED, the generated tokens of every request and a timeline of every task.

    Raises
    ------
    EngineError
        If model, machine or workload cannot be run, or what ran is not what was asked for.
    WorkbenchError
        As `simulate` does.
    """
    prepared = prepare(scenario, schedule)
    check_runnable(prepared)
    engine = Engine(prepared)
    try:
        result = serve(prepared, engine, Source.MEASURED)
        engine.read_back()
        return replace(result, tokens=engine.generated)
    finally:
        engine.close()


def check_runnable(prepared: Prepared) -> None:
    """Everything that `run` needs beyond `simulate`, before any long work."""
    scenario = prepared.scenario
    model, requests = scenario.model, scenario.workload.requests
    if model.path is None:
        raise EngineError(f"model {model.name!r} has no weights here; give model=wb.checkpoint(folder).")
    if not scenario.machine.is_local:
        raise EngineError(f"machine {scenario.machine.name!r} is not this computer; give machine=wb.Machine.local().")
    if not requests:
        raise EngineError(
            f"workload {scenario.workload.name!r} has lengths but no tokens; give Workload.from_jsonl(path)."
        )
    for number, request in enumerate(requests):
        worst = max(request.prompt)
        if worst >= model.vocab_size:
            raise EngineError(
                f"request {number} has the token id {worst}, {model.name!r} knows ids below {model.vocab_size}; "
                "use the model's own tokenizer."
            )
    _check_stages(prepared)


def _check_stages(prepared: Prepared) -> None:
    problems: dict[str, Callable[[str, int, bool], bool]] = {
        "defers experts, which run cannot do yet; use defer=0": lambda name, defer, own: defer > 0,
        "has no such experts in this architecture; remove the stage": lambda name, defer, own: name == "shared_experts",
        "has no run function; give Op(..., run=...)": lambda name, defer, own: (
            not own and name not in Engine.OPERATIONS
        ),
    }
    for stage in prepared.scenario.pipeline.stages:
        for problem, applies in problems.items():
            if applies(stage.op.name, stage.defer, stage.op.run is not None):
                raise EngineError(f"{stage} {problem}.")
