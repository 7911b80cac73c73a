"""Kernels that price the groups of a plan by their tapes, see `tapes`."""

from __future__ import annotations

import math
from typing import Any

from workbench.simulate.kernels.compiling import inner
from workbench.simulate.tapes import ABOVE, ADD, AT_MOST, DIVIDE, EXACT, LESS, MULTIPLY, NOT_LESS, SUBTRACT, TRUE


@inner
def _holds(tape: Any, base: Any, rows: Any, tapes: Any, values: Any) -> Any:
    """Run one tape on the rows from `base` on; false if a check of it fails."""
    steps, constants, table, _ = tapes
    first, stop, constant, count, inputs = table[tape, :5]
    for place in range(inputs):
        values[place] = rows[base + place]
        if not abs(values[place]) < EXACT:
            return False
    for place in range(count):
        values[inputs + place] = constants[constant + place]
    top = inputs + count
    for step in range(first, stop):
        code = steps[step, 0]
        one = values[steps[step, 1]]
        other = values[steps[step, 2]]
        if code >= LESS:
            if code == LESS:
                held = one < other
            elif code == NOT_LESS:
                held = not one < other
            elif code == AT_MOST:
                held = one <= other
            elif code == ABOVE:
                held = not one <= other
            elif code == TRUE:
                held = one != 0.0
            else:
                held = one == 0.0
            if not held:
                return False
            continue
        if code == ADD:
            result = one + other
        elif code == SUBTRACT:
            result = one - other
        elif code == MULTIPLY:
            result = one * other
        elif code == DIVIDE:
            if other == 0.0:
                return False
            result = one / other
        else:
            result = math.pow(one, other)
        if steps[step, 3] and not abs(result) < EXACT:
            return False
        values[top] = result
        top += 1
    return True


@inner
def priced(
    family: Any, base: Any, rows: Any, tapes: Any, first_of: Any, values: Any, answer: Any, hints: Any, group: Any
) -> Any:
    """Answer with the outputs of a tape of the family that holds for the rows; false if none does.

    `hints` has for each group the tape that held last, which is tried first, or -1.
    """
    table = tapes[2]
    follow = tapes[3]
    hinted = hints[group] >= 0
    tape = hints[group] if hinted else first_of[family]
    while tape >= 0 and not _holds(tape, base, rows, tapes, values):
        tape = first_of[family] if hinted else follow[tape]
        hinted = False
    if tape < 0:
        return False
    hints[group] = tape
    for place in range(len(answer)):
        answer[place] = values[table[tape, 5 + place]]
    return True
