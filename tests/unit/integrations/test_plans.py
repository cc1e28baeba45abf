"""What adaptors share, without a kernel: a layer's mods, the user's, and a cache written."""

import sys
from dataclasses import replace
from types import ModuleType

import pytest
import torch

from flexattn.errors import InputError, SettingsError
from flexattn.integrations.plans import Layer, user_mods, write_pages
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


@pytest.mark.parametrize("dtype", [torch.float32, torch.float8_e4m3fn], ids=str)
def test_new_keys_go_to_their_slots_whatever_the_strides(dtype):
    both = torch.zeros(5, 2, 4, 2 * 8).to(dtype)  # [pages, heads, page, K and V]
    pages = both.transpose(1, 2).split(8, dim=-1)
    k, v = torch.randn(2, 4, 2, 8)
    k[0], v[1] = 1e4, torch.nan
    scale = torch.tensor([0.5, 2.0]) if dtype.itemsize == 1 else None
    before = both.clone()
    write_pages(pages, torch.tensor([6, -1, 19]), (k, v), (scale, scale))
    for pool, new in zip(pages, (k, v), strict=True):
        for row, slot in ((0, 6), (2, 19)):
            wanted = new[row]
            if scale is not None:
                wanted = (wanted / scale[:, None]).clamp(-448, 448).to(dtype)
            assert torch.equal(pool[slot // 4, slot % 4].float(), wanted.float())
    changed = (both.float() != before.float()).transpose(1, 2).flatten(0, 1).flatten(1).any(1)
    assert changed.nonzero().flatten().tolist() == [6, 19], "padding leaves zeros in slot 0"
