"""The shipped model with a chat template: a conversation becomes one of its exercises."""

import shutil
from pathlib import Path

import workbench as wb

SHIPPED = wb.data_path("models/tiny-moe")
TEMPLATE = """\
{% for message in messages %}\
{% if message.role not in ("sort", "copy", "reverse", "system") %}{{ raise_exception("no such role") }}{% endif %}\
{{ message.role }}:{{ message.content }}={% endfor %}"""
"""``{"role": "sort", "content": "cab"}`` becomes ``sort:cab=``."""


def talking(folder: Path) -> Path:
    """A copy of the shipped model with that template, in a new folder."""
    shutil.copytree(SHIPPED, folder)
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    return folder
