"""lower(), lower_backward(): torch's marked nodes as ops of ours in Inductor's program.

NodeData is what Inductor has of a node, as this library reads it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from operator import is_
from typing import Any, NamedTuple

import torch
from torch._inductor import config, ir
from torch._inductor.lowering import fallback_handler, lowerings
from torch._inductor.virtualized import V

from flexattn.device import detect
from flexattn.errors import UnsupportedError
from flexattn.frontend.compiled.joint import Examples, is_followed, with_gradients
from flexattn.frontend.compiled.op import (
    ATTEND_OP,
    BACKWARD_OP,
    BY_KEY_OP,
    widened_sources,
)
from flexattn.frontend.compiled.spec import BARE, Spec, parsed, printed
from flexattn.frontend.gradients import AskedGradients, check_backward, check_order
from flexattn.kernels.choose.options import Options, parse
from flexattn.mods import Bound
from flexattn.mods.derivative import derivatives
from flexattn.mods.graph import Captured, GraphMod, read_graph
from flexattn.mods.outside import strays
from flexattn.mods.refusal import Refusal
from flexattn.problem import DTYPES, FP8
from flexattn.runtime.backward import slots_among
from flexattn.settings import current, say_once

_DEVICES = ("cuda", "cpu")
# Of a node's mask: counts and indices of blocks by query, then by key, stand behind two lengths;
# its last three entries are the block's rows, its keys, and the graph of mask_mod.
LISTS, BY_KEY, _BLOCK, _GRAPH = slice(2, 6), slice(6, 10), slice(-3, -1), -1
_POSITIONS = "b", "h", "q_idx", "kv_idx"


class NodeData(NamedTuple):
    """The data of a node of either direction, beside its tensors of rows and keys.

    captures: of the score_mod. mask_captures: of the mask_mod. tensors, integers: what the
    score_mod and the mask_mod capture.
    """

    score: GraphMod
    captures: list[Captured | None]
    mask: GraphMod | None
    mask_captures: list[Captured | None]
    block: tuple[int, int] | None
    lists: tuple[Any, ...]
    by_key: tuple[Any, ...]
    tensors: list[list[Any]]
    integers: list[list[Any]]

    @classmethod
    def read(
        cls,
        kernel_options: dict[str, Any],
        query: Any,
        subgraph: Any,
        block_mask: tuple[Any, ...],
        captures: tuple[Sequence[Any], Sequence[Any]],
        nodes: Any,
    ) -> NodeData:
        """captures: of score_mod and mask_mod, and their nodes. Raises Refusal."""
        where = query.get_device()
        if where.type not in _DEVICES:
            raise Refusal(f"is called on {where}")
        if where.type == "cuda" and query.get_dtype() not in DTYPES | FP8:
            raise Refusal(f"is called on tensors of {query.get_dtype()}")
        score, found = _read(subgraph, "score", captures[0], nodes[0], where)
        mask = block = None
        masked: list[Captured | None] = []
        lists: tuple[Any, ...] = ()
        by_key: tuple[Any, ...] = ()
        if BARE in kernel_options:
            captures = captures[0], ()
        else:
            mask, masked = _read(block_mask[_GRAPH], "mask", captures[1], nodes[1], where)
            rows, keys = map(V.graph.sizevars.guard_int, block_mask[_BLOCK])
            block = rows, keys
            lists = tuple(each for each in block_mask[LISTS] if each is not None)
            by_key = tuple(each for each in block_mask[BY_KEY] if each is not None)
        tensors = [[x for x in each if is_tensor(x)] for each in captures]
        integers = [[x for x in each if not is_tensor(x)] for each in captures]
        return cls(score, found, mask, masked, block, lists, by_key, tensors, integers)

    @property
    def reads_floats(self) -> bool:
        """True if a mod captures a Python float: Inductor's kernel has no argument for one."""
        mods = [mod for mod in (self.score, self.mask) if mod is not None]
        return any(kind == "tensor" for mod in mods for kind, _ in mod.sources)

    def strays(self, sizes: Sequence[int]) -> bool:
        """True if a mod may read outside of a tensor, of which Inductor's kernel makes an error.

        It does also where the mask removes what was read. sizes: of B, Hq, L and S.
        """
        ranges = dict(zip(_POSITIONS, ((0, size - 1) for size in sizes), strict=True))
        pairs = (self.score, self.captures), (self.mask, self.mask_captures)
        return any(
            strays(mod.mod.expr, [each for each in found if each is not None], ranges)
            for mod, found in pairs
            if mod is not None
        )


def _read(
    subgraph: Any, kind: str, captures: Sequence[Any], nodes: Sequence[Any], where: Any
) -> tuple[GraphMod, list[Captured | None]]:
    found = [_captured(each, node, where) for each, node in zip(captures, nodes, strict=True)]
    return read_graph(subgraph.graph_module, kind, found), found


def _captured(given: Any, node: Any, where: torch.device) -> Captured | None:
    """The facts of a captured tensor; None for an integer, which Inductor has as a symbol."""
    if not is_tensor(given):
        # An int, or a symbol of sympy's.
        if not isinstance(given, int) and getattr(given, "is_integer", False) is not True:
            raise Refusal(f"captures {given}, a number that changes from call to call")
        return None
    value = node.meta["val"]
    if value.dim() and value.device != where:
        raise Refusal(f"captures a tensor on {value.device}, and is called on {where}")
    fixed = all(isinstance(size, int) for size in value.shape)
    dtype = str(value.dtype).removeprefix("torch.")
    return Captured(tuple(expected_sizes(value.shape)), dtype, fixed, value.device.type == "cpu")


def is_tensor(given: Any) -> bool:
    return isinstance(given, ir.IRNode)


def expected_sizes(sizes: Sequence[Any]) -> list[int]:
    return [size if isinstance(size, int) else size.node.hint for size in sizes]


def fixed_scale(scale: Any) -> float:
    """The scale as a number: the sizes that it follows from, a head's width, are guarded."""
    if isinstance(scale, (int, float)):
        return float(scale)
    sizes = {each: V.graph.sizevars.guard_int(each) for each in scale.free_symbols}
    return float(scale.subs(sizes))


# Where a backward node has its mask, and its options.
_MASK, _OPTIONS = 9, 11
_LN_2 = math.log(2)
# The dtypes of queries that Inductor's C++ kernel supports.
_CPU_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def lower(
    query: Any,
    key: Any,
    value: Any,
    subgraph: Any,
    block_mask: tuple[Any, ...],
    scale: Any,
    kernel_options: dict[str, Any],
    score_captures: Sequence[Any],
    mask_captures: Sequence[Any],
    *,
    options: dict[str, Any],
) -> Any:
    """(out, lse, max_scores) of a node, statistics in base 2; None where torch's kernel serves.

    options: the call's own. Raises ConfigError for options that no kernel has, and
    UnsupportedError where torch's kernel would serve a call that is to be batch-invariant.
    """
    options = _options(options)
    inputs: Any = V.graph.current_node.args
    found = widened_sources((query, key, value), inputs[:3])
    narrower = any(x is not y for (x, *_), y in zip(found, (query, key, value), strict=True))
    on_cpu = not narrower and _torch_runs(query, kernel_options, options)
    try:
        node = NodeData.read(
            kernel_options, query, subgraph, block_mask, (score_captures, mask_captures),
            inputs[7:9],
        )  # fmt: skip
        if on_cpu and not node.reads_floats and not node.strays(_sizes(inputs)):
            return None
        text = printed(Spec(
            node.score, node.mask, node.block,
            kernel_options.get("OUTPUT_LOGSUMEXP", True), kernel_options.get("OUTPUT_MAX", False),
            options, _kept(node.lists),
        ))  # fmt: skip
        parsed(text)
    # Whatever cannot be read here, torch can compile.
    except Exception as why:
        if parse(options).batch_invariant:
            raise UnsupportedError(
                f"BATCH_INVARIANT under torch.compile, and a mod {why}",
                "the library's own kernels alone are batch-invariant",
                "leave BATCH_INVARIANT out of this call, or change the mod",
            ) from why
        if not on_cpu:
            said = "torch's own kernel serves a call of flexattn under torch.compile"
            say_once(f"{said}: a mod {why}")
        return None
    given = [_as_traced(x, node) for x, node, _ in found]
    out, lse, maxima = _call(ATTEND_OP, [
        *given, list(node.lists), *node.tensors, *node.integers, text, fixed_scale(scale),
        *(factor for *_, factor in found),
    ])  # fmt: skip
    return out, _times(lse, 1 / _LN_2), _times(maxima, 1 / _LN_2)


def lower_backward(
    query: Any,
    key: Any,
    value: Any,
    out: Any,
    lse: Any,
    grad_out: Any,
    grad_lse: Any,
    subgraph: Any,
    joint: Any,
    block_mask: tuple[Any, ...],
    scale: Any,
    kernel_options: dict[str, Any],
    score_captures: Sequence[Any],
    mask_captures: Sequence[Any],
    *,
    options: dict[str, Any],
) -> Any:
    """(dq, dk, dv, gradients of captures) of a node's backward; None where torch's kernel serves.

    lse and its gradient are in base 2. Raises ConfigError for a config that cannot run, and
    UnsupportedError where sums are asked to be deterministic, as an eager call does.
    """
    options = _options(options)
    inputs: Any = V.graph.current_node.args
    chosen = parse(options)
    try:
        if V.graph.cpp_wrapper:
            raise Refusal("is called from Inductor's cpp_wrapper, to which no op returns a list")
        node = NodeData.read(
            kernel_options, query, subgraph, block_mask, (score_captures, mask_captures),
            inputs[12:],
        )  # fmt: skip
        wanted = with_gradients(joint.graph_module)
        examples = Examples(node.captures)
        bound = examples.bound(node.score)
        if not is_followed(subgraph.graph_module):
            raise Refusal("detaches something, or has an autograd Function with its own gradient")
        asked = _asked(bound, [examples.all[i] for i in wanted], chosen)
        derivatives(bound.mod, asked.slots)  # raises where there is none
        if not chosen.backward:
            _check(asked, inputs)
        tensors = [i for i, each in enumerate(node.captures) if each is not None]
        places = [tensors.index(i) for i in wanted]
        text = printed(Spec(
            node.score, node.mask, node.block, False, False, options, not config.triton.cudagraphs,
            True, tuple(places),
        ))  # fmt: skip
        parsed(text)
    except Exception as why:
        say_once(
            f"torch's own backward serves a call of flexattn under torch.compile: a mod {why}"
        )
        return None
    check_order(asked)
    if chosen.backward:
        _check(asked, inputs)
    given = [*map(_as_traced, (query, key, value, out), inputs), _times(lse, _LN_2)]
    given += [grad_out, None if grad_lse is None else _times(grad_lse, 1 / _LN_2)]
    by_key = [] if _unmade(inputs[_MASK]) else list(node.by_key)
    given += [list(node.lists), by_key, *node.tensors, *node.integers, text, fixed_scale(scale)]
    *found, captured = _call(BACKWARD_OP, given)
    by_place = dict(zip(wanted, captured, strict=True))
    return (*found, tuple(map(by_place.get, range(len(score_captures)))))


def with_lists_by_key(args: Sequence[Any]) -> Sequence[Any]:
    """A marked backward's arguments, with lists by key where there are none: torch reads them."""
    traced: Any = V.graph.current_node.args
    mask = args[_MASK]
    if BARE in traced[_OPTIONS] or not _unmade(traced[_MASK]):
        return args
    num, idx, *full = mask[LISTS]
    made = [*_call(BY_KEY_OP, [num, idx])]
    made += full if full[0] is None else _call(BY_KEY_OP, full)
    mask = *mask[: BY_KEY.start], *made, *mask[BY_KEY.stop :]
    return *args[:_MASK], mask, *args[_MASK + 1 :]


def _torch_runs(query: Any, kernel_options: dict[str, Any], options: dict[str, Any]) -> bool:
    """True if Inductor's C++ kernel serves a node on a CPU, where ours is plain torch.

    Not where statistics are asked, which it has none of, and not where what mods read is checked.
    """
    settings = current()
    if query.get_device().type != "cpu" or query.get_dtype() not in _CPU_DTYPES:
        return False
    if settings.interpret or settings.check or parse(options).batch_invariant:
        return False
    asked = kernel_options.get("OUTPUT_LOGSUMEXP", True) or kernel_options.get("OUTPUT_MAX", False)
    try:
        from torch._inductor.kernel.flex.flex_cpu import check_cpu_supported
    except ImportError:  # a torch that has moved it
        return False
    return not asked and bool(check_cpu_supported())


def _unmade(block_mask: Any) -> bool:
    """True if a node has its lists by query in the place of lists by key, as `node` makes it."""
    return all(map(is_, block_mask[LISTS], block_mask[BY_KEY]))


def _call(op: Any, given: Sequence[Any]) -> Any:
    return fallback_handler(op, add_to_fallback_set=False)(*given)


def _asked(bound: Bound, wanted: Sequence[Any], chosen: Options) -> AskedGradients:
    """A backward's request, of examples; its mask makes no difference to what can run."""
    return AskedGradients(bound, None, None, 1.0, chosen, slots_among(bound.tensors, wanted))


def _check(asked: AskedGradients, inputs: Any) -> None:
    """Raises, as an eager call does, if there is no kernel for these gradients."""
    given = [node.meta["val"] for node in inputs[:3]]
    q, k, v = (torch.empty(expected_sizes(x.shape), dtype=x.dtype, device="meta") for x in given)
    check_backward(asked, (q, k, v), None, detect(torch.device(given[0].device)))


def _sizes(inputs: Any) -> list[int]:
    q, k = (node.meta["val"] for node in inputs[:2])
    return expected_sizes((*q.shape[:3], k.shape[2]))


def _options(given: dict[str, Any]) -> dict[str, Any]:
    """A call's own options, that are known to be such; raises ConfigError."""
    found = {name: _number(value) for name, value in given.items()}
    parse(found)
    return found


def _number(given: Any) -> Any:
    """An option, whose value the graph is made for."""
    plain = given is None or isinstance(given, (bool, int, float, str))
    return given if plain else V.graph.sizevars.guard_int(given)


def _kept(lists: Sequence[Any]) -> bool:
    """True if lists are inputs of the graph that nothing but torch's operations writes to."""
    if config.triton.cudagraphs:
        return False
    inner = [getattr(getattr(each, "data", None), "data", None) for each in lists]
    return all(
        isinstance(each, ir.InputBuffer) and each.get_name() not in V.graph.mutated_inputs
        for each in inner
    )


def _as_traced(given: Any, node: torch.fx.Node) -> Any:
    """An input in the order of dimensions that it has in eager mode, as it was traced."""
    strides = node.meta["val"].stride()
    return ir.ExternKernel.require_stride_order(given, ir.get_stride_order(strides))


def _times(statistic: Any, factor: float) -> Any:
    return lowerings[torch.ops.aten.mul.Tensor](statistic, factor)
