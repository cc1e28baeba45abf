"""A plan whose prefills have a kernel of their own: what each kernel is given and leaves alone."""

from dataclasses import replace

import pytest
import torch

import flexattn.serving.kernels as serving
import flexattn.serving.plan as plans
from flexattn.catalogue import causal
from flexattn.device import detect
from flexattn.errors import InputError
from flexattn.kernels.hopper.family import PREFILL
from flexattn.kernels.hopper.ragged import (
    merge_programs,
    part_words,
    render_merge_parts,
    render_row_tiles,
)
from flexattn.runtime.build import builder
from flexattn.runtime.candidates import Candidate
from flexattn.runtime.ragged import RaggedKernels
from flexattn.serving.kernels import in_phase
from flexattn.settings import override
from tests.launches import Recorded
from tests.problems import H200
from tests.serving import (
    EIGHT_BITS,
    assert_right,
    batch,
    plan_for,
    poisoned_pages,
    quantized,
)

Q_LENS, KV_LENS = [1, 70, 16, 17, 0, 3], [60, 70, 33, 17, 12, 3]


class Launched(Recorded):
    """A kernel that runs, too."""

    def __init__(self, kernel):
        super().__init__(kernel.source)
        self.kernel = kernel

    def prepare(self, programs, *given, **more):
        self.runs = self.kernel.prepare(programs, *given, **more)
        return super().prepare(programs, *given, **more)

    def launch(self, stream, given):
        super().launch(stream, given)
        self.runs.launch(stream, given)


@pytest.fixture
def made(monkeypatch):
    """The kernels of prefills, which are launched and do nothing."""
    found = []

    def kernels(problem, target, compiled, gluon, beside):
        if found:  # they were found wrong
            return None
        asked = in_phase(problem, "prefill")
        config = replace(next(PREFILL.able(asked, H200)), splits=True)
        choice = Candidate(asked, H200, config, "default", "here").choice()
        source = render_row_tiles(asked.structure, config, target)
        merging = replace(target, num_sms=H200.num_sms)
        row_tiles = Launched(builder().kernel(source, target, -1))
        merge = Launched(
            builder().kernel(render_merge_parts(asked.structure, config, merging), target, -1)
        )
        found.append(
            RaggedKernels(
                choice,
                Recorded(choice.source),
                row_tiles,
                PREFILL.grid(asked, config, H200),
                merge,
                merge_programs(asked.structure, config, H200),
                part_words(asked.structure, config, H200),
            )
        )
        return found[-1]

    monkeypatch.setattr(serving, "_prefill_kernels", kernels)
    # One SM has time for all that are longer than a decode.
    one = replace(detect(torch.device("cpu")), num_sms=1)
    monkeypatch.setattr(serving, "detect", lambda device: one)
    with override(verify="off", check=False):
        yield found


@pytest.fixture
def each():
    return batch(Q_LENS, KV_LENS, 4, 2, 64, dtype=torch.bfloat16)


def run_on(plan, each, out, **scales):
    cache, table = poisoned_pages(each, 16)
    ends = each.numbers([0, *torch.tensor(each.q_lens).cumsum(0).tolist()])
    lens = each.numbers(each.kv_lens)
    given = {"seq_lens": lens, "block_table": table, "cu_seqlens_q": ends}
    plan.run(each.q, cache, **given, out=out, **scales)
    return cache, given


def test_decodes_alone_are_written(made, each):
    """Those of at most 16 positions; rows of the others stay as they were."""
    plan = plan_for(each, page=16, ragged=True, mask_mod=causal)
    out = torch.full_like(each.q, torch.nan)
    run_on(plan, each, out)
    ends = torch.tensor([0, *Q_LENS]).cumsum(0).tolist()
    for b, n in enumerate(Q_LENS):
        rows = out[ends[b] : ends[b + 1]]
        assert rows.isnan().all() if n > 16 else rows.isfinite().all()
    kept = [b for b, n in enumerate(Q_LENS) if 0 < n <= 16]
    rows = [row for b in kept for row in range(ends[b], ends[b + 1])]
    few = type(each)(
        each.q[rows], [each.k[b] for b in kept], [each.v[b] for b in kept],
        [Q_LENS[b] for b in kept], [KV_LENS[b] for b in kept],
    )  # fmt: skip
    # Mods see no number of a request.
    assert_right((out[rows], None), few, mask_mod=causal)


def test_the_prefills_kernels_are_given_the_run(made, each):
    plan = plan_for(each, page=16, ragged=True, mask_mod=causal)
    out = torch.full_like(each.q, torch.nan)
    (k, _), given = run_on(plan, each, out)
    (kernels,) = made
    (tiles,), (attend,) = kernels.row_tiles.launched, kernels.attend.launched
    (merge,) = kernels.merge.launched
    assert merge["CUT_TILES"] is tiles["CUT_TILES"] and merge["WORKSPACE"] is attend["WORKSPACE"]
    assert len(attend["WORKSPACE"]) == kernels.words and merge["OUT"] is out
    assert plan.prefill_config == kernels.choice.config
    assert kernels.row_tiles.programs == len(Q_LENS)
    assert tiles["ROW_TILES"] is attend["ROW_TILES"] and tiles["COUNTER"] is attend["COUNTER"]
    assert tiles["capacity"] == kernels.grid.num_tiles
    assert attend["TABLE"] is given["block_table"] and attend["SEQ_LENS"] is given["seq_lens"]
    assert attend["OUT_ROWS"] is out and attend["OUT"] is out and attend["Q"] is each.q
    rows = len(each.q)
    assert tiles["total_q"] == attend["total_q"] == rows
    assert (attend["Hq"], attend["group"], attend["sm_scale"]) == (4, 2, plan.scale)
    boxes = kernels.attend.boxes
    for name, tensor in (("Q", each.q), ("OUT", out)):
        row, head = tensor.stride(0), tensor.stride(1)
        assert boxes[name].shape == (2, rows, 2, 64)
        assert boxes[name].strides == (2 * head, row, head, 1)
    assert boxes["K"].shape == (len(k), 2, 16, 64)


@pytest.mark.parametrize("dtype", EIGHT_BITS, ids=str)
def test_caches_of_eight_bits_have_them_too(made, each, dtype):
    """The kernels are given both scales; decodes beside the prefills are right."""
    few, wide, *scales = quantized(each, dtype, True)
    plan = plan_for(few, page=16, ragged=True, mask_mod=causal, kv_dtype=dtype, scaled=True)
    out = torch.full_like(each.q, torch.nan)
    run_on(plan, few, out, k_scale=scales[0], v_scale=scales[1])
    (kernels,) = made
    (attend,), (_,) = kernels.attend.launched, kernels.merge.launched
    assert attend["K_SCALE"] is scales[0] and attend["V_SCALE"] is scales[1]
    assert attend["stride_scale"] == 1
    first = Q_LENS[0]
    one = replace(wide, q=wide.q[:first], k=wide.k[:1], v=wide.v[:1], q_lens=[first])
    one = replace(one, kv_lens=KV_LENS[:1])
    assert_right((out[:first], None), one, mask_mod=causal)


def test_a_plan_counts_the_memory_of_its_tiles(made, each):
    with_tiles = plan_for(each, page=16, ragged=True, mask_mod=causal)
    (kernels,) = made
    assert with_tiles.memory >= 8 * kernels.grid.num_tiles


def test_the_first_use_check_makes_prefills_of_its_batch(made, each, monkeypatch):
    """Of so few rows the streaming kernel serves all, and a wrong forward would look right."""
    many = replace(detect(torch.device("cpu")), num_sms=132)
    monkeypatch.setattr(serving, "detect", lambda device: many)
    with override(verify="first"):
        plan = plan_for(each, page=16, ragged=True, mask_mod=causal)
    assert made and plan.prefill_config is None
    out = torch.full_like(each.q, torch.nan)
    run_on(plan, each, out)
    assert_right((out, None), each, mask_mod=causal)


@pytest.mark.parametrize("heads", [(4, 2), (8, 1), (71, 1), (7, 7)], ids=str)
def test_what_the_host_knows_to_be_prefills_has_no_kernel_of_decodes(made, monkeypatch, heads):
    """An empty one, on a stream of its own, made each layer of a server's chunks wait."""
    many = replace(detect(torch.device("cpu")), num_sms=132)
    monkeypatch.setattr(serving, "detect", lambda device: many)
    plan = plan_for(batch([300], [300], *heads, 64, dtype=torch.bfloat16), page=16, ragged=True)
    least = plan._prefills_from
    assert 17 <= least < 200
    made.clear()
    lens = [least + 1, least]
    each = batch(lens, lens, *heads, 64, dtype=torch.bfloat16)
    plan, launches = plan_for(each, page=16, ragged=True), []
    monkeypatch.setattr(plans, "launch_here", lambda launcher, *_: launches.append(launcher))
    for given, count in ((0, 4), (least - 1, 4), (least, 3)):
        launches.clear()
        run_on(plan, each, torch.empty_like(each.q), least_q=given)
        assert len(launches) == count
    monkeypatch.undo()
    run_on(plan, each, torch.empty_like(each.q), least_q=least)
    assert plan._listed["PREFILLS"].tolist()[:2] == [1, 1]


def test_a_request_with_fewer_queries_than_the_host_says_is_found(made, each):
    plan = plan_for(each, page=16, ragged=True)
    with override(check=True), pytest.raises(InputError, match="pass least_q=0"):
        run_on(plan, each, torch.empty_like(each.q), least_q=2)
