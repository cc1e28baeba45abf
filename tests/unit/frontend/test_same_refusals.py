"""What kernels refuse for the tensors' sake, plain torch refuses with the same words."""

import pytest
import torch

from flexattn import create_block_mask, explain, flex_attention
from flexattn.catalogue import causal
from flexattn.errors import ConfigError, InputError
from flexattn.frontend.call import make_call
from flexattn.frontend.plan import plan
from flexattn.problem.checks import check_devices


def square(dtype=torch.float32, heads=2, width=16):
    return (torch.zeros(1, heads, 8, width).to(dtype),) * 3


def wide(value):
    q, k, _ = square()
    return q, k, torch.zeros(1, 2, 8, value)


REFUSED = {
    "integers": (square(torch.int32), "torch.int32.*bfloat16.*convert"),
    "bools": (square(torch.bool), "torch.bool"),
    "complex": (square(torch.complex64), "torch.complex64"),
    "float8_e5m2": (square(torch.float8_e5m2), "float8_e5m2.*float8_e4m3fn"),
    "no head dimension": (square(width=0), "query has head dimension 0.*between 1 and 576"),
    "a long head dimension": (square(width=1000), "query has head dimension 1000.*576"),
    "no value": (wide(0), "value has head dimension 0"),
    "long values": (wide(577), "value has head dimension 577"),
    "no heads": (square(heads=0), r"\(1, 0, 8, 16\).*at least one head.*make no call"),
    "no heads of the query": ((square(heads=0)[0], *square()[1:]), "at least one head"),
    "no heads of the keys": ((square()[0], *square(heads=0)[1:]), "at least one head"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_both_paths_say_the_same(name):
    """Plain torch answered such calls, with zeros or with other numbers than a kernel's."""
    tensors, words = REFUSED[name]
    said = []
    for path in (flex_attention, explain, kernel):
        with pytest.raises(InputError, match=f"(?s){words}") as caught:
            path(*tensors, enable_gqa=True)
        said.append(str(caught.value))
    assert len(set(said)) == 1


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"BLOCK_M": 63}, "BLOCK_M.*=63.*power of two of at least 16"),
        ({"fwd_BLOCK_N": 8}, "BLOCK_N.*=8.*power of two"),
        ({"BACKEND": "GLUON", "BLOCK_M": 96}, "BLOCK_M.*=96.*64 rows.*use 64, 128 or 192"),
    ],
)
def test_both_paths_refuse_the_same_tiles(options, words):
    """Plain torch took tiles that no kernel has."""
    for path in (flex_attention, explain, kernel):
        with pytest.raises(ConfigError, match=f"(?s){words}"):
            path(*square(), enable_gqa=False, kernel_options=options)


def kernel(q, k, v, enable_gqa, kernel_options=None):
    """The way to a kernel, which the interpreter goes too; it ends before anything is built."""
    plan(make_call(q, k, v, None, None, None, enable_gqa, False, kernel_options, None))


def test_float64_is_for_the_cpu():
    q, k, v = square(torch.float64)
    assert flex_attention(q, k, v).dtype == torch.float64
    with pytest.raises(InputError, match="on the CPU also float64, unless FLEXATTN_INTERPRET"):
        kernel(q, k, v, False)


def test_autocast_makes_no_floats_of_integers():
    with torch.autocast("cpu"), pytest.raises(InputError, match=r"torch\.int32"):
        flex_attention(*square(torch.int32))


@pytest.mark.parametrize("lengths", [(0, 8), (8, 0), (0, 0)], ids=str)
def test_a_mask_of_no_length_can_be_shown(lengths):
    """The share of its blocks that are left out was divided by zero."""
    mask = create_block_mask(causal, None, None, *lengths, device="cpu")
    assert f"shape=(1, 1, {lengths[0]}, {lengths[1]})" in repr(mask)
    assert "sparsity=0.00%" in str(mask)


def test_other_devices():
    class There:
        device = torch.device("meta")

    with pytest.raises(InputError, match=r"(?s)query is on meta.*cuda.*cpu.*x\.cpu\(\)"):
        check_devices(There)


def test_meta_tensors_are_refused_before_anything_else():
    q = torch.zeros(1, 2, 8, 16, device="meta")
    with pytest.raises(InputError, match="query is on meta"):
        flex_attention(q, q, q)
