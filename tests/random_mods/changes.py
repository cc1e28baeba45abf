"""What a mod captures is changed between calls: the next call has it, or there is a stale number.

No kernel runs. A call is what its caches are: the guards of the last call, as a repeated call
asks, and where they do not hold, bind(). What they give is held to the callable itself, run by
torch.
"""

from __future__ import annotations

import builtins
import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from flexattn.kernels.printers.torch_printer import evaluate
from flexattn.mods import Guards, bind, watch
from flexattn.mods.site import Bound
from tests.random_mods.mods import SIGNATURES, everywhere
from tests.random_mods.outcomes import Outcome, Task, outcome
from tests.random_mods.places import PLACES, PRELUDE, Place
from tests.random_mods.python_numbers import source as of_numbers

SIZES = (1, 2, 5, 7)
NAMES = ("b", "h", "q_idx", "kv_idx")
USES = {
    "score": (
        "score * {n}", "score + {n}", "torch.where(q_idx - kv_idx < {n}, score, -score)",
        "torch.tanh(score) / ({n} + 1)",
    ),
    "mask": (
        "(q_idx - kv_idx < {n} - 3)", "((q_idx * 3 + kv_idx) % 10 < {n})", "(kv_idx + {n} > 4)",
    ),
}  # fmt: skip
# What the mod itself is; a third are plain functions.
FORMS = (
    "mod = inner", "mod = inner", "mod = functools.partial(inner)",
    "class Owner:\n def run(self, {names}): return inner({names})\nmod = Owner().run",
    "class Owner:\n def __call__(self, {names}): return inner({names})\nmod = Owner()",
    "class Owner(torch.nn.Module):\n def forward(self, {names}): return inner({names})\n"
    "mod = Owner()",
)  # fmt: skip
# Of Python's numbers alone.
WHOLE_USES = {
    "score": (
        "(score if {n} > 4 else -score)", "score.clamp(max={n} / 8)", "score * min({n}, 5)",
        "score + q_idx // int({n})", "score + kv_idx % int({n})",
        "score + TABLE[(q_idx + int({n})) % 8]",
        "sum((score for _ in range(int({n}))), start=0 * score)",
    ),
    "mask": (
        "(kv_idx % int({n}) == 0)", "(q_idx >= kv_idx // int({n}))",
        "(kv_idx < 3 if {n} > 4 else kv_idx > 1)",
    ),
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Changing:
    """A mod as text, and the statements that change what it reads, one after the other.

    twins: the same code is run in two modules, which change in turn.
    """

    kind: str
    source: str
    steps: tuple[str, ...]
    twins: bool

    def __str__(self) -> str:
        shown = self.source.removeprefix(PRELUDE).strip()
        return f"{shown}\n  then {' | '.join(self.steps)}"


class Calls:
    """Calls of one mod, each of which is told as flex_attention tells it."""

    def __init__(self, scope: dict[str, Any], kind: str) -> None:
        self.fn: Callable[..., Any] = scope["mod"]
        self.kind = kind
        self.last: tuple[Bound, Guards | None] | None = None
        draw = torch.Generator().manual_seed(0)
        self.score = torch.randn(SIZES, generator=draw)
        shapes = ([-1 if axis == dim else 1 for axis in range(4)] for dim in range(4))
        self.places = [torch.arange(n).view(at) for n, at in zip(SIZES, shapes, strict=True)]

    def call(self) -> torch.Tensor:
        """The mod's value at every position, through whatever is remembered of it."""
        if self.last is None or self.last[1] is None or not self.last[1].hold(self.fn):
            bound = bind(self.fn, self.kind)
            assert bound is not None
            self.last = bound, watch(self.fn, self.kind, bound)
        mod, tensors, scalars = self.last[0]
        env = {"score": self.score, **dict(zip(NAMES, self.places, strict=True))}
        return evaluate(mod, env, tensors, scalars).expand(SIZES)

    def fresh(self) -> torch.Tensor:
        """The same of the callable as it is now."""
        score = (self.score,) if self.kind == "score" else ()
        found = everywhere(self.fn, *SIZES, *score).detach()
        return found.float() if self.kind == "score" else found.bool()


def changing(seed: int, index: int, of: Sequence[Place] = PLACES) -> Changing:
    """The case of this name. Every place is used before one is used again.

    Each third one computes with numbers in closures, in Python and at length.
    """
    draw = random.Random(f"{seed} {index} changes")
    kind = draw.choice(("score", "score", "mask"))
    names = SIGNATURES[kind].partition("(")[2][:-1]
    if index % 3 == 2:
        text, changes = of_numbers(draw, kind, names)
        form = draw.choice(FORMS).format(names=names)
        return Changing(kind, f"{text}{form}", tuple(changes), draw.random() < 0.2)
    first = of[(seed + index - index // 3) % len(of)]
    places = [first, *draw.choices(of, k=draw.choice((0, 0, 1)))]
    setup, cells, keywords, lines, steps = [], {}, [], [], []
    for i, place in enumerate(places):
        v, *others = draw.sample(range(1, 10), 4)
        setup.append(place.setup.format(i=i, v=v))
        if place.cell:
            cells[f"c{i}"] = v
        if place.keyword:
            keywords.append(f"k{i}={v}")
        lines.append(_use(draw, kind, place).format(n=place.read.format(i=i, v=v)))
        values = [others[0], others[1], others[0], others[2]]
        changes = draw.choices(place.changes, k=len(values) - (draw.random() < 0.5))
        steps += [each.format(i=i, v=v, w=w) for each, w in zip(changes, values, strict=False)]
    result = " & ".join(lines) if kind == "mask" else " + ".join(lines)
    by_name = "".join(f", {each}" for each in ("*", *keywords)) if keywords else ""
    head = SIGNATURES[kind].removesuffix(")") + f"{by_name})"
    source = [
        PRELUDE, *setup, f"def make({', '.join(cells)}):", f"    def {head}:",
        f"        return {result}", f"    return {kind}_mod",
        f"inner = make({', '.join(map(str, cells.values()))})",
        draw.choice(FORMS).format(names=names),
    ]  # fmt: skip
    draw.shuffle(steps)
    return Changing(kind, "\n".join(source), tuple(steps), draw.random() < 0.2)


def _use(draw: random.Random, kind: str, place: Place) -> str:
    """How a mod computes with what it reads: neither Python nor a jump asks a tensor's value."""
    if kind == "mask" and place.rounds:
        return "(kv_idx < 3) & ({n} > -1)"
    uses = USES[kind] if place.tensor else USES[kind] + WHOLE_USES[kind]
    return draw.choice(uses)


def check(seed: int, index: int) -> str:
    """Hold every call of a case to the callable; how many of its changes made a difference.

    Raises AssertionError with the step that left a stale number.
    """
    case = changing(seed, index)
    code = compile(case.source, f"<changing {index}>", "exec")
    told, modules = 0, []
    with restored():
        for _ in range(1 + case.twins):
            scope: dict[str, Any] = {"__name__": f"changing_{index}"}
            exec(code, scope)
            modules.append((scope, Calls(scope, case.kind)))
        _compare(modules, "nothing")
        for i, step in enumerate(case.steps):
            scope, calls = modules[i % len(modules)]
            before = calls.fresh()
            try:
                exec(step, scope)
                after = calls.fresh()
            except Exception as error:  # a weight of another dtype than its input, a length of 0
                return (
                    f"{told} changes made a difference; after {step!r} {error!r} in the mod itself"
                )
            told += not torch.equal(before, after)
            _compare(modules, step)
    return f"{told} of {len(case.steps)} changes made a difference"


def _compare(modules: list[tuple[dict[str, Any], Calls]], step: str) -> None:
    for _, calls in modules:
        expected = calls.fresh()
        for again in ("call", "repeated call"):
            got = calls.call()
            close = torch.allclose(got.float(), expected.float(), 1e-4, 1e-4, equal_nan=True)
            assert close, f"a stale number in the {again} after {step!r}"


@contextmanager
def restored() -> Iterator[None]:
    """Python and torch afterwards as they were."""
    dtype, grad, threads = (
        torch.get_default_dtype(), torch.is_grad_enabled(), torch.get_num_threads(),
    )  # fmt: skip
    kept = builtins.abs, builtins.round
    try:
        yield
    finally:
        builtins.abs, builtins.round = kept
        torch.set_default_dtype(dtype)
        torch.set_grad_enabled(grad)
        torch.set_num_threads(threads)


def changed(task: Task) -> Outcome:
    """The outcome of one case."""
    named = task.seed, task.index
    return outcome(task, changing(*named), lambda: check(*named))
