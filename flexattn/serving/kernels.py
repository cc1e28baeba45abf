"""A plan's arguments as a Problem, and its kernels: chosen and built."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import torch

from flexattn.device import Device, detect
from flexattn.errors import ConfigError, InputError, InputTypeError, UnsupportedError
from flexattn.kernels.base.config import power_above
from flexattn.kernels.base.source import Source
from flexattn.kernels.block_mask.source import MOST_LISTED, ChosenForm, render_chosen
from flexattn.kernels.choose.registry import by_language
from flexattn.kernels.hopper.config import CONSUMER_ROWS
from flexattn.kernels.paged_decode.config import SPLIT_KEYS, ServingConfig
from flexattn.kernels.paged_decode.family import PAGED_DECODE
from flexattn.mods import Bound
from flexattn.problem import (
    DENSE,
    DTYPES,
    MAX_HEADS,
    MAX_LENGTH,
    Layout,
    captures_of,
    rounded,
)
from flexattn.problem.checks import MAX_HEAD_DIM
from flexattn.problem.serving import (
    DECODE_QUERIES,
    KV_DTYPES,
    LAYOUTS,
    SERVING_ITEMSIZE,
    Phase,
    ServingForm,
    ServingProblem,
)
from flexattn.runtime.build import Kernel, builder
from flexattn.runtime.candidates import Candidate, Choice, open_candidates
from flexattn.runtime.dispatch import first_served
from flexattn.runtime.outcomes import memory
from flexattn.runtime.ragged import RaggedKernels, ragged_kernels
from flexattn.serving.cache import Scaled, asked_scales
from flexattn.settings import current


def plan_problem(
    *,
    batch: int,
    kv_len: int,
    heads: tuple[int, int],
    head_dim: tuple[int, int],
    q_len: int = 1,
    total_q: int = 0,
    dtype: torch.dtype = torch.bfloat16,
    kv_dtype: torch.dtype | None = None,
    page: int = 0,
    layout: str = "NHD",
    score: Bound | None = None,
    mask: Bound | None = None,
    sinks: bool = False,
    scaled: Scaled | str = False,
    shared_kv: bool = False,
    lse: bool = False,
    prefix: bool = False,
    offset: bool = False,
    positive_scale: bool = True,
    batch_invariant: bool = False,
    lengths: str = "",
    selection: tuple[int, int] = (0, 0),
) -> ServingProblem:
    """A plan's problem, by DecodePlan's names; raises InputError for what no kernel serves."""
    kv_dtype = kv_dtype or dtype
    asked = {
        "batch": batch, "q_len": q_len, "total_q": total_q, "kv_len": kv_len, "Hq": heads[0],
        "Hkv": heads[1], "head_dim": head_dim, "dtype": dtype, "kv_dtype": kv_dtype,
        "page_size": page, "layout": layout,
    }  # fmt: skip
    _check(asked)
    able = ("mixed",) if total_q else ("uniform", "ragged")
    if lengths and lengths not in able:
        do = "leave it out for the best record"
        raise InputError(f"lengths={lengths!r}", f"it is one of {', '.join(able)}", do)
    chosen, unit = selection
    if any(selection) and not (0 < chosen <= MOST_LISTED and 0 < unit <= MAX_LENGTH):
        rule = f"it is (k, unit): at most k units of so many keys, k between 1 and {MOST_LISTED}"
        raise InputError(f"selection={selection}", rule, "choose fewer, larger units")
    if unit and (prefix or offset):
        do = "use a DecodePlan"
        raise UnsupportedError("a cascade with a selection", "a plan of its own chooses keys", do)
    (Hq, Hkv), (D, Dv) = heads, head_dim
    row, key, value = D * dtype.itemsize, D * kv_dtype.itemsize, Dv * kv_dtype.itemsize
    aligned = row % 16 == 0 and key % 16 == 0 and (shared_kv or value % 16 == 0)
    found = asked_scales(scaled, page)
    form = ServingForm(
        dtype=KV_DTYPES[dtype],
        kv_dtype=KV_DTYPES[kv_dtype],
        head_dim_qk=D,
        head_dim_v=Dv,
        group=Hq // Hkv,
        kv_heads=Hkv,
        page=page,
        requests=1 if prefix else rounded(batch),
        rows=0 if total_q else rounded((batch if prefix else 1) * q_len * (Hq // Hkv)),
        score=captures_of(score),
        mask=captures_of(mask),
        shared_kv=shared_kv,
        scaled=found.scaled,
        scales=found.scales,
        sinks="float32" if sinks else "",
        lse=lse,
        prefix=prefix,
        offset=offset,
        layout=DENSE if aligned else Layout(True, True, True, False),
        positive_scale=positive_scale,
        split_keys=SPLIT_KEYS if batch_invariant else 0,
        unit=unit,
        chosen=chosen,
    )
    return ServingProblem(
        structure=form, B=batch, Hq=Hq, Hkv=Hkv, q_len=total_q or q_len, kv_len=kv_len,
        mask_class=lengths, cache_layout=layout,
    )  # fmt: skip


def _check(asked: dict[str, Any]) -> None:
    """Raise InputError for what no kernel serves."""
    batch, q_len, total_q, kv_len, Hq, Hkv, dims, dtype, kv_dtype, page, layout = asked.values()
    for name, each in (("dtype", dtype), ("kv_dtype", kv_dtype)):
        if not isinstance(each, torch.dtype):
            raise InputTypeError(
                f"{name} is {each!r:.80}", f"{name} is a torch.dtype", "pass torch.bfloat16"
            )
    eight = SERVING_ITEMSIZE.get(KV_DTYPES.get(kv_dtype, "")) == 1
    rules = (
        (1 <= batch <= 2**12, "batch is between 1 and 4096"),
        (total_q > 0 or q_len >= 1, "q_len is at least 1"),
        (total_q >= 0, "total_q is at least 1; 0 means q_len for each request"),
        (1 <= kv_len <= MAX_LENGTH, f"kv_len is between 1 and {MAX_LENGTH}"),
        ((total_q or batch * q_len) * max(1, Hq) < 2**31, "rows x heads stay below 2**31"),
        (0 < Hkv <= Hq and Hq % Hkv == 0, "Hq is a multiple of Hkv, and both are above 0"),
        (Hq <= MAX_HEADS, f"Hq is at most {MAX_HEADS}"),
        (0 <= page <= 256, "a page has 1 to 256 keys; 0 means a contiguous cache"),
        (layout in LAYOUTS, f"layout is one of {', '.join(LAYOUTS)}"),
        (
            dtype in DTYPES or dtype == kv_dtype == torch.float8_e4m3fn,
            f"dtype is one of {', '.join(map(str, DTYPES))}, or float8_e4m3fn as the cache's",
        ),
        (eight or kv_dtype == dtype, "the cache has q's dtype, float8_e4m3fn or float8_e5m2"),
        (not eight or dtype != torch.float32, "a cache of 8 bits serves queries of 16 bits"),
        (
            1 <= min(dims) and max(dims) <= MAX_HEAD_DIM,
            f"head dimensions are between 1 and {MAX_HEAD_DIM}",
        ),
    )
    for kept, rule in rules:
        if not kept:
            told = ", ".join(f"{name}={value}" for name, value in asked.items())
            raise InputError(f"DecodePlan({told})", rule)


# What 32 bits count beyond a batch's tiles: kernels add their number of programs.
_UNCOUNTED = 2**16


class Kernels(NamedTuple):
    """The kernels that a plan launches. programs: of the serving kernel; merges: of the merging
    one.

    config: of the serving kernel. attend: None if all requests are prefills; choice is then that
    of the prefills' kernel. combine: None also for a shared prefix, whose parts
    the last kernel of its cascade merges. row_tiles: the most that one KV head has. gpu: its
    index, -1 where there is none. prefills: None where the serving kernel serves them too.
    chooser: lists what a selection chose, before a serving kernel that does not sift it.
    """

    choice: Choice
    config: ServingConfig
    gpu: int
    attend: Kernel | None
    combine: Kernel | None
    programs: int
    merges: int
    row_tiles: int
    prefills: RaggedKernels | None = None
    chooser: Kernel | None = None

    @property
    def target(self) -> Device:
        """The device that they are built for."""
        return self.choice.device


def build(
    problem: ServingProblem,
    device: torch.device,
    config: ServingConfig | None,
    gluon: bool = False,
) -> Kernels:
    """Compile a plan's kernels with a config, a tuned one, or the first default that serves.

    gluon: prefills have the device's forward in Gluon, or the plan is refused. Raises ConfigError
    or BuildError where none does, with what became of each, and InputError for a batch of too many
    tiles.
    """
    if device.type == "cpu" and not current().interpret:
        raise UnsupportedError(
            "a DecodePlan for tensors on the CPU",
            "its kernels run on a GPU, or in Triton's interpreter",
            "set FLEXATTN_INTERPRET=1 before flexattn is imported",
        )
    target = detect(device)
    index = device.index if device.type == "cuda" else -1

    def compiled(source: Source) -> Kernel:
        return builder().kernel(source, target, index)

    def served(problem: ServingProblem) -> Choice:
        found = _counted(plan_candidates(problem, target, config))
        return first_served(found, problem, target, compiled, memory())

    prefills = None
    if gluon or config is None:
        beside = partial(served, in_phase(problem, "decode"))
        both = index >= 0 and _mixed(problem)
        prefills = _prefill_kernels(problem, target, compiled, gluon, beside if both else None)
    if prefills is not None and _mixed(problem):
        problem = in_phase(problem, "decode")
    if prefills is not None and not _mixed(problem):
        only: Any = next(_counted(plan_candidates(problem, target, config))).config
        return Kernels(prefills.choice, only, index, None, None, 0, 0, 0, prefills)
    choice = served(problem)
    chosen: Any = choice.config
    grid = PAGED_DECODE.grid(problem, chosen, target)
    merges = PAGED_DECODE.merges(problem, chosen, target)
    chooser, form = None, problem.structure
    if form.unit and not chosen.sifts(form):
        # In order: Triton's kernel walks no more units than a request has.
        width = power_above(form.chosen)
        listed = ChosenForm(1, form.unit, width, "int32", False, False, False, True)
        chooser = compiled(render_chosen(listed, target))
    return Kernels(
        choice, chosen, index, choice.kernels[0], choice.merger, grid.programs, merges,
        grid.num_tiles, prefills, chooser,
    )  # fmt: skip


def _mixed(problem: ServingProblem) -> bool:
    """True if some requests of a batch may be prefills and others decodes."""
    return problem.total_q > 0 and problem.B > 1


def in_phase(problem: ServingProblem, phase: Phase) -> ServingProblem:
    """The part of a mixed batch that is in a phase."""
    return replace(problem, structure=replace(problem.structure, phase=phase))


def _prefills_expected(problem: ServingProblem, target: Device) -> bool:
    """False of few rows: most often decodes, which would wait for a kernel without work."""
    few = problem.rows * problem.Hq < CONSUMER_ROWS * target.num_sms
    few = few and problem.rows <= DECODE_QUERIES * problem.B
    return not few and min(problem.q_len, problem.kv_len) > DECODE_QUERIES


def _prefill_kernels(
    problem: ServingProblem,
    target: Device,
    compiled: Callable[[Source], Kernel],
    gluon: bool,
    beside: Callable[[], object] | None,
) -> RaggedKernels | None:
    """The kernels of the prefills; None where the serving kernel is to serve them as well."""
    if not (gluon or _prefills_expected(problem, target)):
        return None
    asked = in_phase(problem, "prefill") if _mixed(problem) else problem
    if not gluon:
        return ragged_kernels(asked, target, compiled, beside=beside)
    family: Any = by_language("prefill", "gluon", target)
    found = ragged_kernels(asked, target, compiled, family, beside)
    if found is None:
        raise ConfigError(
            f'{problem.describe()} with BACKEND="GLUON"',
            f"no forward in Gluon computes it on {target.arch}",
            "leave kernel_options out",
        )
    return found


def plan_candidates(
    problem: ServingProblem, target: Device, config: ServingConfig | None
) -> Iterator[Candidate]:
    """The candidates in turn: the caller's config alone, or a record's, then the static
    defaults.
    """
    if config is None:
        yield from open_candidates(problem, target)
        return
    found = PAGED_DECODE.limits.reasons(config, problem.structure, target)
    if found:
        raise ConfigError(f"{config}", "; ".join(found), "leave config None for the default")
    yield Candidate(problem, target, config, "forced", "config=", True)


def _counted(found: Iterator[Candidate]) -> Iterator[Candidate]:
    """The candidates; raises InputError where the tiles of a batch are more than 32 bits count."""
    for each in found:
        tiles = PAGED_DECODE.grid(each.problem, each.config, each.device).num_work_tiles
        if tiles >= 2**31 - _UNCOUNTED:
            raise InputError(
                f"{each.problem.describe()} makes {tiles} tiles",
                "the tiles of a batch are counted in 32 bits",
                "plan for fewer requests or keys",
            )
        yield each
