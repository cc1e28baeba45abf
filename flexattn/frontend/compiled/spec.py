"""The calls that become a node of a graph, and a node's data beside tensors: options, and a Spec.

The keys say that torch's node is a call of ours, and what it asked. A Spec is all of a call in a
compiled graph that is no tensor and no size, as the one string that our op takes.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any
from urllib.parse import quote, unquote

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import AuxRequest, BlockMask

from flexattn.errors import CacheError
from flexattn.frontend.call import Call
from flexattn.kernels.choose.options import NONE, Options, parse
from flexattn.mods.graph import GraphMod
from flexattn.mods.recorded import from_data, to_data
from flexattn.problem import FP8
from flexattn.problem.checks import PLUGINS, mixes
from flexattn.settings import current

_NAMES = {"score", "mask", "block", "lse", "max_scores", "options", "looks", "backward", "grads"}


@dataclass(frozen=True, slots=True)
class Spec:
    """The work of one node.

    score, mask: its mods. block: query rows and keys of a block of its mask, None without one.
    lse, max_scores: whether they are asked. options: kernel_options as they were given, chosen:
    as they were read. looks: whether its mask's lists are tensors that torch alone writes, so
    that their versions count what is written.
    """

    score: GraphMod | None
    mask: GraphMod | None
    block: tuple[int, int] | None
    lse: bool
    max_scores: bool
    options: dict[str, Any]
    looks: bool
    backward: bool = False
    grads: tuple[int, ...] = ()
    chosen: Options = NONE

    @property
    def statistics(self) -> AuxRequest:
        """The statistics that the node returns beside the attention itself."""
        return AuxRequest(self.lse, self.max_scores)


def printed(spec: Spec) -> str:
    """The spec as text, which `parsed` reads in any process."""
    data = {name: getattr(spec, name) for name in _NAMES}
    mods = {"score": _told(spec.score), "mask": _told(spec.mask)}
    # Inductor's C++ wrapper writes a string between quotes as it is: this one has none.
    return quote(json.dumps(data | mods, sort_keys=True), safe="{}[]:, ")


def parsed(text: str) -> Spec:
    """The spec of such a text, one object for each; raises CacheError for any other text."""
    return _parsed(text, current().batch_invariant)


@lru_cache(maxsize=1024)
def _parsed(text: str, invariant: bool) -> Spec:
    """invariant: the setting, which options are read by where they do not say."""
    data = json.loads(unquote(text))
    if type(data) is not dict or data.keys() != _NAMES:
        raise CacheError("the text of a node", f"it has {sorted(_NAMES)}")
    block = data["block"]
    return Spec(
        _mod(data["score"]), _mod(data["mask"]), None if block is None else (block[0], block[1]),
        data["lse"], data["max_scores"], data["options"], data["looks"], data["backward"],
        tuple(data["grads"]), parse(data["options"]),
    )  # fmt: skip


def _told(mod: GraphMod | None) -> Any:
    return None if mod is None else [to_data(mod.mod), mod.numbers, mod.sources]


def _mod(data: Any) -> GraphMod | None:
    if data is None:
        return None
    mod, numbers, sources = data
    return GraphMod(from_data(mod), tuple(numbers), tuple((kind, i) for kind, i in sources))


MARK = "FLEXATTN"
# Set where a call has no mask: torch makes one of a single block for it.
BARE = f"{MARK}_WITHOUT_MASK"
# Set where the call is one of torch's function, which `flexattn.install` serves: torch keeps it
# where ours refuses it.
INSTALLED = f"{MARK}_INSTALLED"
_OWN = f"{MARK}_OPTION_"


def _version() -> str:
    """A hash of what reads graphs: Inductor's cache keeps what a lowering of ours made of one."""
    package = Path(__file__).parents[2]
    folders = package / "mods", package / "frontend" / "compiled"
    sources = sorted(path for folder in folders for path in folder.rglob("*.py"))
    found = hashlib.sha256(b"".join(path.read_bytes() for path in sources)).hexdigest()[:16]
    # Where torch's kernel serves a node depends on them.
    settings = current()
    names = ("batch_invariant", "check", "interpret")
    return "-".join([found, *(name for name in names if getattr(settings, name))])


# The mark's value, by which it is a part of that cache's key.
VERSION = _version()


def own(name: str) -> str:
    """The key under which an option of the call stands."""
    return _OWN + name


def split_options(given: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """A node's options without our keys, and the call's own."""
    theirs = {name: value for name, value in given.items() if not name.startswith(MARK)}
    ours = {
        name.removeprefix(_OWN): value for name, value in given.items() if name.startswith(_OWN)
    }
    return theirs, ours


# The block of a mask that torch makes of no mask: it fits every length, whatever it says.
LARGEST_SIZE = 2**30


def breaks(call: Call) -> str:
    """The reason why a call runs outside of a graph, in words; "" where it is a node of it.

    Dynamo reads this function: it asks for nothing but types, sizes, dtypes and devices.
    """
    q, k, v = call.q, call.k, call.v
    for each in (q, k, v):
        if not isinstance(each, Tensor) or each.dim() != 4:
            return "query, key and value are no tensors of four dimensions"
    if q.size(2) == 0:
        return "there is no query"
    if q.device.type in PLUGINS:
        return "a plug-in serves the device"
    narrower = k.dtype != q.dtype or v.dtype != q.dtype
    if narrower and (k.dtype != v.dtype or not mixes(q, k)):
        return "query, key and value have dtypes that no kernel takes together"
    if q.dtype in FP8 and torch.is_autocast_enabled(q.device.type):
        return "autocast would convert what torch's node is given for float8"
    descales = (call.q_descale, q), (call.k_descale, k), (call.v_descale, k)
    for factor, like in descales:
        if factor is not None and not _fits(factor, like, q):
            return "a factor is no float32 tensor of [B, H], beside a query of float8"
    if (narrower or q.dtype in FP8) and (q.requires_grad or k.requires_grad or v.requires_grad):
        return "attention of mixed dtypes, and of float8, has no backward"
    if call.dropout_p != 0.0:
        return "torch's node has no place for dropout"
    if call.scale is not None and not isinstance(call.scale, (int, float)):
        return "torch's node takes a scale that is a Python number"
    if call.return_lse and call.return_aux is not None:
        return "return_lse and return_aux are both given"
    mask = call.block_mask
    if mask is not None and (
        not isinstance(mask, BlockMask) or mask.BLOCK_SIZE[0] >= LARGEST_SIZE
    ):
        return "block_mask is no BlockMask, or torch's mask of no mask"
    if q.device.type not in ("cuda", "xpu"):
        if q.requires_grad or k.requires_grad or v.requires_grad:
            return "torch's node has no backward on the CPU"
        if asked_statistics(call).max_scores:
            return "torch's node has no max_scores on the CPU"
    return ""


def _fits(factor: Tensor, like: Tensor, q: Tensor) -> bool:
    """True if a descale is one that `check_descales` takes."""
    return (
        isinstance(factor, Tensor)
        and q.dtype in FP8
        and factor.dtype == torch.float32
        and tuple(factor.shape) == tuple(like.shape[:2])
        and factor.device == q.device
        and not factor.requires_grad
    )


def asked_statistics(call: Call) -> AuxRequest:
    """The statistics that a call asks for."""
    if call.return_aux is not None:
        return call.return_aux
    return AuxRequest(lse=call.return_lse)
