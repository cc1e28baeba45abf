"""Limits of the serving templates, one group of rules for each: what can run, and why not else."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import get_args

from flexattn.device import Device
from flexattn.kernels.base.limits import (
    SHARED_MEMORY,
    Limits,
    Rule,
    is_power_of_two,
    power_of_two,
)
from flexattn.kernels.paged_decode.config import (
    Combine,
    ServingConfig,
    invariant_config,
    serving_shared_memory,
    tile_columns,
)
from flexattn.kernels.paged_decode.engines import (
    LATENT,
    LEAST_PAGE,
    MOST_STAGES,
    ROPE,
    SPECIALIZED_STAGES,
    TMA_KEYS,
    TMA_ROWS,
    first_registers,
)
from flexattn.problem.serving import ServingForm

COMBINES: tuple[Combine, ...] = get_args(Combine)
# Of a thread's registers, what does not accumulate where warps share a tile; what addresses and
# the loop take beside the tile of a warp of its own.
OTHER_REGISTERS, BESIDE_A_WARPS_TILE = 55, 40
# Operands of 16 bits, on their way from 8 into products: with none left for them, tiles spill.
WIDENED_REGISTERS = 32
# Requests whose lengths are in a warp's registers: where each warp has a tile of its own, and
# where one loads.
WARPS_REQUESTS, LOADER_REQUESTS = 1024, 512
# Bytes of numbers and barriers of a program whose loading warp tells the others of work tiles, and
# what an SM keeps of each program.
NUMBERS, KEPT_BY_AN_SM = 2048, 1024


@dataclass(eq=False)
class ConfigCase:
    """A config for a form on a device."""

    config: ServingConfig
    form: ServingForm
    device: Device

    @property
    def interpreted(self) -> bool:
        """True if there is no device."""
        return self.device.backend == "interpreter"

    @property
    def programs(self) -> int:
        """Programs of a launch."""
        return self.config.programs(self.device)

    @cached_property
    def shared_memory(self) -> int:
        """Bytes of shared memory."""
        tiles = serving_shared_memory(self.config, self.form)
        return tiles + (NUMBERS if self.config.warp_specialized else 0)

    @property
    def accumulators(self) -> int:
        """Numbers of a tile that the registers of all warps add up."""
        columns = tile_columns(self.form, self.form.head_dim_v)
        return self.config.BLOCK_M * (columns + self.config.BLOCK_N)

    # Where each warp has keys of a tile for itself. Rows of 256 columns are two chunks of rows of
    # the products.

    @property
    def product_rows(self) -> int:
        """Rows of a product."""
        return self.config.BLOCK_M * self.form.chunks

    @property
    def product_keys(self) -> int:
        """Keys of a product."""
        return self.config.keys_per_warp * self.form.chunks

    @cached_property
    def held(self) -> int:
        """Registers of a thread for a tile, K, V and Q in words, and the ends of requests."""
        c, form = self.config, self.form
        columns = form.head_dim_qk + form.head_dim_v
        kv_tiles = c.keys_per_warp * columns * self.form.kv_itemsize // 128
        widened = WIDENED_REGISTERS if self.form.kv_itemsize == 1 else 0
        scores = self.product_keys * self.product_rows // 16
        q_and_output = c.BLOCK_M * (form.head_dim_qk // 2 + form.head_dim_v) // 32
        ends = form.requests // 32 * (1 if form.mask is None else 2)
        return kv_tiles + widened + scores + q_and_output + ends

    @property
    def thread_registers(self) -> int:
        """Registers of a thread, for as many programs of an SM."""
        return self.config.registers(self.form, self.device)

    # Where a warp loads by TMA for one or two warpgroups.

    @property
    def threads(self) -> int:
        """Threads of a program, those of the loading warp's group among them."""
        return 128 * (self.config.num_warps // 4 + 1)

    @property
    def whole_boxes(self) -> bool:
        """True if a page is a power of two of keys, or there are no pages."""
        page = self.form.page
        return page == 0 or (page >= LEAST_PAGE and is_power_of_two(page))

    @property
    def fixed(self) -> ServingConfig:
        """The config of a batch-invariant form, without what changes no bit."""
        return invariant_config(self.form)


def overlaps(device: Device) -> bool:
    """True if a kernel may begin while the one before it runs."""
    return device.backend == "interpreter" or device.capability >= 90


_ENOUGH: Rule[ConfigCase] = Rule(
    "programs",
    "per_sm and least are at least 1",
    lambda c: c.config.per_sm >= 1 and c.config.least >= 1,
)


_ALL_KEYS: Rule[ConfigCase] = Rule(
    "selection",
    "chosen keys are read by split_policy='even'",
    lambda c: not c.form.unit,
)

# All warps of a program share a tile: program.py.jinja.
PROGRAMS_LIMITS: Limits[ConfigCase] = Limits(
    ConfigCase,
    fit=(
        Rule(
            "combine",
            "parts are awaited where tiles are split by heads or round",
            lambda c: c.config.combine != "await",
        ),
        Rule(
            "combine",
            "combine={c.config.combine!r} is one of last, launch, dependent, await",
            lambda c: c.config.combine in COMBINES,
        ),
        *map(power_of_two, ("BLOCK_M", "BLOCK_N")),
        Rule(
            "warps",
            "num_warps is 1, 2, 4 or 8, and num_stages at least 1",
            lambda c: c.config.num_warps in (1, 2, 4, 8) and c.config.num_stages >= 1,
        ),
        _ENOUGH,
        SHARED_MEMORY,
        Rule(
            "registers",
            "{c.accumulators} accumulators do not fit {c.config.num_warps} warps' registers",
            lambda c: (
                c.accumulators
                <= 32 * c.config.num_warps * (c.device.max_registers - OTHER_REGISTERS)
            ),
        ),
        Rule(
            "dependent",
            "a kernel begins while the one before it runs on sm_90 and newer",
            lambda c: not c.config.dependent or overlaps(c.device),
        ),
        Rule(
            "dependent",
            "a cascade merges the parts of its prefix itself",
            lambda c: not c.config.dependent or not c.form.prefix,
        ),
    ),
)

# Each warp has keys of a tile for itself: warp.py.jinja.
WARPS_LIMITS: Limits[ConfigCase] = Limits(
    ConfigCase,
    fit=(
        _ALL_KEYS,
        Rule(
            "arch",
            "warp-private kernels run on NVIDIA's sm_80 to sm_90",
            lambda c: c.interpreted or 80 <= c.device.capability <= 90,
        ),
        Rule(
            "rows",
            "BLOCK_M={c.config.BLOCK_M} is 8 or 16, where heads have 256 columns 4 or 8",
            lambda c: c.product_rows in (8, 16),
        ),
        Rule("warps", "num_warps is 1, 2, 4 or 8", lambda c: c.config.num_warps in (1, 2, 4, 8)),
        Rule(
            "keys",
            "each warp has {c.config.keys_per_warp} of 16, 32 or 64 keys, of 256 columns half of "
            "them",
            lambda c: c.product_keys in (16, 32, 64),
        ),
        Rule(
            "keys",
            "warps have equal shares of BLOCK_N",
            lambda c: c.config.BLOCK_N % c.config.num_warps == 0,
        ),
        Rule(
            "stages",
            "num_stages is 1: a warp holds one tile of K and V",
            lambda c: c.config.num_stages == 1,
        ),
        _ENOUGH,
        Rule(
            "merge",
            "fewer than 4 warps have no registers to merge 16 rows, or 8 of 256 columns",
            lambda c: c.interpreted or c.product_rows == 8 or c.config.num_warps >= 4,
        ),
        Rule(
            "split_policy",
            "split_policy={c.config.split_policy!r} is heads or round",
            lambda c: c.config.split_policy in ("heads", "round"),
        ),
        Rule(
            "combine",
            "parts are awaited where tiles are split by heads or round",
            lambda c: c.config.combine == "await",
        ),
        Rule(
            "dtype",
            "q has 16 bits, K and V are as q or have 8",
            lambda c: (
                c.form.itemsize == 2
                and (c.form.kv_itemsize == 1 or c.form.kv_dtype == c.form.dtype)
            ),
        ),
        Rule(
            "dtype",
            "K and V of 8 bits are widened by instructions of sm_89 and newer",
            lambda c: c.form.kv_itemsize != 1 or c.interpreted or c.device.capability >= 89,
        ),
        Rule(
            "head dimension",
            "head dimensions ({c.form.head_dim_qk}, {c.form.head_dim_v}) are 64 or 128, or 128 or"
            " 256",
            lambda c: all(
                dim in (64 * c.form.chunks, 128 * c.form.chunks)
                for dim in (c.form.head_dim_qk, c.form.head_dim_v)
            ),
        ),
        Rule(
            "merge",
            "one warp has too few threads to merge rows of 256 values",
            lambda c: 128 * c.config.num_warps >= c.form.head_dim_v,
        ),
        Rule(
            "layout",
            "K and V are apart, and aligned to 16 bytes",
            lambda c: c.form.aligned and not c.form.shared_kv,
        ),
        Rule(
            "requests",
            f"of at most {WARPS_REQUESTS} requests, no shared prefix",
            lambda c: not c.form.prefix and c.form.requests <= WARPS_REQUESTS,
        ),
        Rule(
            "registers",
            "{c.held} registers hold a thread's K, V, Q, scores and output",
            lambda c: c.interpreted or c.held + BESIDE_A_WARPS_TILE <= c.thread_registers,
        ),
        Rule(
            "heads",
            "{c.form.kv_heads} KV heads have programs of their own",
            lambda c: c.form.kv_heads <= c.programs,
        ),
        # Where a program's first tile lies then says nothing of a length.
        Rule(
            "round",
            "tiles of one request and one tile of rows go round",
            lambda c: (
                c.config.split_policy != "round"
                or (
                    c.form.requests == 1
                    and 0 < c.form.rows <= c.config.BLOCK_M
                    and not c.form.offset
                )
            ),
        ),
    ),
)


def _by_tma(name: str) -> tuple[Rule[ConfigCase], ...]:
    """The rules of a template whose loading warp copies boxes of 16 bits."""
    return (
        Rule(
            "selection",
            f"chosen keys are read by split_policy='even', or for MLA by tiles of {TMA_ROWS} rows",
            lambda c: c.config.gathers(c.form) or not c.form.unit,
        ),
        Rule("arch", f"the {name} template is for sm_90", lambda c: c.device.capability == 90),
        Rule(
            "dtype",
            f"the {name} template multiplies 16 bits",
            lambda c: (
                c.form.itemsize == 2 and (c.form.kv_itemsize == 2 or c.config.gathers(c.form))
            ),
        ),
        Rule(
            "scales",
            f"the {name} template takes one scale of a cache, or one for each head",
            lambda c: not c.form.scales,
        ),
        Rule(
            "page",
            f"a page of the {name} template has {LEAST_PAGE}, 32, 64, 128 or 256 keys",
            lambda c: c.whole_boxes or c.config.gathers(c.form),
        ),
        Rule(
            "prefix",
            f"the {name} template takes no prefix that requests share",
            lambda c: not c.form.prefix,
        ),
        Rule(
            "layout",
            "the copy engine reads what lies at multiples of 16 bytes",
            lambda c: c.form.aligned,
        ),
    )


def _mla_tile(c: ConfigCase) -> bool:
    """True if tiles are those of 64 rows, or of few rows with operands swapped."""
    config = c.config
    if config.num_warps != 4 or config.per_sm != 1 or config.least < 1:
        return False
    if config.BLOCK_M == TMA_ROWS:
        return config.BLOCK_N == 2 * TMA_KEYS and config.num_stages == 1
    most = MOST_STAGES.get(config.BLOCK_M, 0)
    most = 2 if config.gathers(c.form) else most
    return config.BLOCK_N == TMA_KEYS and 2 <= config.num_stages <= most


# Keys are values too, and a warp loads them: py.jinja and mla_swap_ab.py.jinja.
MLA_LIMITS: Limits[ConfigCase] = Limits(
    ConfigCase,
    fit=(
        *_by_tma("MLA"),
        Rule(
            "head dimension",
            f"the MLA template is for shared_kv with head dimensions {LATENT + ROPE} and {LATENT}",
            lambda c: (
                c.form.shared_kv
                and c.form.head_dim_qk == LATENT + ROPE
                and c.form.head_dim_v == LATENT
            ),
        ),
        Rule(
            "tile",
            f"the MLA template has BLOCK_M={TMA_ROWS}, BLOCK_N={2 * TMA_KEYS}, num_warps=4, "
            "num_stages=1 and per_sm=1, or with 2 or 3 stages (of chosen keys 2) BLOCK_M=16, "
            f"with 2 BLOCK_M=32, and BLOCK_N={TMA_KEYS}",
            _mla_tile,
        ),
        Rule(
            "combine",
            "the MLA template leaves merges to a second kernel",
            lambda c: c.config.combine == "launch",
        ),
    ),
)

# A warp loads keys and values: py.jinja.
SPECIALIZED_LIMITS: Limits[ConfigCase] = Limits(
    ConfigCase,
    fit=(
        *_by_tma("warp-specialised"),
        Rule(
            "head dimension",
            "the warp-specialised template is for head dimensions of 64, 128 or 256 of K and V",
            lambda c: (
                c.form.head_dim_qk == c.form.head_dim_v and c.form.head_dim_v in (64, 128, 256)
            ),
        ),
        Rule(
            "layout",
            "the warp-specialised template loads K and V apart",
            lambda c: not c.form.shared_kv,
        ),
        Rule(
            "tile",
            f"the warp-specialised template has BLOCK_M={TMA_ROWS}, BLOCK_N={TMA_KEYS}, "
            f"num_warps=4 or 8, and num_stages of 2 to {SPECIALIZED_STAGES}",
            lambda c: (
                c.config.num_warps in (4, 8) and 2 <= c.config.num_stages <= SPECIALIZED_STAGES
            ),
        ),
        # It would take a tile that the other one waits for in the same slot for its own.
        Rule(
            "stages",
            "each of two warpgroups has slots of its own, so num_stages is even",
            lambda c: c.config.num_stages % max(1, c.config.num_warps // 4) == 0,
        ),
        _ENOUGH,
        Rule(
            "shared memory",
            SHARED_MEMORY.says,
            lambda c: (
                c.shared_memory <= c.device.shared_memory
                and c.config.per_sm * c.shared_memory <= c.device.shared_memory + KEPT_BY_AN_SM
            ),
        ),
        Rule(
            "registers",
            "{c.config.per_sm} programs of {c.threads} threads are more than an SM's registers "
            "hold",
            lambda c: (
                c.config.per_sm * c.threads * first_registers(c.form, c.config)
                <= c.device.registers
            ),
        ),
        Rule(
            "combine",
            "its merges are left to a second kernel",
            lambda c: c.config.combine == "launch",
        ),
        Rule(
            "requests",
            f"the loading warp has registers for the lengths of {LOADER_REQUESTS} requests",
            lambda c: c.form.requests <= LOADER_REQUESTS,
        ),
    ),
)


def _as_fixed(name: str) -> Rule[ConfigCase]:
    words = f"{name} is {{c.fixed.{name}!r}} where results are batch-invariant"
    return Rule(
        "invariant", words, lambda c: bool(getattr(c.config, name) == getattr(c.fixed, name))
    )


# What would give a batch-invariant form other bits than its family has.
INVARIANT_LIMITS: Limits[ConfigCase] = Limits(
    ConfigCase,
    fit=(
        *map(_as_fixed, ("BLOCK_N", "num_warps", "combine", "split_policy")),
        Rule(
            "invariant",
            "a prefix that is read apart splits the keys elsewhere",
            lambda c: not c.form.prefix and not c.form.offset,
        ),
    ),
)


class _OfTemplates(Limits[ConfigCase]):
    """The limits of each template, by the config."""

    def broken(self, case: ConfigCase) -> list[Rule[ConfigCase]]:
        config = case.config
        found: list[Limits[ConfigCase]] = [INVARIANT_LIMITS] if case.form.split_keys else []
        if config.warp_private:
            found = [WARPS_LIMITS, *found]
        elif not found:
            mine = SPECIALIZED_LIMITS if config.warp_specialized else PROGRAMS_LIMITS
            found = [MLA_LIMITS if config.for_mla else mine]
        return [rule for each in found for rule in each.broken(case)]


SERVING_LIMITS = _OfTemplates(ConfigCase, ())
# Why a config cannot run for a form on a device; empty where it can.
serving_reasons = SERVING_LIMITS.reasons
