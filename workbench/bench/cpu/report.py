"""Report of `bench cpu`: rates, shares of the roof by state of the memory, and ratios to the baselines."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from statistics import median

from workbench.bench import record
from workbench.bench.cpu.plots import Roofline
from workbench.bench.cpu.rounds import Round, by_state, fastest_reading
from workbench.bench.cpu.work import COLUMNS, Work

Ratios = dict[str, dict[str, float]]


def report(rounds: Sequence[Round], say: Callable[[str], None]) -> Ratios:
    """Report a table per number of threads; return the ratios by name."""
    ratios: Ratios = {}
    for threads, fastest in sorted(fastest_reading(rounds).items()):
        own = [one for one in rounds if one.threads == threads]
        _say_ceilings(own, fastest, say)
        say(f"  {'':24}  GB/s  of the roof  of paged  ours is so many times as fast as")
        say(f"  {'':24}        slow   fast   reading  {''.join(f'{name:>13}' for name in COLUMNS)}")
        for work in _works(own):
            mine = [one for one in own if one.work is work]
            found = shares(mine, fastest)
            for name in COLUMNS:
                if name in work.implementations:
                    found[name] = _of(mine, name)
            for name, value in found.items():
                ratios[f"{work.name}, {threads} threads: {_said(name)}"] = value
            say(_line(work, mine, found))
    return ratios


def shares(rounds: Sequence[Round], fastest: float) -> Ratios:
    """Shares that our kernel reaches, for the rounds of a work: of the roof and of paged reading.

    The share of the roof is given over all rounds and for each state of the memory.
    """
    found = {"of the roof": _share_of_roof(rounds)}
    for name, own in by_state(rounds, fastest).items():
        found[f"of the roof, {name} memory"] = _share_of_roof(own)
    if "paged" in rounds[0].seconds:
        found["of paged reading"] = record.ratio([one.times("paged") for one in rounds])
    return found


def _share_of_roof(rounds: Sequence[Round]) -> dict[str, float]:
    return record.ratio([one.roof / one.seconds["ours"] for one in rounds])


def rows(rounds: Sequence[Round]) -> list[dict[str, object]]:
    """One row per work, number of threads and implementation: the median rates that the roofline shows."""
    found = []
    for threads in sorted(fastest_reading(rounds)):
        own = [one for one in rounds if one.threads == threads]
        for work in _works(own):
            mine = [one for one in own if one.work is work]
            for name in work.implementations:
                taken = median(one.seconds[name] for one in mine)
                rates = {"bytes_s": work.bytes / taken, "flop_s": work.flops / taken}
                rates["intensity"] = work.flops / work.bytes
                found.append({"work": work.name, "threads": threads, "by": name, "rounds": len(mine), **rates})
    return found


def rooflines(rounds: Sequence[Round]) -> list[Roofline]:
    """The roofline of each number of threads, from the medians."""
    found = []
    for threads in sorted(fastest_reading(rounds)):
        own = [one for one in rounds if one.threads == threads]
        points: dict[str, list[tuple[float, float]]] = {}
        for work in _works(own):
            kind = "" if work.ceilings else "expert: "
            for name in work.implementations:
                taken = median(one.seconds[name] for one in own if one.work is work)
                points.setdefault(kind + name, []).append((work.flops / work.bytes, work.flops / taken))
        read = median(one.read for one in own)
        multiply = median(one.multiply for one in own)
        found.append(Roofline(threads, read, multiply, points))
    return found


def _works(rounds: Sequence[Round]) -> list[Work]:
    return list({id(one.work): one.work for one in rounds}.values())


def _of(rounds: Sequence[Round], name: str) -> dict[str, float]:
    return record.ratio([one.times(name) for one in rounds])


def _said(name: str) -> str:
    return f"times as fast as {name}" if name in COLUMNS else name


def _say_ceilings(rounds: Sequence[Round], fastest: float, say: Callable[[str], None]) -> None:
    reads = sorted(one.read for one in rounds)
    states = by_state(rounds, fastest)
    told = ", ".join(f"{_reading(own) / 1e9:.1f} {name} ({len(own)})" for name, own in states.items())
    say(
        f"{rounds[0].threads} threads: reads {median(reads) / 1e9:.1f} GB/s ({reads[0] / 1e9:.1f} to "
        f"{reads[-1] / 1e9:.1f}; by state of the memory and rounds: {told}), "
        f"multiplies {median(one.multiply for one in rounds) / 1e9:.0f} GFLOP/s in fp32 and "
        f"{median(one.multiply_bf16 for one in rounds) / 1e9:.0f} in bf16"
    )


def _reading(rounds: Sequence[Round]) -> float:
    return median(one.read for one in rounds)


def _line(work: Work, rounds: Sequence[Round], found: Mapping[str, Mapping[str, float]]) -> str:
    rate = work.bytes / median(one.seconds["ours"] for one in rounds) / 1e9
    names = ("of the roof, slow memory", "of the roof, fast memory", "of paged reading")
    told = [f"{found[name]['median']:.2f}" if name in found else "-" for name in names]
    times = [f"{found[name]['median']:.2f}" if name in found else "-" for name in COLUMNS]
    slow, fast, paged = told
    return f"  {work.name:24} {rate:5.1f} {slow:>6} {fast:>6} {paged:>9}  {''.join(f'{one:>13}' for one in times)}"
