"""Builds these pages into out/docs: `./lab docs`. A warning of Sphinx is an error."""

import sys
from pathlib import Path

from sphinx.cmd.build import build_main

DOCS = Path(__file__).resolve().parent
OUT = DOCS.parent / "out" / "docs"


def main() -> int:
    """Build all pages and print the path of the first one; the exit code is Sphinx's.

    Every page is read anew: Sphinx does not repeat the warnings of a page that it has kept from a build that failed.
    """
    code = build_main(["--fail-on-warning", "--keep-going", "--fresh-env", "--quiet", str(DOCS), str(OUT)])
    if code == 0:
        print(OUT / "index.html")
    return code


if __name__ == "__main__":
    sys.exit(main())
