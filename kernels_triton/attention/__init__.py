"""Attention of prompts and of decodes over the paged cache, and rows into the cache and out of it."""
