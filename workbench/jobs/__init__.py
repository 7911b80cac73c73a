"""Texts from a checkpoint (`LLM`): of prompts, of conversations, of a file of requests.

A job is read from a file in OpenAI's batch format, and each answer is kept as soon as it is there.
"""

from workbench.jobs.llm import LLM, Completion

__all__ = ["LLM", "Completion"]
