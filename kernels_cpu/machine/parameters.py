"""The settings of the kernels that depend on the CPU: tables by family, and the one that was tuned on this computer."""

from __future__ import annotations

import functools
import os
import re
import tomllib
import warnings
from collections.abc import Mapping
from dataclasses import Field, dataclass, field, fields, replace
from itertools import product
from pathlib import Path
from typing import Any, ClassVar

from ..declarations import public
from .cpu import cpu_family, cpu_name, user_folder

_SHIPPED = Path(__file__).with_name("parameters.toml")


@dataclass(frozen=True)
class ByLanes:
    """A setting that depends on the number of vector registers, and so on the code path."""

    avx512: int
    avx2: int

    def __getitem__(self, lanes: int) -> int:
        return self.avx512 if lanes == 16 else self.avx2


def _either(*values: Any) -> dict[str, Any]:
    """The values that a setting may have, as metadata of its field."""
    return {"values": values}


def _of_avx512(*values: Any) -> dict[str, Any]:
    """The values of a setting that matters on that code path alone."""
    return {"values": values, "lanes": 16}


def _lanes(avx512: tuple[int, ...], avx2: tuple[int, ...]) -> dict[str, Any]:
    """The values that a setting may have by code path, as metadata of its field."""
    return _either(*(ByLanes(*pair) for pair in product(avx512, avx2)))


@dataclass(frozen=True)
class AttentionParameters:
    """Settings of decode attention.

    Attributes
    ----------
    tile_bytes : int
        Most bytes of keys for which a tile has 128 tokens, so that they stay in L1 while several passes read them; else
        it has 64.
    sums : ByLanes
        Registers used for running sums.
    heads : ByLanes
        Most query heads that share a loaded row: more leave no registers for a second token to hide latency.
    tokens_together : int
        Most tokens that one iteration of the weighted sum takes; it computes one prefetch address for all of them.
    streams : int
        Streams in which the next tile's rows are prefetched by turns: the hardware prefetcher adds more to several than
        one.
    level : int
        Cache level into which rows are prefetched.
    few_heads_ahead, ahead : int
        Distance from one prefetched cache line of a row to the next, with one or two query heads per KV head and with
        more; 0 for no prefetch [lines].
    ordered_products : ByLanes
        Most multiply-adds per cache line with which loads and prefetches are spread evenly between products, because
        reading takes longer than computing; with more, and for 0, LLVM orders them.
    pairs_from : int
        Fewest query heads per KV head with which AVX512_BF16 multiplies queries by keys where both are bf16 numbers,
        which is exact; 0 for never. With fewer heads reading takes longer than computing.
    run, least_run : int
        Tokens of a task: enough to hide its start, few enough that threads end together. Sequences longer than two runs
        are divided into tasks that get shorter towards the end.
    """

    tile_bytes: int = field(metadata=_either(0, 16 << 10, 32 << 10, 64 << 10))
    sums: ByLanes = field(metadata=_lanes((8, 16, 24), (4, 8, 12)))
    heads: ByLanes = field(metadata=_lanes((4, 8), (2, 4)))
    tokens_together: int = field(metadata=_either(1, 2, 4))
    streams: int = field(metadata=_either(1, 2, 4, 8))
    level: int = field(metadata=_either(1, 2))
    few_heads_ahead: int = field(metadata=_either(0, 1, 2, 4))
    ahead: int = field(metadata=_either(0, 1, 2, 4))
    ordered_products: ByLanes = field(metadata=_lanes((0, 8, 12), (0, 4, 8, 16, 32)))
    pairs_from: int = field(metadata=_of_avx512(0, 3, 4, 5))
    run: int = field(metadata=_either(512, 1024, 2048, 4096))
    least_run: int = field(metadata=_either(256, 512, 1024))


@dataclass(frozen=True)
class ExpertParameters:
    """Settings of experts.

    Attributes
    ----------
    sums : ByLanes
        Registers used for running sums.
    ahead : int
        Prefetch distance in a block of weights, into L1, for CPUs whose hardware prefetcher alone is too late; 0 for no
        prefetch. Where several passes read the same steps, it is added to the bytes of these steps [byte].
    scales_ahead : int
        Prefetch distance in the scales of a block, which has so few per group that hardware may not prefetch them; 0
        for no prefetch [byte].
    streams : int
        Streams in which a block is read for the first tokens. Later it is in a cache, where one is up to 1.4 times as
        fast.
    later_tokens : ByLanes
        Tokens for which a block of fp32 or bf16 weights is read at once after the first four, when it is in a cache.
    few : int
        Most tokens of an expert that vectors compute, with BF16 weights in fp32, on CPUs that also have products of
        bf16 or matrix registers: with so few tokens reading the weights takes longer than computing.
    bf16_products : bool
        True to round activations for AVX512_BF16 where an expert has more tokens and the caller permits it.
    kept : int
        Bytes of blocks, or of activations, that stay in L2 while they are read repeatedly.
    summed_tokens : int
        Tokens whose sums stay in L1 from one scale group to the next.
    thread_bytes : int
        Fewest bytes of weights per thread: with fewer, waking a thread takes longer than it saves.
    """

    sums: ByLanes = field(metadata=_lanes((12, 16, 24), (4, 8, 12)))
    ahead: int = field(metadata=_either(0, 1 << 10, 2 << 10, 4 << 10, 6 << 10, 8 << 10))
    scales_ahead: int = field(metadata=_either(0, 256, 512, 1024))
    streams: int = field(metadata=_either(1, 2, 4))
    later_tokens: ByLanes = field(metadata=_lanes((4, 6), (4, 6)))
    few: int = field(metadata=_of_avx512(2, 4, 6, 8))
    bf16_products: bool = field(metadata=_of_avx512(False, True))
    kept: int = field(metadata=_of_avx512(256 << 10, 512 << 10, 1 << 20, 2 << 20))
    summed_tokens: int = field(metadata=_of_avx512(32, 64))
    thread_bytes: int = field(metadata=_either(256 << 10, 1 << 20, 4 << 20))


@dataclass(frozen=True)
class FewRowsParameters:
    """Settings of products of few rows.

    Attributes
    ----------
    task_bytes : int
        Weights of a task [byte].
    alone_bytes : int
        Most bytes of keys and values that the calling thread reads alone: it has read them before another has come.
    ahead : int
        Prefetch distance in weights that lie in rows, those of experts in place too; 0 for no prefetch [byte].
    next_rows : bool
        True to prefetch the rows that follow those that are read side by side into L2, in the order of memory.
    one_stream : int
        Most bytes of a row of fp32 numbers with which one row alone is multiplied with one row of weights at a time, so
        that they are read in the order of memory: it stays in L1 meanwhile. With more, and with more rows, several rows
        of weights share its loads.
    most : int
        Most rows of a call of a stage that holds its weights; 0 for no more than four, where separate operations are
        faster. `FewLinear` and `FewQkv` take more than four with bf16 weights alone, and multiply by AVX512_BF16.
    """

    task_bytes: int = field(metadata=_either(32 << 10, 64 << 10, 128 << 10, 256 << 10))
    alone_bytes: int = field(metadata=_either(256 << 10, 1 << 20, 4 << 20))
    ahead: int = field(metadata=_either(0, 1 << 10, 2 << 10, 4 << 10, 6 << 10, 8 << 10))
    next_rows: bool = field(metadata=_either(False, True))
    one_stream: int = field(metadata=_either(0, 8 << 10))
    most: int = field(metadata=_of_avx512(0, 32, 128))


@dataclass(frozen=True)
class RowsParameters:
    """Settings of norms, rotations, gates and the router.

    Attributes
    ----------
    thread_numbers : int
        Fewest numbers per thread.
    """

    thread_numbers: int = field(metadata=_either(32 << 10, 64 << 10, 128 << 10, 256 << 10))


_GROUPS: Mapping[str, type] = {
    "attention": AttentionParameters,
    "experts": ExpertParameters,
    "few_rows": FewRowsParameters,
    "rows": RowsParameters,
}


@public
@dataclass(frozen=True)
class Parameters:
    """The settings of the kernels on a computer, one table for each group of kernels.

    Attributes
    ----------
    attention : AttentionParameters
    experts : ExpertParameters
    few_rows : FewRowsParameters
    rows : RowsParameters
    why : str
        The table that they are from.
    """

    VARIABLE: ClassVar[str] = "KERNELS_CPU_PARAMETERS"
    """Environment variable: a file whose settings a process takes instead of the computer's."""
    GROUPS: ClassVar[tuple[str, ...]] = tuple(_GROUPS)
    """Names of the tables."""

    attention: AttentionParameters
    experts: ExpertParameters
    few_rows: FewRowsParameters
    rows: RowsParameters
    why: str = field(default="", compare=False, repr=False)

    @classmethod
    def of_family(cls, family: str) -> Parameters:
        """The shipped settings of a family of CPUs, as `cpu_family` names it.

        Examples
        --------
        >>> Parameters.of_family("znver4").attention.streams
        1
        """
        tables = _shipped()
        name = family if family in tables else "zen" if family.startswith("znver") else "any"
        why = f"the table of {family}" if name == family else f"the table {name!r}, for {family} has none of its own"
        return _parsed(_with_bases(tables, name), why)

    @classmethod
    def shipped(cls) -> dict[str, Parameters]:
        """The settings of every table that is shipped, by its name."""
        tables = _shipped()
        return {name: _parsed(_with_bases(tables, name), f"the table {name!r}") for name in tables}

    @classmethod
    def read(cls, path: Path) -> Parameters:
        """The settings of a file; those that it has not are this CPU family's.

        Raises
        ------
        OSError
            If it cannot be read.
        ValueError
            If a setting is unknown, or has a value that it cannot have.
        """
        tables = tomllib.loads(path.read_text(encoding="utf-8"))
        _check_groups(tables)
        shipped = cls.of_family(cpu_family())
        whole = {group: vars(getattr(shipped, group)) | tables.get(group, {}) for group in cls.GROUPS}
        return _parsed(whole, str(path))

    @staticmethod
    def tuned_path() -> Path:
        """The file of what was tuned on computers with this CPU and as many of them, in the user's cache."""
        name = re.sub(r"\W+", "-", f"{cpu_family()} {cpu_name()} {os.cpu_count()}").strip("-").lower()
        return user_folder() / f"{name}.toml"

    def at(self, group: str, setting: str) -> Any:
        """The value of a setting."""
        return getattr(getattr(self, group), setting)

    def having(self, group: str, setting: str, value: Any) -> Parameters:
        """The same settings, but for one."""
        changed: Any = replace(getattr(self, group), **{setting: value})
        return replace(self, **{group: changed})

    def taking(self, group: str, other: Parameters, lanes: int) -> Parameters:
        """The same settings, but those of a group from others, as far as they matter with so many lanes."""
        changed = self
        for setting, values in self.values(group, lanes).items():
            asked = other.at(group, setting)
            if isinstance(asked, ByLanes):
                (asked,) = (value for value in values if value[lanes] == asked[lanes])
            changed = changed.having(group, setting, asked)
        return changed

    def values(self, group: str, lanes: int) -> dict[str, list[Any]]:
        """The values that each setting of a group may have, by its name, of those that matter with so many lanes.

        Of a setting that depends on the code path, those that differ on the path with so many lanes.
        """
        found = dict[str, list[Any]]()
        for known in fields(getattr(self, group)):
            if known.metadata.get("lanes", lanes) != lanes:
                continue
            own = self.at(group, known.name)
            other = "avx2" if lanes == 16 else "avx512"
            found[known.name] = [
                value
                for value in known.metadata["values"]
                if not isinstance(own, ByLanes) or getattr(value, other) == getattr(own, other)
            ]
        return found

    def text(self, base: Parameters | None = None) -> str:
        """The settings as tables in TOML; with a base, those that differ from it."""
        lines = list[str]()
        for group in self.GROUPS:
            names = [known.name for known in fields(getattr(self, group))]
            if base is not None:
                names = [name for name in names if self.at(group, name) != base.at(group, name)]
            if names:
                lines += [f"[{group}]", *(f"{name} = {_toml(self.at(group, name))}" for name in names), ""]
        return "\n".join(lines)


@public
@functools.cache
def parameters() -> Parameters:
    """The settings of this process: those of the file that `Parameters.VARIABLE` names, of `Parameters.tuned_path`,
    or of this CPU's family.

    Raises
    ------
    OSError, ValueError
        As `Parameters.read`, for the file that the variable names.

    Examples
    --------
    >>> parameters().attention.streams in (1, 2, 4, 8)
    True
    """
    given = os.environ.get(Parameters.VARIABLE)
    if given:
        return replace(Parameters.read(Path(given)), why=f"{Parameters.VARIABLE}={given}")
    try:
        tuned = Parameters.tuned_path()
        return replace(Parameters.read(tuned), why=f"tuned on this computer, {tuned}")
    except ValueError as error:
        warnings.warn(
            f"what was tuned on this computer is not used: {error} Delete {tuned}, or tune again.",
            RuntimeWarning,
            stacklevel=2,
        )
    except (OSError, RuntimeError):  # no such file, or no home
        pass
    return Parameters.of_family(cpu_family())


def _shipped() -> dict[str, Any]:
    """The tables of the shipped file, with the names of their bases."""
    tables = tomllib.loads(_SHIPPED.read_text(encoding="utf-8"))
    for table in tables.values():
        _check_groups({group: own for group, own in table.items() if group != "like"})
    return tables


def _with_bases(tables: Mapping[str, Any], name: str) -> dict[str, Any]:
    """A table with what it has of those that it is like."""
    own = tables[name]
    whole = _with_bases(tables, own["like"]) if "like" in own else {}
    for group in _GROUPS:
        whole[group] = whole.get(group, {}) | own.get(group, {})
    return whole


def _check_groups(tables: Mapping[str, Any]) -> None:
    """Raise ValueError if a table is none of the groups."""
    for name, table in tables.items():
        if name not in _GROUPS or not isinstance(table, dict):
            raise ValueError(f"{name} is no table of settings; give those of {', '.join(_GROUPS)}.")


def _parsed(tables: Mapping[str, Any], why: str) -> Parameters:
    groups = {name: _group(name, kind, tables.get(name, {})) for name, kind in _GROUPS.items()}
    return Parameters(**groups, why=why)


def _group(name: str, kind: type, table: Mapping[str, Any]) -> Any:
    known = {each.name: each for each in fields(kind)}
    unknown = sorted(set(table) - set(known))
    if unknown:
        raise ValueError(f"there is no setting {name}.{unknown[0]}; known are {', '.join(known)}.")
    return kind(**{setting: _value(f"{name}.{setting}", each, table) for setting, each in known.items()})


def _value(name: str, known: Field[Any], table: Mapping[str, Any]) -> Any:
    values = known.metadata["values"]
    permitted = ", ".join(map(_toml, values))
    if known.name not in table:
        raise ValueError(f"{name} is missing; give it one of {permitted}.")
    given = table[known.name]
    made = ByLanes(**given) if isinstance(given, dict) and set(given) == {"avx512", "avx2"} else given
    if type(made) is not type(values[0]) or made not in values:
        raise ValueError(f"{name} is {given!r}; give it one of {permitted}.")
    return values[values.index(made)]


def _toml(value: Any) -> str:
    if isinstance(value, ByLanes):
        return f"{{ avx512 = {value.avx512}, avx2 = {value.avx2} }}"
    return str(value).lower()
