"""vLLM's calls, as its contract has them, over the real kernels: batches step by step."""

import sys
from dataclasses import replace
from types import ModuleType

import pytest
import torch

from flexattn.catalogue import causal, sliding_window, softcap
from flexattn.integrations import plans
from flexattn.settings import override
from tests.contracts import imported, vllm
from tests.contracts.requests import Requests
from tests.serving import assert_right

NAME = "flexattn.integrations.vllm"
SLOPES = (0.5, 0.25, 0.125, 0.0625)


def alibi(score, b, h, q, kv):
    return score + torch.tensor(SLOPES)[h].double() * (kv - q)


@pytest.fixture
def model(monkeypatch):
    """A layer in vLLM's hands; what it compiles after its plans are made is an error."""

    def make(of, order="NHD", block=None, invariant=False, version="0.33.0", about=(), **layer):
        config = vllm.config(block or of.page, dtype=of.dtype, **dict(about))
        modules = vllm.modules(config, invariant=invariant, version=version, order=order)
        backend = imported(monkeypatch, modules, NAME).FlexattnBackend
        found = vllm.Model(backend, config, of, order, **layer)
        for plan in ("DecodePlan", "AppendPlan"):
            monkeypatch.setattr(plans, plan, None)
        return found

    return make


def steps(of):
    """Prefill; a chunk beside tokens that decode; decode, with pages that a request shares."""
    yield of.step({"a": 21, "b": 5})
    yield of.step({"a": 1, "c": 17, "b": 1})
    of.share("d", "a", 16)
    yield of.step({"d": 3, "c": 1})
    yield of.step({"c": 1, "a": 1, "b": 1, "d": 1})


@pytest.mark.parametrize(
    ("order", "layer", "mods"),
    [
        ("NHD", {}, {}),
        ("HND", {"sliding_window": 9, "version": "0.26.0"}, {"mask_mod": sliding_window(8)}),
        ("NHD", {"version": "0.29.0", "logits_soft_cap": 2.0, "alibi_slopes": list(SLOPES)}, {
            "score_mod": lambda s, *place: alibi(softcap(2.0)(s, *place), *place)
        }),
        ("HND", {"sinks": torch.tensor([0.5, -1, 2, 0])}, {}),
    ],
    ids=["causal", "window", "softcap and alibi", "sinks"],
)  # fmt: skip
def test_batches_are_right(model, order, layer, mods):
    of = Requests()
    server = model(of, order, **layer)
    sinks = layer.get("sinks")
    for step in steps(of):
        if "sliding_window" in layer:  # pages behind all windows are nobody's again
            for b, (n, rows) in enumerate(zip(step.lens, step.q_lens, strict=True)):
                step.table[b, : max(0, n - rows - 8) // 16] = 0
        out = server.run(step)
        call = {"mask_mod": causal, **mods} | ({} if sinks is None else {"sinks": sinks})
        assert_right((out, None), step.each, **call)


@pytest.mark.parametrize(("name", "dtype"), [
    ("fp8", torch.float8_e4m3fn),
    ("fp8_per_token_head", torch.float8_e4m3fn),
    pytest.param("fp8_e5m2", torch.float8_e5m2, marks=pytest.mark.long),
])  # fmt: skip
def test_a_cache_of_eight_bits(model, name, dtype):
    """What the scale does not bring into its range is kept at the largest value."""
    of = Requests(D=32, dtype=torch.bfloat16, eight=dtype)
    of.scales = torch.tensor(0.001), torch.tensor(0.5)
    if name == "fp8_per_token_head":
        of.scales = None, None
    server = model(of, kv_cache_dtype=name)
    for step in steps(of):
        assert_right((server.run(step), None), step.each, mask_mod=causal)


def test_rows_that_pad_a_captured_graph(model):
    """The graph reads vLLM's own buffers: each replay changes them, and no Python runs."""
    of = Requests()
    server = model(of)
    server.run(of.step({"a": 18, "b": 2, "c": 19}))
    lens, ends = torch.zeros(4, dtype=torch.int32), torch.arange(5, dtype=torch.int32)
    table, slots = torch.zeros(4, 8, dtype=torch.int32), torch.full((4,), -1)
    q, k, v = torch.zeros(4, 4, 16), torch.zeros(4, 2, 16), torch.zeros(4, 2, 16)
    captured = server.builder.build_for_cudagraph_capture(
        vllm.CommonAttentionMetadata(ends, ends, lens, 4, 4, 1, 128, table, slots)
    )
    for names in ("cab", "b", "ac"):
        step, n = of.step(dict.fromkeys(names, 1)), len(names)
        for buffer, new in ((q, step.q), (k, step.k), (v, step.v)):
            buffer.fill_(torch.nan)[:n].copy_(new)
        lens.zero_()[:n].copy_(torch.tensor(step.lens))
        ends[n:].fill_(n)
        slots.fill_(-1)[:n].copy_(step.slots)
        table[:n, : step.table.shape[1]] = step.table
        out = server.launch(captured, q, k, v, slots)
        ends.copy_(torch.arange(5))
        assert_right((out[:n], None), step.each, mask_mod=causal)
        assert not out[n:].any()
        assert server.cache[0].isnan().all(), "padding has no slot"


def test_a_graph_of_chunks_is_padded_too(model):
    of = Requests()
    server = model(of)
    step = of.step({"a": 5, "b": 2})
    metadata = vllm.common(step)
    metadata.query_start_loc = torch.tensor([0, 5, 7, 7], dtype=torch.int32)
    metadata.seq_lens = torch.tensor([5, 2, 0], dtype=torch.int32)
    metadata.block_table_tensor = torch.nn.functional.pad(step.table, (0, 0, 0, 1))
    metadata.num_reqs, metadata.num_actual_tokens = 3, 9
    slots = torch.nn.functional.pad(step.slots, (0, 2), value=-1)
    rows = [torch.nn.functional.pad(x, (0, 0, 0, 0, 0, 2)) for x in (step.q, step.k, step.v)]
    out = server.launch(server.builder.build(0, metadata), *rows, slots)
    assert_right((out[:7], None), step.each, mask_mod=causal)


def mods(layer):
    """What FLEXATTN_MODS names: of layer 3 alone."""
    if layer.index != 3:
        return None
    slopes = torch.tensor(SLOPES, device=layer.device)
    return {
        "score_mod": lambda score, b, h, q_idx, kv_idx: score - slopes[h] * (q_idx - kv_idx) ** 2,
        "mask_mod": lambda b, h, q_idx, kv_idx: (kv_idx < 2) | (q_idx - kv_idx < 6),
    }


def test_mods_that_the_user_names(model, monkeypatch):
    """A score that falls with the square of distance, and a window beside two keys for all."""
    named = ModuleType("mods_of_a_user")
    named.mods = mods
    monkeypatch.setitem(sys.modules, named.__name__, named)
    of = Requests()
    with override(mods="mods_of_a_user:mods"):
        server = model(of, sliding_window=12)
    slopes = torch.tensor(SLOPES).double()
    wanted = {
        "score_mod": lambda score, b, h, q, kv: score - slopes[h] * (q - kv) ** 2,
        "mask_mod": lambda b, h, q, kv: (q >= kv) & (q - kv < 12) & ((kv < 2) | (q - kv < 6)),
    }
    for step in steps(of):
        assert_right((server.run(step), None), step.each, **wanted)


def test_rows_have_the_same_bits_whatever_the_batch(model, monkeypatch):
    """VLLM_BATCH_INVARIANT: a request alone, in chunks and token by token."""
    told = []
    for parts in ((20,), (11, 9), (17, *[1] * 3)):
        monkeypatch.undo()
        of = Requests(D=64, dtype=torch.bfloat16)
        server = model(of, invariant=True)
        q, k, v = (
            torch.randn(20, n, 64, generator=torch.Generator().manual_seed(n)) for n in (4, 2, 2)
        )
        rows, first = [], 0
        for n in parts:
            step = of.step({"a": n} if first else {"a": n, "b": 2})
            for own, fixed in ((step.q, q), (step.k, k), (step.v, v)):
                own[:n] = fixed[first : first + n]
            rows.append(server.run(step)[:n])
            first += n
        told.append(torch.cat(rows))
    assert torch.equal(told[0], told[1]) and torch.equal(told[0], told[2])


class Masks:
    """What requests of a step see, by their number in the batch, for the oracle."""

    def __init__(self, *images, free=()):
        self.images, self.free = images, torch.tensor(free or [0] * 8)

    def __call__(self, b, h, q, kv):
        found = (q >= kv) | (self.free[b] > 0)
        for number, first, last in self.images:
            mine = b == number
            found = found | (mine & (first <= q) & (q <= last) & (first <= kv) & (kv <= last))
        return found


def test_rows_of_an_image_see_each_other(model):
    """Gemma 3 and PaliGemma: a prompt's image is seen whole, in any chunk that holds it."""
    of = Requests()
    server = model(of, about={"images": True}, version="0.26.0")
    step = of.step({"a": 3, "b": 21})
    out = server.run(step, mm_req_doc_ranges={0: [], 1: [(2, 6), (17, 20)]})
    assert_right((out, None), step.each, mask_mod=Masks((1, 2, 6), (1, 17, 20)))
    step = of.step({"b": 12, "a": 1})
    out = server.run(step, mm_req_doc_ranges={0: [(2, 6), (23, 30)], 1: []})
    assert_right((out, None), step.each, mask_mod=Masks((0, 23, 30)))
    step = of.step({"a": 1, "b": 1})
    out = server.run(step, mm_req_doc_ranges={})
    assert_right((out, None), step.each, mask_mod=causal)
    plans = server.impl._ready[1]
    assert plans.chunks.form.mask != plans.spans.form.mask, "text alone keeps the causal mask"
    step = of.step({"a": 3, "c": 2})
    metadata = server.builder.build_for_cudagraph_capture(vllm.common(step))
    assert_right((server.run(step, metadata), None), step.each, mask_mod=causal)


def test_requests_that_say_whether_they_are_causal(model):
    of = Requests()
    server = model(of, about={"free": True})
    for tokens, flags in (({"a": 7, "b": 5}, [0, 1]), ({"b": 3, "a": 18}, [0, 1])):
        step = of.step(tokens)
        out = server.run(step, causal=torch.tensor(flags, dtype=torch.int32))
        assert_right((out, None), step.each, mask_mod=Masks(free=[1 - each for each in flags]))
    step = of.step({"a": 4})
    assert_right((server.run(step, causal=False), None), step.each, mask_mod=Masks(free=[1]))
    step = of.step({"b": 2})
    assert_right((server.run(step), None), step.each, mask_mod=causal)


@pytest.mark.parametrize("window", [None, 4])
def test_an_encoder_reads_what_its_call_brings(model, window):
    """BERT and ModernBERT: no cache; each row sees its request, or both sides of its window."""
    of = Requests()
    kind = vllm.AttentionType.ENCODER_ONLY
    server = model(of, kind=kind, sliding_window=window, kv_cache_dtype="fp8")
    near = None if window is None else lambda b, h, q, kv: (q - kv).abs() < window
    for tokens in ({"a": 9, "b": 20}, {"c": 1, "d": 13}):
        step = of.step(tokens)
        server.cache = torch.tensor([])
        out = server.run(step, causal=False)
        assert_right((out, None), step.each, mask_mod=near)


def test_a_decoder_that_reads_an_encoders_keys(model):
    """Whisper: keys of 19 frames are written once, and read by rows that are fewer or more."""
    of = Requests()
    server = model(of, kind=vllm.AttentionType.ENCODER_DECODER)
    frames = of.step({"a": 19, "b": 3})
    server.impl.do_kv_cache_update(server.layer, frames.k, frames.v, server.cache, frames.slots)
    for rows in ([4, 5], [1, 1]):
        q = torch.randn(sum(rows), 4, 16)
        ends = torch.tensor([0, rows[0], sum(rows)], dtype=torch.int32)
        metadata = vllm.common(frames, causal=False)
        metadata.query_start_loc, metadata.query_start_loc_cpu = ends, ends
        metadata.num_actual_tokens, metadata.max_query_len = sum(rows), max(rows)
        out = torch.full_like(q, torch.nan)
        built = server.builder.build(0, metadata)
        server.impl.forward(server.layer, q, None, None, server.cache, built, out)
        each = frames.each
        assert_right((out, None), replace(each, q=q, q_lens=rows))


def test_a_layer_that_reads_anothers_cache(model):
    """vLLM binds the other's tensor, and calls no update; its builder may not list the layer."""
    of = Requests()
    server = model(of)
    step = of.step({"a": 21, "b": 5})
    wanted = server.run(step)
    other = vllm.Model.__new__(vllm.Model)
    other.__dict__ |= server.__dict__
    other.impl = type(server.impl)(4, 16, 0.25, 2, kv_sharing_target_layer_name="model.layers.3")
    metadata, out = server.builder.build(0, vllm.common(step)), torch.full_like(step.q, torch.nan)
    other.impl.forward(server.layer, step.q, None, None, server.cache, metadata, out)
    assert torch.equal(out, wanted) and other.impl.plans is server.impl.plans


def test_a_page_that_was_guessed_does_not_replace_the_right_one(model):
    """vLLM runs forwards without metadata again when its cache is there, whose page is another."""
    of = Requests()
    server = model(of, block=64)
    for tokens in ({"a": 21, "b": 5}, {"a": 1, "b": 1}):
        step = of.step(tokens)
        assert_right((server.run(step), None), step.each, mask_mod=causal)
        server.warm(of)


def test_a_plan_is_told_how_many_rows_each_request_has_at_least(model):
    """Chunks alone need no kernel of decodes; a graph serves other batches too."""
    of = Requests()
    server = model(of)
    for tokens, least in (({"a": 21, "b": 5}, 5), ({"a": 1, "b": 9}, 1), ({"a": 1, "b": 1}, 0)):
        common = vllm.common(of.step(tokens))
        assert server.builder.build(0, common).least_q == least
        assert server.builder.build_for_cudagraph_capture(common).least_q == 0


def test_the_cache_is_written_by_one_kernel(model, monkeypatch):
    """Nothing of torch's indexing: it took five times as long."""
    of = Requests()
    server, step = model(of), of.step({"a": 21, "b": 5})
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        server.impl.do_kv_cache_update(server.layer, step.k, step.v, server.cache, step.slots)
    called = {each.name for each in profile.events()}
    assert not {name for name in called if "index" in name or "scatter" in name or "where" in name}


def test_kernels_that_compile_while_weights_are_read_are_those_of_the_plans(monkeypatch):
    begun, ours = [], plans.Plans()
    monkeypatch.setattr(plans, "_compile", lambda *given: begun.append(given))
    monkeypatch.setattr(plans, "usable", lambda device: device)
    maxima = {"batch": 4, "kv_len": 128, "batch_invariant": None}
    about = {"page_size": 16, "softcap": 2.0, "slopes": SLOPES, "window": 9, "scale": 0.2}
    layer = plans.Layer((4, 2), (16, 16), torch.float32, torch.device("cpu"), **about)
    elsewhere = replace(layer, device=torch.device("cuda", 0))
    monkeypatch.setattr(plans.Layer, "score_mod", lambda self, own: softcap(self.softcap))
    for _ in range(2):
        ours.begin(layer, 40, **maxima)
        ours.begin(elsewhere, 40, **maxima)
    single, chunks, spans, _ = ours.of(layer, 40, **maxima)
    assert spans is chunks
    # The longest first.
    assert [problem for problem, _ in begun] == [chunks.problem, single.problem]
    assert {where for _, where in begun} == {elsewhere.device} and ours._threads is None
