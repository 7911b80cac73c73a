"""GPT-OSS: a sliding window in every other layer."""

from workbench.models.family import Family

FAMILY = Family("gpt_oss")
