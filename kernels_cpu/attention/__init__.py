"""Decode attention and latent attention on a paged KV cache, and the append of new keys and values to the cache."""
