"""Every argument of a backward's kernels has a value: of each family, with lists and with mods."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from flexattn import create_block_mask
from flexattn.catalogue import causal, softcap
from flexattn.frontend.gradients import AskedGradients, _problem, run_backward
from flexattn.kernels.base.binding import bind_arguments
from flexattn.kernels.choose.options import NONE, Options
from flexattn.mods import bind as bound
from flexattn.runtime import backward
from flexattn.runtime.candidates import candidates_of
from flexattn.runtime.key_lists import BothLists
from tests.problems import H200

DOCUMENT = torch.arange(400) // 130


class Recorded:
    """A kernel whose launches note the shapes of what they are given."""

    def __init__(self, source, launched):
        self.source, self.launched = source, launched

    def prepare(self, programs, fixed, given, boxes=None, spare=()):
        found = bind_arguments(self.source.arguments, fixed, given, boxes, spare)
        names = [each.name for each in self.source.arguments]

        def launch(stream, values):
            assert len(values) == found.passed
            told = {names[i]: values[place] for i, place in found.given}
            self.launched.append(
                (programs, {**dict(zip(names, found.fixed, strict=True)), **told})
            )

        return SimpleNamespace(launch=launch, bound=found)


def document(b, h, q_idx, kv_idx):
    return (DOCUMENT[q_idx] == DOCUMENT[kv_idx]) & (q_idx >= kv_idx)


def holes(b, h, q_idx, kv_idx):
    return (q_idx // 128 + kv_idx // 128) % 2 == 0


@pytest.mark.parametrize("language", ["gluon", "triton"])
@pytest.mark.parametrize("mask_mod", [None, causal, document, holes])
@pytest.mark.parametrize("batch", [1, 2])
def test_every_argument_has_a_value(language, mask_mod, batch, monkeypatch):
    q, dout = (torch.zeros(2, 4, 300, 128, dtype=torch.bfloat16) for _ in range(2))
    k, v = (torch.zeros(batch, 2, 400, 128, dtype=torch.bfloat16) for _ in range(2))
    mask = mask_mod and create_block_mask(mask_mod, None, None, 300, 400, device="cpu")
    lists = None if mask is None else BothLists.of(mask)
    score = bound(softcap(20.0), "score")
    asked = AskedGradients(score, bound(mask_mod, "mask"), mask, 0.1, NONE, ())
    problem, launched = _problem(asked, (q, k, v), lists, H200), []

    def choose(problem, target, index, options):
        choice = next(candidates_of(problem, target, options)).choice()
        return replace(choice, kernels=(Recorded(choice.source, launched),))

    def build(source, *_):
        return Recorded(source, launched)

    monkeypatch.setattr(backward, "builder", lambda: SimpleNamespace(kernel=build))
    prepared = backward.prepare_backward(
        problem, H200, q.device, SimpleNamespace(choose=choose), Options(language=language),
        (q, k, v), q, dout, lists,
    )  # fmt: skip
    assert prepared.choice.config.language == language
    rest = prepared.rest_of(lists, asked.score, asked.mask)
    lse = torch.zeros(2, 4, 300)
    found = prepared.run((q, k, v), q, lse, (dout, None), 0.1, rest, ())
    assert [x.shape for x in found[:3]] == [q.shape, k.shape, v.shape]
    names = [next(iter(values)) for _, values in launched]
    if language == "triton":
        assert names == ["OUT", "Q"]
    else:
        # Of documents the ends of runs are trimmed first.
        assert names == ["M_RUNS"] * (mask_mod is document) + ["OUT", "Q", "DQ_FLAGS"]
        (tiles, before), (programs, kernel), (again, after) = launched[-3:]
        assert all(trim["M_RUNS"] is kernel["M_RUNS"] for _, trim in launched[:-3])
        assert before["DQ_FLAGS"] is kernel["DQ_FLAGS"] is after["DQ_FLAGS"]
        assert "DQ_ACC" not in before and kernel["DQ_ACC"] is after["DQ_ACC"]
        assert before["STATS"] is kernel["STATS"] and after["DQ"] is found.dq
        assert kernel["DQ_ACC"].numel() == tiles * 64 * 128 and tiles == again
        assert programs == 4 * batch * 2 and kernel["shared_heads"] == 4 // batch


def test_descriptors_of_keys_that_batches_share_stay_in_their_memory():
    """A stride of 0 has none: with that of a whole tensor in its place others' memory was read.

    torch.compile is given keys of batch 1 so, expanded to the queries' batches.
    """
    q, out, dout = (torch.randn(3, 2, 40, 64) for _ in range(3))
    shared = [torch.randn(1, 2, 50, 64).expand(3, -1, -1, -1) for _ in range(2)]

    def planned(q, k, v, out, dout):
        for given, tensor in zip(shared, (k, v), strict=True):
            read = torch.as_strided(tensor, *backward.box_of(tensor))
            assert torch.equal(read, given)
        raise LookupError("read")

    with pytest.raises(LookupError, match="read"):
        run_backward(
            planned, (q, *shared), out, torch.zeros(3, 2, 40), (dout, None), 0.1, (), None
        )
