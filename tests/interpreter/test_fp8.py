"""What turns V for fp8 products, run by Triton's interpreter; the rest of fp8 has none."""

import pytest
import torch

import flexattn
from flexattn.build import builder
from flexattn.device import detect
from flexattn.launch import _turned, _turning
from flexattn.render.values import render_values
from tests.problems import problem
from tests.support import heads_inside, inputs

pytestmark = pytest.mark.interpreter
CPU = torch.device("cpu")
# Keys that a thread has of sixteen scores of a row lie in the order that its operand has them.
PLACES = [8 * pair + 2 * quad + one for quad in range(4) for pair in range(2) for one in range(2)]


@pytest.mark.parametrize("D", [64, 96])
@pytest.mark.parametrize("kv_len", [1, 15, 16, 131])
def test_values_lie_as_the_weights_do(D, kv_len):
    v = inputs(2, 3, 3, 5, kv_len, D)[2].to(torch.float8_e4m3fn)
    if kv_len == 131:
        v = heads_inside(v)
    source = render_values(problem(D=D, dtype="float8_e4m3fn").structure, detect(CPU))
    box = _turned(v)
    width = -(-kv_len // 16) * 16
    assert box.shape == (2, 3, D, width)
    found = torch.full(box.shape, 0x7F, dtype=torch.int8)
    kernel = builder().kernel(source, detect(CPU), -1)
    _turning(kernel, v).launch(-1, [v.view(torch.int8), found])
    padded = torch.zeros(2, 3, width, D, dtype=torch.int8)
    padded[:, :, :kv_len] = v.view(torch.int8)
    wanted = padded.reshape(2, 3, width // 16, 16, D)[:, :, :, PLACES].reshape(padded.shape).mT
    assert torch.equal(found, wanted)


def test_nothing_interprets_the_template():
    q, k, v = (x.to(torch.float8_e4m3fn) for x in inputs(1, 2, 2, 7, 9, 16))
    found = flexattn.explain(q, k, v)
    assert found.route == "reference" and "Hopper" in found.why
    assert flexattn.flex_attention(q, k, v).dtype == torch.bfloat16
