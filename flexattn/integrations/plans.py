"""Shared parts of the adaptors: a model's layer, its masks, its plans, and the user's mods."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from contextvars import copy_context
from dataclasses import dataclass, field, replace
from importlib import import_module
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import and_masks

from flexattn import catalogue
from flexattn.device import usable
from flexattn.errors import FlexAttnError, InputError, SettingsError
from flexattn.mods import bind
from flexattn.problem.serving import ServingProblem
from flexattn.runtime.codecache import know_compiler
from flexattn.serving import AppendPlan, DecodePlan
from flexattn.serving.cache import Scaled
from flexattn.serving.decode import live_identity
from flexattn.serving.kernels import build, plan_problem
from flexattn.serving.verified import verified_by
from flexattn.settings import current, log

_Mod = Callable[..., Tensor]
_KINDS = ("score_mod", "mask_mod")
_THREADS = 8
# Behind every position.
_FAR = 2**30


@dataclass(eq=False, slots=True)
class Spans:
    """Keys that rows of a batch see beside those of a causal mask, in buffers that masks read.

    first, last int32 [rows]: the first and last position that a row sees, where they are beyond
    its causal mask's or its window's. shift int32 [batch]: a request's first row less that row's
    position.
    """

    first: Tensor
    last: Tensor
    shift: Tensor
    _plain: bool = False

    @classmethod
    def empty(cls, batch: int, rows: int, device: torch.device) -> Spans:
        """Buffers for a batch of at most these requests and rows."""
        sizes = (rows, rows, batch)
        first, last, shift = (torch.zeros(n, dtype=torch.int32, device=device) for n in sizes)
        return cls(first, last, shift)

    def fill(
        self,
        ends: Tensor,
        lens: Tensor,
        ends_cpu: Tensor,
        lens_cpu: Tensor | None,
        ranges: Mapping[int, Sequence[tuple[int, int]]],
        causal: Tensor | bool,
    ) -> bool:
        """Write a batch; returns True where a row sees more than its causal mask.

        ends int32 [requests + 1]: cu_seqlens_q. lens int32 [requests]: keys. ranges: by request,
        positions (first, last) of rows that see each other. causal: of all requests, or int [n].
        """
        torch.sub(ends[1:], lens, out=self.shift[: len(lens)])
        if not self._plain:
            self.first.fill_(_FAR)
            self.last.fill_(-1)
        starts, self._plain = ends_cpu.tolist(), causal is True
        for b, own in ranges.items():
            assert lens_cpu is not None, "the lengths of requests with images are known"
            past = int(lens_cpu[b]) - (starts[b + 1] - starts[b])
            for first, last in own:
                low = starts[b] + max(first - past, 0)
                high = min(starts[b] + last - past + 1, starts[b + 1])
                if first < last and low < high:
                    self.first[low:high], self.last[low:high] = first, last
                    self._plain = False
        if causal is not True:
            free = torch.as_tensor(causal, device=ends.device).expand(len(lens)) == 0
            rows = free.repeat_interleave(ends.diff(), output_size=starts[-1])
            self.last[: starts[-1]].masked_fill_(rows, _FAR)
        return not self._plain

    def mask_mod(self, window: int | None, clamped: bool) -> _Mod:
        """The causal mask and the spans; with a window, spans end it unless they are clamped."""
        shift, starts, ends = self.shift, self.first, self.last

        def seen(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
            row = shift[b] + q_idx
            found = (kv_idx <= q_idx) | (kv_idx <= ends[row])
            if window is None:
                return found
            if clamped:
                return found & (q_idx - kv_idx < window) & (kv_idx - q_idx < window)
            return found & ((q_idx - kv_idx < window) | (kv_idx >= starts[row]))

        return seen


@dataclass(eq=False, slots=True)
class DraftTrees:
    """Drafts that a model verifies: each token sees the keys before the draft and its ancestors.

    past int32 [batch]: keys of a request before its draft. seen bool [batch, n, n]: of each token
    of a draft, which ones it sees.
    """

    past: Tensor
    seen: Tensor

    @classmethod
    def empty(cls, batch: int, tokens: int, device: torch.device) -> DraftTrees:
        """Buffers for drafts of so many tokens."""
        past = torch.zeros(batch, dtype=torch.int32, device=device)
        seen = torch.zeros(batch, tokens, tokens, dtype=torch.bool, device=device)
        return cls(past, seen)

    def fill(self, past: Tensor, mask: Tensor | None) -> None:
        """Write a batch. past int [requests]. mask bool, flat: each request's [n, past + n], one
        behind the other; None for chains of tokens."""
        count, n = len(past), self.seen.shape[1]
        self.past[:count].copy_(past)
        if mask is None or not len(mask):
            self.seen[:count] = torch.ones_like(self.seen[0]).tril()
            return
        steps, widths = torch.arange(n, device=past.device), past.long() + n
        firsts = (widths * n).cumsum(0) - widths * n + past
        at = (firsts[:, None] + widths[:, None] * steps)[..., None] + steps
        # A captured batch is padded, its mask is not.
        self.seen[:count].copy_(mask[at.clamp_(max=len(mask) - 1)])

    def mask_mod(self, window: int | None, clamped: bool) -> _Mod:
        """The drafts' mask, within a window of places in the cache."""
        past, ancestors = self.past, self.seen

        def seen(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
            node = torch.clamp(kv_idx - past[b], min=0)
            found = (kv_idx < past[b]) | ancestors[b, q_idx - past[b], node]
            return found if window is None else found & (q_idx - kv_idx < window)

        return seen


@dataclass(frozen=True, slots=True)
class Layer:
    """An attention layer: equal ones share their plans.

    name: the model's for it. heads (Hq, Hkv) and head_dim (D, Dv): of this process. page_size:
    tokens of a page. softcap: scores stay within it. window: keys that a row sees, its own
    included. slopes [Hq]: of ALiBi. sinks: its runs are given sinks. scaled: what an 8-bit cache
    has scales of, as DecodePlan's. causal: False where a row sees later keys too, as far as its
    window. spans, clamped: of rows that see other keys, see Spans and DraftTrees.
    """

    heads: tuple[int, int]
    head_dim: tuple[int, int]
    dtype: torch.dtype
    device: torch.device
    page_size: int
    kv_dtype: torch.dtype | None = None
    scale: float | None = None
    softcap: float | None = None
    window: int | None = None
    slopes: tuple[float, ...] | None = None
    sinks: bool = False
    scaled: Scaled = False
    causal: bool = True
    spans: Spans | DraftTrees | None = None
    clamped: bool = True
    name: str = field(default="", compare=False)

    @property
    def index(self) -> int:
        """The first number in its name, its place in the model; -1 where there is none."""
        found = re.search(r"\d+", self.name)
        return int(found[0]) if found else -1

    @property
    def of_tokens(self) -> Layer:
        """The same for single tokens: a request's last row sees all of its keys."""
        return self if self.window is not None else replace(self, causal=False)

    def score_mod(self, own: _Mod | None) -> _Mod | None:
        """Soft-capping, then ALiBi, then the user's; None where there is none."""
        chain = [] if not self.softcap else [catalogue.softcap(self.softcap)]
        if self.slopes is not None:
            slopes = torch.tensor(self.slopes, dtype=torch.float32, device=self.device)
            chain.append(_alibi(slopes))
        chain += [] if own is None else [own]

        def score_mod(score: Tensor, *place: Tensor) -> Tensor:
            for mod in chain:
                score = mod(score, *place)
            return score

        return chain[0] if len(chain) == 1 else score_mod if chain else None

    def mask_mod(self, own: _Mod | None) -> _Mod | None:
        """The layer's mask and the user's; None where a row sees every key."""
        window = self.window
        seen: list[_Mod] = [] if own is None else [own]
        if self.spans is not None:
            seen.insert(0, self.spans.mask_mod(window, self.clamped))
        elif window is not None:
            seen.insert(0, catalogue.sliding_window(window - 1) if self.causal else _near(window))
        elif self.causal:
            seen.insert(0, catalogue.causal)
        return seen[0] if len(seen) == 1 else and_masks(*seen) if seen else None


def _near(window: int) -> _Mod:
    def near(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return (q_idx - kv_idx < window) & (kv_idx - q_idx < window)

    return near


def _alibi(slopes: Tensor) -> _Mod:
    def alibi(score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return score + slopes[h] * (kv_idx - q_idx)

    return alibi


class LayerPlans(NamedTuple):
    """The plans of a layer: attention of single tokens, of chunks, and of chunks with spans, which
    is that of chunks where the layer has none; and its cache's writes."""

    single: DecodePlan
    chunks: DecodePlan
    spans: DecodePlan
    append: AppendPlan


class Plans:
    """Plans that the layers of one model share, each made at its first use, run by one stream."""

    def __init__(self) -> None:
        self._made: dict[Any, Any] = {}
        self._begun: set[Any] = set()
        self._threads: ThreadPoolExecutor | None = None
        self.spans: Spans | None = None

    def plan(
        self, layer: Layer, mods: Mapping[str, _Mod] | None = None, **maxima: Any
    ) -> DecodePlan:
        """The plan of layers like this one. maxima: batch, kv_len and total_q of DecodePlan, 0 for
        single tokens, and batch_invariant."""
        own = _own(mods)
        key = (layer, *_identities(own), *maxima.items())
        found: DecodePlan | None = self._made.get(key)
        if found is None:
            found = self._made[key] = DecodePlan(
                heads=layer.heads, head_dim=layer.head_dim, dtype=layer.dtype,
                kv_dtype=layer.kv_dtype, device=layer.device, page_size=layer.page_size,
                scale=layer.scale, sinks=layer.sinks, scaled=layer.scaled,
                score_mod=layer.score_mod(own[0]), mask_mod=layer.mask_mod(own[1]), **maxima,
            )  # fmt: skip
            said = verified_by(found)
            log.info("attention as in %s: kernels verified %s", layer.name or "a layer", said)
        return found

    def append(self, layer: Layer, slots: torch.dtype) -> AppendPlan:
        """The plan that writes the cache of layers like this. slots: dtype of slot mappings."""
        about: dict[str, Any] = {
            "heads": layer.heads[1], "head_dim": layer.head_dim, "page_size": layer.page_size,
            "dtype": layer.dtype, "kv_dtype": layer.kv_dtype, "scaled": layer.scaled,
            "slots": slots, "device": layer.device,
        }  # fmt: skip
        key = tuple(about.values())
        found: AppendPlan | None = self._made.get(key)
        if found is None:
            found = self._made[key] = AppendPlan(**about)
        return found

    def begin(
        self, layer: Layer, rows: int, mods: Mapping[str, _Mod] | None = None, **maxima: Any
    ) -> None:
        """Compile a layer's kernels in threads: half of a compile runs outside Python.

        They are verified when their plans are made, in the caller's thread: a check sets torch's
        default dtype, which is the process's. What fails does so again there.
        """
        own = _own(mods)
        key = (layer, rows, *_identities(own))
        if layer.device.type != "cuda" or key in self._begun:
            return
        self._begun.add(key)
        know_compiler()
        self._threads = self._threads or ThreadPoolExecutor(_THREADS)
        # Those of chunks take longest.
        for kind, total in reversed(_kinds(layer, rows)):
            found = (kind.score_mod(own[0]), kind.mask_mod(own[1]))
            bound = [bind(mod, name[:-4]) for mod, name in zip(found, _KINDS, strict=True)]
            about: dict[str, Any] = {name: value or False for name, value in maxima.items()}
            problem = plan_problem(
                heads=kind.heads, head_dim=kind.head_dim, dtype=kind.dtype, kv_dtype=kind.kv_dtype,
                page=kind.page_size, sinks=kind.sinks, scaled=kind.scaled, score=bound[0],
                mask=bound[1], positive_scale=kind.scale is None or kind.scale > 0, total_q=total,
                **about,
            )  # fmt: skip
            self._threads.submit(copy_context().run, _compile, problem, usable(layer.device))

    def of(self, layer: Layer, rows: int, **maxima: Any) -> LayerPlans:
        """A layer's plans with the user's mods, verified; nothing is being compiled then.

        rows: the most of a chunk.
        """
        mods = user_mods(layer)
        self.begin(layer, rows, mods, **maxima)
        # Kernels that are there are verified while others are compiled.
        append = self.append(layer, torch.int64)
        made = [self.plan(kind, mods, total_q=n, **maxima) for kind, n in _kinds(layer, rows)]
        if self._threads is not None:  # one that allocates would end a capture
            self._threads.shutdown()
            self._threads = None
        return LayerPlans(made[0], made[1], made[-1], append)


def _kinds(layer: Layer, rows: int) -> list[tuple[Layer, int]]:
    """The layers of a layer's plans, and the rows of each, 0 for single tokens."""
    plain = replace(layer, spans=None)
    found = [(plain.of_tokens, 0), (plain, rows)]
    return found if layer.spans is None else [*found, (layer, rows)]


def _own(mods: Mapping[str, _Mod] | None) -> list[_Mod | None]:
    return [(mods or {}).get(kind) for kind in _KINDS]


def _identities(own: Sequence[_Mod | None]) -> list[object]:
    bound = [bind(mod, kind[:-4]) for mod, kind in zip(own, _KINDS, strict=True)]
    return [live_identity(each) for each in bound]


def _compile(problem: ServingProblem, device: torch.device) -> None:
    with suppress(FlexAttnError), torch.cuda.device(device):
        build(problem, device, None)


def user_mods(layer: Layer) -> Mapping[str, _Mod]:
    """The mods of a layer by the function that FLEXATTN_MODS names: score_mod, mask_mod, neither.

    Raises SettingsError where it cannot be imported, and InputError for another answer.
    """
    named = current().mods
    if not named:
        return {}
    module, _, function = named.partition(":")
    try:
        mods = getattr(import_module(module), function)
    except (ImportError, AttributeError) as error:
        raise SettingsError(
            f"FLEXATTN_MODS={named!r}: {error}",
            "it names a function as module:function, in a module that can be imported",
            "add the module's folder to PYTHONPATH",
        ) from error
    found = mods(layer)
    if found is not None and not (isinstance(found, Mapping) and found.keys() <= set(_KINDS)):
        raise InputError(
            f"{named} gives {found!r:.80} for layer {layer.name}",
            "it gives a dict with score_mod, mask_mod or both, or None",
        )
    return found or {}
