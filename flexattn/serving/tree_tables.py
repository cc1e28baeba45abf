"""What the kernels of a TreePlan read of a tree: one row of int32 with a place for each table."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

from torch import Tensor

from flexattn.serving.tree import TreeReads

# Numbers of a table are rounded up to so many: 16 bytes.
_ALIGNED = 4


@dataclass(frozen=True, slots=True)
class TreeTables:
    """The tables of any tree that a plan serves, by the plan's maxima.

    A shared read is a request of the first launch, whose rows are those of all requests below it,
    one request after the other. starts [batch]: the first key that a request reads itself. begins,
    ends [reads]: keys of a shared read. before [reads]: the row of its first query less the
    position at which the kernel places it. row_ends [reads + 1]: its rows, as cu_seqlens_q. gather
    [rows]: of each row, the query's place among requests x query positions. slots [batch x q_len,
    levels]: of each query its rows, in the order of their keys, -1 where there are fewer.
    """

    batch: int
    q_len: int
    levels: int

    @property
    def reads(self) -> int:
        """The most shared reads: their requests are nested sets of at least two."""
        return max(1, self.batch - 1)

    @property
    def rows(self) -> int:
        """The most rows of all shared reads."""
        return self.levels * self.batch * self.q_len

    def sizes(self) -> dict[str, int]:
        """Numbers of each table, by its name."""
        reads = self.reads
        return {
            "starts": self.batch,
            "begins": reads,
            "ends": reads,
            "before": reads,
            "row_ends": reads + 1,
            "gather": self.rows,
            "slots": self.rows,
        }

    def spans(self) -> dict[str, slice]:
        """Where each table lies in the row."""
        sizes = self.sizes()
        ends = accumulate(-(-size // _ALIGNED) * _ALIGNED for size in sizes.values())
        starts = [0, *ends]
        return {
            name: slice(start, start + size)
            for (name, size), start in zip(sizes.items(), starts, strict=False)
        }

    def views(self, row: Tensor) -> dict[str, Tensor]:
        """The tables in a tensor that holds the row."""
        return {name: row[span] for name, span in self.spans().items()}

    def filled(self, found: TreeReads) -> list[int]:
        """The row for what was chosen; what a tree leaves empty has no rows and no keys."""
        spans = self.spans()
        row = [0] * spans["slots"].stop
        slots = [[-1] * self.levels for _ in range(self.batch * self.q_len)]
        taken = [0] * self.batch
        begins, ends, before, row_ends, gather = [], [], [], [0], []  # type: ignore[var-annotated]
        for read in found.shared:
            rows = len(read.requests) * self.q_len
            begins.append(read.first)
            ends.append(read.end)
            # The last of a launch's rows stands at its last key, or the first one at key 0.
            before.append(len(gather) - max(read.end - rows, 0))
            for request in read.requests:
                for place in range(request * self.q_len, (request + 1) * self.q_len):
                    slots[place][taken[request]] = len(gather)
                    gather.append(place)
                taken[request] += 1
            row_ends.append(len(gather))
        row_ends += [len(gather)] * (self.reads + 1 - len(row_ends))
        tables: dict[str, Sequence[int]] = {
            "starts": found.starts, "begins": begins, "ends": ends, "before": before,
            "row_ends": row_ends, "gather": gather,
            "slots": [slot for each in slots for slot in each],
        }  # fmt: skip
        for name, numbers in tables.items():
            start = spans[name].start
            row[start : start + len(numbers)] = numbers
        return row
