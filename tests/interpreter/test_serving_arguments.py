"""What a caller of plans may get wrong is said in words, before any kernel runs."""

import pytest
import torch

from flexattn.errors import InputError
from flexattn.serving import AppendPlan, DecodePlan, PrefixTree, TreePlan, flex_decode
from flexattn.serving.append import append_paged_kv_cache

SIZES = {
    "batch": 2, "kv_len": 9, "heads": (2, 1), "head_dim": 16, "dtype": torch.float32,
    "page_size": 4, "device": "cpu",
}  # fmt: skip
POOL = torch.zeros(6, 4, 1, 16)
GIVEN = {
    "q": torch.zeros(2, 1, 2, 16),
    "kv_cache": (POOL, POOL),
    "seq_lens": torch.tensor([3, 5], dtype=torch.int32),
    "block_table": torch.tensor([[1, 2, 0], [3, 4, 0]], dtype=torch.int32),
}
# As FlashAttention's backend in vLLM lays it out: the cache of K before that of V.
VLLMS = torch.zeros(2, 6, 4, 1, 16)
WRONG = {
    "no query": ({"q": None}, "q is a NoneType"),
    "a list for the query": ({"q": [0.0]}, "q is a list"),
    "no lengths": ({"seq_lens": None}, "seq_lens is a NoneType"),
    "a list of lengths": ({"seq_lens": [3, 5]}, "seq_lens is a list"),
    "a list for the cache": ({"kv_cache": [POOL, POOL]}, r"kv_cache is a list(.|\n)*\(K, V\)"),
    "no V": ({"kv_cache": (POOL, None)}, "kv_cache is a tuple of Tensor, NoneType"),
    "an empty cache": ({"kv_cache": ()}, "kv_cache is a tuple"),
    "K alone": ({"kv_cache": (POOL,)}, "kv_cache is a tuple of Tensor"),
    "K before V in one tensor": ({"kv_cache": VLLMS}, r"\[2, 6, 4, 1, 16\](.|\n)*\(K, V\)"),
    "a number": ({"kv_cache": torch.tensor(3)}, "5 dimensions"),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_run_says_what_is_wrong(name):
    """One tensor [2, pages, ...] was taken for a cache of two pages, and answered from these."""
    wrong, said = WRONG[name]
    for call in (DecodePlan(**SIZES).run, flex_decode):
        with pytest.raises(InputError, match=said):
            call(**(GIVEN | wrong))


@pytest.mark.parametrize("name", ["q", "seq_lens", "block_table"])
def test_flex_decode_counts_dimensions(name):
    with pytest.raises(InputError, match=f"{name} has shape"):
        flex_decode(**(GIVEN | {name: torch.tensor(3, dtype=torch.int32)}))


def test_outputs_are_tensors():
    with pytest.raises(InputError, match="out is a int"):
        DecodePlan(**SIZES).run(**GIVEN, out=0)


def test_maxima_are_not_negative():
    with pytest.raises(InputError, match="total_q is at least 1"):
        DecodePlan(**SIZES, total_q=-1)
    for wrong in ({"batch": -1}, {"batch": 2**40}, {"q_len": 0}):
        with pytest.raises(InputError, match="batch is between 1 and 4096"):
            TreePlan(**(SIZES | wrong))


def test_what_is_no_tree_or_no_table():
    plan, tree = TreePlan(**SIZES), PrefixTree((-1,), (4,), (0, 0))
    for given in ((None, GIVEN["block_table"]), (tree, None)):
        with pytest.raises(InputError, match="a PrefixTree and a"):
            plan.update(*given)


@pytest.mark.parametrize(
    ("wrong", "said"),
    [({"v": torch.tensor(3.0)}, r"v \[\]"), ({"kv_cache": ()}, "tuple"),
     ({"slot_mapping": 0}, "slot_mapping"), ({"kv_cache": VLLMS}, "5 dimensions"),
     ({"layout": "HDN"}, "layout='HDN'")],
)  # fmt: skip
def test_an_append_says_what_is_wrong(wrong, said):
    new = torch.zeros(2, 1, 16)
    given = {"k": new, "v": new, "kv_cache": (POOL, POOL), "slot_mapping": torch.tensor([0, 5])}
    with pytest.raises(InputError, match=said):
        append_paged_kv_cache(**(given | wrong))
    if "kv_cache" in wrong and wrong["kv_cache"] is VLLMS:
        plan = AppendPlan(heads=1, head_dim=16, page_size=4, dtype=torch.float32, device="cpu")
        with pytest.raises(InputError, match=said):
            plan.run(**(given | wrong))
