"""generate_batch on a GPU: the tokens of generate, with CUDA graphs and without."""

import pytest
import torch

from flexattn.integrations import plans
from tests.continuous import batched, drawn_prompts, one_by_one
from tests.models import tiny

pytest.importorskip("transformers", "5.23", reason="no transformers of 5.23 or later is here")


@pytest.mark.parametrize("graphs", [True, False], ids=["graphs", "plain"])
@pytest.mark.parametrize("name", ["Llama", "GptOss", "Gemma2"])
def test_tokens_are_those_of_generate(name, graphs):
    model = tiny(name, device="cuda")
    if name == "GptOss":
        # Grouped products of fp32 read their sizes on the host: no graph records that.
        model.set_experts_implementation("batched_mm")
    prompts = drawn_prompts((5, 170, 31, 9, 64, 1, 100, 33, 7, 12))
    wanted = one_by_one(model, prompts, 32)
    config = {
        "num_blocks": 400, "max_batch_tokens": 128, "max_requests_per_batch": 8,
        "use_cuda_graph": graphs,
    }  # fmt: skip
    for page in (16, 256):
        assert batched(model, prompts, 32, page_size=page, **config) == wanted


def test_nothing_is_planned_twice(monkeypatch):
    """The plans of the first prompts serve the others."""
    model, made, built = tiny("Llama", device="cuda", dtype=torch.bfloat16), plans.DecodePlan, []
    monkeypatch.setattr(plans, "DecodePlan", lambda **more: built.append(more) or made(**more))
    config = {"num_blocks": 400, "max_batch_tokens": 128, "max_requests_per_batch": 8}
    batched(model, drawn_prompts((5, 90, 31)), 8, page_size=16, **config)
    first = len(built)
    assert 1 <= first <= 2
    batched(model, drawn_prompts((200, 1, 31, 40, 60, 61, 62, 63, 64)), 8, page_size=16, **config)
    assert len(built) == 2 * first, "another cache has plans of its own, as many"
