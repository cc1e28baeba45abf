"""How a kernel that merges parts of work tiles is cut into programs."""

from __future__ import annotations

from dataclasses import dataclass

from flexattn.device import Device
from flexattn.kernels.base.config import padded
from flexattn.kernels.paged_decode.config import COMBINE_WARPS, MERGED, ServingConfig
from flexattn.problem.serving import ServingForm

# A part's columns that one program merges at least.
LEAST_COLUMNS = 128
# Programs of a launch for each SM at most. Where nobody left parts they end at once, and each wave
# of them is a wait for lengths.
_PROGRAMS_AN_SM = 4


@dataclass(frozen=True, slots=True)
class MergeShape:
    """rows, columns: of a work tile that a program merges; parts: that it holds at a time.

    row_parts, column_parts: programs of a work tile. work_tiles: of the largest batch, each with
    programs of its own; 0 where each program that attends has them, for the work tile that it ends
    in: there may be more work tiles than programs. turns: how often a program merges rows.
    rehearsed: it goes through a turn that merges nothing before it waits for parts.
    """

    rows: int
    columns: int
    parts: int
    row_parts: int
    column_parts: int
    work_tiles: int = 0
    turns: int = 1
    rehearsed: bool = False

    def grid(self, programs: int) -> int:
        """Programs of the launch, where so many attend."""
        return (self.work_tiles or programs) * self.row_parts * self.column_parts


def merge_shape(form: ServingForm, config: ServingConfig, device: Device) -> MergeShape:
    """At most MERGED values of rows and parts a warp; few work tiles are cut small for all SMs."""
    width = 1 << (padded(form.head_dim_v) - 1).bit_length()
    held = MERGED * (COMBINE_WARPS if config.merges_apart else config.num_warps)
    if config.warp_specialized:
        held //= 2  # it begins with the registers that two warpgroups leave
    filled = min(config.BLOCK_M, form.rows or config.BLOCK_M)
    rows = min(filled, max(1, held // (4 * width)))
    work_tiles = form.requests * -(-form.rows // config.BLOCK_M) * form.kv_heads
    if not config.dependent or form.ragged or work_tiles > config.programs(device):
        parts = max(1, min(32, held // (rows * width)))
        return MergeShape(rows, width, parts, config.BLOCK_M // rows, 1)
    columns, least = width, LEAST_COLUMNS // (2 if config.swap_ab else 1)
    if form.head_dim_v != width:
        least = width  # tiles of two sizes have no equal parts
    while work_tiles * (filled // rows) * (width // columns) < device.num_sms:
        if rows > 1:
            rows //= 2
        elif columns > least:
            columns //= 2
        else:
            break
    if config.swap_ab and columns > least:
        held //= 2  # weights take registers where threads have whole rows
    parts = min(128 if config.swap_ab else 64, held // (rows * columns))
    row_parts, column_parts, turns = -(-filled // rows), width // columns, 1
    most = _PROGRAMS_AN_SM * device.num_sms
    while row_parts > 1 and work_tiles * row_parts * column_parts > most:
        row_parts, turns = -(-row_parts // 2), 2 * turns
    rehearsed = config.swap_ab and turns == 1
    return MergeShape(rows, columns, parts, row_parts, column_parts, work_tiles, turns, rehearsed)
