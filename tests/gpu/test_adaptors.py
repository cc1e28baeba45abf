"""vLLM's and SGLang's calls on a GPU, over doubles of both: what a captured graph replays."""

import pytest
import torch

from flexattn.catalogue import causal, sliding_window
from tests.contracts import imported, sglang, vllm
from tests.contracts.requests import Requests
from tests.contracts.sglang import ForwardMode, Pool
from tests.serving import assert_right
from tests.support import captured

MOST = 4


def requests():
    return Requests(8, 2, 128, page=64, pages=40, dtype=torch.bfloat16, device="cuda")


def rows_of(of):
    """Static buffers for q, k and v of a captured batch."""
    Hq, Hkv, D = of.shape
    return [torch.zeros(MOST, n, D, dtype=of.dtype, device="cuda") for n in (Hq, Hkv, Hkv)]


@pytest.mark.parametrize("order", ["NHD", "HND"])
@pytest.mark.parametrize("window", [None, 100])
def test_vllm_replays_a_graph_with_other_requests(monkeypatch, order, window):
    of = requests()
    config = vllm.config(64, tokens=700, length=640, dtype=of.dtype)
    ours = imported(monkeypatch, vllm.modules(config), "flexattn.integrations.vllm")
    server = vllm.Model(ours.FlexattnBackend, config, of, order, sliding_window=window)
    mask = causal if window is None else sliding_window(window - 1)
    first = of.step({"a": 301, "b": 2, "c": 130})
    assert_right((server.run(first), None), first.each, mask_mod=mask)
    lens, ends = (torch.zeros(n, dtype=torch.int32, device="cuda") for n in (MOST, MOST + 1))
    table = torch.zeros(MOST, 10, dtype=torch.int32, device="cuda")
    slots, rows = torch.full((MOST,), -1, device="cuda"), rows_of(of)
    metadata = server.builder.build_for_cudagraph_capture(
        vllm.CommonAttentionMetadata(ends, ends, lens, MOST, MOST, 1, 640, table, slots)
    )
    graph, out = captured(lambda: server.launch(metadata, *rows, slots))
    for names in ("cab", "b", "ac"):
        step, n = of.step(dict.fromkeys(names, 1)), len(names)
        for buffer, new in zip(rows, (step.q, step.k, step.v), strict=True):
            buffer.fill_(torch.nan)[:n].copy_(new)
        lens.zero_()[:n].copy_(torch.tensor(step.lens))
        slots.fill_(-1)[:n].copy_(step.slots)
        table[:n, : step.table.shape[1]] = step.table
        graph.replay()
        assert_right((out[:n], None), step.each, mask_mod=mask)
        assert not out[n:].any()


def test_vllms_kernels_compile_while_its_model_is_made(monkeypatch):
    """Threads compile, in vLLM's default device and dtype; plans that wait for them are right."""
    of = requests()
    config = vllm.config(64, tokens=700, length=640, dtype=of.dtype)
    ours = imported(monkeypatch, vllm.modules(config), "flexattn.integrations.vllm")
    before = torch.get_default_dtype()
    torch.set_default_dtype(of.dtype)
    try:
        with torch.device("cuda"):
            server = vllm.Model(ours.FlexattnBackend, config, of)
    finally:
        torch.set_default_dtype(before)
    assert server.impl.plans._begun and server.impl.plans._threads is None
    # In the second batch each request is a prefill: no kernel of decodes runs.
    for tokens in ({"a": 301, "b": 2, "c": 130}, {"a": 40, "c": 130}):
        step = of.step(tokens)
        assert_right((server.run(step), None), step.each, mask_mod=causal)


def test_sglang_replays_a_graph_with_other_requests(monkeypatch):
    of = requests()
    ours = imported(monkeypatch, sglang.modules(), "flexattn.integrations.sglang")
    runner, layer = sglang.runner(of, Pool(of), length=640), sglang.layer(of)
    server = ours.FlexattnBackend(runner)
    server.init_cuda_graph_state(MOST, MOST)
    fill = server.get_cuda_graph_seq_len_fill_value()
    first = of.step({"a": 301, "b": 2, "c": 130})
    whole = sglang.forward_batch(first, runner, ForwardMode.EXTEND, of.page)
    server.init_forward_metadata(whole)
    out = server.forward(first.q.flatten(1), first.k, first.v, layer, whole).view_as(first.q)
    assert_right((out, None), first.each, mask_mod=causal)
    for pool in runner.token_to_kv_pool.buffers:
        pool[0] = 0  # what SGLang keeps for rows that pad
    rows, slots = rows_of(of), torch.zeros(MOST, dtype=torch.int64, device="cuda")
    graph = None
    for names in ("cab", "b", "ac"):
        step, n = of.step(dict.fromkeys(names, 1)), len(names)
        batch = sglang.forward_batch(step, runner, ForwardMode.DECODE, of.page)
        pad = torch.nn.functional.pad
        batch.batch_size, batch.out_cache_loc = MOST, slots
        batch.seq_lens = pad(batch.seq_lens, (0, MOST - n), value=fill)
        batch.req_pool_indices = pad(batch.req_pool_indices, (0, MOST - n))
        for buffer, new in zip(rows, (step.q, step.k, step.v), strict=True):
            buffer.zero_()[:n].copy_(new)
        slots.zero_()[:n].copy_(step.slots)
        server.init_forward_metadata_out_graph(batch, in_capture=graph is None)
        if graph is None:
            q, k, v = rows
            graph, out = captured(lambda: server.forward(q.flatten(1), k, v, layer, batch))
        graph.replay()
        assert_right((out.view_as(rows[0])[:n], None), step.each, mask_mod=causal)
        assert out.isfinite().all()
