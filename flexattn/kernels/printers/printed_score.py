"""What the printer of score_mods hands to templates."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Fused = Literal["", "ramp", "columns", "diagonals", "softcap"]


@dataclass(frozen=True, slots=True)
class KeyLimits:
    """Which keys a prefill tile can need, where the score_mod's own mask says so.

    lines: statements on row_start. first, last: the first key, and one past the last.
    """

    lines: tuple[str, ...]
    first: str
    last: str


@dataclass(frozen=True, slots=True)
class Ramp:
    """A column that rises by the same step from key to key: the tile's first key has `lift`.

    step: a number before the loop. Both in base 2, texts.
    """

    step: str
    lift: str


@dataclass(frozen=True, slots=True)
class PrintedScore:
    """Statements of a score_mod, and of what it leaves for later.

    hoisted: before the loop over keys. early: inside it, on the keys alone. body: after the
    scores; it turns `qk`, the bare product, into base-2 scores, but for a factor `qk_scale` where
    `folded`. strip: whether a vector of STRIP diagonals is read. rows: statements after the loop
    whose last one is `shift`, what each row adds to its scores in base 2. empties: whether -inf
    may be among that. limits: of the keys. ramp: what the product with the keys adds, and their
    softmax, instead of body; only with `folded`. fused: what the softmax does by itself: "ramp",
    with the numbers `slope` and `column`, the first key's; "columns" and "diagonals", with one
    `column` a key or a score; "softcap", with `score_scale` inside of tanh; "" nothing. Only with
    `folded`.
    """

    hoisted: tuple[str, ...]
    early: tuple[str, ...]
    body: tuple[str, ...]
    folded: bool
    strip: bool
    rows: tuple[str, ...]
    empties: bool
    limits: KeyLimits | None
    ramp: Ramp | None = None
    fused: Fused = ""

    @property
    def reads_keys(self) -> bool:
        """Whether the tile's statements name the indices of its keys."""
        return any("kv_idx" in line for line in (*self.early, *self.body))

    @property
    def lines(self) -> tuple[str, ...]:
        """Every statement, in the order of the kernel."""
        limits = self.limits.lines if self.limits else ()
        return (*self.hoisted, *limits, *self.early, *self.body, *self.rows)
