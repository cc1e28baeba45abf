"""generate_batch of transformers says what generate says of each prompt, in float32."""

import pytest
import torch

from flexattn.errors import UnsupportedError
from flexattn.integrations import paged
from flexattn.integrations.transformers import PAGED, register, serve_batches
from tests.continuous import batched, drawn_prompts, one_by_one
from tests.models import tiny

pytest.importorskip("transformers", reason="transformers is not installed: make test installs it")

pytestmark = [
    pytest.mark.interpreter,
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore::RuntimeWarning:triton"),
]
# Fewer tokens a step than the longest prompt has, fewer requests than there are prompts.
SMALL = {"page_size": 16, "num_blocks": 40, "max_batch_tokens": 24, "max_requests_per_batch": 3}


@pytest.mark.parametrize(
    "name", ["Llama", "GptOss", pytest.param("Gemma2", marks=pytest.mark.long)]
)
def test_tokens_are_those_of_generate(name, monkeypatch):
    """Chunks beside single tokens; sinks, windows that are left behind, soft caps."""
    model, prompts = tiny(name), drawn_prompts((5, 17, 30, 9))
    plans = []
    made = paged.DecodePlan
    monkeypatch.setattr(paged, "DecodePlan", lambda **more: plans.append(more) or made(**more))
    wanted = one_by_one(model, prompts, 6)
    assert batched(model, prompts, 6, **SMALL) == wanted
    # A plan of chunks and one of single tokens, for each kind of layer.
    kinds = 1 if name == "Llama" else 2
    assert 1 <= len(plans) <= 2 * kinds
    assert len({token for each in wanted for token in each}) > 4


def test_a_model_attends_by_generate_again():
    model = tiny("Llama")
    wanted = one_by_one(model, drawn_prompts((5,)), 3)
    serve_batches(model)
    with pytest.raises(UnsupportedError, match="generate_batch"):
        model(torch.ones(1, 4, dtype=torch.long))
    assert one_by_one(model, drawn_prompts((5,)), 3, "flexattn") == wanted


def test_a_model_that_lists_its_flash_takes_it_too():
    from transformers import modeling_flash_attention_utils as utils

    model = tiny("GptOss")
    register()
    imports = utils._lazy_imports
    serve_batches(model)
    assert model.config._attn_implementation == PAGED
    assert utils._lazy_imports is imports, "a second registration changes nothing"
