"""A step as numbers in static tensors: the layout that the model, the plans and a graph read.

Rows of a step: first those of pieces that the ragged plan attends to, in the order of their slots,
then one for each member of a cascade. A slot without a piece has no rows and a length of 0.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from examples.serving.request import Limits, Request
from examples.serving.scheduler import Step


class Inputs:
    """int32 on the device, filled from one buffer by one copy a step.

    tokens, positions, slots [rows]: of each row; its key goes to slots // page, at slots % page,
    and nowhere where that is below 0.
    lens [B], ends [B + 1], table [B, P]: the ragged plan's seq_lens, cu_seqlens_q and block_table.
    last [B]: the row whose logits are wanted, of each slot.
    Of a cascade: gather [B], rows of its members; scatter [B], where what they give goes: behind
    all rows, where there is no member; their lens_c and start_c [B]; prefix_len [1], prefix
    [1, P]; own [B, P], the pages behind the prefix.
    """

    def __init__(self, limits: Limits, device: torch.device) -> None:
        B, R, P = limits.batch, limits.rows, limits.pages_of(limits.longest)
        shapes = {
            "tokens": (R,), "positions": (R,), "slots": (R,), "lens": (B,), "ends": (B + 1,),
            "last": (B,), "gather": (B,), "scatter": (B,), "lens_c": (B,),
            "start_c": (B,), "prefix_len": (1,), "table": (B, P), "prefix": (1, P), "own": (B, P),
        }  # fmt: skip
        sizes = [-(-torch.Size(shape).numel() // 4) * 4 for shape in shapes.values()]
        pinned = {"pin_memory": device.type == "cuda"}
        self._host = torch.zeros(sum(sizes), dtype=torch.int32, **pinned)
        self._device = torch.zeros(sum(sizes), dtype=torch.int32, device=device)
        self._limits = limits

        def views(whole: Tensor) -> dict[str, Tensor]:
            parts = zip(shapes.items(), whole.split(sizes), strict=True)
            return {
                name: part[: torch.Size(shape).numel()].view(shape)
                for (name, shape), part in parts
            }

        self._views = views(self._host)
        self.on = views(self._device)

    def seat(self, request: Request) -> None:
        """A request's pages, all of which it holds from now on, into its slot of the table."""
        pages = torch.tensor(request.pages, dtype=torch.int32)
        self._views["table"][request.slot, : len(pages)] = pages

    def fill(self, step: Step) -> int:
        """Write a step, and copy all to the device; returns how many rows it has."""
        limits = self._limits
        shared = step.shared
        members = set() if shared is None else shared.members
        pieces = sorted(
            ((i in members, p.request.slot, p) for i, p in enumerate(step.pieces)),
            key=lambda each: each[:2],
        )
        rows: list[list[int]] = [[], [], []]
        lens, counts, last = ([0] * limits.batch for _ in range(3))
        gather, scatter = [0] * limits.batch, [limits.rows] * limits.batch
        lens_c, start_c = [0] * limits.batch, [0] * limits.batch
        depth = 0 if shared is None else len(shared.pages)
        for in_cascade, slot, piece in pieces:
            request, places = piece.request, range(piece.first, piece.last)
            if in_cascade:
                gather[slot] = scatter[slot] = len(rows[0])
                lens_c[slot], start_c[slot] = piece.last, depth * limits.page
                own = self._views["table"][slot, depth:]
                self._views["own"][slot, : len(own)] = own
            else:
                lens[slot], counts[slot] = piece.last, len(places)
            rows[0] += request.tokens[piece.first : piece.last]
            rows[1] += places
            size = limits.page
            rows[2] += [request.pages[at // size] * size + at % size for at in places]
            last[slot] = len(rows[0]) - 1
        used = len(rows[0])
        ends = [0]
        for count in counts:
            ends.append(ends[-1] + count)
        for name, values in zip(("tokens", "positions", "slots"), rows, strict=True):
            self._put(name, values + [-(name == "slots")] * (limits.rows - used))
        for name, values in {
            "lens": lens, "ends": ends, "last": last, "gather": gather, "scatter": scatter,
            "lens_c": lens_c, "start_c": start_c,
        }.items():  # fmt: skip
            self._put(name, values)
        if shared is not None:
            self._put("prefix_len", [depth * limits.page])
            self._views["prefix"][0, :depth] = torch.tensor(shared.pages, dtype=torch.int32)
        self._device.copy_(self._host, non_blocking=True)
        return used

    def _put(self, name: str, values: Sequence[int]) -> None:
        self._views[name].copy_(torch.tensor(values, dtype=torch.int32))
