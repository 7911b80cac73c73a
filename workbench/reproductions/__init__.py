"""Every table of the five papers, and every figure whose values the text tells, recomputed beside the print."""

from workbench.reproductions.reproduce import Reproduction, reproduce
from workbench.reproductions.rows import Outcome, Row, papers

__all__ = ["Outcome", "Reproduction", "Row", "papers", "reproduce"]
