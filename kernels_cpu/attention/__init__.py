"""Decode attention on a paged KV cache, latent attention too, and the append that feeds it."""
