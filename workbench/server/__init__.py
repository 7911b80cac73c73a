"""A small server for trying things: OpenAI's completions from a checkpoint, for programs on this computer alone.

It needs the extra ``[serve]``; ``python -m workbench serve`` starts it.
"""

from workbench.server.serve import serve

__all__ = ["serve"]
