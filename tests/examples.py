"""How many examples a property is tried with: a few, always the same ones; forty times as many under `--deep`."""

import os

from hypothesis import settings

DEEP = bool(os.environ.get("WB_TEST_DEEP"))
"""Set by `./lab test --deep`, for the processes that tests start as well."""
FEWEST = 20
"""Examples that every property is tried with, where it asks for so many."""


def examples(count: int, profile: settings | None = None) -> settings:
    """A quarter of `count`, but not below FEWEST; ten times `count` under `--deep`."""
    return settings(profile, max_examples=10 * count if DEEP else max(min(count, FEWEST), count // 4))
