"""What a mod captures is changed between calls of compiled code: the next call has it.

The cases of `changes`, in the places that Dynamo guards, by torch.compile against the CPU's plain
torch. Dynamo's guards decide what is compiled again; what Inductor makes of a node is the op.
"""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any

import pytest
import torch

import flexattn
from flexattn.reference import attention
from tests.compiled import compiling
from tests.random_mods.changes import SIZES, Changing, changing, restored
from tests.random_mods.outcomes import Outcome, Task, outcome
from tests.random_mods.places import PLACES

# Numbers, texts and flags in closures, globals, defaults, containers and attributes; tensors.
NAMES = (
    "global", "type of a number", "cell", "keyword", "list", "dict", "key of a dict", "text",
    "flag", "attribute", "attribute of what is handed on", "dataclass", "namespace", "module",
    "global of a helper", "default of a helper", "cell of a helper", "partial", "tensor",
    "tensor without dimensions", "size", "attribute of a class",
)  # fmt: skip
GUARDED = tuple(each for each in PLACES if each.name in NAMES)


def case_of(seed: int, index: int) -> Changing:
    """The case of this name. Every place is used before one is used again."""
    return changing(seed, index, GUARDED)


def check(seed: int, index: int, backend: str, most: int | None = None) -> str:
    """Hold every call of a case to plain torch; how many of its changes made a difference.

    most: of its changes, where not all are made.
    Raises AssertionError with the step that left a stale number.
    """
    case = case_of(seed, index)
    code = compile(case.source, f"<changing {index}>", "exec")
    # Dynamo looks a function's globals up in its module.
    module = ModuleType(f"changing_{index}")
    scope = module.__dict__
    many = torch._dynamo.config.patch(recompile_limit=64)
    with restored(), pytest.MonkeyPatch.context() as patch, many, torch.no_grad():
        patch.setitem(sys.modules, module.__name__, module)
        exec(code, scope)
        calls = _Calls(scope["mod"], case.kind)
        with compiling(patch, backend) as found:
            model = torch.compile(_layer, backend=found.counter)
            told, before = 0, None
            for step in ("", *case.steps[:most]):
                exec(step, scope)
                after = calls.wanted()
                got = model(*calls.inputs, *calls.given())
                close = torch.allclose(got, after, rtol=1e-3, atol=1e-3)
                assert close, f"a stale number after {step!r}"
                told += before is not None and not torch.equal(before, after)
                before = after
            graphs = len(found.counter.graphs)
    return f"{told} of {len(case.steps[:most])} changes made a difference; {graphs} graphs"


def _layer(q: Any, k: Any, v: Any, score_mod: Any, block_mask: Any) -> Any:
    return flexattn.flex_attention(q, k, v, score_mod, block_mask)


class _Calls:
    """The arguments of calls of one mod, and what they give."""

    def __init__(self, fn: Any, kind: str) -> None:
        self.fn, self.kind = fn, kind
        draw = torch.Generator().manual_seed(0)
        B, H, L, S = SIZES
        self.inputs = [torch.randn(B, H, n, 8, generator=draw) for n in (L, S, S)]

    def given(self) -> tuple[Any, Any]:
        """score_mod and block_mask; a mask's lists are of what its mod captures now."""
        if self.kind == "score":
            return self.fn, None
        B, H, L, S = SIZES
        return None, flexattn.create_block_mask(self.fn, B, H, L, S, "cpu", 16)

    def wanted(self) -> torch.Tensor:
        """The same of the callable as it is now."""
        score_mod, block_mask = self.given()
        return attention(*self.inputs, score_mod=score_mod, block_mask=block_mask).out


def changed(task: Task) -> Outcome:
    """The outcome of one case."""
    named = task.seed, task.index
    return outcome(task, case_of(*named), lambda: check(*named, "inductor"))
