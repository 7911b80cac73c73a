"""Builds these pages into out/docs: `./lab docs`. A warning of Sphinx is an error."""

import sys
from pathlib import Path

from sphinx.cmd.build import build_main

DOCS = Path(__file__).resolve().parent
OUT = DOCS.parent / "out" / "docs"


def main() -> int:
    """Build all pages and print the path of the first one; the exit code is Sphinx's."""
    code = build_main(["--fail-on-warning", "--keep-going", "--quiet", str(DOCS), str(OUT)])
    if code == 0:
        print(OUT / "index.html")
    return code


if __name__ == "__main__":
    sys.exit(main())
