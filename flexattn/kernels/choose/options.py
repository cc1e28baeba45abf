"""kernel_options: torch's FlexKernelOptions as frozen choices; unknown keys are an error."""

from __future__ import annotations

import logging
import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from difflib import get_close_matches
from numbers import Integral
from typing import Any, TypeVar, get_args

from torch.nn.attention.flex_attention import FlexKernelOptions

from flexattn.errors import ConfigError, InputError
from flexattn.kernels.base.config import Config, Language, check_power
from flexattn.kernels.choose.registry import check_rows, family_of
from flexattn.kernels.ptx.assembler import PTXAS, Ptxas
from flexattn.mods.rules import REWRITES
from flexattn.problem import Fp8Weights, Tanh
from flexattn.problem.facts import Fp32Setting
from flexattn.settings import current, log, say_once
from flexattn.util.text import did_you_mean

LEGACY = "FORCE_USE_FLEX_ATTENTION"
# Keys that torch does not have: they are taken out before a call is handed to it.
OURS_ALONE = (
    "SPLIT_KV", "RULES_OFF", "TANH", "MERGE_CONSUMERS", "PTXAS", "DETERMINISTIC",
    "BATCH_INVARIANT", "FP8_WEIGHTS",
)  # fmt: skip
HONOURED = (
    "BLOCK_M", "BLOCK_N", "num_warps", "num_stages", "USE_TMA", "FLOAT32_PRECISION", "BACKEND",
    LEGACY, *OURS_ALONE,
)  # fmt: skip
# Of a backward, with torch's names: rows and keys of the programs of dK and dV, then those of dQ.
TILES = ("BLOCK_M1", "BLOCK_N1", "BLOCK_M2", "BLOCK_N2")
# Whoever writes for torch may pass them: ROCm's and its warps' settings,
# promises that no kernel here needs, and facts of a call that torch's lowering finds by itself.
_TORCHS = (
    "WRITE_DQ "
    "kpack matrix_instr_nonkdim waves_per_eu num_consumer_groups num_buffers_warp_spec "
    "PARTITION_SIZE SKIP_MASK_SCORE PRESCALE_QK ROWS_GUARANTEED_SAFE BLOCKS_ARE_CONTIGUOUS "
    "IS_DIVISIBLE SAFE_HEAD_DIM SAFE_M_BOUNDARY SAFE_N_BOUNDARY HAS_FULL_BLOCKS GQA_SHARED_HEADS "
    "QK_HEAD_DIM QK_HEAD_DIM_ROUNDED V_HEAD_DIM V_HEAD_DIM_ROUNDED "
    "SPARSE_Q_BLOCK_SIZE SPARSE_KV_BLOCK_SIZE"
).split()
_WITHOUT_EFFECT = frozenset(_TORCHS) | FlexKernelOptions.__annotations__.keys() - set(
    HONOURED
) - set(TILES)
# An argument says it: torch refuses the outputs too, and would compute with the other scale.
_ARGUMENTS = {
    "SM_SCALE": "scale=",
    "OUTPUT_LOGSUMEXP": "return_aux=AuxRequest(lse=True)",
    "OUTPUT_MAX": "return_aux=AuxRequest(max_scores=True)",
}


def bare_key(key: object) -> str:
    """A key without torch's prefix; raises InputError for one that is no string."""
    if not isinstance(key, str):
        raise InputError(
            f"kernel_options has the key {key!r} ({type(key).__name__})",
            "its keys are strings",
            'pass a dict such as {"BLOCK_M": 64}',
        )
    return key.removeprefix("fwd_").removeprefix("bwd_")


def acts(key: str) -> bool:
    """True if a key decides something in a forward kernel here.

    Raises ConfigError for one that nobody has, and for what is an argument of the call instead.
    """
    name = bare_key(key)
    if name in _ARGUMENTS:
        raise ConfigError(
            f"kernel_options has {key!r}", "an argument says it", f"pass {_ARGUMENTS[name]}"
        )
    if name not in _WITHOUT_EFFECT and name not in (*HONOURED, *TILES):
        near = get_close_matches(name, (*HONOURED, *TILES, *sorted(_WITHOUT_EFFECT)), n=1)
        raise ConfigError(
            f"kernel_options has {key!r}",
            f"the keys are {', '.join((*HONOURED, *TILES))} and those that torch alone reads, "
            "bare or with fwd_ or bwd_ in front",
            f"did you mean {near[0]!r}?" if near else "remove it, or correct its spelling",
        )
    return name in HONOURED and not key.startswith("bwd_")


def acts_behind(key: str) -> bool:
    """True if a key decides something in a backward kernel here: its tiles, or a bwd_ number."""
    name = bare_key(key)
    own = key.startswith("bwd_") and name in ("num_warps", "num_stages", "USE_TMA")
    return own or (name in TILES and not key.startswith("fwd_"))


_T = TypeVar("_T")
_V = TypeVar("_V")

# GLUON is ours as well: of torch's own, a call that trains uses AUTO in its place.
_BACKENDS: dict[str, tuple[str | None, Language | None]] = {
    "AUTO": (None, None),
    "TRITON": ("prefill", "triton"),
    "TRITON_DECODE": ("decode", None),
    "FLASH": (None, None),
    "GLUON": ("prefill", "gluon"),
}
FLASH = 'BACKEND="FLASH" leaves the choice of the kernel to flexattn'
# As torch writes a precision into a kernel.
_QUOTE = "'"
_TANH: dict[str, Tanh] = {each: each for each in get_args(Tanh)}
_FP8_WEIGHTS: dict[str, Fp8Weights] = {each: each for each in get_args(Fp8Weights)}
# tf32x3 as well: six products of bfloat16 are nearer to float32, and faster.
_FP32: dict[str, Fp32Setting] = {each: each for each in get_args(Fp32Setting)}
_FP32["tf32x3"] = "bf16x6"


@dataclass(frozen=True, slots=True)
class Options:
    """The caller's decisions: a template, and numbers that override the config's.

    kind, language: of the template. merge_consumers, ptxas: how one of Hopper's is compiled.
    exact: the whole config, where a tuner decides; the numbers are then not looked at.
    fp32: how it is multiplied; torch's own setting where None. rules_off, tanh: as a
    Structure has them. deterministic: a backward gives the same bits in every run, or is refused.
    backward: names and numbers of its config. batch_invariant: a row's bits depend on its own
    query and keys alone. fp8_weights: as a Structure has them.
    """

    kind: str | None = None
    language: Language | None = None
    BLOCK_M: int | None = None
    BLOCK_N: int | None = None
    num_warps: int | None = None
    num_stages: int | None = None
    num_splits: int | None = None
    use_tma: bool | None = None
    merge_consumers: bool | None = None
    ptxas: Ptxas | None = None
    exact: Config | None = None
    rules_off: tuple[str, ...] = ()
    tanh: Tanh = "auto"
    fp32: Fp32Setting | None = None
    deterministic: bool = False
    backward: tuple[tuple[str, int | bool], ...] = ()
    batch_invariant: bool = False
    fp8_weights: Fp8Weights = "exact"

    @property
    def all_rules_off(self) -> tuple[str, ...]:
        """rules_off, and of a batch-invariant call those that look at more than a row."""
        if not self.batch_invariant:
            return self.rules_off
        # The first measures all keys of a head; the second rounds by where a tile begins.
        return tuple(sorted({*self.rules_off, "decay_skip", "row_slope"}))

    @property
    def overrides(self) -> bool:
        """True if any number of a config is forced."""
        return self.exact is not None or any(getattr(self, name) is not None for name in _NUMBERS)

    def apply(self, config: Config) -> Config:
        """The config with the caller's numbers in it."""
        return self.exact or self._forced(config, (*_NUMBERS, *_COMPILED))

    def compiled(self, config: Config) -> Config:
        """The config compiled as the caller says."""
        return self._forced(config, _COMPILED)

    def _forced(self, config: Config, names: Sequence[str]) -> Config:
        given = ((name, getattr(self, name)) for name in names)
        numbers = {name: value for name, value in given if value is not None}
        forced: Config = family_of(config).forced(config, numbers) if numbers else config
        return forced


_NUMBERS = ("BLOCK_M", "BLOCK_N", "num_warps", "num_stages", "num_splits", "use_tma")
_COMPILED = ("merge_consumers", "ptxas")
NONE = Options()


def parse(kernel_options: Mapping[str, Any] | None) -> Options:
    """Read kernel_options, with torch's prefixes.

    fwd_ wins over a bare key; what only torch's kernels or a backward read has no effect. Raises
    ConfigError for keys and backends that do not exist, InputError for values of the wrong type.
    """
    check_mapping(kernel_options)
    if not kernel_options:
        return replace(NONE, batch_invariant=True) if current().batch_invariant else NONE
    chosen: dict[str, Any] = {}
    behind: dict[str, Any] = {}
    names = {key: bare_key(key) for key in kernel_options}
    for key in sorted(names, key=lambda key: key.startswith("fwd_")):
        if acts(key):
            chosen[names[key]] = kernel_options[key]
        elif acts_behind(key):
            behind[names[key]] = kernel_options[key]
        else:
            log.debug("kernel_options[%r] has no effect on flexattn's forward kernels", key)
    kind, language = _template(chosen)
    invariant = _boolean(chosen, "BATCH_INVARIANT")
    found = Options(
        kind=kind,
        language=language,
        BLOCK_M=_rows(chosen, language),
        BLOCK_N=_power(chosen, "BLOCK_N"),
        num_warps=_integer(chosen, "num_warps"),
        num_stages=_integer(chosen, "num_stages"),
        num_splits=_integer(chosen, "SPLIT_KV"),
        use_tma=_boolean(chosen, "USE_TMA"),
        merge_consumers=_boolean(chosen, "MERGE_CONSUMERS"),
        ptxas=_ptxas(chosen.get("PTXAS")),
        rules_off=_rules(chosen.get("RULES_OFF", "")),
        tanh=_one_of("TANH", chosen.get("TANH", "auto"), _TANH),
        fp32=_fp32(chosen.get("FLOAT32_PRECISION")),
        fp8_weights=_one_of("FP8_WEIGHTS", chosen.get("FP8_WEIGHTS", "exact"), _FP8_WEIGHTS),
        deterministic=bool(_boolean(chosen, "DETERMINISTIC")),
        backward=_backward(behind),
        batch_invariant=current().batch_invariant if invariant is None else invariant,
    )
    forced = found.overrides or found.kind == "decode" or language == "gluon"
    if found.batch_invariant and forced:
        raise ConfigError(
            f"kernel_options {dict(kernel_options)} of a batch-invariant call",
            "its tile is fixed by dtype and head dimensions, in Triton's prefill template",
            "leave BACKEND, tiles, warps, stages and SPLIT_KV out",
        )
    return found


def _backward(behind: Mapping[str, Any]) -> tuple[tuple[str, int | bool], ...]:
    """Numbers of a backward's config, by its names."""
    found = {
        name: (_power if name.startswith("BLOCK") else _integer)(behind, name)
        for name in (*TILES, "num_warps", "num_stages")
    }
    found["use_tma"] = _boolean(behind, "USE_TMA")
    return tuple((name, value) for name, value in found.items() if value is not None)


def _rows(chosen: Mapping[str, Any], language: Language | None) -> int | None:
    """Rows of a tile, which the template's family has rules for."""
    rows = _integer(chosen, "BLOCK_M")
    if rows is not None:
        check_rows("prefill", language or "triton", rows)
    return rows


def _power(chosen: Mapping[str, Any], name: str) -> int | None:
    size = _integer(chosen, name)
    if size is not None:
        check_power(name, size)
    return size


def check_mapping(kernel_options: object) -> None:
    """Raises InputError if kernel_options are neither a mapping nor None."""
    if kernel_options is not None and not isinstance(kernel_options, Mapping):
        raise InputError(
            f"kernel_options is a {type(kernel_options).__name__}",
            "it is a mapping of names to values",
            'pass a dict such as {"BLOCK_M": 64}',
        )


def asks_flash(kernel_options: Mapping[str, Any] | None) -> bool:
    """True if kernel_options name FlashAttention, which no kernel here is."""
    given = (kernel_options or {}).items()
    return any(bare_key(key) == "BACKEND" and value == "FLASH" for key, value in given)


def asks_gluon(kernel_options: Mapping[str, Any] | None) -> bool:
    """True if a plan's kernel_options name Gluon; raises ConfigError for all but a BACKEND."""
    found = replace(parse(kernel_options), batch_invariant=False)
    gluon = found.language == "gluon"
    if found != (replace(NONE, kind="prefill", language="gluon") if gluon else NONE):
        raise ConfigError(
            f"kernel_options {dict(kernel_options or {})} of a plan",
            'a plan has BACKEND alone, "AUTO" or "GLUON"',
            "pass config= for the numbers of its kernel",
        )
    return gluon


def for_torch(kernel_options: Mapping[str, Any] | None) -> dict[str, Any] | None:
    """The options without the keys that torch does not have, and with values as torch has them."""
    if kernel_options is None:
        return None
    found = {
        key: _exact(value)
        for key, value in kernel_options.items()
        if bare_key(key) not in OURS_ALONE and value != "GLUON"
    }
    for key, value in found.items():
        if bare_key(key) == "FLOAT32_PRECISION" and isinstance(value, str):
            found[key] = f"{value.strip(_QUOTE)!r}"  # torch writes it into a kernel as it stands
    return found


def _exact(value: object) -> object:
    """An integer of a class of its own as an int: a kernel's text has what a number prints."""
    if type(value) is bool or not isinstance(value, Integral):
        return value
    return operator.index(value)


def _template(chosen: Mapping[str, Any]) -> tuple[str | None, Language | None]:
    """The kind and the language of the templates that a call is restricted to."""
    backend = chosen.get("BACKEND", "AUTO")
    legacy = chosen.get(LEGACY, False)
    if legacy and backend != "AUTO":
        raise ConfigError(
            f"kernel_options has BACKEND={backend!r} and {LEGACY}",
            "they say the same thing and may differ",
            'keep BACKEND: "TRITON" forces the Triton prefill kernel',
        )
    if not isinstance(backend, str) or backend not in _BACKENDS:
        raise ConfigError(f"BACKEND={backend!r}", f"it is one of {tuple(_BACKENDS)}")
    if backend == "FLASH":
        say_once(FLASH, logging.INFO)
    return _BACKENDS["TRITON" if legacy else backend]


def _rules(value: object) -> tuple[str, ...]:
    """Names of rewrites, separated by commas, or "all"."""
    names = {name.strip() for name in value.split(",")} if isinstance(value, str) else {"?"}
    if names == {"all"}:
        return tuple(sorted(REWRITES))
    found = names - {""}
    if not found <= REWRITES.keys():
        raise ConfigError(
            f"kernel_options['RULES_OFF']={value!r}",
            f"the rules are {', '.join(REWRITES)}, separated by commas, or all",
            did_you_mean(min(found - REWRITES.keys()), REWRITES),
        )
    return tuple(sorted(found))


def _one_of(name: str, value: object, among: Mapping[_T, _V]) -> _V:
    """The meaning of a key's value, one of `among`; raises ConfigError for another value."""
    for known, meaning in among.items():
        if value == known:
            return meaning
    raise ConfigError(f"kernel_options[{name!r}]={value!r}", f"it is one of {tuple(among)}")


def _ptxas(value: object) -> Ptxas | None:
    return None if value is None else _one_of("PTXAS", value, dict(zip(PTXAS, PTXAS, strict=True)))


def _fp32(value: object) -> Fp32Setting | None:
    if value is None:
        return None
    precision = value.strip(_QUOTE) if isinstance(value, str) else value
    return _one_of("FLOAT32_PRECISION", precision, _FP32)


def _integer(chosen: Mapping[str, Any], name: str) -> int | None:
    value = _exact(chosen.get(name))
    if value is None:
        return None
    if type(value) is not int or value < 1:
        raise InputError(f"kernel_options[{name!r}]={value!r}", "it is a positive integer")
    return value


def _boolean(chosen: Mapping[str, Any], name: str) -> bool | None:
    value = chosen.get(name)
    if value is not None and not isinstance(value, bool):
        raise InputError(f"kernel_options[{name!r}]={value!r}", "it is True or False")
    return value
