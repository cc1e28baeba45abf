"""Which of the things that a bench knows the command line asks for."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from typing import TypeVar

from flexattn.errors import InputError

__all__ = ["matching"]

T = TypeVar("T")


def matching(
    known: Iterable[T], pattern: str, option: str, noun: str, text: Callable[[T], str]
) -> list[T]:
    """Those whose text matches the pattern somewhere; raises InputError if none does.

    option: where the pattern came from, as "--rows"; noun: what one of them is, as "row".
    """
    every = list(known)
    try:
        found = [each for each in every if re.search(pattern, text(each))]
    except re.error as error:
        raise InputError(f"{option} {pattern!r}", f"is a regular expression: {error}") from error
    if not found:
        names = ", ".join(map(text, every))
        raise InputError(f"{option} {pattern!r} matches no {noun}", f"the {noun}s are {names}")
    return found
