"""A plan's launches on a Hopper that is not here: Gluon kernels emulated, merges interpreted."""

from dataclasses import replace
from typing import ClassVar

import numpy as np
import torch

from flexattn.device import detect
from flexattn.kernels.block_mask.source import render_chosen
from flexattn.kernels.paged_decode import family
from flexattn.kernels.paged_decode.source import render_serving_combine
from flexattn.runtime.build import DESCRIPTOR, builder
from flexattn.serving import kernels
from flexattn.util.locks import Lru
from tests.emulated_memory import Pointer
from tests.emulated_mla import described, run as run_source
from tests.launches import Recorded
from tests.problems import H200


class Emulated(Recorded):
    """The attending kernel, on arrays of float32."""

    compiled = binary = None
    shared_memory = 0
    pointers: ClassVar = {}

    def launch(self, stream, given):
        super().launch(stream, given)
        told, kept = self.launched[-1], {}
        types = {each.name: each.type for each in self.source.arguments}
        for name, value in told.items():
            if name in self.boxes:
                block = DESCRIPTOR.match(types[name])["shape"].split(",")
                told[name] = described(value, self.boxes[name], tuple(map(int, block)))
            elif isinstance(value, torch.Tensor):
                size = value.untyped_storage().nbytes() // value.itemsize
                whole = value.as_strided((size,), (1,), 0)
                kept[name] = whole, (whole.float() if whole.is_floating_point() else whole).numpy()
                told[name] = self.pointers.get(name, Pointer)(
                    kept[name][1], value.storage_offset()
                )
        run_source(self.source, self.programs, told)
        for name in ("OUT", "LSE", "WORKSPACE"):
            if name in kept:
                kept[name][0].copy_(torch.from_numpy(kept[name][1]))


class Changing(Pointer):
    """Lengths that another stream changes: each read finds others."""

    chance = np.random.default_rng(1)

    @property
    def array(self):
        return self.chance.integers(0, self.longest, len(self.held), dtype=np.int32)

    @array.setter
    def array(self, lengths):
        self.held, self.longest = lengths, int(lengths.max()) + 1

    def __add__(self, more):
        return type(self)(self.held, self.offset + more)


def emulate(monkeypatch, number):
    """Launch on a Hopper of so many SMs."""
    few = replace(H200, num_sms=number)
    interpreted = replace(detect(torch.device("cpu")), num_sms=number)

    class Builder:
        def kernel(self, source, device, index):
            gluon = source.language == "gluon"
            return Emulated(source) if gluon else builder().kernel(source, interpreted, -1)

    def combine(form, config, device):
        return render_serving_combine(form, config, interpreted)

    def chosen(form, device):
        return render_chosen(form, interpreted)

    monkeypatch.setattr(kernels, "detect", lambda device: few)
    monkeypatch.setattr(kernels, "render_chosen", chosen)
    monkeypatch.setattr(kernels, "builder", Builder)
    monkeypatch.setattr(family, "render_serving_combine", combine)
    # Texts that were rendered for a device whose merges are not interpreted, and those of here.
    monkeypatch.setattr(builder(), "rendered", Lru(64))
