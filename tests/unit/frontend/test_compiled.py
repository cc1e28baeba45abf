"""A call under torch.compile is one node of the graph, and launches what an eager call does."""

from functools import partial

import pytest
import torch
from torch.nn.attention.flex_attention import AuxRequest

import flexattn
from flexattn.catalogue import causal
from flexattn.errors import InputError
from flexattn.kernels.choose.options import parse
from tests.compiled import as_on_a_gpu, compiling, gpt, nodes
from tests.random_mods import compiled_changes
from tests.support import block_mask, heads_inside, inputs, sinks

LAYERS = 2


@pytest.fixture
def inductor(monkeypatch):
    with compiling(monkeypatch) as found:
        yield found


@pytest.fixture
def gpu_like(monkeypatch):
    as_on_a_gpu(monkeypatch)


def documents(length):
    ids = torch.arange(length) // 19

    def same_document(b, h, q_idx, kv_idx):
        return (ids[q_idx] == ids[kv_idx]) & (q_idx >= kv_idx)

    return flexattn.create_block_mask(same_document, None, None, length, length, "cpu", 16)


@pytest.mark.parametrize(
    "case", ["automatic", pytest.param("amp and dynamic", marks=pytest.mark.long)]
)
def test_a_gpt_trains_in_one_graph(monkeypatch, gpu_like, case):
    """A node a layer; a second length compiles once more, a third not at all.

    Of what Inductor makes of it, whose C++ takes g++ a minute, tests/gpu has the same test.
    """
    weights = [(0.1 * torch.randn(32, 96)).requires_grad_() for _ in range(LAYERS)]
    amp = case != "automatic"

    def gradients(call, x, mask):
        with torch.autocast("cpu", torch.bfloat16, enabled=amp):
            loss = call(x, weights, mask, 20.0, 16).float().square().mean()
        return torch.autograd.grad(loss, weights)

    # torch 2.13 refuses a Python float that may change in more than one node of a graph.
    constant = torch._dynamo.config.patch(specialize_float=True)
    with constant, compiling(monkeypatch, "aot_eager") as found:
        model = found.compile(gpt, dynamic=amp or None)
        for length, compiles in ((40, 1), (57, 2 - amp), (71, 2 - amp))[: 3 - amp]:
            x, mask = torch.randn(1, length, 32), documents(length)
            mine, eager = (gradients(call, x, mask) for call in (model, gpt))
            for got, wanted in zip(mine, eager, strict=True):
                assert (got - wanted).norm() < (5e-2 if amp else 1e-4) * wanted.norm()
            assert found.counter.frame_count == compiles
        assert set(nodes(found.counter)) == {LAYERS}


def masked(length=40, **more):
    q, k, v = inputs(2, 4, 2, length, length, 16, **more)
    return q, k, v, {"block_mask": block_mask(causal, q, k, 16), "enable_gqa": True}


def biased(table, score, b, h, q_idx, kv_idx):
    return torch.tanh(score) + table[h, q_idx - kv_idx + 40]


def eight_bits():
    q, k, v = inputs(1, 2, 2, 9, 9, 16)
    return q, k.to(torch.float8_e4m3fn), v.to(torch.float8_e4m3fn), {}


def all_in_eight_bits():
    q, k, v = (x.to(torch.float8_e4m3fn) for x in inputs(2, 4, 2, 9, 9, 16, Bkv=1))
    factors = {
        f"{x}_descale": torch.rand(*n) + 0.5
        for x, n in zip("qkv", [(2, 4), (1, 2), (1, 2)], strict=True)
    }
    return q, k, v, {"enable_gqa": True, **factors}


CALLS = {
    "plain": lambda: (*inputs(1, 2, 2, 5, 9, 16), {}),
    "a mask and GQA": masked,
    "bfloat16": partial(masked, dtype=torch.bfloat16),
    "float64 and captured tensors": lambda: (
        *inputs(1, 2, 2, 9, 9, 16, dtype=torch.float64),
        {"score_mod": partial(biased, torch.randn(2, 80))},
    ),
    "heads inside of rows": lambda: (
        *(heads_inside(x) for x in inputs(2, 9, 9, 2, 11, 16)), {}
    ),
    "one query": lambda: (*inputs(2, 4, 2, 1, 19, 16), {"enable_gqa": True}),
    "one batch of keys": lambda: (*inputs(3, 2, 2, 5, 9, 16, Bkv=1), {}),
    "keys in eight bits": eight_bits,
    "all in eight bits": all_in_eight_bits,
    "options of our own": lambda: (
        *inputs(1, 2, 2, 5, 9, 16), {"kernel_options": {"BACKEND": "GLUON", "SPLIT_KV": 2}}
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", CALLS)
def test_compiled_code_calls_our_op_with_what_an_eager_call_launches(inductor, name):
    """Bit for bit the same, whatever Inductor does around it; no call of torch's own kernel."""
    q, k, v, call = CALLS[name]()

    def layer(q, k, v):
        return flexattn.flex_attention(q, k, v, **call)

    got = inductor.compile(layer)(q, k, v)
    assert len(inductor.called) == 1
    wanted = layer(q, k, v)
    assert torch.equal(got, wanted) and got.stride() == wanted.stride()
    assert inductor.called[0] == parse(call.get("kernel_options"))


def test_statistics_sinks_and_autocast(monkeypatch):
    """As the graph has them around the node, whoever computes that."""
    q, k, v = inputs(1, 2, 2, 40, 40, 16)
    logits, factors = sinks(2), torch.tensor([[0.5, 2.0]])
    bits = [x.to(torch.float8_e4m3fn) for x in (q, k, v)]

    def layer(q, k, v):
        out, lse = flexattn.flex_attention(q, k, v, return_lse=True, sinks=logits)
        with torch.autocast("cpu", torch.bfloat16):
            narrow, aux = flexattn.flex_attention(
                q, k, v, lambda s, b, h, i, j: s + i / 3, return_aux=AuxRequest(lse=True)
            )
        eight = flexattn.flex_attention(*bits, q_descale=factors)
        return out, lse, narrow, aux.lse, eight

    with compiling(monkeypatch, "aot_eager") as found:
        results = zip(found.compile(layer)(q, k, v), layer(q, k, v), strict=True)
    for got, wanted in results:
        assert got.dtype == wanted.dtype
        rough = 2e-2 if got.dtype == torch.bfloat16 else 1e-5
        torch.testing.assert_close(got, wanted, rtol=rough, atol=rough)


class Box:
    def __init__(self):
        self.table = torch.linspace(-1, 1, 40)


box = Box()


def captures(kind):
    """A mod of a value, and a way to give it another one."""

    def closure(value):
        return lambda score, b, h, q_idx, kv_idx: score + value * (q_idx - kv_idx)

    def in_place(value):
        box.table.mul_(value)
        return lambda score, b, h, q_idx, kv_idx: score + box.table[kv_idx]

    return in_place if kind == "in place" else closure


CHANGES = {
    "float": [1.0, 2.0, 3.0, 0.0, -0.5],
    "int": [5, 2, 3, 4, 0, 1],
    "in place": [1.0, -2.0, 0.5],
}


@pytest.mark.parametrize("kind", CHANGES)
def test_what_a_mod_captures_is_never_stale(inductor, kind):
    """A mod that is read from its closure inside of traced code is guarded by nothing.

    So one was, in a trial of this node: a float of 1.0 that became 2.0 kept its kernel, and
    captured ints were right twice and then stale. Dynamo traces the mod of torch's own node, and
    guards all that it reads.
    """

    def layer(q, k, v, mod):
        return flexattn.flex_attention(q, k, v, mod)

    model, make = inductor.compile(layer), captures(kind)
    q, k, v = inputs(1, 2, 2, 24, 24, 16)
    for value in CHANGES[kind]:
        mod = make(value)
        wanted = layer(q, k, v, mod)
        torch.testing.assert_close(model(q, k, v, mod), wanted, rtol=1e-5, atol=1e-5)
    assert len(inductor.called) == len(CHANGES[kind])
    # torch counts a float that becomes an input twice: it starts again where it finds that out.
    assert len(inductor.counter.graphs) <= 3


def test_every_size_may_be_a_symbol(inductor):
    """A scale of symbols was no float to the op, and fake tensors looked up strides of symbols."""
    weights, model = [0.1 * torch.randn(32, 96)], inductor.compile(gpt, dynamic=True)
    with torch.no_grad(), torch._dynamo.config.patch(specialize_float=True):
        for length in (40, 57):
            call = torch.randn(1, length, 32), weights, documents(length), 20.0, 16
            torch.testing.assert_close(model(*call), gpt(*call))
    assert len(inductor.called) == 2


@pytest.mark.long
def test_random_changes():
    """`python -m tests.random_mods compiled-changes` has 200 of them, through Inductor."""
    for index in range(0, 20, 4):
        compiled_changes.check(0, index, "eager", most=3)


def gradients_of_a_layer(call, by_key=True):
    """Those of q, k, v, sinks and a captured table, through out and lse.

    by_key: whether the mask has its lists by key, which a graph makes else.
    """
    q, k, v, more = masked()
    assert not by_key or more["block_mask"].q_num_blocks is not None
    given = [x.requires_grad_() for x in (q, k, v, sinks(4), torch.linspace(-1, 1, 80))]
    out, lse = call(*given, more["block_mask"])
    return torch.autograd.grad((out * out).sum() + lse.square().sum(), given)


def layer_with_lse(q, k, v, logits, table, mask):
    def mod(score, b, h, q_idx, kv_idx):
        return 3 * torch.tanh(score) + table[q_idx - kv_idx + 40]

    return flexattn.flex_attention(
        q, k, v, mod, mask, enable_gqa=True, sinks=logits, return_lse=True
    )


@pytest.mark.parametrize("backend", ["inductor", "aot_eager"])
def test_gradients_are_an_op_of_ours(monkeypatch, gpu_like, backend):
    """Below Inductor; other backends have torch's nodes, which plain torch differentiates."""
    with compiling(monkeypatch, backend) as found:
        got = gradients_of_a_layer(found.compile(layer_with_lse), backend == "inductor")
        assert len(found.called) == len(found.differentiated) == (backend == "inductor")
    for mine, wanted in zip(got, gradients_of_a_layer(layer_with_lse), strict=True):
        torch.testing.assert_close(mine, wanted, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    "backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.long)]
)
def test_training_on_the_cpu_is_right(monkeypatch, backend):
    """torch's node has no backward there: the call is outside of the graph, as plain torch."""
    q, k, v = (x.requires_grad_() for x in inputs(1, 2, 2, 9, 9, 16))

    def layer(q, k, v):
        return flexattn.flex_attention(q, k, v, causal_score).sum()

    with compiling(monkeypatch, backend):
        got = torch.autograd.grad(torch.compile(layer, backend=backend)(q, k, v), (q, k, v))
    wanted = torch.autograd.grad(layer(q, k, v), (q, k, v))
    assert all(torch.equal(*pair) for pair in zip(got, wanted, strict=True))
    assert "no backward on the CPU" in flexattn.explain(q, k, v).breaks


def causal_score(score, b, h, q_idx, kv_idx):
    return torch.where(q_idx >= kv_idx, score, -1e4)


def mixed_up():
    q, k, v = inputs(1, 2, 2, 9, 9, 16)
    given = {"query": q.half(), "key": k.half(), "value": v.half()}
    return {**given, "scale": torch.tensor(0.5)}


def maxima():
    q, k, v = inputs(1, 2, 2, 9, 9, 16)
    return {"query": q, "key": k, "value": v, "return_aux": AuxRequest(max_scores=True)}


BREAKS = {"a scale that is a tensor": mixed_up, "max_scores": maxima}


@pytest.mark.parametrize("name", BREAKS)
def test_what_torchs_node_has_no_place_for_breaks_the_graph(monkeypatch, name):
    call = BREAKS[name]()
    found = flexattn.explain(**call)
    assert found.breaks and "breaks a graph of torch.compile: torch's node" in str(found)

    def layer():
        return flexattn.flex_attention(**call)

    with compiling(monkeypatch, "eager") as compiler:
        got = torch.compile(layer, backend="eager")()
        with pytest.raises(Exception, match=r"flexattn\.explain"):
            compiler.compile(layer)()
    wanted = layer()
    assert torch.equal(got[0], wanted[0])


def test_bad_input_is_refused_in_our_words(monkeypatch):
    q, k, v = inputs(1, 2, 2, 9, 9, 16)
    with compiling(monkeypatch) as found:
        with pytest.raises(Exception, match="ConfigError: kernel_options has 'NOPE'"):
            found.compile(flexattn.flex_attention)(q, k, v, kernel_options={"NOPE": 1})
        compiled = found.counter.frame_count
        with pytest.raises(InputError, match="same head dimension"):
            torch.compile(flexattn.flex_attention, backend=found.counter)(q, k[..., :3], v)
        # Dynamo gave it up, and compiled none of the functions that refused it.
        assert found.counter.frame_count == compiled
