"""Routed experts: the router, pairs sorted by expert, the grouped products, and their tiles."""
