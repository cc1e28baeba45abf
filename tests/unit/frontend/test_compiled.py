"""A call under torch.compile is one node of the graph, and launches what an eager call does."""

import logging
import random
from functools import partial

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.attention.flex_attention import AuxRequest

import flexattn
from flexattn.catalogue import causal
from flexattn.errors import InputError
from flexattn.frontend.call import Call
from flexattn.frontend.compiled import lowering, mark, node, op, rules, seam, spec
from flexattn.kernels.choose.options import parse
from flexattn.mods import bind
from flexattn.mods.graph import GraphMod
from flexattn.mods.refusal import Refusal
from flexattn.problem import mask_class
from flexattn.problem.mask_class import known_class
from flexattn.problem.runs import known_runs
from flexattn.settings import say_once
from tests.compiled import compiling, nodes
from tests.support import block_mask, heads_inside, inputs, run, sinks

LAYERS = 3


@pytest.fixture
def inductor(monkeypatch):
    with compiling(monkeypatch) as found:
        yield found


@pytest.fixture
def dynamo(monkeypatch):
    with compiling(monkeypatch, "eager") as found:
        yield found


def gpt(x, weights, mask, cap):
    """A decoder with documents and soft-capping, without what is not attention."""

    def capped(score, b, h, q_idx, kv_idx):
        return cap * torch.tanh(score / cap)

    for weight in weights:
        q, k, v = ((x @ weight).view(*x.shape[:2], 3, 2, 16).permute(2, 0, 3, 1, 4)).unbind()
        out = flexattn.flex_attention(q, k, v, capped, mask)
        x = x + out.transpose(1, 2).flatten(2)
    return x


def documents(length):
    ids = torch.arange(length) // 19

    def same_document(b, h, q_idx, kv_idx):
        return (ids[q_idx] == ids[kv_idx]) & (q_idx >= kv_idx)

    return flexattn.create_block_mask(same_document, None, None, length, length, "cpu", 16)


def test_a_layer_is_a_node_and_a_third_length_compiles_nothing(dynamo):
    weights = [0.1 * torch.randn(32, 96) for _ in range(LAYERS)]
    model = dynamo.compile(gpt)
    for length, compiles in ((40, 1), (40, 1), (57, 2), (71, 2), (33, 2)):
        x = torch.randn(1, length, 32)
        mask = documents(length)
        got = model(x, weights, mask, 20.0)
        torch.testing.assert_close(got, gpt(x, weights, mask, 20.0), rtol=1e-4, atol=1e-4)
        assert dynamo.counter.frame_count == compiles
    assert nodes(dynamo.counter) == [LAYERS, LAYERS]


def masked(length=40, **more):
    q, k, v = inputs(2, 4, 2, length, length, 16, **more)
    return q, k, v, {"block_mask": block_mask(causal, q, k, 16), "enable_gqa": True}


def biased(table, score, b, h, q_idx, kv_idx):
    return torch.tanh(score) + table[h, q_idx - kv_idx + 40]


def eight_bits():
    q, k, v = inputs(1, 2, 2, 9, 9, 16)
    return q, k.to(torch.float8_e4m3fn), v.to(torch.float8_e4m3fn), {}


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
    "options of our own": lambda: (
        *inputs(1, 2, 2, 5, 9, 16), {"kernel_options": {"BACKEND": "GLUON", "SPLIT_KV": 2}}
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", CALLS)
def test_compiled_code_calls_our_op_with_what_an_eager_call_launches(inductor, name):
    """Bit for bit the same, whatever Inductor does around it; no call of torch's own kernel."""
    if CALLS[name] is eight_bits and not rules._TAKES_NARROWER:
        pytest.skip("torch's node takes keys narrower than queries from 2.13 on")
    q, k, v, call = CALLS[name]()

    def layer(q, k, v):
        return flexattn.flex_attention(q, k, v, **call)

    got = inductor.compile(layer)(q, k, v)
    assert len(inductor.called) == 1
    wanted = layer(q, k, v)
    assert torch.equal(got, wanted) and got.stride() == wanted.stride()
    assert inductor.called[0].options == parse(call.get("kernel_options"))


def test_statistics_sinks_and_autocast(monkeypatch):
    """As the graph has them around the node, whoever computes that."""
    q, k, v = inputs(1, 2, 2, 40, 40, 16)
    logits = sinks(2)

    def layer(q, k, v):
        out, lse = flexattn.flex_attention(q, k, v, return_lse=True, sinks=logits)
        with torch.autocast("cpu", torch.bfloat16):
            narrow, aux = flexattn.flex_attention(
                q, k, v, lambda s, b, h, i, j: s + i / 3, return_aux=AuxRequest(lse=True)
            )
        return out, lse, narrow, aux.lse

    with compiling(monkeypatch, "aot_eager") as found:
        results = zip(found.compile(layer)(q, k, v), layer(q, k, v), strict=True)
    for got, wanted in results:
        assert got.dtype == wanted.dtype
        rough = 2e-2 if got.dtype == torch.bfloat16 else 1e-5
        torch.testing.assert_close(got, wanted, rtol=rough, atol=rough)


def test_the_op_gives_the_statistics_that_it_is_asked():
    q, k, v = inputs(1, 2, 2, 40, 40, 16)
    wanted = run(q, k, v)
    for lse, maxima in ((True, True), (True, False), (False, True)):
        text = spec.printed(spec.Spec(None, None, None, lse, maxima, {}, True))
        given = (q, k, v, [], [], [], [], [], text, 0.25)
        got = torch.ops.flexattn.attend(*given)
        assert torch.equal(got[0], wanted.out)
        assert torch.equal(got[1], wanted.lse) if lse else not got[1].numel()
        assert torch.equal(got[2], wanted.max_scores) if maxima else not got[2].numel()
        with FakeTensorMode(allow_non_fake_inputs=True):
            fake = torch.ops.flexattn.attend(*given)
        for one, other in zip(fake, got, strict=True):
            assert (one.shape, one.stride(), one.dtype) == (
                other.shape,
                other.stride(),
                other.dtype,
            )


class Box:
    def __init__(self):
        self.number, self.table = 1.5, torch.linspace(-1, 1, 40)


box = Box()
factor = 1.0


def captures(kind):
    """A mod of a value, and a way to give it another one."""

    def closure(value):
        def mod(score, b, h, q_idx, kv_idx):
            if isinstance(value, str):
                return score + kv_idx if value == "keys" else score + q_idx
            return score * 2 + kv_idx if value is True else score + value * (q_idx - kv_idx)

        return mod

    def of_global(value):
        globals()["factor"] = value
        return lambda score, b, h, q_idx, kv_idx: score + factor * kv_idx

    def of_attribute(value):
        box.number = value
        return lambda score, b, h, q_idx, kv_idx: score + box.number * kv_idx

    def in_place(value):
        box.table.mul_(value)
        return lambda score, b, h, q_idx, kv_idx: score + box.table[kv_idx]

    def other_tensor(value):
        box.table = torch.full([40 + int(value)], value)
        return lambda score, b, h, q_idx, kv_idx: score + box.table[kv_idx]

    return {
        "global": of_global, "attribute": of_attribute, "in place": in_place,
        "another tensor": other_tensor,
    }.get(kind, closure)  # fmt: skip


CHANGES = {
    "float": [1.0, 2.0, 3.0, 0.0, -0.5],
    "int": [5, 2, 3, 4, 0, 1],
    "bool": [True, False, True],
    "str": ["keys", "rows", "keys"],
    "global": [1.0, 2.0, 3.0, 4.0],
    "attribute": [1.0, 2.0, 3.0, 4.0],
    "in place": [1.0, -2.0, 0.5],
    "another tensor": [1.0, 2.0, 3.0],
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


def test_random_changes(dynamo):
    """Several captured values at once, in any order, against eager calls."""
    draw = random.Random(0)
    q, k, v = inputs(1, 2, 2, 9, 9, 16)
    values = {"cap": 2.0, "shift": 3, "add": True, "axis": "rows"}
    choices = {
        "cap": [0.5, 1.0, 7.0], "shift": range(9), "add": [True, False], "axis": ["rows", "keys"]
    }  # fmt: skip

    def make(cap, shift, add, axis):
        def mod(score, b, h, q_idx, kv_idx):
            score = torch.tanh(score / cap) + (q_idx - kv_idx) // (shift + 1)
            score = score + q_idx if add else score
            return score * kv_idx if axis == "keys" else score

        return mod

    def layer(q, k, v, mod):
        return flexattn.flex_attention(q, k, v, mod)

    model = dynamo.compile(layer)
    with torch._dynamo.config.patch(recompile_limit=64):
        for _ in range(16):
            name = draw.choice(list(choices))
            values[name] = draw.choice(choices[name])
            mod = make(**values)
            torch.testing.assert_close(model(q, k, v, mod), layer(q, k, v, mod))


def test_gradients_run_through_torchs_backward(monkeypatch):
    """Our forward gives torch's backward the statistics that it expects, and it sees no key of
    ours, which its templates would print into a kernel."""
    import torch.nn.attention.flex_attention as torch_flex
    from torch._dynamo.backends.common import aot_autograd
    from torch._functorch.aot_autograd import make_boxed_func
    from torch._inductor.compile_fx import compile_fx_inner
    from torch._inductor.decomposition import select_decomp_table

    # torch has a backward of its node for plain torch alone on the CPU, and refuses it there.
    monkeypatch.setattr(torch_flex, "_validate_device", lambda *_: None)
    monkeypatch.setattr(node, "breaks", lambda _: "")
    options = torch_flex._apply_kernel_options

    def with_lse(*given, **named):
        return {**options(*given, **named), "OUTPUT_LOGSUMEXP": True}

    monkeypatch.setattr(torch_flex, "_apply_kernel_options", with_lse)
    backend = aot_autograd(
        fw_compiler=compile_fx_inner,
        bw_compiler=lambda graph, _: make_boxed_func(graph.forward),
        decompositions=select_decomp_table(),
    )
    table = torch.randn(80, requires_grad=True)

    def layer(q, k, v, mask):
        def mod(score, b, h, q_idx, kv_idx):
            return 3 * torch.tanh(score) + table[q_idx - kv_idx + 40]

        return flexattn.flex_attention(q, k, v, mod, mask, enable_gqa=True)

    def gradients(call):
        q, k, v, more = masked()
        given = [x.requires_grad_() for x in (q, k, v)]
        out = call(*given, more["block_mask"])
        return torch.autograd.grad((out * out).sum(), (*given, table))

    with compiling(monkeypatch, backend) as found:
        got = gradients(found.compile(layer))
        assert len(found.called) == 1
    for mine, wanted in zip(got, gradients(layer), strict=True):
        torch.testing.assert_close(mine, wanted, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
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


def all_in_eight_bits():
    given = zip(("query", "key", "value"), inputs(1, 2, 2, 9, 9, 16), strict=True)
    return {name: x.to(torch.float8_e4m3fn) for name, x in given}


def maxima():
    q, k, v = inputs(1, 2, 2, 9, 9, 16)
    return {"query": q, "key": k, "value": v, "return_aux": AuxRequest(max_scores=True)}


BREAKS = {"float8": all_in_eight_bits, "max_scores": maxima}


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


def test_the_seam_is_where_this_torch_has_it():
    from torch._inductor.lowering import lowerings

    assert seam.open_seam() == ""
    for name in (seam.NODE, seam.BACKWARD):
        lowered = lowerings[getattr(torch.ops.higher_order, name)]
        assert lowered.__module__ != seam.__name__ or lowered.__wrapped__
        assert lowered.__code__.co_filename == seam.__file__


def test_a_moved_seam_is_said_once_and_breaks_the_graph(monkeypatch, caplog):
    from torch._inductor.lowering import lowerings

    hop = torch.ops.higher_order.flex_attention
    monkeypatch.setitem(lowerings, hop, lambda query, key, value, node: None)
    say_once.cache_clear()
    with caplog.at_level(logging.WARNING, "flexattn"):
        why, again = (seam.open_seam.__wrapped__() for _ in range(2))
    assert "query, key, value, node" in why and again == why
    assert [r.getMessage().count("break the graph") for r in caplog.records] == [1]
    monkeypatch.setattr(node, "_MOVED", why)
    q, k, v = inputs(1, 2, 2, 9, 9, 16)
    with compiling(monkeypatch, "eager"):
        got = torch.compile(flexattn.flex_attention, backend="eager")(q, k, v)
    assert torch.equal(got, flexattn.flex_attention(q, k, v))


def test_torchs_lowering_serves_what_ours_leaves_and_sees_no_key_of_ours(monkeypatch, caplog):
    say_once.cache_clear()
    seen = []

    def stock(*given):
        seen.append(given)
        return "torch's"

    options = {mark.MARK: mark.VERSION, mark.own("SPLIT_KV"): 2, "BACKEND": "AUTO"}
    given = [*"qkv", "graph", (), 1.0, options, (), ()]
    assert seam._ours(stock, lambda *_, options: None)(*given) == "torch's"
    assert seam._ours(stock, lambda *_, options: options)(*given) == {"SPLIT_KV": 2}
    assert seam._unmarked(stock)(*given) == "torch's"
    assert [x[6] for x in seen] == [{"BACKEND": "AUTO"}] * 2
    # Another's node passes as it is.
    assert seam._ours(stock, None)(*given[:6], {"BACKEND": "AUTO"}, (), ()) == "torch's"


class Listed:
    """A mask of two rows of blocks in tensors of our own, and what the op made of it."""

    def __init__(self, monkeypatch):
        self.lists = torch.tensor([[[1, 2]]]), torch.tensor([[[[0, 1], [0, 1]]]])
        self.lists = [x.to(torch.int32) for x in self.lists]
        self.found = []
        made = op._mask

        def kept(*given):
            bound, mask = made(*given)
            self.found.append((known_class(mask), known_runs(mask)))
            return bound, mask

        monkeypatch.setattr(op, "_mask", kept)

    def call(self, looks=True):
        bound = bind(causal, "mask")
        said = spec.Spec(None, GraphMod(bound.mod, ()), (16, 16), False, False, {}, looks)
        q, k, v = inputs(1, 2, 2, 32, 32, 16)
        given = (q, k, v, self.lists, [], [], [], [], spec.printed(said), 0.25)
        return torch.ops.flexattn.attend(*given)[0]


def test_lists_are_looked_at_once_until_somebody_writes_to_them(monkeypatch):
    """A look waits for the device; so it is kept with the tensors, as an eager call keeps it."""
    mask, looks = Listed(monkeypatch), []
    look = mask_class.look
    monkeypatch.setattr(mask_class, "look", lambda *given: looks.append(given) or look(*given))
    whole = [mask.call() for _ in range(3)]
    assert len(looks) == 1 and torch.equal(whole[0], whole[2])
    assert all(name != "unknown" and runs is not None for name, runs in mask.found)
    assert torch.equal(mask.found[0][1], mask.found[2][1])
    mask.lists[0].fill_(1)
    assert not torch.equal(mask.call(), whole[0])
    # As with an eager call's mask: it is read as lists from now on.
    assert len(looks) == 1 and mask.found[3] == (mask.found[0][0], None)
    known = len(op._looks)
    del mask.lists, looks[:]
    assert len(op._looks) == known - 1


def test_lists_of_inference_mode_have_a_class_and_no_runs(monkeypatch):
    """They do not tell when they are written to."""
    with torch.inference_mode():
        mask = Listed(monkeypatch)
        assert torch.equal(mask.call(), mask.call())
    assert mask.found[0] == mask.found[1] and mask.found[0][0] != "unknown"
    assert mask.found[0][1] is None


def test_lists_that_generated_code_writes_are_never_looked_at(monkeypatch):
    """No version counts its writes: runs that were found before would be another mask's."""
    mask = Listed(monkeypatch)
    mask.call(looks=False)
    assert mask.found == [("unknown", None)]


class Read(BaseException):
    """Ends a compile where a node was read."""


@pytest.mark.parametrize("given", [False, True])
def test_only_lists_that_a_graph_is_given_are_looked_at(inductor, monkeypatch, given):
    """A mask that is made in the graph lies in memory that Inductor hands on to the next one."""
    sizes = (causal, None, None, 40, 40, "cpu", 16)

    def layer(q, k, v, mask):
        mask = flexattn.create_block_mask(*sizes) if mask is None else mask
        return flexattn.flex_attention(q, k, v, block_mask=mask)

    def read(said):
        raise Read(said.looks)

    monkeypatch.setattr(lowering, "printed", read)
    mask = flexattn.create_block_mask(*sizes) if given else None
    with pytest.raises(Read, match=str(given)), torch.no_grad():
        inductor.compile(layer)(*inputs(1, 2, 2, 40, 40, 16), mask)


def test_a_mod_that_no_kernel_computes_is_left_to_torch(inductor, monkeypatch, caplog):
    """torch's own lowering takes the node, and a warning says why, once."""
    from torch._inductor.lowering import lowerings

    hop = torch.ops.higher_order.flex_attention
    taken = []

    def stock(query, *rest):
        taken.append(rest)
        return query, query, query

    monkeypatch.setitem(lowerings, hop, seam._ours(stock, lowering.lower))

    def refuse(*_):
        raise Refusal("uses an operation of tomorrow")

    monkeypatch.setattr(lowering, "read_graph", refuse)
    say_once.cache_clear()
    q, k, v = inputs(1, 2, 2, 9, 9, 16)
    with caplog.at_level(logging.WARNING, "flexattn"):
        inductor.compile(flexattn.flex_attention)(q, k, v)
    assert len(taken) == 1 and not inductor.called
    assert "torch's own kernel serves" in caplog.text and "of tomorrow" in caplog.text


def test_a_graph_that_other_code_of_ours_read_is_not_taken_from_a_cache(monkeypatch, tmp_path):
    """The mark is a part of Inductor's key, and a hash of what reads graphs."""
    assert mark.VERSION == mark._version() and len(mark.VERSION) == 16
    folder = tmp_path / "frontend" / "compiled"
    folder.mkdir(parents=True)
    monkeypatch.setattr(mark, "__file__", str(folder / "mark.py"))
    (tmp_path / "mods").mkdir()
    before = mark._version()
    (tmp_path / "mods" / "graph.py").write_text("changed = True")
    assert mark._version() != before


def test_a_node_prints_as_one_string_and_back():
    bound = bind(lambda score, b, h, q_idx, kv_idx: score * 1e-30 + q_idx, "score")
    mod = GraphMod(bound.mod, (("integer", 0),))
    said = spec.Spec(mod, None, (16, 32), True, False, {"SPLIT_KV": 2}, True)
    found = spec.parsed(spec.printed(said))
    assert isinstance(found.score, GraphMod) and (found.score.mod, found.score.numbers) == (
        mod.mod,
        mod.numbers,
    )
    assert (found.block, found.options, found.looks) == ((16, 32), {"SPLIT_KV": 2}, True)
    assert rules.asked(Call(None, None, None)) == AuxRequest()
