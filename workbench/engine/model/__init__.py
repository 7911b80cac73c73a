"""The model in memory: weights, KV cache, and the operations that lanes execute on the rows of a batch."""
