"""The kernel that stores keys, as text: every form renders, and names what its launch gives."""

from itertools import product

import pytest

from flexattn.kernels.cache_append.source import (
    append_arguments,
    append_programs,
    append_rows,
    render_append,
)
from flexattn.problem.serving import AXES, AppendForm, RopeForm
from tests.problems import H200
from tests.rendered_names import undefined

ROPES = (None, RopeForm(8, False, ""), RopeForm(16, True, "float32"))


@pytest.mark.parametrize("slots", ["int64", "int32", "table", "ragged table"])
def test_every_form_renders(slots):
    texts = set()
    for scales, rope, values in product(AXES, ROPES, (0, 40)):
        kv = "float8_e4m3fn" if scales else "bfloat16"
        form = AppendForm("bfloat16", kv, 72, values, 3, 16, slots, scales, rope)
        source = render_append(form, H200)
        assert not undefined(source.text), (form, undefined(source.text))
        names = [each.name for each in append_arguments(form)]
        assert len(set(names)) == len(names)
        assert sum(name.startswith("stride_s") for name in names) == len(AXES[scales])
        texts.add(source.hash)
    assert len(texts) == len(AXES) * len(ROPES) * 2


def test_programs_hold_every_row_once():
    """Of one scale a token, a program has all of its heads, in pieces where there are many."""
    form = AppendForm("bfloat16", "bfloat16", 128, 128, 8, 16, "int64")
    assert append_rows(form) == 8 and append_programs(form, 65) == 65
    assert append_programs(form, 0) == 0
    wide = AppendForm("bfloat16", "bfloat16", 576, 0, 1, 64, "int64")
    assert append_rows(wide) == 1 and append_programs(wide, 7) == 7
    whole = AppendForm("bfloat16", "float8_e4m3fn", 128, 64, 100, 16, "int64", "token")
    assert append_rows(whole) == 64 and append_programs(whole, 7) == 7
    assert "for head0 in range(0, HEADS, ROWS)" in render_append(whole, H200).text
