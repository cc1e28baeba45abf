"""How a node of a compiled graph becomes our op: the seam, the lowering, and the op by itself."""

import logging
import types
import weakref
from functools import partial

import pytest
import torch
from torch._inductor import ir
from torch._inductor.virtualized import V
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.attention.flex_attention import AuxRequest

import flexattn
from flexattn.block_mask.lists import lists_pending
from flexattn.catalogue import causal
from flexattn.errors import ConfigError
from flexattn.frontend.call import Call
from flexattn.frontend.compiled import (
    lowering,
    node,
    op,
    spec,
)  # fmt: skip
from flexattn.frontend.install import served
from flexattn.mods import bind
from flexattn.mods.graph import GraphMod
from flexattn.mods.refusal import Refusal
from flexattn.problem import mask_lists
from flexattn.problem.mask_lists import known_class, known_runs
from flexattn.runtime.key_lists import BothLists
from flexattn.settings import override
from tests.compiled import as_on_a_gpu, compiling
from tests.support import inputs, run


@pytest.fixture
def inductor(monkeypatch):
    with compiling(monkeypatch) as found:
        yield found


def test_the_seam_is_where_this_torch_has_it():
    from torch._inductor.lowering import lowerings

    assert node.open_seam() == ""
    for name in (node.NODE, node.BACKWARD_NODE):
        lowered = lowerings[getattr(torch.ops.higher_order, name)]
        assert lowered.__module__ != node.__name__ or lowered.__wrapped__
        assert lowered.__code__.co_filename == node.__file__


def test_a_moved_seam_is_said_once_and_breaks_the_graph(monkeypatch, caplog):
    from torch._inductor.lowering import lowerings

    hop = torch.ops.higher_order.flex_attention
    monkeypatch.setitem(lowerings, hop, lambda query, key, value, node: None)
    with caplog.at_level(logging.WARNING, "flexattn"):
        why, again = (node.open_seam() for _ in range(2))
    assert "query, key, value, node" in why and again == why
    assert [r.getMessage().count("break the graph") for r in caplog.records] == [1]
    monkeypatch.setattr(node, "_MOVED", why)
    q, k, v = inputs(1, 2, 2, 9, 9, 16)
    with compiling(monkeypatch, "eager"):
        got = torch.compile(flexattn.flex_attention, backend="eager")(q, k, v)
    assert torch.equal(got, flexattn.flex_attention(q, k, v))


def test_torchs_lowering_serves_what_ours_leaves_and_sees_no_key_of_ours(monkeypatch, caplog):
    served.clear()
    seen = []

    def stock(*given):
        seen.append(given)
        return "torch's"

    options = {spec.MARK: spec.VERSION, spec.own("SPLIT_KV"): 2, "BACKEND": "AUTO"}
    given = [*"qkv", "graph", (), 1.0, options, (), ()]
    assert node._ours(stock, lambda *_, options: None, 6)(*given) == "torch's"
    assert node._ours(stock, lambda *_, options: options, 6)(*given) == {"SPLIT_KV": 2}
    assert [x[6] for x in seen] == [{"BACKEND": "AUTO"}]
    assert served == {"torch: a node it was left": 1, "flexattn: a node": 1}
    # A call of torch's function is torch's where we refuse it; one of ours is refused.
    refused = {**options, spec.own("NOPE"): 1}
    with pytest.raises(ConfigError, match="NOPE"):
        node._ours(stock, lowering.lower, 6)(*given[:6], refused, (), ())
    refused[spec.INSTALLED] = True
    assert node._ours(stock, lowering.lower, 6)(*given[:6], refused, (), ()) == "torch's"
    assert seen[-1][6] == {"BACKEND": "AUTO"} and any("NOPE" in who for who in served)
    # Another's node passes as it is.
    assert node._ours(stock, None, 6)(*given[:6], {"BACKEND": "AUTO"}, (), ()) == "torch's"


class Listed:
    """A mask of two rows of blocks in tensors of our own, and what the op made of it."""

    def __init__(self, monkeypatch):
        self.lists = torch.tensor([[[1, 2]]]), torch.tensor([[[[0, 1], [0, 1]]]])
        self.lists = [x.to(torch.int32) for x in self.lists]
        self.found = []
        made = op.mask_of

        def kept(*given):
            bound, mask = made(*given)
            self.found.append((known_class(mask), known_runs(mask)))
            return bound, mask

        monkeypatch.setattr(op, "mask_of", kept)

    def call(self, looks=True):
        bound = bind(causal, "mask")
        said = spec.Spec(None, GraphMod(bound.mod, (), ()), (16, 16), False, False, {}, looks)
        q, k, v = inputs(1, 2, 2, 32, 32, 16)
        given = (q, k, v, self.lists, [], [], [], [], spec.printed(said), 0.25)
        return torch.ops.flexattn.attend(*given)[0]


def test_lists_are_looked_at_once_until_somebody_writes_to_them(monkeypatch):
    """A look waits for the device; so it is kept with the tensors, as an eager call keeps it."""
    mask, seen = Listed(monkeypatch), []
    look = mask_lists.look_at_lists
    monkeypatch.setattr(
        mask_lists, "look_at_lists", lambda *given: seen.append(given) or look(*given)
    )
    whole = [mask.call() for _ in range(3)]
    assert len(seen) == 1 and torch.equal(whole[0], whole[2])
    assert all(name != "unknown" and runs is not None for name, runs in mask.found)
    assert torch.equal(mask.found[0][1], mask.found[2][1])
    mask.lists[0].fill_(1)
    assert not torch.equal(mask.call(), whole[0])
    # As with an eager call's mask: it is read as lists from now on.
    assert len(seen) == 1 and mask.found[3] == (mask.found[0][0], None)
    # The lists have what was found, and nothing else keeps either.
    runs = weakref.ref(getattr(mask.lists[0], op._LOOK).runs)
    del mask.lists, mask.found, seen[:]
    assert runs() is None


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


def test_a_backward_takes_what_its_forward_saw(monkeypatch, inductor):
    """Autograd hands a graph the lists that it saved, which are those that the forward looked at.

    A backward looks at none itself: it cannot tell who made them. It makes the lists by key, once
    for all calls until somebody writes into those by query.
    """
    as_on_a_gpu(monkeypatch)
    found, seen = [], []
    monkeypatch.setattr(op, "route_of", lambda call: ("kernel", ""))

    def planned(call, said, mask, *rest):
        both = BothLists.of(mask)
        found.append((known_class(mask), both.by_query.runs, both.by_key))
        return torch.zeros_like(call.q), torch.zeros_like(call.k), torch.zeros_like(call.v), []

    monkeypatch.setattr(op, "_by_kernel", planned)
    mask = flexattn.create_block_mask(causal, None, None, 40, 40, "cpu", 16)
    model = inductor.compile(lambda q, k, v, m: flexattn.flex_attention(q, k, v, block_mask=m))
    look = mask_lists.look_at_lists
    monkeypatch.setattr(
        mask_lists, "look_at_lists", lambda *given: seen.append(given) or look(*given)
    )
    for _ in range(2):
        q, k, v = (x.requires_grad_() for x in inputs(1, 2, 2, 40, 40, 16))
        model(q, k, v, mask).sum().backward()
    assert len(seen) == 1 and len(found) == 2
    (name, runs, by_key), again = found
    assert name == again[0] != "unknown" and runs is not None and by_key.runs is not None
    assert again[2].kv_num is by_key.kv_num and again[2].runs is by_key.runs
    mask.kv_num_blocks.fill_(1)
    for _ in range(2):
        model(q, k, v, mask).sum().backward()
    (_, runs, by_key), again = found[2:]
    assert runs is None and by_key.runs is None and again[2].kv_num is by_key.kv_num
    assert inductor.counter.frame_count == 1 and lists_pending(mask)


def test_torchs_backward_is_given_lists_by_key_that_nobody_made(monkeypatch, inductor):
    """Those by query stood for them: its kernel would walk them as queries of each key."""
    from torch._inductor.lowering import lowerings

    as_on_a_gpu(monkeypatch)
    hop, taken = torch.ops.higher_order.flex_attention_backward, []

    def stock(*given):
        taken.extend(given[9][6:10])
        raise Read

    monkeypatch.setattr(lowering, "is_followed", lambda graph: False)
    monkeypatch.setitem(
        lowerings, hop, node._ours(stock, lowering.lower_backward, 11, lowering.with_lists_by_key)
    )
    mask = flexattn.create_block_mask(causal, None, None, 40, 40, "cpu", 16)
    q, k, v = (x.requires_grad_() for x in inputs(1, 2, 2, 40, 40, 16))
    with pytest.raises(Read), torch._functorch.config.patch(force_non_lazy_backward_lowering=True):
        inductor.compile(flexattn.flex_attention)(q, k, v, None, mask)
    assert lists_pending(mask)
    num, idx, full_num, full_idx = ([*map(int, x.get_size())] for x in taken)
    assert num == full_num == [1, 1, 3] and idx == full_idx == [1, 1, 3, 3]
    assert all("lists_by_key" in str(x.data.data.inputs[0].op_overload) for x in taken)


def test_lists_by_key_as_an_op():
    mask = flexattn.create_block_mask(causal, None, None, 40, 60, "cpu", 16)
    given = mask.kv_num_blocks, mask.kv_indices
    found = torch.ops.flexattn.lists_by_key(*given)
    assert all(map(torch.equal, found, (mask.q_num_blocks, mask.q_indices)))
    with FakeTensorMode(allow_non_fake_inputs=True):
        fake = torch.ops.flexattn.lists_by_key(*given)
    assert [(x.shape, x.dtype) for x in fake] == [(x.shape, x.dtype) for x in found]


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

    monkeypatch.setitem(lowerings, hop, node._ours(stock, lowering.lower, 6))

    def refuse(*_):
        raise Refusal("uses an operation of tomorrow")

    monkeypatch.setattr(lowering, "read_graph", refuse)
    q, k, v = inputs(1, 2, 2, 9, 9, 16)
    with caplog.at_level(logging.WARNING, "flexattn"):
        inductor.compile(flexattn.flex_attention)(q, k, v)
    assert len(taken) == 1 and not inductor.called
    assert "torch's own kernel serves" in caplog.text and "of tomorrow" in caplog.text
    # Its bits depend on the batch, which a call may have ruled out.
    invariant = partial(flexattn.flex_attention, kernel_options={"BATCH_INVARIANT": True})
    with pytest.raises(Exception, match=r"BATCH_INVARIANT under torch.compile.*of tomorrow"):
        inductor.compile(invariant)(q, k, v)
    assert len(taken) == 1


def test_a_backward_that_c_plus_plus_calls_is_left_to_torch(caplog):
    """Inductor ended the compile: its C++ wrapper takes tensors alone from an op it looks up."""
    graph = types.SimpleNamespace(cpp_wrapper=True, current_node=types.SimpleNamespace(args=()))
    with V.set_graph_handler(graph), caplog.at_level(logging.WARNING, "flexattn"):
        assert lowering.lower_backward(*[None] * 14, options={}) is None
    assert "cpp_wrapper" in caplog.text


def test_a_table_on_another_device_is_left_to_torch():
    """It was copied to the query's in every call, in silence; eager calls refuse it in words.

    torch's lowering refuses it too. A number on the CPU is read there.
    """
    given = object.__new__(ir.IRNode)
    elsewhere = types.SimpleNamespace(meta={"val": torch.empty(8, device="meta")})
    number = types.SimpleNamespace(meta={"val": torch.empty(())})
    with pytest.raises(Refusal, match="a tensor on meta, and is called on cpu"):
        lowering._captured(given, elsewhere, torch.device("cpu"))
    assert lowering._captured(given, number, torch.device("meta")).on_cpu


def test_a_graph_that_other_code_of_ours_read_is_not_taken_from_a_cache(monkeypatch, tmp_path):
    """The mark is a part of Inductor's key, and a hash of what reads graphs."""
    assert spec.VERSION == spec._version()
    with override(check=False, batch_invariant=True):
        assert spec._version() == spec.VERSION.replace("-check", "-batch_invariant")
    folder = tmp_path / "frontend" / "compiled"
    folder.mkdir(parents=True)
    monkeypatch.setattr(spec, "__file__", str(folder / "spec.py"))
    (tmp_path / "mods").mkdir()
    before = spec._version()
    (tmp_path / "mods" / "graph.py").write_text("changed = True")
    assert spec._version() != before


def test_a_node_prints_as_one_string_and_back():
    bound = bind(lambda score, b, h, q_idx, kv_idx: score * 1e-30 + q_idx, "score")
    mod = GraphMod(bound.mod, ("s[0]",), (("integer", 0),))
    said = spec.Spec(mod, None, (16, 32), True, False, {"SPLIT_KV": 2}, True)
    text = spec.printed(said)
    # torch's C++ wrapper writes it into C++ as it is, which did not compile.
    assert text.isascii() and text.isprintable() and not {'"', "\\"} & set(text)
    found = spec.parsed(text)
    assert found.score == mod
    assert (found.block, found.options, found.looks) == ((16, 32), {"SPLIT_KV": 2}, True)
    # What a graph leaves to the setting is the setting's when the graph runs.
    text = spec.printed(spec.Spec(None, None, None, True, False, {}, True))
    assert not spec.parsed(text).chosen.batch_invariant
    with override(batch_invariant=True):
        assert spec.parsed(text).chosen.batch_invariant
    assert not spec.parsed(text).chosen.batch_invariant
    assert spec.asked_statistics(Call(None, None, None)) == AuxRequest()


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
