"""Tuned configs of serving kernels: how records name a plan, and which one serves it."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Literal, NamedTuple, get_args

from flexattn.device import Device
from flexattn.errors import InputError
from flexattn.kernels.paged_decode.config import TILE_ROWS, ServingConfig, ServingForm
from flexattn.kernels.paged_decode.limits import serving_reasons
from flexattn.kernels.paged_decode.space import serving_candidates
from flexattn.records.environment import environment
from flexattn.records.key import Key, Sizes, mod_name, rounded
from flexattn.records.layers import Stored, layers, origin, passed_over, ranked
from flexattn.serving.request import Maxima
from flexattn.settings import current, say_once

Lengths = Literal["uniform", "ragged", "mixed"]
LENGTHS: tuple[Lengths, ...] = get_args(Lengths)
# Of a mixed batch each so many-th request brings a chunk of prefill, the others one query.
CHUNKED = 8


@dataclass(frozen=True)
class ServingProblem:
    """What is tuned for: the form of kernel, the largest batch, and how lengths are spread in it.

    lengths: "uniform", all requests are as long; "ragged", few are long; "mixed", cu_seqlens_q
    cuts chunks of prefill and single queries.
    """

    form: ServingForm
    maxima: Maxima
    lengths: Lengths

    @property
    def sizes(self) -> Sizes:
        """Requests, query positions of one (of all where they are mixed), keys of the longest."""
        m = self.maxima
        return Sizes(m.batch, m.total_q or m.q_len, m.kv_len)

    @cached_property
    def key(self) -> Key:
        """What its records are filed under; lse changes no config."""
        form, m = self.form, self.maxima
        layout = [m.layout, *(name for name in _LAYOUT if getattr(form, name))]
        precision = [f"kv={form.kv_dtype}"] * (form.kv_dtype != form.dtype)
        precision += [f"invariant {form.split_keys}"] * (form.split_keys > 0)
        precision += [f"scaled {form.scales}"] * (form.scales != "")
        precision += ["scaled"] * form.scaled + ["signed-scale"] * (not form.positive_scale)
        sizes = self.sizes.rounded()
        return Key(
            kind="serving",
            dtype=form.dtype,
            head_dim_qk=form.head_dim_qk,
            head_dim_v=form.head_dim_v,
            Hq=m.Hq,
            Hkv=m.Hkv,
            B=sizes.B,
            q_len=sizes.q_len,
            kv_len=sizes.kv_len,
            score=mod_name(form.score),
            mask=mod_name(form.mask),
            blocks=f"page {form.page}",
            mask_class=self.lengths,
            layout=" ".join(layout),
            precision=" ".join(precision),
            sinks=form.sinks,
        )

    def describe(self) -> str:
        """In one line."""
        form, m = self.form, self.maxima
        return (
            f"serving {form.dtype} keys {form.kv_dtype} B={m.batch} Hq={m.Hq} Hkv={m.Hkv} "
            f"kv_len={m.kv_len} D={form.head_dim_qk}/{form.head_dim_v} page={form.page} "
            f"{self.lengths}"
        )


_LAYOUT = ("shared_kv", "prefix", "offset", "aligned")
_RANK = {"hit": 0, "hint": 1, "nearest": 2}


def batch_lengths(
    lengths: str, batch: int, q_len: int, kv_len: int
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Query positions and keys of each request of a class.

    ragged: as lengths of live traffic, the i-th of kv_len / (i + 1)^0.8 keys, at least 128.
    """
    if lengths == "mixed":
        q_lens = tuple(q_len if b % CHUNKED == 0 else 1 for b in range(batch))
        return q_lens, (kv_len,) * batch
    q_lens = (q_len,) * batch
    if lengths == "uniform":
        return q_lens, (kv_len,) * batch
    least = min(kv_len, max(128, q_len))
    return q_lens, tuple(max(least, int(kv_len / (b + 1) ** 0.8)) for b in range(batch))


class Tuned(NamedTuple):
    """A config of a record, where it comes from in words, and the record."""

    config: ServingConfig
    origin: str
    stored: Stored


def classes(maxima: Maxima, lengths: str) -> tuple[Lengths, ...]:
    """The classes of batches whose records may serve a plan, the likeliest first.

    Raises InputError for a name that is none, and for one that does not fit the plan's maxima.
    """
    able: tuple[Lengths, ...] = ("mixed",) if maxima.total_q else ("uniform", "ragged")
    if not lengths:
        return able
    if lengths not in able:
        raise InputError(f"lengths={lengths!r}", f"it is one of {', '.join(able)}")
    return (lengths,)


def tuned(form: ServingForm, maxima: Maxima, device: Device, lengths: str = "") -> Tuned | None:
    """The config of the best record that fits a plan and can run on a device; None without one.

    lengths: the class that its batches will be of, "" where nobody knows. Files are read here,
    when a plan is built, and never in its runs.
    """
    able = classes(maxima, lengths)
    if current().mode == "off" or device.backend == "interpreter":
        return None
    here, places = environment("serving", device), layers(device)
    static = next(serving_candidates(form, device))
    found: list[tuple[Stored, Key]] = []
    for name in able:
        key = ServingProblem(form, maxima, name).key
        for stored in ranked(key, here, places):
            if not _holds_rows(stored, form, static.BLOCK_M):
                continue
            broken = serving_reasons(_config(stored), form, device)
            if not broken:
                today: Any = _static_of(stored, form, device)
                if stored.how != "hit" and passed_over(stored, today):
                    continue
                found.append((stored, key))
                break
            if stored.how != "nearest":  # a neighbour was measured for another form
                said = "; ".join(broken)
                say_once(f"{stored.path}: its config cannot run on {device.name}: {said}")
    if not found:
        return None
    best, key = min(found, key=lambda each: (_RANK[each[0].how], each[0].distance))
    return Tuned(_config(best), origin(best, key.sizes), best)


def _holds_rows(stored: Stored, form: ServingForm, height: int) -> bool:
    """Whether a record is of as many rows, or its tile holds them as well as the default's height.

    Several short tiles would each read the keys again, and a tall one computes rows of nobody.
    """
    if _rows(stored, form) == form.rows:
        return True
    return min(form.rows, height) <= _config(stored).BLOCK_M <= max(TILE_ROWS, height)


def _rows(stored: Stored, form: ServingForm) -> int:
    """Of a request of a record's sizes, as the form that it was measured with has them."""
    batch, q_len, _ = stored.answer.sizes
    return rounded(q_len * form.group * (batch if form.prefix else 1)) if form.rows else 0


def _static_of(stored: Stored, form: ServingForm, device: Device) -> ServingConfig:
    """Today's static default of a record's own sizes, of which its trials tell."""
    requests = 1 if form.prefix else rounded(stored.answer.sizes[0])
    batch, q_len, kv_len = stored.answer.sizes
    in_l2 = form.rows > 0 and form.fits_l2(batch * kv_len, q_len * form.group)
    measured = replace(form, rows=_rows(stored, form), requests=requests, keys_in_l2=in_l2)
    return next(serving_candidates(measured, device))


def _config(stored: Stored) -> ServingConfig:
    """A record of this kind holds no other config: its decoder saw to that."""
    config: Any = stored.answer.config
    found: ServingConfig = config
    return found
