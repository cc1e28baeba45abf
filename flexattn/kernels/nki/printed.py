"""Feasibility of the NKI templates for prefill and decode.

Printed of stated/nki.py, which says what the numbers mean, by `make golden`.
"""

from __future__ import annotations

from dataclasses import dataclass

from flexattn.kernels.base.rule import Rule, Rules


@dataclass(slots=True, eq=False, repr=False)
class RuleCase:
    """The numbers of one case."""

    BLOCK_M: int
    BLOCK_N: int
    num_splits: int
    section: int
    score_buffers: int
    value_buffers: int
    buffers: int
    kv_buffers: int
    dma: bool
    turned: bool
    refused: bool
    range_select: bool
    sbuf_limit: int
    has_dma_transpose: bool
    has_range_select: bool
    has_bf16_psum: bool
    # Known where the rules of the shape hold.
    sbuf: int = 0
    banks: int = 0
    itemsize: int = 0
    lanes: int = 0


RULES: Rules[RuleCase] = Rules(
    shape=(
        Rule("at least one", "BLOCK_M={BLOCK_M} is below 1", lambda c: c.BLOCK_M >= 1),
        Rule("at least one", "BLOCK_N={BLOCK_N} is below 1", lambda c: c.BLOCK_N >= 1),
        Rule("at least one", "num_splits={num_splits} is below 1", lambda c: c.num_splits >= 1),
        Rule("at least one", "section={section} is below 1", lambda c: c.section >= 1),
        Rule(
            "at least one",
            "score_buffers={score_buffers} is below 1",
            lambda c: c.score_buffers >= 1,
        ),
        Rule(
            "at least one",
            "value_buffers={value_buffers} is below 1",
            lambda c: c.value_buffers >= 1,
        ),
        Rule("at least one", "buffers={buffers} is below 1", lambda c: c.buffers >= 1),
        Rule("at least one", "kv_buffers={kv_buffers} is below 1", lambda c: c.kv_buffers >= 1),
        Rule(
            "rows",
            "BLOCK_M={BLOCK_M}: a matmul has 128 stationary columns",
            lambda c: c.BLOCK_M <= 128,
        ),
        Rule(
            "keys",
            "BLOCK_N={BLOCK_N} is less than a chunk of 128 keys",
            lambda c: c.BLOCK_N >= 128,
        ),
    ),
    fit=(
        Rule("mods", "{refusal}", lambda c: not c.refused),
        Rule(
            "sbuf",
            "SBUF: {sbuf} bytes of a partition, {core} has {sbuf_limit}",
            lambda c: c.sbuf <= c.sbuf_limit,
        ),
        Rule("psum", "PSUM: {banks} banks, there are 8", lambda c: c.banks <= 8),
        Rule(
            "dma transpose",
            "transpose=dma: {core} has no DMA transpose",
            lambda c: c.has_dma_transpose or c.turned or not c.dma,
        ),
        Rule(
            "dma transpose",
            "transpose=dma: it moves elements of 2 bytes",
            lambda c: c.turned or not c.dma or c.itemsize == 2,
        ),
        Rule(
            "form",
            "mask=range: range_select compares along the free dimension, and form=st has rows "
            "there",
            lambda c: not c.range_select or not c.turned,
        ),
        Rule(
            "form",
            "form=st: tiles of BLOCK_M={BLOCK_M} rows cross the end of a PSUM bank",
            lambda c: (
                c.has_bf16_psum
                or not c.turned
                or c.lanes * c.score_buffers <= 512
                or 512 % c.BLOCK_M == 0
            ),
        ),
        Rule(
            "range_select",
            "mask=range: {core} has no range_select",
            lambda c: c.has_range_select or c.turned or not c.range_select,
        ),
    ),
    worth=(),
)
