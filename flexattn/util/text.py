"""Words and lines for people: the word that was meant, and text of others that only shows."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

# Other names of dtypes, as torch and users write them.
DTYPE_NAMES = {
    **dict.fromkeys(("fp16", "half", "f16"), "float16"),
    **dict.fromkeys(("bf16",), "bfloat16"),
    **dict.fromkeys(("fp32", "float", "f32"), "float32"),
    **dict.fromkeys(("fp8", "e4m3", "float8"), "float8_e4m3fn"),
}


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """ "did you mean X?", whatever the case of its letters; "" where nothing is near."""
    names = {name.lower(): name for name in known}
    close = difflib.get_close_matches(word.lower(), names)
    return f"did you mean {names[close[0]]}?" if close else ""


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
