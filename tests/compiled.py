"""What tests of torch.compile share: fresh caches, counted compiles, and the calls of our op."""

import contextlib
from types import SimpleNamespace

import torch

import flexattn
from flexattn.frontend.compiled import node, op


@contextlib.contextmanager
def compiling(monkeypatch, backend="inductor"):
    """compile(fn) with fullgraph=True, a counter of compiles, and the options of our ops' calls:
    `called` the forward's, `differentiated` the backward's.

    A graph that an earlier process compiled would come out of Inductor's cache, lowered by nobody.
    Of a call its options are kept, and none of its tensors: they lie in the memory of a CUDA
    graph, which torch refuses to record while somebody holds what is no output of it.
    """
    from torch._dynamo.testing import CompileCounterWithBackend
    from torch._inductor import config
    from torch._inductor.utils import fresh_inductor_cache

    called, run = [], op.run_admitted
    monkeypatch.setattr(op, "run_admitted", lambda call: called.append(call.options) or run(call))
    differentiated, route = [], op.route_of
    monkeypatch.setattr(
        op, "route_of", lambda call: differentiated.append(call.options) or route(call)
    )
    counter = CompileCounterWithBackend(backend)

    def compiled(fn, **options):
        return torch.compile(fn, backend=counter, fullgraph=True, **options)

    torch._dynamo.reset()
    # What takes g++ long: headers that are compiled ahead, and a trial of each vector extension.
    quick = {"cpp_cache_precompile_headers": False, "cpp.vec_isa_ok": False}
    with config.patch(quick), fresh_inductor_cache():
        yield SimpleNamespace(
            compile=compiled, counter=counter, called=called,
            differentiated=differentiated,
        )  # fmt: skip
    torch._dynamo.reset()


def as_on_a_gpu(monkeypatch):
    """Let torch's node have gradients and max_scores on the CPU, where it refuses them."""
    import torch.nn.attention.flex_attention as torch_flex

    monkeypatch.setattr(torch_flex, "_validate_device", lambda *_: None)
    monkeypatch.setattr(node, "breaks", lambda _: "")
    options = torch_flex._apply_kernel_options

    def with_lse(*given, **named):
        return {**options(*given, **named), "OUTPUT_LOGSUMEXP": True}

    monkeypatch.setattr(torch_flex, "_apply_kernel_options", with_lse)


def nodes(counter, name="flex_attention"):
    """How many nodes of a name each graph has that Dynamo gave to the backend."""
    return [sum(name in str(node.target) for node in g.graph.nodes) for g in counter.graphs]


def gpt(x, weights, mask, cap, width):
    """A decoder of heads of a width, with documents and soft-capping, and attention alone."""

    def capped(score, b, h, q_idx, kv_idx):
        return cap * torch.tanh(score / cap)

    for weight in weights:
        parts = (x @ weight).view(*x.shape[:2], 3, -1, width).permute(2, 0, 3, 1, 4)
        out = flexattn.flex_attention(*parts.unbind(), capped, mask)
        x = x + out.transpose(1, 2).flatten(2)
    return x
