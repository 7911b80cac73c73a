"""Advice on a model and a machine: the placements that people use, what fits, how fast each is, and the best."""

from workbench.analysis.advise.advice import Advice, advise
from workbench.analysis.advise.rows import Row, Worth, best

__all__ = ["Advice", "Row", "Worth", "advise", "best"]
