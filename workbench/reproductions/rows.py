"""Rows that set each value a paper prints beside the value that the workbench computes."""

from __future__ import annotations

import enum
import math
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from types import MappingProxyType
from typing import Any, NamedTuple

from workbench.core.catalogue import data_path
from workbench.core.errors import CatalogueError

Value = float | bool | str | tuple[float, float]
"""A number, a statement that holds or not, a word, or the two ends of a printed range."""

Inputs = Mapping[str, Any]
_OF_A_CELL = ("id", "published", "at", "outcome", "remark", "evidence", "tolerance", "otherwise")


class Outcome(enum.Enum):
    """Verdict of a comparison."""

    MET = "met"
    MISSED = "not met"
    MISPRINT = "misprint"
    COMPARED = "compared"
    OPEN = "not computed"


class Evidence(enum.Enum):
    """Class of a row by its weight as evidence for a model; each row has the weakest class that is true of it.

    RECOMPUTED: a formula or the scheduler gives the value from other values, and nothing was fitted. SIZE: a dimension
    of a model, or a line of a data sheet. PRINT: arithmetic on the paper's own values. CALIBRATED: constants were
    fitted to values of the same tables. REDRAWN: a distribution or a curve was fitted to the value among others.
    CONSTANT: a constant that the paper does not print was chosen so that this value comes out. OWN_BAND: nothing was
    fitted, but the tolerance is our choice, and wider than rounding explains. MEASURED: only the authors' system gives
    the value.
    """

    RECOMPUTED = "recomputed"
    SIZE = "size"
    PRINT = "print against print"
    CALIBRATED = "calibrated"
    REDRAWN = "redrawn fit"
    CONSTANT = "fitted constant"
    OWN_BAND = "own band"
    MEASURED = "measurement"


UNFITTED = frozenset({Evidence.RECOMPUTED, Evidence.SIZE, Evidence.PRINT})
"""Classes whose matches are evidence: nothing was fitted or chosen for them."""


class Tolerance(NamedTuple):
    """Largest difference that counts as the same, as a share of the published value or in its unit."""

    rel: float = 0.0
    abs: float = 0.0

    def allowed(self, value: float) -> float:
        """Largest difference from a published value, in its unit."""
        return max(self.abs, self.rel * abs(value))


@dataclass(frozen=True)
class Printed:
    """One printed value, with the inputs of its computation.

    Attributes
    ----------
    key : str
        Unique name: the name of the group, which chooses the computation, and the name of the cell.
    item, quantity, unit : str
        Its place in the paper (Table 2, section 5.3), the quantity, and its unit.
    value : Value
    tolerance : Tolerance
    evidence : Evidence
    expected : Outcome
        MET, or another outcome that `remark` explains.
    given : mapping
        Inputs of the computation.
    otherwise : mapping
        For a statement, a word or a zero: inputs with which the same computation gives another value.
    source : str
        The paper and where it was published.
    """

    paper: str
    group: str
    key: str
    item: str
    quantity: str
    unit: str
    value: Value
    tolerance: Tolerance
    evidence: Evidence
    expected: Outcome
    remark: str
    given: Inputs
    otherwise: Inputs
    source: str


@dataclass(frozen=True)
class Row:
    """A printed value and the computed one, which is None if nothing here can compute it."""

    printed: Printed
    computed: Value | None

    @property
    def difference(self) -> float:
        """Computed minus published value, from the nearer end of a range; nan if they are no numbers."""
        numbers = _numbers(self.printed.value, self.computed)
        if numbers is None:
            return math.nan
        (low, high), found = numbers
        return found - min(max(found, low), high)

    @property
    def ratio(self) -> float:
        """Computed over published value, with the nearer end of a range; nan if there is no ratio."""
        numbers = _numbers(self.printed.value, self.computed)
        if numbers is None:
            return math.nan
        (low, high), found = numbers
        nearest = min(max(found, low), high)
        return found / nearest if nearest else math.nan

    @property
    def factor(self) -> float:
        """The larger of computed and published value over the smaller one; nan if there is no ratio."""
        return max(self.ratio, 1 / self.ratio) if self.ratio > 0 else math.nan

    @property
    def outcome(self) -> Outcome:
        """MET within the tolerance, OPEN if nothing was computed, else the outcome that the data expects, or MISSED.

        The data mark a row as COMPARED: a prediction beside a measurement has no tolerance; its `factor` is the result.
        """
        if self.computed is None:
            return Outcome.OPEN
        if self.printed.expected is Outcome.COMPARED:
            return Outcome.COMPARED
        if self._is_met():
            return Outcome.MET
        return Outcome.MISPRINT if self.printed.expected is Outcome.MISPRINT else Outcome.MISSED

    def _is_met(self) -> bool:
        numbers = _numbers(self.printed.value, self.computed)
        if numbers is None:
            return type(self.printed.value) is type(self.computed) and self.printed.value == self.computed
        (low, high), found = numbers
        allowed = self.printed.tolerance.allowed
        return low - allowed(low) - _ROUNDING <= found <= high + allowed(high) + _ROUNDING


_ROUNDING = 1e-9
"""Slack for floating point where the tolerance is zero."""


def _numbers(published: Value, computed: Value | None) -> tuple[tuple[float, float], float] | None:
    """The ends of the published range and the computed number; None unless all are numbers."""
    if isinstance(computed, bool) or not isinstance(computed, int | float):
        return None
    if isinstance(published, tuple):
        return published, computed
    if isinstance(published, bool | str):
        return None
    return (published, published), computed


@cache
def published(paper: str) -> Mapping[str, Any]:
    """Tables of a paper that ship with the project, by the name of their file."""
    return MappingProxyType(_read(f"catalogue/published/{paper}.toml"))


def _read(file: str) -> dict[str, Any]:
    return tomllib.loads(data_path(file).read_text(encoding="utf-8"))


def printed(paper: str) -> tuple[Printed, ...]:
    """Every value of one paper, in the order of its file.

    Parameters
    ----------
    paper : str
        A name from `papers`.

    Raises
    ------
    CatalogueError
        If there is no such paper, or an entry lacks its explanation.
    """
    file = data_path(f"catalogue/reproductions/{paper}.toml")
    if not file.exists():
        raise CatalogueError(f"no reproduction of {paper!r}; there are {', '.join(papers())}.")
    tables = _read(f"catalogue/reproductions/{paper}.toml")
    return tuple(one for group in tables["group"] for one in _cells(paper, tables, group))


def papers() -> tuple[str, ...]:
    """Names of the papers whose values are recomputed."""
    return tuple(sorted(file.stem for file in data_path("catalogue/reproductions").glob("*.toml")))


def _cells(paper: str, tables: dict[str, Any], group: dict[str, Any]) -> Iterator[Printed]:
    cells = group.get("cells", [{}])
    for number, cell in enumerate(cells):
        given = {**group.get("given", {}), **{name: cell[name] for name in cell if name not in _OF_A_CELL}}
        merged = {**group, **cell}
        own = cell.get("id", str(number) if len(cells) > 1 else "")
        outcome, evidence, remark = _judgement(f"{group['id']} of {paper}", merged)
        yield Printed(
            paper=tables["title"],
            group=group["id"],
            key=f"{group['id']}.{own}" if own else group["id"],
            item=group["item"],
            quantity=group["quantity"].format(**given),
            unit=group.get("unit", ""),
            value=_value(paper, merged),
            tolerance=Tolerance(**merged.get("tolerance", {})),
            evidence=evidence,
            expected=outcome,
            remark=remark,
            given=MappingProxyType(given),
            otherwise=MappingProxyType(merged.get("otherwise", {})),
            source=tables["source"],
        )


def _judgement(name: str, entry: dict[str, Any]) -> tuple[Outcome, Evidence, str]:
    """The expected outcome of an entry, its class and its remark."""
    outcome = Outcome(entry.get("outcome", "met"))
    remark = entry.get("remark", "")
    if outcome is not Outcome.MET and not remark:
        raise CatalogueError(f"{name} is {outcome.value} without a remark; say why.")
    if "evidence" not in entry:
        raise CatalogueError(f"{name} has no evidence; give one of {', '.join(one.value for one in Evidence)}.")
    evidence = Evidence(entry["evidence"])
    if (evidence is Evidence.MEASURED) is not (outcome is Outcome.OPEN):
        raise CatalogueError(f"{name} is {outcome.value} with evidence {evidence.value}; these two exclude each other.")
    return outcome, evidence, remark


def _value(paper: str, entry: dict[str, Any]) -> Value:
    """The value in the entry, or the one to which `at` points in the paper's own tables."""
    found: Any = entry["published"] if "published" in entry else published(paper)
    for step in entry.get("at", ()) if "published" not in entry else ():
        found = found[step]
    return (float(found[0]), float(found[1])) if isinstance(found, list) else found
