"""Keys that data choose: results and gradients by kernels, for whatever indices say."""

from dataclasses import replace

import pytest
import torch
from torch.nn.attention.flex_attention import AuxRequest
from torch.utils._python_dispatch import TorchDispatchMode

from flexattn import Selection, explain, flex_attention
from flexattn.block_mask.chosen import map_choices
from flexattn.catalogue import causal
from flexattn.frontend import selection as selection_module
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


@pytest.mark.parametrize("seed", range(8))
def test_the_map_of_a_kernel_is_that_of_plain_torch(seed):
    """Its lists name each block once, those that are listed first."""
    rows, unit, heads = ((1, 64), (4, 16), (2, 128), (8, 32))[seed % 4] + ((2, 1)[seed % 2],)
    lengths, Hq, B = (291, 300 + 64 * seed), 6, 1 + seed % 2
    draw = torch.Generator().manual_seed(seed)
    shape = B, heads, -(-lengths[0] // rows), 5
    indices = torch.randint(-2, -(-lengths[1] // unit) + 2, shape, generator=draw)
    indices = indices.to((torch.int32, torch.int64)[seed // 2 % 2])
    counts = torch.randint(0, 6, shape[:3], generator=draw) if seed % 3 else None
    selection = Selection(indices, counts, unit, rows, causal if seed < 6 else None)
    listed = Hq if heads > 1 else 1
    made = map_choices(
        indices, counts, rows, unit, lengths, listed, selection.mask_mod is causal, 128
    )
    chosen, (num, idx) = selection._by_torch(-(-lengths[1] // unit), listed, lengths)
    assert torch.equal(made[0], chosen) and torch.equal(made[1][0], num)
    order = idx.shape[3]
    assert torch.equal(made[1][1].sort(-1).values, torch.arange(order).int().expand_as(idx))
    first = torch.arange(order) < num[..., None]
    assert torch.equal(made[1][1][first], idx[first])


def test_what_no_kernel_maps():
    """Sizes that divide no block of 128, and so many choices that torch's scatter is faster."""
    few, many = (torch.zeros(1, 1, 40, k, dtype=torch.int32) for k in (2, 9000))
    for given in ((few, 3, 64), (few, 1, 1), (few, 1, 48), (many, 1, 16)):
        assert map_choices(given[0], None, *given[1:], (40, 200), 1, True, 128) is None


class Operations(TorchDispatchMode):
    """Counts what torch is asked for."""

    def __init__(self):
        super().__init__()
        self.found = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.found.append(str(func))
        return func(*args, **(kwargs or {}))


def test_a_new_choice_costs_the_host_two_launches_and_one_operation(monkeypatch):
    """Each operation of torch takes a GPU's host microseconds; the first alone is the output."""
    q, k, v = made((1, 2, 2, 256, 256))
    launched = []
    draw = torch.Generator().manual_seed(0)
    chosen = [torch.randint(0, 4, (1, 2, 4, 2), generator=draw).int() for _ in range(3)]
    with torch.no_grad():
        for indices in chosen[:2]:
            flex_attention(q, k, v, block_mask=Selection(indices, None, 64, 64, causal))
        monkeypatch.setattr(TritonLaunch, "launch", lambda *given: launched.append(given))
        with Operations() as seen:
            flex_attention(q, k, v, block_mask=Selection(chosen[2], None, 64, 64, causal))
    poisoned = "aten.fill_.Scalar"
    assert len(launched) == 2
    assert [each for each in seen.found if each != poisoned] == ["aten.empty_strided.default"]


GATHERED = {
    "rows": {},
    "rows of four": {"rows": 4, "group": 2},
    "group of one": {"group": 1},
    "tall": {"group": 20, "Hkv": 1},
    "all keys": {"mask_mod": None},
    "two batches": {"batch": 2},
    "shared": {"shared": True},
    "counted": {"counted": True},
}


@pytest.mark.parametrize("name", GATHERED)
def test_what_single_rows_choose_is_gathered(name, monkeypatch):
    """A key head's group fills a tile; forward alone, and where a dense kernel is not faster."""
    about = {
        "rows": 1, "group": 4, "Hkv": 2, "batch": 1, "mask_mod": causal, "shared": False,
        "counted": False, **GATHERED[name],
    }  # fmt: skip
    Hkv, batch, rows = about["Hkv"], about["batch"], about["rows"]
    q, k, v = made((batch, Hkv * about["group"], Hkv, 37, 83))
    draw = torch.Generator().manual_seed(len(name))
    shape = (1, 1) if about["shared"] else (batch, Hkv)
    shape = *shape, -(-37 // rows), 3
    indices = torch.randint(-1, 8, shape, generator=draw)
    counts = torch.randint(0, 4, shape[:3], generator=draw) if about["counted"] else None
    selection = Selection(indices, counts, 16, rows, about["mask_mod"])
    assert selection.apart(q, k, v, True, ()) is None
    monkeypatch.setattr(selection_module, "_FLOPS_OF_A_BYTE", 0)
    assert selection.apart(q, k, v, True, ()) is not None
    assert_right(selection, q, k, v)
    kernels = {each.problem.structure.kind for each in launch_cache.launches()}
    assert "decode" in kernels
    assert selection.apart(q, k, v, True, (torch.ones(1),)) is None
    assert selection.apart(q.requires_grad_(), k, v, True, ()) is None
    with torch.no_grad():
        aux = flex_attention(
            q, k, v, block_mask=selection, enable_gqa=True, return_aux=AuxRequest(True, True)
        )[1]
        assert aux.lse.shape == aux.max_scores.shape == q.shape[:3]
    assert explain(q.detach(), k, v, block_mask=selection, enable_gqa=True).template == "decode"


def test_heads_outside_of_batches_are_not_gathered(monkeypatch):
    monkeypatch.setattr(selection_module, "_FLOPS_OF_A_BYTE", 0)
    q, k, v = (x.transpose(1, 2).contiguous().transpose(1, 2) for x in made((2, 4, 2, 33, 40)))
    indices = torch.randint(0, 3, (2, 2, 33, 2), generator=torch.Generator().manual_seed(0))
    selection = Selection(indices, None, 16, 1, causal)
    assert selection.apart(q, k, v, True, ()) is None
    assert_right(selection, q, k, v)
    one = Selection(indices[:1], None, 16, 1, causal)
    assert one.apart(q[:1], k[:1], v[:1], True, ()) is not None
    assert_right(one, q[:1], k[:1], v[:1])
