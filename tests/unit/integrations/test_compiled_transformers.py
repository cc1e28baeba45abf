"""A model of transformers compiles whole: a node a layer, masks and all."""

import pytest
import torch

from flexattn.integrations.transformers import register
from tests.compiled import compiling, nodes
from tests.models import greedy, prompts, tiny

pytest.importorskip("transformers", reason="transformers is not installed: make test installs it")
pytestmark = pytest.mark.slow


@pytest.fixture(autouse=True, scope="module")
def registered():
    register()


# A cache with a window counts its tokens in Python, and its mask the keys that left the window.
@pytest.mark.parametrize(
    ("name", "most"), [("Llama", 1), pytest.param("Gemma2", 3, marks=pytest.mark.long)]
)
def test_a_step_of_a_static_cache_is_one_graph(monkeypatch, name, most):
    """generate makes the masks outside, and compiles the rest: it broke at each attention."""
    model, (ids, mask) = tiny(name), prompts()
    own = greedy(model, "eager", ids, mask, 5)
    forward = model.forward
    with compiling(monkeypatch, "eager") as found:
        compiled = found.compile(forward)

        def step(input_ids=None, **more):
            return (compiled if input_ids.shape[1] == 1 else forward)(input_ids=input_ids, **more)

        monkeypatch.setattr(model, "forward", step)
        got = greedy(model, "flexattn", ids, mask, 5, cache_implementation="static")
    assert torch.equal(got, own)
    assert found.counter.frame_count <= most
    assert set(nodes(found.counter)) == {2}


def test_a_mask_is_made_in_the_graph(monkeypatch):
    """Of a padded batch: whether the padding removes anything is not asked there."""
    model, (ids, mask) = tiny("Llama"), prompts()
    model.set_attn_implementation("flexattn")
    with torch.no_grad(), compiling(monkeypatch, "eager") as found:
        wanted = model(ids, attention_mask=mask, use_cache=False).logits
        got = found.compile(model.forward)(ids, attention_mask=mask, use_cache=False).logits
    torch.testing.assert_close(got[mask.bool()], wanted[mask.bool()], rtol=1e-4, atol=1e-4)
    assert nodes(found.counter) == [2]
