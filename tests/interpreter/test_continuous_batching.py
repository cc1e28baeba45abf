"""generate_batch of transformers says what generate says of each prompt, in float32."""

from types import SimpleNamespace

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

from flexattn.errors import UnsupportedError
from flexattn.integrations import paged, plans, transformers
from flexattn.integrations.transformers import PAGED, register, serve_batches
from tests.continuous import batched, drawn_prompts, one_by_one
from tests.models import tiny

pytest.importorskip("transformers", reason="transformers is not installed: make test installs it")

pytestmark = pytest.mark.slow
# Fewer tokens a step than the longest prompt has, fewer requests than there are prompts.
SMALL = {"page_size": 16, "num_blocks": 40, "max_batch_tokens": 24, "max_requests_per_batch": 3}


@pytest.mark.parametrize(
    "name", ["Llama", "GptOss", pytest.param("Gemma2", marks=pytest.mark.long)]
)
def test_tokens_are_those_of_generate(name, monkeypatch):
    """Chunks beside single tokens; sinks, windows that are left behind, soft caps."""
    model, prompts = tiny(name), drawn_prompts((5, 17, 30, 9))
    built, made = [], plans.DecodePlan
    monkeypatch.setattr(plans, "DecodePlan", lambda **more: built.append(more) or made(**more))
    wanted = one_by_one(model, prompts, 6)
    assert batched(model, prompts, 6, **SMALL) == wanted
    # A plan of chunks and one of single tokens, for each kind of layer.
    kinds = 1 if name == "Llama" else 2
    assert 1 <= len(built) <= 2 * kinds
    assert len({token for each in wanted for token in each}) > 4


@pytest.mark.long
@pytest.mark.parametrize("name", ["Llama", "GptOss"])
def test_batches_that_are_padded_as_for_cuda_graphs(name, monkeypatch):
    """On a GPU alone transformers pads rows and requests, and lists pages of single tokens."""
    from transformers.generation.continuous_batching import initialization, model_runner

    made = model_runner.ModelRunner.__init__

    def padding(runner, *given, **more):
        made(runner, *given, **more)
        runner.pad_inputs = True

    monkeypatch.setattr(model_runner.ModelRunner, "__init__", padding)
    monkeypatch.setattr(model_runner.ModelRunner, "warmup", lambda *_: None)
    if name == "Llama":  # a model with windows has no page tables
        available = "ensure_decode_fast_path_is_available"
        monkeypatch.setattr(initialization, available, lambda *_: None)
    seen, paged_attention = set(), transformers.attend_paged

    def watched(module, query, *given, **more):
        seen.add((more.get("block_table") is not None, query.shape[2]))
        return paged_attention(module, query, *given, **more)

    monkeypatch.setattr(transformers, "attend_paged", watched)
    model, prompts = tiny(name), drawn_prompts((5, 17, 30, 9, 3))
    wanted = one_by_one(model, prompts, 5)
    sizes = {**SMALL, "q_padding_interval_size": 8, "kv_padding_interval_size": 64}
    assert batched(model, prompts, 5, **sizes) == wanted
    assert {rows for listed, rows in seen if not listed} == {8, 16, 24}
    assert any(listed for listed, _ in seen) == (name == "Llama")


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


class Pages:
    """A paged cache of one layer of full attention, which is its own allocator."""

    supports_block_table, layer_type, index, write_trash_index = True, "full_attention", 0, 4
    max_batch_tokens = 8

    def __init__(self, layer):
        self.layer_indices, self.layer_to_allocator = [layer], {layer: self}
        self.k, self.v = torch.randn(2, 9, 4, 2, 16)

    def get_cache_for_block_table(self, layer):
        return self.k, self.v


def test_page_tables_of_single_tokens_are_read_and_written():
    """As transformers gives them on a GPU alone; the last place has no request."""
    module = SimpleNamespace(layer_idx=3)
    cache, lens = Pages(3), (6, 1, 0)
    table = torch.tensor([[[7, 2, 0], [5, 0, 0], [0, 0, 0]]], dtype=torch.int32)
    q, k, v = torch.randn(1, 4, 3, 16), torch.randn(1, 2, 3, 16), torch.randn(1, 2, 3, 16)
    ends = torch.tensor([0, 6, 7, 7], dtype=torch.int32)
    before = cache.k.clone()
    out, _ = paged.attend_paged(
        module, q, k, v, scaling=0.25, cache=cache, block_table=table, max_length_q=1,
        cu_seq_lens_q=torch.tensor([0, 1, 2, 2], dtype=torch.int32),
        cu_seq_lens_k={"full_attention": ends}, max_length_k={"full_attention": 1},
        read_index=[], write_index=[],
    )  # fmt: skip
    for b, n in enumerate(lens[:2]):
        keys, values = (
            pool[table[0, b].long()].flatten(0, 1)[:n].transpose(0, 1)[None]
            for pool in (cache.k, cache.v)
        )
        assert torch.equal(keys[0, :, -1], k[0, :, b]) and torch.equal(
            values[0, :, -1], v[0, :, b]
        )
        own = scaled_dot_product_attention(
            q[:, :, b : b + 1], keys, values, scale=0.25, enable_gqa=True
        )
        torch.testing.assert_close(out[0, b], own[0, :, 0])
    assert not out[0, 2].any(), "rows of nobody"
    changed = (cache.k != before).flatten(1).any(1).nonzero().flatten().tolist()
    assert changed == [1, 2, 5], "their pages, and the one that is nobody's"
