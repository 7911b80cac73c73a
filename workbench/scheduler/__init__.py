"""WHO is in an iteration's batch: request queues over the blocks of the KV cache, and policies that admit and preempt.

The serving loop asks a scheduler for each batch; a schedule then orders its tasks.
"""
