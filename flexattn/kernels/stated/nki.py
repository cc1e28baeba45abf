"""The NKI templates' feasibility on a NeuronCore, in sympy.

What a config takes of SBUF and PSUM are numbers here: kernels/nki/config.py counts them as the
interpreter does, to the byte.
"""

from __future__ import annotations

from sympy import Eq, Mod, Not, Or, symbols

from flexattn.device.neuroncore import BANK_BYTES, PARTITIONS, PSUM_BANKS, STATIONARY_MAX
from flexattn.kernels.stated.statement import Inequality, Statement

# A config's numbers, num_splits 1 for prefill, and truth values: dma where DMA turns P, turned
# where keys lie on the partitions, so that nothing need turn it.
_SIZES = (
    BLOCK_M, BLOCK_N, num_splits, section, score_buffers, value_buffers, buffers, kv_buffers,
) = symbols(
    "BLOCK_M BLOCK_N num_splits section score_buffers value_buffers buffers kv_buffers"
)  # fmt: skip
_WORDS = (dma, turned) = symbols("dma turned")
# What mods ask for, and what a core has.
NEEDS = (refused, range_select) = symbols("refused range_select")
CORE = (sbuf_limit, has_dma_transpose, has_range_select, has_bf16_psum) = symbols(
    "sbuf_limit has_dma_transpose has_range_select has_bf16_psum"
)
# Bytes of a partition of SBUF, banks of PSUM, bytes of an element, elements of a tile in one
# partition.
_ESTIMATED = (sbuf, banks, itemsize, lanes) = symbols("sbuf banks itemsize lanes")
# fp32 numbers of a PSUM bank.
_COLUMNS = BANK_BYTES // 4

NKI_STATEMENT = Statement(
    "the NKI templates for prefill and decode",
    (*_SIZES, *_WORDS, *NEEDS, *CORE),
    estimated=_ESTIMATED,
    shape=(
        *(
            Inequality("at least one", size >= 1, f"{size.name}={{{size.name}}} is below 1")
            for size in _SIZES
        ),
        Inequality(
            "rows",
            BLOCK_M <= STATIONARY_MAX,
            f"BLOCK_M={{BLOCK_M}}: a matmul has {STATIONARY_MAX} stationary columns",
        ),
        Inequality(
            "keys",
            BLOCK_N >= PARTITIONS,
            f"BLOCK_N={{BLOCK_N}} is less than a chunk of {PARTITIONS} keys",
        ),
    ),
    fit=(
        Inequality("mods", Not(refused), "{refusal}"),
        Inequality(
            "sbuf",
            sbuf <= sbuf_limit,
            "SBUF: {sbuf} bytes of a partition, {core} has {sbuf_limit}",
        ),
        Inequality("psum", banks <= PSUM_BANKS, f"PSUM: {{banks}} banks, there are {PSUM_BANKS}"),
        Inequality(
            "dma transpose",
            Or(Not(dma), turned, has_dma_transpose),
            "transpose=dma: {core} has no DMA transpose",
        ),
        Inequality(
            "dma transpose",
            Or(Not(dma), turned, Eq(itemsize, 2)),
            "transpose=dma: it moves elements of 2 bytes",
        ),
        Inequality(
            "form",
            Or(Not(turned), Not(range_select)),
            "mask=range: range_select compares along the free dimension, and form=st has rows "
            "there",
        ),
        Inequality(
            "form",
            Or(
                Not(turned),
                score_buffers * lanes <= _COLUMNS,
                Eq(Mod(_COLUMNS, BLOCK_M), 0),
                has_bf16_psum,
            ),
            "form=st: tiles of BLOCK_M={BLOCK_M} rows cross the end of a PSUM bank",
        ),
        Inequality(
            "range_select",
            Or(turned, Not(range_select), has_range_select),
            "mask=range: {core} has no range_select",
        ),
    ),
)
