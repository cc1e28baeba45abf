"""A pass over PTX: P V multiplies the columns that V has, not the power of two above.

Gluon's tensors are powers of two wide, and so is the accumulator of P V; N of a wgmma is any
multiple of 8. A thread's registers of an accumulator are in the order of its columns, four for
each eight: those of the first N columns are the first of the list. A kernel that asks for this
pass says in a comment of its inline assembly how many columns its products have. The others it
stores as zeros, so that ptxas gives them no registers.

Without the pass the kernel multiplies what its tiles of V hold behind them, and drops the result.
"""

from __future__ import annotations

import re

from flexattn.errors import RenderError

_NAME = "unpadded_values"
# Part of every announcement: a kernel that an older form of the pass made has another name.
_FORM = 1

_ANNOUNCED = re.compile(rf"{_NAME} {_FORM}: (?P<columns>\d+) of (?P<padded>\d+) columns")


def announcement(columns: int, padded: int) -> str:
    """The line about products of P and V in an assembly; padded: their width as written."""
    return f"{_NAME} {_FORM}: {columns} of {padded} columns"


def block_warps(text: str) -> None:
    """A block keeps its warps."""


def merged(ptx: str) -> str:
    """The PTX with those products narrowed: wgmma whose first operand lies in registers.

    Raises RenderError where there are none.
    """
    found = _ANNOUNCED.search(ptx)
    if found is None:
        return ptx
    columns, padded = int(found["columns"]), int(found["padded"])
    product = re.compile(
        rf"(?P<name>wgmma\.mma_async\.sync\.aligned\.m64n){padded}(?P<types>k16\S+ )"
        r"\{(?P<sums>[^}]*)\}(?P<weights>, \{)"
    )

    def narrowed(match: re.Match[str]) -> str:
        sums = ",".join(match["sums"].split(",")[: columns // 2])
        return f"{match['name']}{columns}{match['types']}{{{sums}}}{match['weights']}"

    ptx, count = product.subn(narrowed, ptx)
    if not count:
        raise RenderError(
            f"PTX without a wgmma of {padded} columns whose first operand lies in registers",
            "products of P and V are found where Triton writes PTX as its releases 3.6 to 3.9 do",
            'take another template: kernel_options={"BACKEND": "TRITON"}',
        )
    return ptx
