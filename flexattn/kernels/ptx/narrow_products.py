"""A pass over PTX: a product multiplies the columns that a head has, not the power of two above.

Gluon's tensors are powers of two wide. wgmma multiplies 16 columns of its operands at a time, and
N of one is any multiple of 8. So a product whose operands are zeros behind the columns of a head
takes fewer steps, and one whose result has as many columns takes a smaller N. A thread's registers
of a result are in the order of its columns, four for each eight: those of the first N are the
first of the list, and ptxas gives no registers to what is zero throughout.

A kernel says in a comment of its inline assembly how large the next product is. Without the pass
the product multiplies zeros, and its result is the same.
"""

from __future__ import annotations

import re

from flexattn.errors import RenderError

NARROW_PRODUCTS = "ptx.narrow_products"
# Part of every announcement: a kernel that an older form of the pass made has another name.
_NAME = "narrow_products 1"
_ANNOUNCED = re.compile(rf"{_NAME}: (\d+) of (\d+) steps, (\d+) of (\d+) columns")
_STEP = re.compile(
    r"(?P<name>wgmma\.mma_async\.sync\.aligned\.m64n)(?P<columns>\d+)(?P<types>k16\S+ )"
    r"\{(?P<sums>[^}]*)\}(?P<rest>[^;]*;)"
)
_END = "wgmma.commit_group"


def announcement(steps: tuple[int, int], columns: tuple[int, int]) -> str:
    """The line about the next product in an assembly; of each what is multiplied, and is written.

    steps: of 16 columns or rows that are summed. columns: of the result.
    """
    return f"{_NAME}: {steps[0]} of {steps[1]} steps, {columns[0]} of {columns[1]} columns"


def block_warps(text: str) -> None:
    """A block keeps its warps."""


def merged(ptx: str) -> str:
    """The PTX with each product behind an announcement as narrow as that says.

    Raises RenderError where another product follows.
    """
    head, *rest = _ANNOUNCED.split(ptx)
    found = [head]
    for i in range(0, len(rest), 5):
        steps, written, columns, padded = map(int, rest[i : i + 4])
        product, end, after = rest[i + 4].partition(_END)
        widths = [int(each["columns"]) for each in _STEP.finditer(product)]
        if widths != [padded] * written:
            raise RenderError(
                f"PTX with products of {widths} columns behind one of {written} steps and "
                f"{padded} columns",
                "products are found where Triton writes PTX as its releases 3.6 to 3.9 do",
                'take another template: kernel_options={"BACKEND": "TRITON"}',
            )
        found += [_narrowed(product, steps, columns), end, after]
    return "".join(found)


def _narrowed(product: str, steps: int, columns: int) -> str:
    """The text of a product with the first of its steps, each of so many columns."""
    left = iter(range(steps))

    def narrowed(step: re.Match[str]) -> str:
        if next(left, None) is None:
            return ""
        sums = ",".join(step["sums"].split(",")[: columns // 2])
        return f"{step['name']}{columns}{step['types']}{{{sums}}}{step['rest']}"

    return _STEP.sub(narrowed, product)
