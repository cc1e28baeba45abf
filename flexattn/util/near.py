"""The word that was meant: by another name of it, or the nearest to one that nobody knows."""

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
