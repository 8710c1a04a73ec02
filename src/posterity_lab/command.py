"""The console script, which can be installed without the command line's dependencies."""

from __future__ import annotations

import sys


def main() -> None:
    """Run the command line, or say what to install.

    Example:
        >>> main()  # doctest: +SKIP
    """
    try:
        from posterity_lab.cli import app
    except ImportError:
        print("the command line needs the extra lab: pip install 'posterity[lab]'", file=sys.stderr)
        raise SystemExit(2) from None
    app()
