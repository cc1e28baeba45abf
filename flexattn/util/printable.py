"""Text that others wrote, in a form that only shows: on a terminal, in a log, on a page."""

from __future__ import annotations


def printable(text: str) -> str:
    """The text with every character that does not print as Python's escape of it.

    Of control characters only line breaks and tabs stay: the others move a terminal's cursor,
    change its title or colour what follows. Marks that turn the direction of writing, and lone
    surrogates, which no encoding writes, are escaped too.
    """
    if text.isprintable():
        return text
    return "".join([each if each in "\n\t" else one_line(each) for each in text])


def one_line(text: str) -> str:
    """As `printable`, with line breaks and tabs escaped: what a file gave cannot begin a line."""
    if text.isprintable():
        return text
    return "".join(
        [
            each if each.isprintable() else each.encode("unicode_escape").decode("ascii")
            for each in text
        ]
    )
