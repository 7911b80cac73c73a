"""Schedulers choose the requests of each iteration's batch (WHO): queues over KV blocks that admit and preempt.

The serving loop takes each batch from a scheduler; a schedule then orders its tasks.
"""
