"""Threads of the engine: one per lane, on cores of their own; with the clock, the meters and the control of a run."""
