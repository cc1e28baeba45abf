"""What calls build, render and trace, counted from a process that has built nothing yet."""

import dataclasses

import torch

from flexattn.block_mask import classify, create
from flexattn.block_mask.classify import BlockClassifier
from flexattn.device import named
from flexattn.frontend.launch_cache import launch_cache
from flexattn.kernels.base import source
from flexattn.kernels.choose.registry import families
from flexattn.mods.bind import clear, stats
from flexattn.runtime import dispatch
from flexattn.runtime.build import Builder, TritonLaunch, builder


@dataclasses.dataclass
class Work:
    """What was built (hashes of sources), and how many sources were rendered."""

    built: list
    rendered: int = 0

    def of(self, calls):
        """(kernels built, sources rendered, callables traced) by a function's calls."""
        before = len(self.built), self.rendered, stats().traces
        with torch.no_grad():
            calls()
        after = len(self.built), self.rendered, stats().traces
        return tuple(b - a for a, b in zip(before, after, strict=True))


def renders(monkeypatch):
    """A list of the templates that are filled from now on."""
    filled, fill = [], source.render_template

    def noted(name, context):
        filled.append(name)
        return fill(name, context)

    monkeypatch.setattr(source, "render_template", noted)
    return filled


def counting(monkeypatch):
    """A Work that counts from now on. Kernels are built and not run: outputs hold anything.

    Masks are classified by the kernel that a GPU has for it, beside the host's answer.
    """
    found = Work([])
    build, on_host = Builder._build, classify.kinds_by_rows

    def built(self, source, device, index):
        found.built.append(source.hash)
        return build(self, source, device, index)

    def counted(render):
        def call(*arguments):
            found.rendered += 1
            return render(*arguments)

        return call

    def on_gpu(bound, sizes, block, device):
        for first, kinds in on_host(bound, sizes, block, device):
            BlockClassifier(bound, sizes, block, device).run(kinds, first)
            yield first, kinds

    monkeypatch.setattr(Builder, "_build", built)
    monkeypatch.setattr(TritonLaunch, "launch", lambda *_: None)
    monkeypatch.setattr(create, "kinds_by_rows", on_gpu)
    kinds = (families(kind, named("nvidia-h200")) for kind in ("prefill", "decode"))
    for family in (family for kind in kinds for family in kind):
        monkeypatch.setattr(family, "render", counted(family.render))
    made = counted(classify.render_block_mask)
    monkeypatch.setattr(classify, "render_block_mask", made)
    forget()
    return found


def forget():
    """Let everything be traced, rendered and built anew."""
    clear()
    builder().clear()
    dispatch.dispatcher().clear()
    builder().rendered.clear()
    launch_cache.clear()
