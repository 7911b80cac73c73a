"""Attention of prompts and of decodes over the paged KV cache, and copies into and out of the cache."""
