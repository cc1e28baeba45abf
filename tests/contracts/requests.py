"""Requests of one attention layer as a server has them: tokens that come in steps, and pages."""

from dataclasses import dataclass

import torch

from tests.serving import Batch


@dataclass
class Step:
    """One forward: q [rows, Hq, D], k and v [rows, Hkv, D], and where keys lie.

    slots int64 [rows]: of the new keys. table int32 [requests, pages of the longest], lens and
    q_lens: keys and rows of each request. each: all that the oracle attends to.
    """

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    slots: torch.Tensor
    table: torch.Tensor
    lens: list
    q_lens: list
    each: Batch


class Requests:
    """The keys and values of requests so far, and the pages of a pool that hold them.

    Page 0 is nobody's. eight: the dtype of an 8-bit cache, whose scales are
    `scales`, or None where each token and head has its own.
    """

    def __init__(
        self, Hq=4, Hkv=2, D=16, page=16, pages=24, dtype=torch.float32, eight=None, device="cpu"
    ):
        self.shape, self.page, self.pages, self.dtype = (Hq, Hkv, D), page, pages, dtype
        self.device = torch.device(device)
        self.eight = eight
        self.scales = torch.tensor(0.5, device=device), torch.tensor(2.0, device=device)
        self._draw = torch.Generator().manual_seed(7 * page + D)
        self._free = (torch.randperm(pages - 1, generator=self._draw) + 1).tolist()
        self._keys, self._values, self._pages = {}, {}, {}

    def share(self, name, other, tokens):
        """A new request whose first tokens, whole pages of them, are another's."""
        self._pages[name] = self._pages[other][: tokens // self.page]
        self._keys[name] = self._keys[other][:tokens]
        self._values[name] = self._values[other][:tokens]

    def step(self, tokens):
        """The next tokens of requests, {name: how many}, in this order."""
        rows = [self._grown(name, n) for name, n in tokens.items()]
        q, k, v = (torch.cat(x) for x in list(zip(*rows, strict=True))[:3])
        slots = torch.tensor([slot for row in rows for slot in row[3]], device=self.device)
        width = max(len(self._pages[name]) for name in tokens)
        table = torch.tensor(
            [self._pages[name] + [-7] * (width - len(self._pages[name])) for name in tokens],
            dtype=torch.int32,
            device=self.device,
        )
        keys, values = ([x[name] for name in tokens] for x in (self._keys, self._values))
        lens = [len(x) for x in keys]
        each = Batch(q, keys, values, list(tokens.values()), lens)
        return Step(q, k, v, slots, table, lens, list(tokens.values()), each)

    def _grown(self, name, n):
        Hq, Hkv, D = self.shape
        q, k, v = (
            torch.randn(n, heads, D, generator=self._draw).to(self.device, self.dtype)
            for heads in (Hq, Hkv, Hkv)
        )
        for found, new, scale in ((self._keys, k, 0), (self._values, v, 1)):
            kept = self._stored(new, self.scales[scale])
            found[name] = torch.cat([found.get(name, kept[:0]), kept])
        own, end = self._pages.setdefault(name, []), len(self._keys[name])
        while len(own) * self.page < end:
            own.append(self._free.pop())
        places = range(end - n, end)
        return q, k, v, [own[i // self.page] * self.page + i % self.page for i in places]

    def _stored(self, new, scale):
        """What the cache stands for."""
        if self.eight is None:
            return new
        most = torch.finfo(self.eight).max
        if scale is None:
            scale = (new.float().abs().amax(-1, keepdim=True) / most).clamp(min=2.0**-100)
            return (new.float() * (1 / scale)).to(self.eight).float() * scale
        return (new.float() / scale).clamp(-most, most).to(self.eight).float() * scale
