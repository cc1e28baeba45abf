"""The command line: a file for each verb, and helpers. typer and rich are needed here alone."""

from __future__ import annotations

import sys


def main() -> None:
    """Run the command line; the status is 2 for a bad request, 1 for a failed check."""
    try:
        from flexattn.cli.app import app

        app()
    except ModuleNotFoundError as error:
        if error.name not in ("typer", "rich"):
            raise
        sys.exit(f"flexattn's command line needs {error.name}: pip install 'flexattn[cli]'")
