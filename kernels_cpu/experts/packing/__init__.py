"""Copies of experts' weights in the layout of `weights`, and back in rows."""
