"""Under torch.compile on a GPU: values, gradients, compiles, and CUDA graphs, against eager."""

import random

import pytest
import torch
from torch.nn.attention.flex_attention import AuxRequest, flex_attention as torch_flex_attention

import flexattn
from bench import training_step
from flexattn.block_mask.lists import lists_pending
from flexattn.catalogue import causal
from flexattn.reference import Precision, attention
from flexattn.verify.gate import judge
from tests.cases import CASES
from tests.compiled import compiling, gpt, nodes
from tests.support import block_mask, inputs, sinks

LAYERS = 12


@pytest.fixture
def inductor(monkeypatch):
    with compiling(monkeypatch) as found:
        yield found


def tensors(L=333, S=333, dtype=torch.bfloat16, **more):
    return inputs(2, 8, 2, L, S, 64, dtype=dtype, device="cuda", **more)


# Each compiles for seconds; tests/unit/mods/test_mods_graph.py reads all of them.
@pytest.mark.parametrize("case", CASES[::3], ids=str)
def test_the_catalogue_gives_what_eager_calls_give(inductor, case):
    """Bit for bit: the same kernel, of the same record."""
    q, k, v = tensors()
    built = case.make(2, 8, 2, 333, 333, "cuda", torch.bfloat16)
    mask = block_mask(built.mask_mod, q, k)

    def layer(q, k, v):
        return flexattn.flex_attention(q, k, v, built.score_mod, mask, enable_gqa=True)

    with torch.no_grad():
        got, wanted = inductor.compile(layer)(q, k, v), layer(q, k, v)
    assert len(inductor.called) == 1
    assert torch.equal(got, wanted)


def test_statistics_are_natural_logarithms(inductor):
    q, k, v = tensors()
    asked = AuxRequest(lse=True, max_scores=True)

    def layer(q, k, v):
        return flexattn.flex_attention(q, k, v, enable_gqa=True, return_aux=asked)

    with torch.no_grad():
        got, wanted = inductor.compile(layer)(q, k, v), layer(q, k, v)
    assert torch.equal(got[0], wanted[0])
    for one, other in zip(got[1], wanted[1], strict=True):
        torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-5)


@pytest.mark.parametrize("lengths", [(1, 1000), (333, 333), (4096, 4096)], ids=str)
def test_decode_and_prefill_with_sinks(inductor, lengths):
    q, k, v = tensors(*lengths)
    logits = sinks(8, device="cuda")

    def layer(q, k, v):
        return flexattn.flex_attention(q, k, v, enable_gqa=True, sinks=logits)

    with torch.no_grad():
        got = inductor.compile(layer)(q, k, v)
        exact, rounded = (
            attention(q, k, v, sinks=logits, precision=each)
            for each in (Precision.ORACLE, Precision.ROUNDED)
        )
    triples = [(x, None, None) for x in (got, exact.out, rounded.out)]
    verdict = judge(*triples, q.dtype)
    assert verdict.passed, verdict.message()


def documents(length):
    ids = torch.arange(length, device="cuda") // 150

    def same_document(b, h, q_idx, kv_idx):
        return (ids[q_idx] == ids[kv_idx]) & (q_idx >= kv_idx)

    return flexattn.create_block_mask(same_document, None, None, length, length, "cuda")


@pytest.mark.parametrize("amp", [False, True], ids=["float32", "amp"])
@pytest.mark.parametrize("dynamic", [None, True], ids=["automatic", "dynamic"])
def test_a_gpt_trains_in_one_graph(inductor, monkeypatch, dynamic, amp):
    """Forward and backward, three lengths, at most two compiles; gradients as in eager mode.

    torch 2.13 refuses a Python float that may change in more than one node of a graph.
    """
    monkeypatch.setattr(torch._dynamo.config, "specialize_float", True)
    weights = [0.05 * torch.randn(256, 768, device="cuda") for _ in range(LAYERS)]
    weights = [x.requires_grad_() for x in weights]
    model = inductor.compile(gpt, dynamic=dynamic)

    def gradients(call, x, mask):
        with torch.autocast("cuda", torch.bfloat16, enabled=amp):
            loss = (call(x, weights, mask, 20.0, 64).float() ** 2).mean()
        return torch.autograd.grad(loss, weights)

    for length in (512, 640, 768, 640):
        x, mask = torch.randn(2, length, 256, device="cuda"), documents(length)
        mine, eager = gradients(model, x, mask), gradients(gpt, x, mask)
        for got, wanted in zip(mine, eager, strict=True):
            error = (got - wanted).norm() / wanted.norm()
            assert error < (5e-2 if amp else 1e-2), error
        assert inductor.counter.frame_count <= 2
    assert set(nodes(inductor.counter)) == {LAYERS}
    assert len(inductor.called) == len(inductor.differentiated) == 4 * LAYERS


@pytest.mark.parametrize("options", [{}, {"BACKEND": "TRITON"}], ids=["chosen", "triton"])
@pytest.mark.parametrize("group", [1, 4])
def test_gradients_of_a_product_that_is_split(inductor, group, options):
    """By kernels that store through descriptors and through pointers, as eager calls' are."""
    widths = [1024, 1024 // group, 1024 // group]
    x = torch.randn(2, 1000, 256, device="cuda", dtype=torch.bfloat16)
    weight = (0.05 * torch.randn(256, sum(widths), device="cuda")).bfloat16().requires_grad_()

    def layer(x, weight, mask):
        parts = (x @ weight).split(widths, -1)
        q, k, v = (each.unflatten(-1, (-1, 128)).transpose(1, 2) for each in parts)
        out = flexattn.flex_attention(
            q, k, v, block_mask=mask, enable_gqa=True, kernel_options=options
        )
        return out.float().square().mean()

    mask = documents(1000)
    mine, eager = (
        torch.autograd.grad(call(x, weight, mask), weight)[0].float()
        for call in (inductor.compile(layer), layer)
    )
    assert (mine - eager).norm() < 1e-2 * eager.norm()


def test_a_block_of_the_bench_copies_nothing_for_its_attention(inductor):
    """No output is laid out anew, and no list of its mask is made.

    Inductor alone copies: it gathers the gradients of q, k and v for their one projection.
    """
    documents = training_step.TrainingRow("packs", batch=2, length=1024, mean=300)
    attend, mask = training_step.attends(documents, "cuda")[training_step.OURS]()
    block = training_step.GPT(1, attend).to("cuda", torch.bfloat16).blocks[0]
    x, grad = torch.randn(2, 2, 1024, training_step.WIDTH, device="cuda", dtype=torch.bfloat16)
    leaves = [x.requires_grad_(), *block.parameters()]

    def gradients(call):
        return torch.autograd.grad(call(x, mask), leaves, grad)

    eager, model = gradients(block), inductor.compile(block)
    for _ in range(2):
        mine = gradients(model)
    for got, wanted in zip(mine, eager, strict=True):
        assert (got - wanted).float().norm() < 2e-2 * wanted.float().norm()
    kernels = training_step.kernels(lambda: gradients(model))
    copies = "CatArray", "direct_copy", "clone", "sort", "index_put", "scatter"
    copied = [name for name in kernels if any(copy in name for copy in copies)]
    assert len(copied) == 1 and "select_backward" in copied[0], copied
    assert lists_pending(mask) and inductor.counter.frame_count == 1


def trained(q, k, v, table, cap, mask):
    def mod(score, b, h, q_idx, kv_idx):
        return cap * torch.tanh(score / cap) + table[q_idx - kv_idx + 256]

    call = {"enable_gqa": True, "return_lse": True}
    out, lse = flexattn.flex_attention(q, k, v, mod, mask, **call)
    return out.square().sum() + lse.sum()


def leaves():
    table = torch.linspace(-1, 1, 512, device="cuda")
    return [x.requires_grad_() for x in (*tensors(256, 256, torch.float32), table)]


def assert_gradients(model, given, cap, mask):
    mine, eager = (
        torch.autograd.grad(call(*given, cap, mask), given) for call in (model, trained)
    )
    for got, wanted in zip(mine, eager, strict=True):
        assert (got - wanted).norm() / wanted.norm() < 1e-2


def test_gradients_of_captured_tensors_and_a_float_that_changes(inductor):
    """Once the float was lost on its way to a backward: PendingUnbackedSymbolNotFound."""
    model, given = inductor.compile(trained), leaves()
    mask = block_mask(causal, *given[:2])
    for cap in (5.0, 3.0, 4.0, 5.0):
        assert_gradients(model, given, cap, mask)
    assert len(inductor.called) == len(inductor.differentiated) == 4
    assert inductor.counter.frame_count <= 3


def test_torchs_backward_walks_lists_by_key_that_nobody_made(inductor):
    """Of a mod whose gradient is not its expression's: the mask has lists by query alone."""
    q, k, v, _ = leaves()
    mask = block_mask(causal, q, k)

    def layer(q, k, v):
        def mod(score, b, h, q_idx, kv_idx):
            return score + 0.1 * score.detach()

        return flexattn.flex_attention(q, k, v, mod, mask, enable_gqa=True).square().sum()

    mine = torch.autograd.grad(inductor.compile(layer)(q, k, v), (q, k, v))
    assert lists_pending(mask) and inductor.called and not inductor.differentiated
    for got, wanted in zip(mine, torch.autograd.grad(layer(q, k, v), (q, k, v)), strict=True):
        assert (got - wanted).norm() / wanted.norm() < 1e-2


def test_gradients_of_a_backend_that_leaves_torchs_nodes_alone(monkeypatch):
    with compiling(monkeypatch, "aot_eager") as found:
        model, given = found.compile(trained), leaves()
        assert_gradients(model, given, 5.0, block_mask(causal, *given[:2]))
        assert not found.differentiated and not found.called


@pytest.mark.parametrize("by_key", [True, False], ids=["by key", "pending"])
def test_training_under_cuda_graphs(monkeypatch, by_key):
    """mode="reduce-overhead": another mask of the same sizes, and weights that a step changed.

    by_key: whether masks have their lists by key, which each replay of a backward makes else.
    """
    given = leaves()
    masks = [block_mask(each, *given[:2]) for each in (causal, lambda b, h, i, j: j >= i)]
    for mask in masks:
        assert not by_key or mask.q_num_blocks is not None
    with compiling(monkeypatch) as found:
        model = torch.compile(trained, mode="reduce-overhead", fullgraph=True)
        for step in range(6):
            torch.compiler.cudagraph_mark_step_begin()
            assert_gradients(model, given, 5.0, masks[step % 2])
            with torch.no_grad():
                for x in given:
                    x.mul_(0.9)
        assert found.differentiated


def test_torchs_own_function_is_served(monkeypatch):
    """As torchtitan and transformers call it: imported by name, compiled by itself."""
    q, k, v, _ = leaves()
    mask = block_mask(causal, q, k)

    def gradients(call):
        return torch.autograd.grad(
            call(q, k, v, block_mask=mask, enable_gqa=True).square().sum(), (q, k, v)
        )

    with compiling(monkeypatch) as found:
        theirs = gradients(torch.compile(torch_flex_attention))
        assert not found.called
        with flexattn.install() as installed:
            ours = gradients(torch.compile(torch_flex_attention))
            assert len(found.called) == len(found.differentiated) == 1
            assert installed.served == {"flexattn: a node": 2}
    for got, wanted in zip(ours, theirs, strict=True):
        assert (got - wanted).norm() / wanted.norm() < 1e-2


def test_changes_of_what_a_mod_captures(inductor):
    """Values of every kind, in closures: none is ever stale.

    `python -m tests.random_mods compiled-changes` has 200, in places of every kind.
    """
    draw = random.Random(0)
    q, k, v = tensors(100, 100, torch.float32)
    values = {"cap": 2.0, "shift": 3, "add": True, "axis": "rows", "slope": torch.ones(8)}
    values["slope"] = values["slope"].cuda()
    choices = {
        "cap": lambda: draw.choice([0.5, 1.0, 7.0, 3.25]), "shift": lambda: draw.randrange(9),
        "add": lambda: draw.random() < 0.5, "axis": lambda: draw.choice(["rows", "keys"]),
        "slope": lambda: torch.randn(8, device="cuda"),
    }  # fmt: skip

    def make(cap, shift, add, axis, slope):
        def mod(score, b, h, q_idx, kv_idx):
            score = cap * torch.tanh(score / cap) + slope[h] * ((q_idx - kv_idx) // (shift + 1))
            score = score + 0.1 * q_idx if add else score
            return score * 0.5 if axis == "keys" else score

        return mod

    def layer(q, k, v, mod):
        return flexattn.flex_attention(q, k, v, mod, enable_gqa=True)

    model = inductor.compile(layer)
    with torch.no_grad(), torch._dynamo.config.patch(recompile_limit=64):
        for _ in range(40):
            name = draw.choice(list(choices))
            values[name] = choices[name]()
            mod = make(**values)
            torch.testing.assert_close(
                model(q, k, v, mod), layer(q, k, v, mod), rtol=1e-4, atol=1e-4
            )
    assert len(inductor.called) == 40


def test_a_replayed_graph_sees_captured_tensors_and_masks_that_changed_in_place(monkeypatch):
    """mode="reduce-overhead": another mask of the same sizes, another table, other inputs."""
    q, k, v = tensors(256, 256)
    table = torch.randn(8, 256, device="cuda", dtype=torch.bfloat16)
    masks = [block_mask(each, q, k) for each in (causal, lambda b, h, i, j: j >= i)]
    limit = torch.zeros((), dtype=torch.int64, device="cuda")

    def beyond(b, h, q_idx, kv_idx):
        return kv_idx - q_idx <= limit

    lists = flexattn.create_block_mask(beyond, None, None, 256, 256, "cuda")

    def layer(q, k, v, mask):
        def mod(score, b, h, q_idx, kv_idx):
            return score + table[h, kv_idx]

        return flexattn.flex_attention(q, k, v, mod, mask, enable_gqa=True)

    with torch.no_grad(), compiling(monkeypatch):
        model = torch.compile(layer, mode="reduce-overhead", fullgraph=True)
        for step in range(8):
            q.normal_()
            table.normal_()
            limit.fill_(step % 3 - 1)
            mask = [*masks, lists][step % 3]
            got = model(q, k, v, mask).clone()
            wanted = layer(q, k, v, mask)
            torch.testing.assert_close(got, wanted, rtol=2e-2, atol=2e-2)


def test_a_hand_made_cuda_graph_of_compiled_code(inductor):
    q, k, v = tensors(1, 1000)
    mask = block_mask(lambda b, h, i, j: j <= i + 700, q, k)

    def layer(q, k, v):
        return flexattn.flex_attention(q, k, v, block_mask=mask, enable_gqa=True)

    with torch.no_grad():
        model = inductor.compile(layer)
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            for _ in range(3):
                model(q, k, v)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = model(q, k, v)
        q.normal_()
        graph.replay()
        torch.cuda.synchronize()
        assert torch.equal(out, layer(q, k, v))


@pytest.mark.parametrize("name", ["Llama", "Gemma2", "GptOss"])
def test_generate_compiles_a_static_cache_without_a_break(monkeypatch, name):
    """Four layers, generate's own compile; a break would end fullgraph=True."""
    pytest.importorskip("transformers", reason="transformers is not installed")
    from transformers import CompileConfig

    from flexattn.integrations.transformers import register
    from tests.models import greedy, prompts, tiny

    register()
    sizes = {
        "hidden_size": 256, "num_attention_heads": 16, "num_key_value_heads": 2, "head_dim": 64,
        "max_position_embeddings": 1024, "num_hidden_layers": 4,
    }  # fmt: skip
    model, (ids, mask) = tiny(name, torch.float32, "cuda", **sizes), prompts("cuda", 301)
    own = greedy(model, "eager", ids, mask, 24)
    with compiling(monkeypatch):
        model.generation_config.compile_config = CompileConfig(
            fullgraph=True, mode="reduce-overhead"
        )
        for _ in range(2):
            got = greedy(model, "flexattn", ids, mask, 24, cache_implementation="static")
            assert torch.equal(got, own)


def test_a_second_cache_length_compiles_once_more(inductor):
    def layer(q, k, v, mask):
        return flexattn.flex_attention(q, k, v, block_mask=mask, enable_gqa=True)

    model = inductor.compile(layer)
    with torch.no_grad():
        for length, compiles in ((500, 1), (700, 2), (900, 2), (1100, 2)):
            q, k, v = tensors(length, length)
            mask = block_mask(causal, q, k, per_batch=False, per_head=False)
            assert torch.equal(model(q, k, v, mask), layer(q, k, v, mask))
            assert inductor.counter.frame_count == compiles
