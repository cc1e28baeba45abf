"""What adaptors share, without a kernel: a layer's mods, the user's, and a cache written."""

import sys
import threading
from dataclasses import replace
from types import ModuleType

import pytest
import torch

from flexattn.errors import InputError, SettingsError
from flexattn.integrations import plans
from flexattn.integrations.plans import Layer, Spans, user_mods
from flexattn.settings import override

CPU = torch.device("cpu")
LAYER = Layer((4, 2), (16, 16), torch.float32, CPU, 16, name="model.layers.7.self_attn.attn")
PLACE = [torch.tensor(x) for x in (0, 1, 9, 4)]  # b, h, q_idx, kv_idx


def test_layers_that_differ_in_their_name_alone_are_equal():
    assert replace(LAYER, name="model.layers.8") == LAYER != replace(LAYER, window=3)
    assert LAYER.index == 7 and replace(LAYER, name="attn").index == -1


def test_scores_are_capped_then_biased_then_the_users():
    score = torch.tensor(3.0)
    assert LAYER.score_mod(None) is None
    layer = replace(LAYER, softcap=2.0, slopes=(0.5, 0.25, 0.5, 0.5))
    wanted = 2.0 * torch.tanh(score / 2.0) + 0.25 * (4 - 9)
    torch.testing.assert_close(layer.score_mod(None)(score, *PLACE), wanted)
    own = layer.score_mod(lambda score, b, h, q_idx, kv_idx: score * kv_idx)
    torch.testing.assert_close(own(score, *PLACE), wanted * 4)


@pytest.mark.parametrize(("window", "seen"), [(None, True), (6, True), (5, False)])
def test_a_window_counts_the_rows_own_key(window, seen):
    layer = replace(LAYER, window=window)
    assert bool(layer.mask_mod(None)(*PLACE)) == seen
    assert not layer.mask_mod(lambda b, h, q_idx, kv_idx: kv_idx != 4)(*PLACE)


def test_what_a_user_names(monkeypatch):
    named = ModuleType("named_by_a_user")
    monkeypatch.setitem(sys.modules, "named_by_a_user", named)
    assert user_mods(LAYER) == {}
    named.mods = lambda layer: {"score_mod": abs} if layer.index == 7 else None
    with override(mods="named_by_a_user:mods"):
        assert user_mods(LAYER) == {"score_mod": abs}
        assert user_mods(replace(LAYER, name="model.layers.8")) == {}
        named.mods = lambda layer: abs
        with pytest.raises(InputError, match="a dict with score_mod, mask_mod"):
            user_mods(LAYER)
        named.mods = lambda layer: {"mask": abs}
        with pytest.raises(InputError, match=r"model\.layers\.7"):
            user_mods(LAYER)
    for missing in ("named_by_a_user:none", "no_such_module_at_all:mods"):
        with override(mods=missing), pytest.raises(SettingsError, match="PYTHONPATH"):
            user_mods(LAYER)


def seen(layer, L=9, b=0):
    """[L, L]: the keys that each row sees."""
    rows, keys = torch.arange(L)[:, None], torch.arange(L)
    mask = layer.mask_mod(None)
    found = (
        torch.ones(L, L) if mask is None else mask(torch.tensor(b), torch.tensor(0), rows, keys)
    )
    return (torch.ones(L, L) * found).bool()


def far(window, L=9):
    """[L, L]: keys within a window, on both sides."""
    return (torch.arange(L)[:, None] - torch.arange(L)).abs() < window


def test_single_tokens_have_no_causal_mask():
    """Their kernels are those of tuned records, which have none."""
    assert LAYER.of_tokens.mask_mod(None) is None
    window = replace(LAYER, window=3)
    assert window.of_tokens == window and torch.equal(seen(window), seen(window.of_tokens))


def test_layers_that_are_not_causal():
    assert replace(LAYER, causal=False).mask_mod(None) is None
    assert torch.equal(seen(replace(LAYER, causal=False, window=3)), far(3))
    own = replace(LAYER, causal=False).mask_mod(lambda b, h, q_idx, kv_idx: kv_idx < 2)
    assert not own(*PLACE)


@pytest.mark.parametrize("window", [None, 3])
@pytest.mark.parametrize("clamped", [False, True])
def test_rows_of_an_image_see_each_other(window, clamped):
    """Request 0 has rows 2 to 8 of its positions, with an image of 4 to 7; request 1 is alone."""
    spans = Spans.empty(3, 12, CPU)
    layer = replace(LAYER, spans=spans, window=window, clamped=clamped)
    ends, lens = torch.tensor([0, 7, 9]).int(), torch.tensor([9, 4]).int()
    past = torch.ones(9, 9).tril().bool()
    near = past if window is None else past & far(window)
    image = torch.zeros(9, 9).bool()
    image[4:8, 4:8] = True
    image &= far(window) if window and clamped else True
    assert spans.fill(ends, lens, ends, lens, {0: [(4, 7)], 1: [(3, 3)]}, causal=True)
    assert torch.equal(seen(layer)[2:], (near | image)[2:])
    assert torch.equal(seen(layer, 4, b=1)[2:], near[2:4, :4])
    assert not spans.fill(ends, lens, ends, None, {}, causal=True)
    assert torch.equal(seen(layer)[2:], near[2:])


def test_requests_that_are_not_causal():
    spans = Spans.empty(2, 12, CPU)
    ends, lens = torch.tensor([0, 9, 11]).int(), torch.tensor([9, 2]).int()
    layer = replace(LAYER, spans=spans, window=3)
    assert spans.fill(ends, lens, ends, lens, {}, causal=torch.tensor([0, 1]).int())
    assert torch.equal(seen(layer), far(3)) and torch.equal(seen(layer, 2, b=1), far(3, 2).tril())
    assert spans.fill(ends, lens, ends, lens, {}, causal=False)
    assert torch.equal(seen(layer, 2, b=1), far(3, 2))


def test_plans_are_verified_while_other_kernels_compile(monkeypatch):
    """A server that waited for all kernels first started seconds later."""
    made, waited, ours = threading.Event(), [], plans.Plans()
    monkeypatch.setattr(plans, "_compile", lambda *given: waited.append(made.wait(60)))
    monkeypatch.setattr(plans, "usable", lambda device: device)
    monkeypatch.setattr(plans, "know_compiler", lambda: waited.append("known"))
    monkeypatch.setattr(ours, "append", lambda *given: None)
    monkeypatch.setattr(ours, "plan", lambda *given, **maxima: made.set())
    on_gpu = replace(LAYER, device=torch.device("cuda", 0))
    ours.of(on_gpu, 40, batch=4, kv_len=128, batch_invariant=None)
    assert waited == ["known", True, True] and ours._threads is None
