"""Reproductions: every table of the five papers, and every figure with values in the text, recomputed and compared.

Public runs with experts on the CPU are simulated and compared by `workbench.reproductions.offload_runs`.
"""

from workbench.reproductions.reproduce import Reproduction, reproduce, summary
from workbench.reproductions.rows import Evidence, Outcome, Row, papers

__all__ = ["Evidence", "Outcome", "Reproduction", "Row", "papers", "reproduce", "summary"]
