"""Routed experts: packed weights, the products' inner loops, and the tasks that threads take."""
