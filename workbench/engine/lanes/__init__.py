"""Threads of the engine: a lane each, on cores of their own, with the clock, the meters and the stop of a run."""
