"""Every entry of the catalogue builds anywhere and gives one value a lane."""

import re

import pytest
import torch
from torch.nn.attention.flex_attention import create_mask

from bench.gallery import GROUPS, entry
from flexattn import catalogue, visualize
from flexattn.catalogue import document, document_offsets
from flexattn.reference import attention
from tests.cases import CASES, case

SHAPES = [
    (1, 1, 1, 1, 1),
    (2, 3, 1, 37, 53),
    (1, 4, 2, 53, 37),
    (3, 2, 2, 1, 71),
    (1, 2, 1, 19, 19),
]


def test_names_are_unique_and_found():
    names = [c.name for c in CASES]
    assert len(set(names)) == len(names)
    assert all(case(name).name == str(case(name)) == name for name in names)
    with pytest.raises(KeyError, match="there are noop, "):
        catalogue.case("nothing")


@pytest.mark.parametrize("shape", SHAPES, ids=lambda s: "x".join(map(str, s)))
@pytest.mark.parametrize("entry", CASES, ids=str)
def test_every_case_builds_and_returns_scalars(entry, shape):
    B, Hq, Hkv, L, S = shape
    built = entry.make(*shape, dtype=torch.bfloat16, seed=3)
    draw = torch.Generator().manual_seed(0)
    q, k, v = (
        torch.randn(s, generator=draw) for s in ((B, Hq, L, 8), (B, Hkv, S, 8), (B, Hkv, S, 8))
    )
    zeros = [torch.zeros((), dtype=torch.int64)] * 4
    if built.mask_mod is not None:
        value = built.mask_mod(*zeros)
        assert value.shape == () and value.dtype == torch.bool
        mask = create_mask(built.mask_mod, B, Hq, L, S, device="cpu")
        assert mask.shape == (B, Hq, L, S)
        assert entry.empty_rows or mask.any(-1).all()
        assert built.mask_mod.__name__ not in ("", "<lambda>")
    if built.score_mod is not None:
        value = built.score_mod(torch.zeros(()), *zeros)
        assert value.shape == () and value.is_floating_point()
        assert built.score_mod.__name__ not in ("", "<lambda>", "score_mod")
        if entry.torch_eager:
            assert attention(q, k, v, score_mod=built.score_mod).out.shape == (B, Hq, L, 8)


@pytest.mark.parametrize("entry", CASES, ids=str)
def test_a_seed_gives_the_same_tensors(entry):
    first, again, other = (entry.make(2, 3, 1, 37, 53, seed=s).learned for s in (1, 1, 2))
    torch.testing.assert_close(first, again)
    assert not first or not torch.equal(first[0], other[0])


@pytest.mark.parametrize("entry", [c for c in CASES if c.empty_rows], ids=str)
def test_cases_that_claim_empty_rows_have_them_somewhere(entry):
    def has_empty_rows(shape):
        mask_mod = entry.make(*shape).mask_mod
        B, Hq, _, L, S = shape
        return not create_mask(mask_mod, B, Hq, L, S, device="cpu").any(-1).all()

    assert any(map(has_empty_rows, [*SHAPES, (1, 2, 1, 71, 3)]))


def test_both_forms_of_documents_are_one_mask():
    doc_ids = torch.tensor([0, 0, 0, 1, 2, 2, 2, 2, 2])
    offsets = torch.tensor([0, 3, 4, 9])
    masks = [
        create_mask(mod, None, None, 9, 9, device="cpu")
        for mod in (document(doc_ids), document_offsets(doc_ids, offsets))
    ]
    assert torch.equal(*masks)


MODS = [name for names in GROUPS.values() for name in names.split()]


def test_the_gallery_has_every_mod():
    helpers = {"CASES", "Built", "Case", "Setup", "case", "noop", "alibi_slopes", "document_ids"}
    assert sorted(MODS) == sorted(set(catalogue.__all__) - helpers)
    for name in MODS:
        assert re.search(rf"\b{name}\b", catalogue.__doc__), name


@pytest.mark.parametrize("name", MODS)
def test_a_mod_has_a_paragraph_a_line_and_a_paper(name):
    found = entry(name)
    assert len(found.paragraph) > 40
    assert re.search(r"(arXiv:\d{4}\.\d{5}|doi:\S+)\.$", found.source), found.source
    role = "score" if found.line.count("score_mod") else "mask"
    shown = visualize(found.mod(), 64)
    assert (shown.scores is None) == (role == "mask")
