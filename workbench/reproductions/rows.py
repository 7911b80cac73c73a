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
    """The weight of a row that is met as evidence for a model; each row has the weakest class that is true of it.

    RECOMPUTED: a formula or the scheduler gives it from other values, and nothing was fitted. SIZE: a dimension of a
    model, or a line of a data sheet. PRINT: arithmetic on the paper's own values. CALIBRATED: constants were fitted to
    values of the same tables. REDRAWN: the value is one of those that a distribution or a curve was fitted to.
    CONSTANT: a constant that the paper does not print was chosen so that this value comes out. OWN_BAND: nothing was
    fitted, but how near counts is our choice, beyond what rounding explains. MEASURED: only their system gives it.
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
"""Classes of which a match is evidence: nothing was fitted or chosen for it."""


class Tolerance(NamedTuple):
    """Largest difference that counts as the same, as a share of the published value or in its unit."""

    rel: float = 0.0
    abs: float = 0.0

    def allowed(self, value: float) -> float:
        """Largest difference from a published value, in its unit."""
        return max(self.abs, self.rel * abs(value))


@dataclass(frozen=True)
class Printed:
    """One printed value, with what is needed to compute it.

    Attributes
    ----------
    key : str
        Unique name; the part before the cell's own is the group's, by which it is computed.
    item, quantity, unit : str
        Where it stands (Table 2, section 5.3), what it is, and in which unit.
    value : Value
    tolerance : Tolerance
    evidence : Evidence
    expected : Outcome
        MET, or the one that `remark` explains.
    given : mapping
        Inputs.
    otherwise : mapping
        Of a statement, a word or a zero: inputs with which the same computation says something else.
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
    """A printed value and the computed one, None where nothing here can compute it."""

    printed: Printed
    computed: Value | None

    @property
    def difference(self) -> float:
        """Computed less published, from the nearer end of a range, nan where they are no numbers."""
        numbers = _numbers(self.printed.value, self.computed)
        if numbers is None:
            return math.nan
        (low, high), found = numbers
        return found - min(max(found, low), high)

    @property
    def ratio(self) -> float:
        """Computed over published, the nearer end of a range, nan where there is none."""
        numbers = _numbers(self.printed.value, self.computed)
        if numbers is None:
            return math.nan
        (low, high), found = numbers
        nearest = min(max(found, low), high)
        return found / nearest if nearest else math.nan

    @property
    def factor(self) -> float:
        """Larger of computed and published over the other, nan where there is no ratio."""
        return max(self.ratio, 1 / self.ratio) if self.ratio > 0 else math.nan

    @property
    def outcome(self) -> Outcome:
        """MET within the tolerance, OPEN where nothing was computed, else why not as the data says, or MISSED.

        COMPARED is told in the data: a prediction beside a measurement has no tolerance, its `factor` is the answer.
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
    """The ends of what was published and the computed number, None unless all are numbers."""
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
        If there is no such paper, or an entry lacks what explains it.
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
    """As it stands in the entry, or where `at` points to in the paper's own tables."""
    found: Any = entry["published"] if "published" in entry else published(paper)
    for step in entry.get("at", ()) if "published" not in entry else ():
        found = found[step]
    return (float(found[0]), float(found[1])) if isinstance(found, list) else found
