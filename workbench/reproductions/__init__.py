"""Every table of the five papers, and every figure whose values the text tells, recomputed beside the print."""

from workbench.reproductions.reproduce import Reproduction, reproduce, summary
from workbench.reproductions.rows import Evidence, Outcome, Row, papers

__all__ = ["Evidence", "Outcome", "Reproduction", "Row", "papers", "reproduce", "summary"]
