"""A plan with kernel_options: its prefills on Blackwell's forward, which runs in plain Python."""

import pytest
import torch

import flexattn.serving.kernels as serving
from flexattn.catalogue import causal
from flexattn.device import named
from flexattn.errors import ConfigError
from flexattn.kernels.blackwell.family import PREFILL
from flexattn.kernels.hopper.ragged import render_row_tiles
from flexattn.runtime.build import DESCRIPTOR, builder
from flexattn.runtime.candidates import Candidate
from flexattn.runtime.ragged import RaggedKernels
from flexattn.settings import override
from tests.emulated_blackwell import run
from tests.emulated_memory import Descriptor, Number, Pointer
from tests.launches import Recorded
from tests.serving import assert_right, batch, plan_for, poisoned_pages

B200 = named("nvidia-b200")
GLUON = {"BACKEND": "GLUON"}


class OnTensorCore(Recorded):
    """Blackwell's kernel, on tensors of float16 as the launch describes them."""

    def launch(self, stream, given):
        super().launch(stream, given)
        told = self.launched[-1]
        out = told["OUT"]
        told["OUT"] = told["OUT_ROWS"] = wide = out.float()
        run(self.source, self.programs, {x.name: self._of(x, told) for x in self.source.arguments})
        out.copy_(wide)

    def _of(self, argument, told):
        value = told[argument.name]
        if found := DESCRIPTOR.match(argument.type):
            box, block = self.boxes[argument.name], tuple(map(int, found["shape"].split(",")))
            return Descriptor(value.as_strided(box.shape, box.strides).numpy(), block, 2)
        if isinstance(value, torch.Tensor):
            return Pointer(value.view(-1).numpy())
        return Number(value) if type(value) is int else value


@pytest.fixture
def made(monkeypatch):
    found = []

    def kernels(problem, target, compiled, family, beside):
        config = next(PREFILL.able(problem, B200))
        choice = Candidate(problem, B200, config, "default", "here").choice()
        row_tiles = builder().kernel(
            render_row_tiles(problem.structure, config, target), target, -1
        )
        grid = PREFILL.grid(problem, config, B200)
        found.append(RaggedKernels(choice, OnTensorCore(choice.source), row_tiles, grid))
        return found[-1]

    monkeypatch.setattr(serving, "ragged_kernels", kernels)
    with override(verify="off", check=False):
        yield found


Q_LENS, KV_LENS = [1, 70, 16, 17, 0, 3], [60, 70, 33, 17, 12, 3]


def test_prefills_and_decodes_beside_them(made):
    each = batch(Q_LENS, KV_LENS, 2, 1, 64, dtype=torch.float16)
    plan = plan_for(each, page=16, ragged=True, mask_mod=causal, kernel_options=GLUON)
    assert plan.prefill_config == made[0].choice.config
    cache, table = poisoned_pages(each, 16)
    given = {
        "seq_lens": each.numbers(KV_LENS), "block_table": table,
        "cu_seqlens_q": each.numbers([0, *torch.tensor(Q_LENS).cumsum(0).tolist()]),
    }  # fmt: skip
    out = torch.full_like(each.q, torch.nan)
    lse = torch.full(each.q.shape[:2], torch.nan)
    plan.run(each.q, cache, **given, out=out, lse=lse)
    assert made[0].attend.launched
    assert_right((out, lse), each, mask_mod=causal)


def test_a_device_without_a_forward_in_gluon():
    each = batch([70], [70], 2, 1, 64, dtype=torch.float16)
    with pytest.raises(ConfigError, match="no forward in Gluon"):
        plan_for(each, page=16, kernel_options=GLUON)


def test_other_options_are_not_a_plans():
    each = batch([70], [70], 2, 1, 64, dtype=torch.float16)
    with pytest.raises(ConfigError, match="BACKEND alone"):
        plan_for(each, page=16, kernel_options={"BLOCK_N": 64})
