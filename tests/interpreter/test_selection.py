"""Keys that data choose: results and gradients by kernels, for whatever indices say."""

from dataclasses import replace

import pytest
import torch

from flexattn import Selection
from flexattn.catalogue import causal
from flexattn.frontend.launch_cache import launch_cache
from flexattn.runtime import key_lists
from flexattn.runtime.build import TritonLaunch
from flexattn.settings import override
from tests.random_mods.selections import check_selection
from tests.selections import assert_gradients, assert_right, drawn
from tests.support import run

pytestmark = pytest.mark.usefixtures("poisoned")


def made(sizes, width=16):
    batch, Hq, Hkv, q_len, kv_len = sizes
    draw = torch.Generator().manual_seed(sum(sizes))
    shapes = ((Hq, q_len), (Hkv, kv_len), (Hkv, kv_len))
    return [torch.randn(batch, h, n, width, generator=draw) for h, n in shapes]


@pytest.mark.parametrize("seed", range(6))
def test_drawn_blocks(seed):
    selection, sizes = drawn(seed)
    assert_right(selection, *made(sizes))


@pytest.mark.parametrize("seed", range(3))
def test_drawn_rows_and_tokens(seed):
    selection, sizes = drawn(seed, (1, 3, 16, 20))
    assert_right(selection, *made(sizes))


@pytest.mark.parametrize("index", range(6))
def test_random_selections_beside_mods(index):
    """`FLEXATTN_INTERPRET=1 python -m tests.random_mods selections` has 500."""
    check_selection(seed=0, index=index, longest=45, device="cpu")


@pytest.mark.parametrize("right", [assert_right, assert_gradients], ids=["", "gradients"])
def test_other_choices_have_the_same_launch(right):
    """Each layer chooses anew: nothing is planned again, and nothing old is read."""
    q, k, v = made((1, 2, 2, 256, 256))
    for seed in range(4):
        draw = torch.Generator().manual_seed(seed)
        indices = torch.randint(0, 4, (1, 2, 4, 2), generator=draw)
        right(Selection(indices, None, 64, 64, causal), q, k, v)
        if not seed:
            known = len(launch_cache.launches())
    assert len(launch_cache.launches()) == known


def test_lists_by_key_are_made_by_one_launch_when_a_backward_reads_them(monkeypatch):
    q, k, v = (x.requires_grad_() for x in made((1, 2, 2, 256, 256)))
    chosen = Selection(torch.zeros(1, 2, 4, 1, dtype=torch.int32), None, 64, 64)
    run(q, k, v, max_scores=False, block_mask=chosen)[0].sum().backward()
    plain, count = TritonLaunch.launch, []

    def counted(launch, stream, given):
        count.append(launch)
        return plain(launch, stream, given)

    monkeypatch.setattr(TritonLaunch, "launch", counted)
    monkeypatch.setattr(key_lists, "_transposed", None)
    with override(check=False):
        out = run(q, k, v, max_scores=False, block_mask=replace(chosen))[0]
        assert len(count) == 2
        out.sum().backward()
    assert len(count) == 5  # then delta and the gradients


def test_lists_that_were_replaced_are_read_by_key_as_well():
    """Of another width than those that were chosen."""
    q, k, v = (x.requires_grad_() for x in made((1, 1, 1, 64, 64)))
    mask = Selection(torch.tensor([[[[0], [1], [2], [3]]]]), None, 16, 16).for_call(q, k)
    mask.kv_num_blocks = torch.zeros(1, 1, 4, dtype=torch.int32)
    mask.kv_indices = torch.zeros(1, 1, 4, 2, dtype=torch.int32)
    mask.full_kv_num_blocks = torch.full((1, 1, 4), 2, dtype=torch.int32)
    mask.full_kv_indices = torch.tensor([0, 2], dtype=torch.int32).expand(1, 1, 4, 2).contiguous()
    run(q, k, v, max_scores=False, block_mask=mask)[0].sum().backward()
    assert v.grad[0, 0].any(1).nonzero().flatten().tolist() == [*range(16), *range(32, 48)]


def test_another_mask_of_the_same_form_has_its_own_launch():
    q, k, v = made((1, 2, 2, 128, 128))
    plain = Selection(torch.zeros(1, 1, 2, 1, dtype=torch.int32), None, 64, 64, None)
    for mask_mod in (causal, None, causal):
        assert_right(replace(plain, mask_mod=mask_mod), q, k, v)


def test_topk_of_scores():
    q, k, v = made((2, 4, 2, 256, 256))
    scores = torch.randn(2, 2, 4, 8, generator=torch.Generator().manual_seed(0))
    scores[0, 0, 1, 2] = torch.nan
    selection = Selection.from_topk(scores, 3, unit=32, rows=64, causal=True)
    assert selection.indices[0, 0, 0].max() < 2  # two blocks begin before row 64
    assert_right(selection, q, k, v)
