"""A pass over PTX: a product multiplies the columns that a head has, not the power of two above.

Gluon's tensors are powers of two wide. wgmma multiplies 16 columns of its operands at a time, and
N of one is any multiple of 8. So a product whose operands are zeros behind the columns of a head
takes fewer steps, and one whose result has as many columns takes a smaller N. A thread's registers
of a result are in the order of its columns, four for each eight: those of the first N are the
first of the list, and ptxas gives no registers to what is zero throughout.

At D 96 the products of a backward are 512/480 of what the head needs, and 640/480 without it.

A kernel says in a comment of its inline assembly how large the next product is, or how large all
are whose first operand lies in registers. Without the pass a product also multiplies the numbers
behind the columns. These are zeros, or the kernel drops the columns that they give.
"""

from __future__ import annotations

import re

from flexattn.errors import RenderError

NARROW_PRODUCTS = "ptx.narrow_products"
# Part of every announcement: a kernel that an older form of the pass made has another name.
_NAME = "narrow_products 2"
_NEXT = re.compile(rf"{_NAME}: (\d+) of (\d+) steps, (\d+) of (\d+) columns")
_FROM_REGISTERS = re.compile(rf"{_NAME}: from registers, (\d+) of (\d+) columns")
_STEP = re.compile(
    r"(?P<name>wgmma\.mma_async\.sync\.aligned\.m64n)(?P<columns>\d+)(?P<types>k16\S+ )"
    r"\{(?P<sums>[^}]*)\}, (?P<operand>[^;]*;)"
)
_END = "wgmma.commit_group"


def announcement(steps: tuple[int, int], columns: tuple[int, int]) -> str:
    """The line about the next product in an assembly; of each what is multiplied, and is written.

    steps: of 16 columns or rows that are summed. columns: of the result.
    """
    return f"{_NAME}: {steps[0]} of {steps[1]} steps, {columns[0]} of {columns[1]} columns"


def from_registers(columns: int, padded: int) -> str:
    """The line about all products whose first operand lies in registers; padded: as written."""
    return f"{_NAME}: from registers, {columns} of {padded} columns"


def block_warps(text: str) -> None:
    """A block keeps its warps."""


def merged(ptx: str) -> str:
    """The PTX with each product as narrow as the kernel announces.

    Raises RenderError where there is no such product.
    """
    head, *rest = _NEXT.split(ptx)
    found = [head]
    for i in range(0, len(rest), 5):
        steps, written, columns, padded = map(int, rest[i : i + 4])
        product, end, after = rest[i + 4].partition(_END)
        widths = [int(each["columns"]) for each in _STEP.finditer(product)]
        if widths != [padded] * written:
            raise _unknown(
                f"products of {widths} columns behind one of {written} steps and {padded} columns"
            )
        found += [_first(steps, columns, product), end, after]
    ptx = "".join(found)
    every = _FROM_REGISTERS.search(ptx)
    return ptx if every is None else _every(ptx, int(every[1]), int(every[2]))


def _first(steps: int, columns: int, product: str) -> str:
    """The text of a product with the first of its steps, each of so many columns."""
    left = iter(range(steps))
    return _STEP.sub(lambda step: "" if next(left, None) is None else _cut(step, columns), product)


def _every(ptx: str, columns: int, padded: int) -> str:
    """The PTX with each product of `padded` columns narrowed whose first operand is registers."""
    count = 0

    def narrowed(step: re.Match[str]) -> str:
        nonlocal count
        if int(step["columns"]) != padded or not step["operand"].startswith("{"):
            return step[0]
        count += 1
        return _cut(step, columns)

    ptx = _STEP.sub(narrowed, ptx)
    if not count:
        raise _unknown(f"no product of {padded} columns whose first operand lies in registers")
    return ptx


def _cut(step: re.Match[str], columns: int) -> str:
    sums = ",".join(step["sums"].split(",")[: columns // 2])
    return f"{step['name']}{columns}{step['types']}{{{sums}}}, {step['operand']}"


def _unknown(what: str) -> RenderError:
    return RenderError(
        f"PTX with {what}",
        "products are found where Triton writes PTX as its releases 3.6 to 3.9 do",
        'take another template: kernel_options={"BACKEND": "TRITON"}',
    )
