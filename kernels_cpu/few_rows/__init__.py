"""Stages of a decoder layer for a few rows: one compiled call each, on weights that were checked beforehand."""
