"""What the integration makes of transformers' arguments; transformers itself is not needed."""

import math
import sys
from types import SimpleNamespace

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention as sdpa

from flexattn.block_mask.create import create_block_mask
from flexattn.catalogue import causal, sliding_window
from flexattn.errors import InputError, UnsupportedError
from flexattn.integrations import transformers as integration
from flexattn.integrations.transformers import attend_transformers, make_mask
from tests.support import inputs, sinks

LAYER = SimpleNamespace(is_causal=True)
ENCODER = SimpleNamespace(is_causal=False)


def lanes(mask, B, L, S):
    """The rows and keys that a BlockMask keeps, as bool [B, L, S]."""
    b, q_idx, kv_idx = torch.meshgrid(*map(torch.arange, (B, L, S)), indexing="ij")
    kept = [mask.mask_mod(*each) for each in zip(
        b.flatten(), torch.zeros(B * L * S, dtype=int), q_idx.flatten(), kv_idx.flatten(),
        strict=True,
    )]  # fmt: skip
    return torch.stack(kept).view(B, L, S)


@pytest.mark.parametrize("q_offset", [6, torch.tensor(6)], ids=["int", "tensor"])
def test_a_mask_is_of_positions_in_the_sequence(q_offset):
    padding = torch.ones(2, 9, dtype=torch.bool)
    padding[1, :4] = False
    mask = make_mask(2, 3, 10, q_offset, 2, sliding_window(4), padding)
    if isinstance(q_offset, torch.Tensor):
        q_offset += 3  # as a static cache does when a layer's keys come in
    rows, keys = torch.arange(6, 9)[:, None], torch.arange(2, 12)
    wanted = ((rows >= keys) & (rows - keys <= 4)).repeat(2, 1, 1)
    wanted &= torch.nn.functional.pad(padding, (0, 3))[:, None, 2:]
    assert torch.equal(lanes(mask, 2, 3, 10), wanted)
    assert mask.seq_lengths == (3, 10) and mask.contiguous() is mask and len(mask.shape) == 4


ONE = {"batch_size": 2, "q_length": 1}


@pytest.mark.parametrize(
    ("asked", "none"),
    [
        ({"kv_length": 7, "q_offset": 6}, True),
        ({"kv_length": 7, "q_offset": 6, "attention_mask": torch.ones(2, 7).bool()}, True),
        ({"kv_length": 7, "q_offset": 6, "attention_mask": torch.zeros(2, 7).bool()}, False),
        ({"kv_length": 9, "q_offset": 6}, False),
        ({"kv_length": 7, "q_offset": torch.tensor(6)}, False),
        ({"kv_length": 7, "q_offset": 6, "allow_is_causal_skip": False}, False),
        ({"kv_length": 7, "q_offset": 6, "local_size": 7}, True),
        ({"kv_length": 7, "q_offset": 6, "local_size": 6}, False),
        ({"kv_length": 4, "q_offset": 9, "kv_offset": 6, "local_size": 4}, True),
        (
            {
                "kv_length": 4, "q_offset": 9, "kv_offset": 6, "local_size": 4,
                "config": SimpleNamespace(attention_chunk_size=4),
            },
            False,
        ),
        ({"kv_length": 7, "q_length": 7}, False),
        ({"kv_length": 7, "q_length": 7, "allow_is_bidirectional_skip": True}, True),
    ],
)  # fmt: skip
def test_no_mask_is_made_where_every_row_sees_every_key(asked, none):
    assert (make_mask(**{**ONE, **asked}) is None) == none


def check(got, wanted):
    assert got[1] is None and got[0].is_contiguous()
    torch.testing.assert_close(got[0], wanted.transpose(1, 2), rtol=1e-5, atol=1e-5)


def test_without_a_mask_the_layer_says_whether_it_is_causal():
    q, k, v = inputs(2, 4, 2, 9, 9)
    call = {"enable_gqa": True}
    check(attend_transformers(LAYER, q, k, v, None), sdpa(q, k, v, is_causal=True, **call))
    check(attend_transformers(ENCODER, q, k, v, None), sdpa(q, k, v, **call))
    check(attend_transformers(LAYER, q, k, v, None, is_causal=False), sdpa(q, k, v, **call))
    check(attend_transformers(LAYER, q[:, :, :1], k, v, None), sdpa(q[:, :, :1], k, v, **call))
    near = torch.ones(9, 9, dtype=torch.bool).tril().triu(-2)
    check(attend_transformers(LAYER, q, k, v, None, sliding_window=3), sdpa(q, k, v, near, **call))
    check(
        attend_transformers(LAYER, q, k, v, None, scaling=0.3),
        sdpa(q, k, v, is_causal=True, scale=0.3, **call),
    )


@pytest.mark.parametrize("shape", [(2, 1, 9, 15), (1, 1, 9, 13), (2, 4, 9, 13), (2, 1, 1, 13)])
def test_masks_that_are_tensors(shape, caplog):
    """Bool ones are masks, others are added, and keys past the last are not read."""
    q, k, v = inputs(2, 4, 2, 9, 13)
    draw = torch.Generator().manual_seed(3)
    table = torch.randn(shape, generator=draw)
    kept = (table > -0.5) | (torch.arange(shape[3]) == 0)
    for each in (table, kept):
        wanted = sdpa(q, k, v, each[..., :13], enable_gqa=True)
        check(attend_transformers(LAYER, q, k, v, each), wanted)
    assert not [each for each in caplog.records if "its mask_mod reads" in each.getMessage()]


def test_softcap_comes_before_what_is_added_and_sinks_after():
    q, k, v = inputs(2, 4, 2, 9, 13, dtype=torch.float64)
    bias = torch.randn(1, 4, 9, 13, dtype=torch.float64)
    logits = sinks(4, torch.float64)
    scores = 2.0 * torch.tanh(q @ k.repeat_interleave(2, 1).mT / math.sqrt(16) / 2.0) + bias
    column = logits.view(1, 4, 1, 1).expand(2, 4, 9, 1)
    weights = torch.cat([scores, column], -1).softmax(-1)[..., :-1]
    got = attend_transformers(
        ENCODER, q, k, v, None, softcap=2.0, position_bias=bias, s_aux=logits.view(1, 4, 1, 1)
    )
    check(got, weights @ v.repeat_interleave(2, 1))
    scores = scores - bias
    weights = torch.cat([scores, column], -1).softmax(-1)[..., :-1]
    check(
        attend_transformers(ENCODER, q, k, v, None, softcap=2.0, s_aux=logits),
        weights @ v.repeat_interleave(2, 1),
    )


@pytest.mark.parametrize("cause", [True, False])
@pytest.mark.parametrize("name", ["sinks", "s_aux"])
def test_sinks_of_rows(name, cause):
    """Inkling 2 computes a sink of each row, as sinks=: **rest dropped them in silence."""
    q, k, v = inputs(2, 4, 2, 9, 9, dtype=torch.float64)
    logits = sinks(72, torch.float64).view(2, 4, 9, 1)[:1]
    scores = q @ k.repeat_interleave(2, 1).mT / 4
    if cause:
        scores = scores.masked_fill(torch.ones(9, 9).triu(1).bool(), -math.inf)
    weights = torch.cat([scores, logits.expand(2, 4, 9, 1)], -1).softmax(-1)[..., :-1]
    layer = LAYER if cause else ENCODER
    check(
        attend_transformers(layer, q, k, v, None, **{name: logits}),
        weights @ v.repeat_interleave(2, 1),
    )


CHOSEN = torch.randint(13, (2, 9, 5), generator=torch.Generator().manual_seed(5))


@pytest.mark.parametrize("given", ["none", "bool", "added", "blocks", "blocks of heads"])
def test_chosen_keys_are_those_of_the_mask_and_the_indices(given):
    """DeepSeek-V3.2 masks with them itself for eager and sdpa, and only hands them to others."""
    q, k, v = inputs(2, 4, 2, 9, 13, dtype=torch.float64)
    q_idx, kv_idx = torch.arange(9)[:, None], torch.arange(13)
    kept = (q_idx + 4 >= kv_idx).expand(2, 4, 9, 13)

    def later(b, h, q_idx, kv_idx):
        return q_idx + 4 + (h if given == "blocks of heads" else 0) >= kv_idx

    if given == "blocks of heads":
        kept = later(None, torch.arange(4)[:, None, None], q_idx, kv_idx).expand(2, 4, 9, 13)
    heads = 4 if given == "blocks of heads" else None
    mask = {
        "none": None, "bool": kept[:, :1], "added": torch.where(kept[:, :1], 0.0, -math.inf),
    }.get(given, create_block_mask(later, None, heads, 9, 13, "cpu"))  # fmt: skip
    kept = torch.ones_like(kept) if given == "none" else kept
    chosen = torch.zeros(2, 9, 13, dtype=torch.bool).scatter(-1, CHOSEN, True)[:, None]
    wanted = sdpa(q, k, v, kept & chosen, enable_gqa=True).nan_to_num(0.0)
    check(attend_transformers(ENCODER, q, k, v, mask, indices=CHOSEN.int()), wanted)


ROWS = torch.ones(9)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"sink": ROWS}, r"SimpleNamespace hands its attention sink \[9\]"),
        ({"attention_biass": ROWS}, "call the model without attention_biass"),
        ({"head_mask": ROWS}, "set_attn_implementation\\('eager'\\)"),
        ({"soft_cap": 30.0}, "its attention soft_cap"),
        ({"block_indices": ROWS}, "block_indices"),
        ({"cu_seq_lens_q": ROWS}, "packed by a mask"),
    ],
)
def test_what_may_change_the_result_is_used_or_refused(given, words):
    """Any keyword was swallowed: a misspelt tensor was left out in silence."""
    q, k, v = inputs(2, 4, 2, 9, 13)
    with pytest.raises(UnsupportedError, match=words):
        attend_transformers(ENCODER, q, k, v, None, **given)


def test_what_changes_nothing_passes():
    q, k, v = inputs(2, 4, 2, 9, 13)
    mask = torch.ones(2, 1, 9, 13, dtype=torch.bool)
    given = {
        "output_attentions": False, "use_cache": True, "position_ids": ROWS, "head_mask": None,
        "num_items_in_batch": torch.tensor(3), "cu_seq_lens_q": ROWS, "max_length_q": 9,
    }  # fmt: skip
    check(attend_transformers(ENCODER, q, k, v, mask, **given), sdpa(q, k, v, enable_gqa=True))


@pytest.mark.parametrize(
    ("given", "error", "words"),
    [
        ({"sinks": torch.ones(1, 4, 8, 1)}, InputError, r"\(1, 4, 8, 1\) for out"),
        ({"sinks": ROWS[:4], "s_aux": ROWS[:4]}, InputError, "both s_aux and sinks"),
        ({"cache": object()}, UnsupportedError, "generate_batch"),
        ({"attention_mask": torch.ones(2, 1, 9, 12)}, InputError, r"\(2, 1, 9, 12\) for scores"),
        ({"attention_mask": torch.ones(9, 13)}, InputError, "four dimensions"),
        ({"position_bias": torch.ones(1, 3, 9, 13)}, InputError, r"\(1, 3, 9, 13\)"),
    ],
)
def test_what_is_refused(given, error, words):
    q, k, v = inputs(2, 4, 2, 9, 13)
    with pytest.raises(error, match=words):
        attend_transformers(LAYER, q, k, v, **{"attention_mask": None, **given})


def test_dropout_is_passed_on_where_the_layer_trains():
    q, k, v = inputs(2, 4, 2, 9, 13)
    plain = attend_transformers(LAYER, q, k, v, None)[0]
    modules = [SimpleNamespace(is_causal=True, training=each) for each in (True, False)]
    trained, evaluated = (
        attend_transformers(each, q, k, v, None, dropout=0.4)[0] for each in modules
    )
    assert torch.equal(evaluated, plain) and not torch.allclose(trained, plain)


def test_registering_needs_a_transformers_that_says_where_queries_stand(monkeypatch):
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(UnsupportedError, match=r"pip install 'flexattn\[transformers\]'"):
        integration.register()
    old = SimpleNamespace(AttentionInterface=None, AttentionMaskInterface=None, __version__="4.53")
    masking = SimpleNamespace(sdpa_mask=lambda batch_size, cache_position, kv_length: None)
    monkeypatch.setitem(sys.modules, "transformers", old)
    monkeypatch.setitem(sys.modules, "transformers.masking_utils", masking)
    with pytest.raises(UnsupportedError, match=r"transformers 4\.53"):
        integration.register()


def test_the_default_mask_function_is_causal():
    mask = make_mask(1, 4, 4)
    assert torch.equal(lanes(mask, 1, 4, 4)[0], torch.ones(4, 4, dtype=torch.bool).tril())
    assert make_mask.__defaults__[2] is causal


def test_a_mask_has_the_lists_that_a_backward_reads():
    """Training with transformers met a mask whose lists by key, built when asked, were gone."""
    mask = make_mask(2, 300, 300)
    wanted = create_block_mask(causal, 2, None, 300, 300, device="cpu")
    for name in ("q_num_blocks", "q_indices", "full_q_num_blocks", "full_q_indices"):
        assert torch.equal(getattr(mask, name), getattr(wanted, name))
    assert mask.as_tuple()
