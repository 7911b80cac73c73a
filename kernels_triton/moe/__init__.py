"""Routed experts: the router, pairs in order by expert, the grouped products, and their tiles."""
