"""SGLang's calls, as its contract has them, over the real kernels: batches step by step."""

import sys
from types import ModuleType

import pytest
import torch

from flexattn.catalogue import causal, sliding_window, softcap
from flexattn.integrations import plans
from flexattn.settings import override
from tests.contracts import imported, sglang
from tests.contracts.requests import Requests
from tests.contracts.sglang import ForwardMode, Pool, SWAKVPool
from tests.serving import assert_right

NAME = "flexattn.integrations.sglang"


@pytest.fixture
def backend(monkeypatch):
    """The class, over SGLang's double."""
    return lambda **more: imported(monkeypatch, sglang.modules(**more), NAME).FlexattnBackend


def steps(of):
    """Prefill; a chunk beside a token that decodes; decode of a prefix that is shared."""
    yield ForwardMode.EXTEND, of.step({"a": 21, "b": 5})
    yield ForwardMode.MIXED, of.step({"c": 17, "a": 1})
    of.share("d", "a", 16)
    yield ForwardMode.EXTEND, of.step({"d": 3})
    yield ForwardMode.DECODE, of.step({"c": 1, "a": 1, "b": 1, "d": 1})


def serve(backend, of, pool, layer, more=None, version=sglang.VERSION):
    """Each step's rows as (out, step)."""
    runner = sglang.runner(of, pool, version=version)
    server = backend(runner)
    for mode, step in steps(of):
        found = sglang.forward_batch(step, runner, mode, of.page)
        server.init_forward_metadata(found)
        q = step.q.flatten(1)
        out = server.forward(q, step.k, step.v, layer, found, **(more or {}))
        assert out.shape == q.shape
        yield out.view_as(step.q), step


@pytest.mark.parametrize(
    ("page", "pool", "layer", "mods", "version"),
    [
        (1, Pool, {}, {}, "0.5.17"),
        (16, Pool, {"logit_cap": 2.0}, {"score_mod": softcap(2.0)}, "0.5.19"),
        *(
            (16, SWAKVPool, {"sliding_window_size": 8}, {"mask_mod": sliding_window(8)}, each)
            for each in ("0.5.17", "0.5.23")
        ),
    ],
)
def test_batches_are_right(backend, page, pool, layer, mods, version):
    of = Requests(page=page, pages=24 if page > 1 else 80)
    found = sglang.layer(of, **layer)
    for out, step in serve(backend(version=version), of, pool(of), found, version=version):
        assert_right((out, None), step.each, **{"mask_mod": causal, **mods})


def test_a_chunk_longer_than_the_buffers_has_slots_in_its_window(backend):
    """Its plans grew, and its slots in the pool with windows did not fit where they were put."""
    of = Requests()
    runner = sglang.runner(of, SWAKVPool(of))
    server, layer = backend()(runner), sglang.layer(of, sliding_window_size=8)
    step = of.step({"a": 45})
    found = sglang.forward_batch(step, runner, ForwardMode.EXTEND, of.page)
    server.init_forward_metadata(found)
    out = server.forward(step.q.flatten(1), step.k, step.v, layer, found).view_as(step.q)
    assert_right((out, None), step.each, mask_mod=sliding_window(8))


def test_sinks_and_pages_of_heads(backend):
    of = Requests()
    sinks = torch.tensor([0.5, -1, 2, 0])
    for out, step in serve(backend(), of, Pool(of, "hnd"), sglang.layer(of), {"sinks": sinks}):
        assert_right((out, None), step.each, mask_mod=causal, sinks=sinks)


def test_a_cache_of_eight_bits(backend):
    of = Requests(D=32, dtype=torch.bfloat16, eight=torch.float8_e4m3fn)
    layer = sglang.layer(of, k_scale=of.scales[0], v_scale=of.scales[1])
    for out, step in serve(backend(), of, Pool(of, eight=of.eight), layer):
        assert_right((out, None), step.each, mask_mod=causal)


def test_requests_that_pad_a_captured_graph(backend, monkeypatch):
    """Buffers stay where they are, whatever is captured: a replay writes into them alone."""
    of = Requests()
    runner, layer = sglang.runner(of, Pool(of)), sglang.layer(of)
    server = backend()(runner)
    server.init_cuda_graph_state(4, 4)
    fill = server.get_cuda_graph_seq_len_fill_value()
    first = of.step({"a": 18, "b": 2, "c": 19})
    whole = sglang.forward_batch(first, runner, ForwardMode.EXTEND, of.page)
    server.init_forward_metadata(whole)
    server.forward(first.q.flatten(1), first.k, first.v, layer, whole)
    for plan in ("DecodePlan", "AppendPlan"):
        monkeypatch.setattr(plans, plan, None)
    for pool in runner.token_to_kv_pool.buffers:
        pool[0] = 0  # what SGLang keeps for rows that pad
    for names in ("cab", "b"):
        step, n = of.step(dict.fromkeys(names, 1)), len(names)
        found = sglang.forward_batch(step, runner, ForwardMode.DECODE, of.page)
        pad = torch.nn.functional.pad
        found.batch_size = 4
        found.seq_lens = pad(found.seq_lens, (0, 4 - n), value=fill)
        found.req_pool_indices = pad(found.req_pool_indices, (0, 4 - n))
        found.out_cache_loc = pad(found.out_cache_loc, (0, 4 - n))
        server.init_forward_metadata_out_graph(found, in_capture=False)
        q, k, v = (pad(x, (0, 0, 0, 0, 0, 4 - n)) for x in (step.q, step.k, step.v))
        out = server.forward(q.flatten(1), k, v, layer, found).view_as(q)
        assert_right((out[:n], None), step.each, mask_mod=causal)
        assert out.isfinite().all()


# A draft of five tokens: 1 and 2 come behind 0, 3 behind 1, 4 behind 2.
PARENTS = (None, 0, 0, 1, 2)


def ancestors():
    seen = torch.eye(5, dtype=torch.bool)
    for token, parent in enumerate(PARENTS):
        if parent is not None:
            seen[token] |= seen[parent]
    return seen


@pytest.mark.parametrize(("version", "own"), [("0.5.17", False), ("0.5.23", True)])
def test_drafts_are_verified(backend, monkeypatch, version, own):
    """A tree, a chain whose mask is not given, another tree; own: with a mask of the user's."""
    of, chosen = Requests(), ""
    if own:
        named = ModuleType("masks_of_a_user")
        named.mods = lambda layer: {"mask_mod": lambda b, h, q_idx, kv_idx: kv_idx != 1}
        monkeypatch.setitem(sys.modules, named.__name__, named)
        chosen = f"{named.__name__}:mods"
    runner = sglang.runner(of, Pool(of), version=version)
    server, layer = backend(version=version, drafted=5)(runner), sglang.layer(of)
    server.init_cuda_graph_state(3, 15)
    tree, chain = ancestors(), torch.ones(5, 5).tril().bool()

    def serve_step(step, mode, trees=None):
        batch = sglang.forward_batch(step, runner, mode, of.page, trees)
        server.init_forward_metadata(batch)
        with override(mods=chosen):
            out = server.forward(step.q.flatten(1), step.k, step.v, layer, batch)
        return out.view_as(step.q)

    def past_only(b, h, q, kv):
        return (q >= kv) & ((kv != 1) | (not own))

    first = of.step({"a": 18, "b": 3})
    out = serve_step(first, ForwardMode.EXTEND)
    assert_right((out, None), first.each, mask_mod=past_only)
    for trees in ((tree, chain), None, (chain, tree)):
        step = of.step({"a": 5, "b": 5})
        out = serve_step(step, ForwardMode.TARGET_VERIFY, trees)
        past = torch.tensor(step.lens) - 5
        each = torch.stack(trees or (chain, chain))

        def seen(b, h, q, kv, past=past, each=each):
            inside = each[b, (q - past[b]).clamp(min=0), (kv - past[b]).clamp(min=0)]
            return ((kv < past[b]) | inside) & ((kv != 1) | (not own))

        assert_right((out, None), step.each, mask_mod=seen)
    step = of.step({"b": 1, "a": 1})
    assert_right((serve_step(step, ForwardMode.DECODE), None), step.each, mask_mod=past_only)
