"""The sources of the package, and tests of each of them."""

from pathlib import Path

PACKAGE = Path(__file__).parents[1] / "flexattn"
FILES = sorted(PACKAGE.rglob("*.py"))


def each_file(test):
    """One test of all files: a test for each took longer than what it looked at."""

    def of_all():
        for path in FILES:
            test(path)

    return of_all
