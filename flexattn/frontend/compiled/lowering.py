"""lower(): torch's marked node as one op of ours in Inductor's program."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch._inductor import config, ir
from torch._inductor.lowering import fallback_handler, lowerings
from torch._inductor.virtualized import V

from flexattn.frontend.compiled.mark import BARE
from flexattn.frontend.compiled.op import NAME
from flexattn.frontend.compiled.spec import Spec, parsed, printed
from flexattn.kernels.choose.options import parse
from flexattn.mods.graph import Captured, GraphMod, read_graph
from flexattn.mods.refusal import Refusal
from flexattn.settings import say_once

_DEVICES = ("cuda", "cpu")
# Of a node's mask: counts and indices of blocks by query stand behind two lengths; its last three
# entries are the block's rows, its keys, and the graph of mask_mod.
_LISTS, _BLOCK, _GRAPH = slice(2, 6), slice(-3, -1), -1


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

    options: the call's own. Raises ConfigError for options that no kernel has.
    """
    options = {name: _number(value) for name, value in options.items()}
    parse(options)
    inputs: Any = V.graph.current_node.args
    try:
        lists, mask, block = (), None, None
        if BARE not in kernel_options:
            lists = tuple(each for each in block_mask[_LISTS] if each is not None)
            block = tuple(map(V.graph.sizevars.guard_int, block_mask[_BLOCK]))
            mask = _read(block_mask[_GRAPH], "mask", mask_captures, inputs[8])
        if query.get_device().type not in _DEVICES:
            raise Refusal(f"is called on {query.get_device()}")
        spec = Spec(
            _read(subgraph, "score", score_captures, inputs[7]), mask, block,  # type: ignore[arg-type]
            kernel_options.get("OUTPUT_LOGSUMEXP", True), kernel_options.get("OUTPUT_MAX", False),
            options, _kept(lists),
        )  # fmt: skip
        text = printed(spec)
        parsed(text)
    # Whatever cannot be read here, torch can compile.
    except Exception as why:
        say_once(f"torch's own kernel serves a call of flexattn under torch.compile: a mod {why}")
        return None
    query, key, value = map(_as_traced, (query, key, value), inputs)
    tensors = [[x for x in each if _is_tensor(x)] for each in (score_captures, mask_captures)]
    integers = [[x for x in each if not _is_tensor(x)] for each in (score_captures, mask_captures)]
    if mask is None:
        tensors[1], integers[1] = [], []
    attend = fallback_handler(_op(), add_to_fallback_set=False)
    out, lse, maxima = attend(
        query, key, value, list(lists), *tensors, *integers, text, float(scale)
    )
    return out, _in_base_2(lse), _in_base_2(maxima)


def _op() -> Any:
    namespace, name = NAME.split("::")
    return getattr(getattr(torch.ops, namespace), name).default


def _read(subgraph: Any, kind: str, captures: Sequence[Any], nodes: Sequence[Any]) -> GraphMod:
    found = [_captured(each, node) for each, node in zip(captures, nodes, strict=True)]
    return read_graph(subgraph.graph_module, kind, found)


def _captured(given: Any, node: Any) -> Captured | None:
    """What is known of a captured tensor; None for an integer, which Inductor has as a symbol."""
    if not _is_tensor(given):
        # An int, or a symbol of sympy's.
        if not isinstance(given, int) and getattr(given, "is_integer", False) is not True:
            raise Refusal(f"captures {given}, a number that changes from call to call")
        return None
    value = node.meta["val"]
    fixed = all(isinstance(size, int) for size in value.shape)
    shape = tuple(size if isinstance(size, int) else size.node.hint for size in value.shape)
    dtype = str(value.dtype).removeprefix("torch.")
    return Captured(shape, dtype, fixed, value.device.type == "cpu")


def _is_tensor(given: Any) -> bool:
    return isinstance(given, ir.IRNode)


def _number(given: Any) -> Any:
    """An option, whose value the graph is made for."""
    plain = given is None or isinstance(given, (bool, int, float, str))
    return given if plain else V.graph.sizevars.guard_int(given)


def _kept(lists: Sequence[Any]) -> bool:
    """Whether lists are inputs of the graph that nothing but torch's operations writes to."""
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


def _in_base_2(statistic: Any) -> Any:
    return lowerings[torch.ops.aten.mul.Tensor](statistic, 1 / math.log(2))
