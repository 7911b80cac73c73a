"""Tapes: the arithmetic of a pricer, recorded while it runs, so that a kernel can repeat it for other rows.

A pricer is run with `Traced` numbers in place of counts of rows. Each has a value, computes like it, and writes down
the step that made it. Where the pricer asks whether a number is 0, or less than another, the answer is recorded as a
check: the tape holds for all rows for which every check has the same answer. So there is one set of formulas, and the
kernel's results are those of the pricer bit by bit.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

from workbench.core.errors import WorkbenchError

ADD, SUBTRACT, MULTIPLY, DIVIDE, POWER, LESS, NOT_LESS, AT_MOST, ABOVE, TRUE, FALSE = range(11)
"""Codes of steps. Those from `LESS` on are checks, which compute nothing."""
EXACT = 2**53
"""Whole numbers below this have a float of their own, so that sums and products of floats are those of integers."""


class UntraceableError(WorkbenchError):
    """Raised where a pricer does with a traced number what no tape repeats."""


@dataclass(frozen=True)
class Tape:
    """Steps that compute numbers from some inputs.

    Numbers are known by their places: first the inputs, then the constants, then the results of steps.

    Attributes
    ----------
    inputs : int
    constants : tuple of float
    steps : tuple of (code, place, place, whole)
        `whole` is 1 if the result is an integer.
    answer : tuple of int
        Places of the numbers that were asked for.
    """

    inputs: int
    constants: tuple[float, ...]
    steps: tuple[tuple[int, int, int, int], ...]
    answer: tuple[int, ...]


def record(function: Callable[[Sequence[Any]], Sequence[Any]], inputs: Sequence[float]) -> Tape:
    """The tape of a function of some numbers, which returns some, for inputs such as these.

    Raises
    ------
    UntraceableError
        If it does something with the numbers that no tape repeats, or integers are too large for a float.
    """
    if any(abs(value) >= EXACT for value in inputs):
        raise UntraceableError(f"counts of rows must be below {EXACT}, not {inputs}.")
    writer = _Writer()
    answer = function([Traced(writer, writer.entry(), value) for value in inputs])
    marks = [writer.mark(number) for number in answer]
    count = len(inputs)
    behind = count + len(writer.constants)

    def place(mark: tuple[int, int]) -> int:
        kind, number = mark
        return (0, count, behind)[kind] + number

    steps = tuple((code, place(one), place(other), whole) for code, one, other, whole in writer.steps)
    return Tape(count, tuple(writer.constants), steps, tuple(map(place, marks)))


_Step = tuple[int, tuple[int, int], tuple[int, int], int]
"""A step with marks in place of places."""


class _Writer:
    """The steps of a tape while it is recorded; numbers have marks: input, constant or result, and which."""

    def __init__(self) -> None:
        self.constants = list[float]()
        self._known = dict[str, int]()
        self.steps = list[_Step]()
        self._entries = 0
        self._made = dict[_Step, tuple[int, int]]()
        self._checked = set[_Step]()

    def entry(self) -> tuple[int, int]:
        """Mark of the next input."""
        self._entries += 1
        return 0, self._entries - 1

    def mark(self, number: Any) -> tuple[int, int]:
        """Mark of a traced number or of a constant."""
        if isinstance(number, Traced):
            return number.mark
        if type(number) not in (int, float, bool) or (type(number) is int and abs(number) >= EXACT):
            raise UntraceableError(f"{number!r} cannot stand on a tape beside counts of rows; give a float.")
        value = float(number)
        place = self._known.setdefault(value.hex(), len(self.constants))  # tells 0.0 and -0.0 apart
        if place == len(self.constants):
            self.constants.append(value)
        return 1, place

    def result(self, code: int, one: Any, other: Any, value: Any) -> Traced:
        """Write down a step that computes `value`, once; a product with 1 takes none."""
        if type(value) not in (int, float) or (type(value) is int and (code == POWER or abs(value) >= EXACT)):
            raise UntraceableError(f"{value!r} cannot be computed on a tape; give a float.")
        if code == MULTIPLY:
            for factor, same in ((one, other), (other, one)):
                if isinstance(same, Traced) and not isinstance(factor, Traced) and factor == 1:
                    return Traced(self, same.mark, value)
        step = (code, self.mark(one), self.mark(other), int(type(value) is int))
        if step not in self._made:
            self.steps.append(step)
            self._made[step] = 2, len(self._made)
        return Traced(self, self._made[step], value)

    def check(self, code: int, one: Any, other: Any) -> None:
        """Write down a check, once."""
        step = (code, self.mark(one), self.mark(other), 0)
        if step not in self._checked:
            self.steps.append(step)
            self._checked.add(step)


def _value(number: Any) -> Any:
    return number.value if isinstance(number, Traced) else number


class Traced:
    """A number that writes down what is computed with it."""

    __slots__ = ("_writer", "mark", "value")
    __array_ufunc__ = None
    """NumPy leaves arithmetic with it to it."""

    def __init__(self, writer: _Writer, mark: tuple[int, int], value: Any) -> None:
        self._writer = writer
        self.mark = mark
        self.value = value

    def __hash__(self) -> int:
        return id(self)

    def __bool__(self) -> bool:
        told = bool(self.value)
        self._writer.check(TRUE if told else FALSE, self, self)
        return told

    def __add__(self, other: Any) -> Traced:
        return self._writer.result(ADD, self, other, self.value + _value(other))

    def __radd__(self, other: Any) -> Traced:
        return self._writer.result(ADD, other, self, other + self.value)

    def __sub__(self, other: Any) -> Traced:
        return self._writer.result(SUBTRACT, self, other, self.value - _value(other))

    def __rsub__(self, other: Any) -> Traced:
        return self._writer.result(SUBTRACT, other, self, other - self.value)

    def __mul__(self, other: Any) -> Traced:
        return self._writer.result(MULTIPLY, self, other, self.value * _value(other))

    def __rmul__(self, other: Any) -> Traced:
        return self._writer.result(MULTIPLY, other, self, other * self.value)

    def __truediv__(self, other: Any) -> Traced:
        return self._writer.result(DIVIDE, self, other, self.value / _value(other))

    def __rtruediv__(self, other: Any) -> Traced:
        return self._writer.result(DIVIDE, other, self, other / self.value)

    def __pow__(self, other: Any) -> Traced:
        return self._writer.result(POWER, self, other, self.value ** _value(other))

    def __rpow__(self, other: Any) -> Traced:
        return self._writer.result(POWER, other, self, other**self.value)

    def __lt__(self, other: Any) -> bool:
        told = bool(self.value < _value(other))
        self._writer.check(LESS if told else NOT_LESS, self, other)
        return told

    def __le__(self, other: Any) -> bool:
        told = bool(self.value <= _value(other))
        self._writer.check(AT_MOST if told else ABOVE, self, other)
        return told

    def __gt__(self, other: Any) -> bool:
        told = bool(self.value > _value(other))
        self._writer.check(LESS if told else NOT_LESS, other, self)
        return told

    def __ge__(self, other: Any) -> bool:
        told = bool(self.value >= _value(other))
        self._writer.check(AT_MOST if told else ABOVE, other, self)
        return told

    def _refuse(self, *_: Any) -> NoReturn:
        raise UntraceableError("the formula does something with a count of rows that no tape repeats.")

    __eq__ = _refuse
    __ne__ = _refuse
    __float__ = __int__ = __index__ = __round__ = __floor__ = __ceil__ = __trunc__ = _refuse
    __floordiv__ = __rfloordiv__ = __mod__ = __rmod__ = __divmod__ = __rdivmod__ = _refuse
    __neg__ = __pos__ = __abs__ = _refuse
