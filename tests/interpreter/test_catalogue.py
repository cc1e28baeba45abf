"""Every mod of the catalogue through the real templates, in Triton's CPU interpreter."""

import pytest

from tests.cases import CASES
from tests.support import DTYPES, KINDS, assert_accurate, call_of

# Under the oldest Triton: a mask, loads at computed indices, floor division, a helper, empty rows.
OLDEST = {"causal", "natten_2d", "relative_bias", "softcap_50", "alibi_causal_document"}


def cases(rows, often=lambda place, row: True):
    """Each case in rows of a kind and a dtype; often: whether `make test` runs one, by numbers."""
    for place, entry in enumerate(CASES):
        for row, (kind, dtype) in enumerate(rows):
            marks = [pytest.mark.oldest] * (entry.name in OLDEST)
            marks += [pytest.mark.long] * (not often(place, row))
            name = f"{entry.name}-{kind}-{dtype}"
            yield pytest.param(entry, kind, dtype, id=name, marks=marks)


def check(entry, *sizes, block, kind, dtype, **tile):
    given, call = call_of(entry, *sizes, dtype=DTYPES[dtype], block=block)
    assert_accurate(*given, kernel_options={**KINDS[kind], **tile}, **call)


ODD = [("prefill", "fp32"), ("decode", "fp16")]
SEVERAL = [("prefill", "fp16"), ("decode", "fp32")]


# Of each case one, in turns: of both kinds several tiles follow.
@pytest.mark.parametrize(
    ("entry", "kind", "dtype"), cases(ODD + SEVERAL, lambda place, row: row == place % 2)
)
def test_short_odd_lengths(entry, kind, dtype):
    check(entry, 2, 3, 1, 37, 53, block=16, kind=kind, dtype=dtype)


@pytest.mark.parametrize(("entry", "kind", "dtype"), cases(SEVERAL))
def test_several_tiles_and_full_blocks(entry, kind, dtype):
    # Random blocks of 16 seldom fill one of 32.
    lengths = (141, 173) if entry.name == "random_blocks" else (77, 109)
    check(entry, 1, 2, 2, *lengths, block=32, kind=kind, dtype=dtype, BLOCK_N=16)
