"""Rows of requests, keys in pages or of packed sequences: Hopper's kernel, in plain Python."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from flexattn.catalogue import alibi, causal, sliding_window, softcap
from flexattn.device import named
from flexattn.kernels.base.arguments import captured_values
from flexattn.kernels.choose.registry import family_of
from flexattn.kernels.hopper.config import RaggedPrefillConfig
from flexattn.kernels.hopper.ragged import box_rows, packed_heads, part_words, ragged_defaults
from flexattn.kernels.hopper.source import render
from flexattn.mods import bind
from tests.emulated_memory import Descriptor, Number, Pointer
from tests.emulated_prefill import run
from tests.families import geometry, violated
from tests.problems import served

H200 = replace(named("nvidia-h200"), num_sms=3)
CONFIG = RaggedPrefillConfig(
    2, 128, 2, 232, ping_pong=False, tile_scheduler="dynamic", order="sections", l2_swizzle=2,
    cross_tile_pipeline=False, v_box=64, merge_consumers=False,
)  # fmt: skip


def row_tiles(q_lens, kv_lens, rows, parts=1, workers=10**6):
    """How many tiles there are, and each one's request and first row, the most keys first.

    parts: into which the keys of each tile are cut, if they are many. workers: programs that take
    tiles.
    """
    found = [
        (min(max(k - q, 0) + first + rows, k), b, first)
        for b, (q, k) in enumerate(zip(q_lens, kv_lens, strict=True))
        for first in range(0, q, rows)
    ]
    found.sort(key=lambda each: -each[0])
    listed, slots = [], 0
    for _, b, first in found:
        count = parts if kv_lens[b] > 64 else 1
        listed += [(b, first, part, count, slots + part) for part in range(count)]
        slots += count
    return [len(listed), workers, *(number for each in listed for number in each)]


class Cache:
    """Keys and values of requests in pages that lie anywhere; NaN where there is none of them.

    Numbers are those of kv_dtype.
    """

    def __init__(self, page, kv_lens, heads, dims, seed, kv_dtype=torch.float32):
        draw = np.random.default_rng(seed)
        counts = [-(-n // page) for n in kv_lens]
        order = draw.permutation(sum(counts) + 3)
        # What follows a request's last page is no page.
        self.table = np.full((len(kv_lens), max(*counts, 1) + 2), 10**6)
        shape = (len(order), page, heads)
        self.k, self.v = (np.full((*shape, dim), np.nan, np.float32) for dim in dims)
        self.keys, self.values = [], []
        place = 0
        for b, (n, count) in enumerate(zip(kv_lens, counts, strict=True)):
            pages = order[place : place + count]
            place += count
            self.table[b, :count] = pages
            for cache, kept, dim in zip(
                (self.k, self.v), (self.keys, self.values), dims, strict=True
            ):
                each = torch.from_numpy(draw.standard_normal((n, heads, dim)))
                each = each.to(kv_dtype).float().numpy()
                kept.append(each)
                for i, at in enumerate(pages):
                    part = each[i * page : (i + 1) * page]
                    cache[at, : len(part)] = part


class Packed:
    """Keys and values of sequences one behind the other, then rows of none, which are NaN.

    bad: sequences whose own are NaN.
    """

    def __init__(self, kv_lens, heads, dims, seed, bad=()):
        draw = np.random.default_rng(seed)
        self.keys, self.values = (
            [
                np.full((n, heads, dim), np.nan, np.float32)
                if b in bad
                else draw.standard_normal((n, heads, dim)).astype(np.float32)
                for b, n in enumerate(kv_lens)
            ]
            for dim in dims
        )
        rest = (np.full((5, heads, dim), np.nan, np.float32) for dim in dims)
        every = zip((self.keys, self.values), rest, strict=True)
        self.k, self.v = (np.concatenate([*own, behind]) for own, behind in every)
        self.ends = np.cumsum([0, *kv_lens])


def emulated(
    page, q_lens, kv_lens, heads=(4, 2), dims=(128, 128), score_mod=None, mask_mod=causal,
    sinks=None, config=CONFIG, seed=0, uniform=False, parts=1, workers=10**6, bad=(),
    behind=False, kv_dtype=torch.bfloat16, scales=(),
):  # fmt: skip
    """(out, lse) of a kernel in bfloat16 that computes exactly, and of float64.

    page: 0 of packed sequences; bad: whose keys and values are NaN; behind: cu_seqlens do not
    count the last one. scales: of K and of V, each one number or one for each KV head.
    """
    (Hq, Hkv), (D, Dv), total = heads, dims, sum(q_lens)
    score, mask = bind(score_mod, "score"), bind(mask_mod, "mask")
    problem = served(
        len(q_lens), q_lens[0], 0 if uniform else total, 1024, Hq, Hkv, D, Dv, torch.bfloat16,
        kv_dtype, page, score=score, mask=mask, sinks=sinks is not None, lse=True,
        scaled=bool(scales),
    )  # fmt: skip
    problem = replace(problem, structure=replace(problem.structure, ragged_kv=not page))
    form = problem.structure
    assert not violated(config, form, H200)
    roomy = replace(H200, num_sms=100)  # it has slots for all parts
    source = render(form, config, roomy, "test")
    if page:
        cache = Cache(
            page, kv_lens, Hkv, dims, seed, torch.float32 if kv_dtype.itemsize == 2 else kv_dtype
        )
        k, v = (x.transpose(0, 2, 1, 3) for x in (cache.k, cache.v))
        placed = {
            "SEQ_LENS": Pointer(np.array(kv_lens)), "max_keys": 1024,
            "TABLE": Pointer(cache.table.reshape(-1)), "stride_table": cache.table.shape[1],
        }  # fmt: skip
    else:
        cache = Packed(kv_lens, Hkv, dims, seed, bad)
        k, v = (x.transpose(1, 0, 2)[None] for x in (cache.k, cache.v))
        placed = {
            "CU_SEQLENS_K": Pointer(cache.ends[: len(kv_lens) + 1 - behind]),
            "total_k": cache.ends[-1] if behind else len(cache.k),
            "num_requests": len(cache.ends) - behind,
        }  # fmt: skip
    q = np.random.default_rng(seed + 1).standard_normal((total, Hq, D)).astype(np.float32)
    out = np.full((total, Hq, Dv), np.nan, np.float32)
    lse = np.full((total, Hq), np.nan, np.float32)
    rows = (1, 64 // config.packed_heads, config.packed_heads, 64)
    keys = (1, 1, box_rows(form, config), 64)
    q_heads, out_heads = (
        x.reshape(total, Hkv, Hq // Hkv, -1).transpose(1, 0, 2, 3) for x in (q, out)
    )
    workspace = np.full(part_words(form, config, roomy), np.nan, np.float32)
    given = {
        "Q": Descriptor(q_heads, rows, 2),
        "K": Descriptor(k, keys, kv_dtype.itemsize),
        "V": Descriptor(v, keys, kv_dtype.itemsize), **placed,
        "OUT": Descriptor(out_heads, rows, 2),
        "OUT_ROWS": Pointer(out.reshape(-1)), "LSE": Pointer(lse.reshape(-1)),
        "stride_oh": Dv, "stride_om": Hq * Dv, "Hq": Hq, "group": Hq // Hkv,
        "COUNTER": Pointer(np.zeros(1, np.int64)),
        "ROW_TILES": Pointer(
            np.array(row_tiles(q_lens, kv_lens, config.BLOCK_M, parts, workers))
        ),
        "WORKSPACE": Pointer(workspace),
        "CU_SEQLENS": Pointer(np.cumsum([0, *q_lens])[: len(q_lens) + 1 - behind]),
        "total_q": total, "q_rows": q_lens[0], "sm_scale": 0.1,
        "SINKS": None if sinks is None else Pointer(np.array(sinks, np.float32)),
        **captured_values(form.score, score), **captured_values(form.mask, mask),
    }  # fmt: skip
    for name, scale in zip(("K_SCALE", "V_SCALE"), scales, strict=False):
        given[name] = Pointer(np.atleast_1d(np.float32(scale)))
        given["stride_scale"] = int(np.ndim(scale) > 0)
    for name, value in given.items():
        if isinstance(value, torch.Tensor):
            given[name] = Pointer(value.reshape(-1).numpy())
        elif type(value) is int:
            given[name] = Number(value)
    run(source, geometry(problem, config, H200).programs, given, seed)
    if parts > 1:
        listed = np.reshape(given["ROW_TILES"].array[2:], (-1, 5))
        merge_parts(out, lse, listed, workspace, config, (q_lens, heads, sinks))
    for kept, scale in zip((cache.keys, cache.values), scales, strict=False):
        kept[:] = [each * np.broadcast_to(scale, Hkv)[:, None] for each in kept]
    return (out, lse), exact(q, q_lens, cache, score_mod, mask_mod, sinks)


def merge_parts(out, lse, listed, workspace, config, about):
    """Write the rows of tiles whose keys were cut, merged from their parts."""
    q_lens, (Hq, Hkv), sinks = about
    group, rows = Hq // Hkv, config.all_rows
    head_tiles, Dv = config.head_tiles(group), out.shape[-1]
    size = len(workspace) // (Dv + 1)
    outs = workspace[: size * Dv].reshape(-1, rows, Dv)
    logs = workspace[size * Dv :].reshape(-1, rows)
    starts = np.cumsum([0, *q_lens])
    for b, first, part, parts, slot in listed:
        if parts == 1 or part:
            continue
        for tile in range(Hkv * head_tiles):
            at = (slot + np.arange(parts)) * Hkv * head_tiles + tile
            base_2, values = logs[at] * np.log(2), outs[at]
            for row in range(rows):
                heads = config.packed_heads
                token = first + row // heads % config.BLOCK_M
                head = row % heads + row // (config.BLOCK_M * heads)
                head += tile % head_tiles * config.heads
                if token >= q_lens[b] or head >= group:
                    continue
                h, at_row = tile // head_tiles * group + head, starts[b] + token
                extra = [] if sinks is None else [sinks[h]]
                total = np.logaddexp.reduce([*base_2[:, row], *extra])
                assert np.isnan(out[at_row, h]).all() and np.isnan(lse[at_row, h])
                lse[at_row, h] = total
                weights = np.exp(base_2[:, row] - max(total, -1e30))
                out[at_row, h] = weights @ values[:, row]


def exact(q, q_lens, cache, score_mod, mask_mod, sinks):
    """(out, lse) in float64.

    The last query of a request stands at its last key, the first one of a sequence at its first.
    """
    outs, totals, first = [], [], 0
    Hq, group = q.shape[1], q.shape[1] // cache.k.shape[-2]
    for b, q_len in enumerate(q_lens):
        k, v = (
            torch.from_numpy(x[b]).double().repeat_interleave(group, 1).transpose(0, 1)
            for x in (cache.keys, cache.values)
        )
        mine = torch.from_numpy(q[first : first + q_len]).double().transpose(0, 1)
        kv_len, first = k.shape[1], first + q_len
        scores = 0.1 * mine @ k.transpose(1, 2)
        past = max(kv_len - q_len, 0) if isinstance(cache, Cache) else 0
        at = (
            torch.tensor(b),
            torch.arange(Hq)[:, None, None],
            past + torch.arange(q_len)[:, None],
            torch.arange(kv_len)[None],
        )
        if score_mod is not None:
            scores = score_mod(scores, *at)
        if mask_mod is not None:
            scores = scores.where(mask_mod(*at), -torch.inf)
        logits = scores
        if sinks is not None:
            sink = torch.tensor(sinks).double()[:, None, None].expand(Hq, q_len, 1)
            logits = torch.cat((scores, sink), 2)
        total = logits.logsumexp(2)
        weights = (scores - total[..., None].clamp(min=-1e30)).exp()
        outs.append((weights @ v).transpose(0, 1))
        totals.append(total.T)
    return torch.cat(outs).numpy(), torch.cat(totals).numpy()


def check(*given, **more):
    got, wanted = emulated(*given, **more)
    for each, right in zip(got, wanted, strict=True):
        np.testing.assert_allclose(each, right, atol=2e-5, rtol=2e-5)


BATCHES = {
    16: ([130, 1, 64], [300, 45, 64]),
    32: ([64, 0, 70], [64, 90, 129]),
    64: ([200], [333]),
    128: ([129, 3], [129, 260]),
    256: ([70, 256], [513, 300]),
}


@pytest.mark.parametrize("page", BATCHES)
def test_pages(page):
    """Whole and partial tiles of rows, over pages of less than a tile of keys and of more."""
    check(page, *BATCHES[page], seed=page)


LENS = torch.tensor([100, 260, 31])


def prefix(b, h, q_idx, kv_idx):
    """Causal but for what every request begins with."""
    return (kv_idx < LENS[b]) | (q_idx >= kv_idx)


def tilted(score, b, h, q_idx, kv_idx):
    return score + (kv_idx - q_idx) / (32 * (h + 1)) + b


def holes(b, h, q_idx, kv_idx):
    return (q_idx // 32 + kv_idx // 32) % 2 == 0


ASKED = {
    "no mask": {"mask_mod": None},
    "window": {"mask_mod": sliding_window(90)},
    "prefix by request": {"mask_mod": prefix},
    "holes": {"mask_mod": holes},
    "soft cap": {"score_mod": softcap(4.0)},
    "alibi": {"score_mod": alibi(4, "cpu")},
    "score by request": {"score_mod": tilted, "mask_mod": sliding_window(150)},
    "sinks": {"sinks": [0.5, -1.0, 3.0, 0.0], "mask_mod": sliding_window(64)},
    "lazy": {"config": replace(CONFIG, lazy_rescale=True)},
    "ping pong": {"config": replace(CONFIG, ping_pong=True)},
    "packed": {"config": replace(CONFIG, pack_gqa=True)},
    "two heads in a tile": {"config": replace(CONFIG, packed_heads=2)},
    "seven heads in a tile": {"heads": (14, 2), "config": replace(CONFIG, packed_heads=8)},
    "some of five heads": {
        "heads": (10, 2),
        "mask_mod": sliding_window(40),
        "sinks": [i / 4 for i in range(10)],
        "config": replace(CONFIG, packed_heads=4),
        "score_mod": softcap(4.0),
    },
    "sixteen heads": {
        "heads": (16, 1),
        "config": replace(CONFIG, packed_heads=16),
        "mask_mod": holes,
    },
    "forty-eight heads": {"heads": (48, 1), "config": replace(CONFIG, packed_heads=64)},
    "three consumers": {"config": replace(CONFIG, consumers=3, consumer_regs=160, BLOCK_N=64)},
    "64 columns": {"dims": (64, 64)},
    "96 columns": {"dims": (96, 96)},
    "256 columns": {"dims": (256, 256), "config": replace(CONFIG, BLOCK_N=64)},
    "192 and 128": {"dims": (192, 128), "config": replace(CONFIG, BLOCK_N=64)},
}


@pytest.mark.parametrize("asked", ASKED)
def test_what_a_plan_asks(asked):
    """Masks and scores stand at positions in the request, and a mask's bounds end the loop."""
    check(16, [130, 70, 3], [130, 300, 40], **ASKED[asked])
    if asked in ("window", "packed"):
        check(64, [65, 130], [500, 140], **ASKED[asked], seed=3)


CUT = {
    "causal": {},
    "no mask": {"mask_mod": None},
    "sinks": {"sinks": [0.5, -1.0, 3.0, 0.0], "mask_mod": sliding_window(64)},
    "heads in a tile": {"heads": (14, 2), "config": {"packed_heads": 8}},
    "heads of consumers": {"config": {"pack_gqa": True, "lazy_rescale": True}, "mask_mod": holes},
    "alibi": {"score_mod": alibi(4, "cpu"), "mask_mod": prefix},
    "96 columns": {"dims": (96, 96), "config": {"packed_heads": 2}},
    "256 columns": {"dims": (256, 256), "config": {"BLOCK_N": 64}},
}


@pytest.mark.parametrize("asked", CUT)
def test_keys_in_parts(asked):
    """Parts of a tile's keys are left in float32; some have no key that the tile's rows see."""
    more = dict(CUT[asked])
    config = replace(CONFIG, splits=True, **more.pop("config", {}))
    check(16, [70, 33, 3], [700, 300, 40], config=config, parts=3, **more)


def test_programs_without_tiles():
    """They leave their SMs to the decodes beside this kernel, and no tile is lost."""
    check(16, [130, 70, 3], [130, 300, 40], workers=1)


def test_requests_of_equal_rows():
    """Their rows begin at multiples of q_rows; no cu_seqlens is read."""
    check(16, [70] * 3, [70, 300, 129], uniform=True)


def test_no_keys_and_too_few():
    """A request without keys has zeros; of fewer keys than rows, rows begin at position 0."""
    (out, lse), wanted = emulated(32, [10, 70], [0, 40])
    assert not out[:10].any() and np.isneginf(lse[:10]).all()
    np.testing.assert_allclose(out[10:], wanted[0][10:], atol=2e-5)


PACKS = {
    "odd lengths": ([130, 1, 70, 3], [130, 1, 70, 3], {}),
    "none, one, and whole tiles": ([0, 1, 128, 0, 256], [0, 1, 128, 0, 256], {}),
    "more keys than queries": ([70, 3, 1], [333, 130, 257], {}),
    "more queries than keys": ([200, 70], [40, 1], {}),
    "queries or keys alone": ([0, 70, 33], [40, 0, 50], {}),
    "all keys": ([70, 130], [300, 45], {"mask_mod": None}),
    "window": ([300, 70, 140], [300, 70, 140], {"mask_mod": sliding_window(90)}),
    "a bound by sequence": ([130, 260, 40], [130, 260, 40], {"mask_mod": prefix}),
    "no bounds": ([130, 70], [130, 70], {"mask_mod": holes}),
    "sinks": ([130, 40], [130, 40], {"sinks": [0.5, -1.0, 3.0, 0.0]}),
    "alibi": (
        [130, 40],
        [130, 40],
        {"score_mod": alibi(4, "cpu"), "config": {"pack_gqa": True}},
    ),
    "soft cap in a window": (
        [130, 40],
        [130, 40],
        {"score_mod": softcap(4.0), "mask_mod": sliding_window(64)},
    ),
    "score by sequence": ([130, 40], [130, 40], {"score_mod": tilted}),
    "heads in a tile": (
        [30, 1, 17, 90],
        [30, 1, 17, 90],
        {"heads": (14, 2), "config": {"packed_heads": 8, "ping_pong": True}},
    ),
    "heads of one's own": ([130, 40], [130, 40], {"heads": (3, 3)}),
    "keys in parts": ([70, 33, 3], [700, 300, 40], {"config": {"splits": True}, "parts": 3}),
    "64 columns": ([130, 40], [130, 40], {"dims": (64, 64)}),
    "80 columns": ([130, 40], [130, 40], {"dims": (80, 80)}),
    "96 columns": ([130, 40], [130, 40], {"dims": (96, 96)}),
    "192 columns": ([70, 40], [70, 40], {"dims": (192, 192), "config": {"BLOCK_N": 64}}),
    "192 and 128": ([70, 40], [70, 40], {"dims": (192, 128), "config": {"BLOCK_N": 64}}),
    "256 columns": ([70, 40], [70, 40], {"dims": (256, 256), "config": {"BLOCK_N": 64}}),
}


@pytest.mark.parametrize("pack", PACKS)
def test_packed_sequences(pack):
    """Keys of a sequence begin at any row; those of the next one count for nothing."""
    q_lens, kv_lens, asked = PACKS[pack]
    asked = {**asked, "config": replace(CONFIG, **asked.get("config", {}))}
    check(0, q_lens, kv_lens, **asked, seed=len(pack))


def test_rows_behind_the_last_sequence_see_the_keys_there():
    check(0, [40, 3, 70], [50, 130, 90], behind=True)
    check(0, [40], [50], behind=True, mask_mod=sliding_window(20))


@pytest.mark.parametrize("mask_mod", [None, causal])
def test_a_sequence_of_nan_spoils_no_other(mask_mod):
    """The last tile of keys of the one before it reads its first rows."""
    q_lens = kv_lens = [70, 90, 131]
    (out, lse), wanted = emulated(0, q_lens, kv_lens, bad=(1,), mask_mod=mask_mod)
    for got, right in ((out, wanted[0]), (lse, wanted[1])):
        assert np.isnan(got[70:160]).all()
        kept = np.r_[:70, 160:291]
        np.testing.assert_allclose(got[kept], right[kept], atol=2e-5, rtol=2e-5)


TILED = {  # query positions of a request, heads of a group: heads of a tile
    (2048, 8): 8, (2048, 7): 1, (52, 7): 8, (294, 48): 16, (26, 5): 8, (2048, 5): 1, (9, 71): 32,
    (2048, 1): 1, (500, 2): 2,
}  # fmt: skip


@pytest.mark.parametrize("rows", TILED)
def test_heads_of_a_tile(rows):
    assert packed_heads(*rows, 128) == TILED[rows]


def test_mods_that_read_the_head_keep_one_head_a_consumer():
    for mod, tiled in (
        (softcap(4.0), (False, 4)),
        (alibi(8, "cpu"), (True, 1)),
        (tilted, (True, 1)),
    ):
        found = served(
            1, 1, 999, 1024, 8, 2, 128, 128, torch.bfloat16, torch.bfloat16, 16,
            score=bind(mod, "score"),
        )  # fmt: skip
        first = next(ragged_defaults(found, H200))
        assert (first.pack_gqa, first.packed_heads) == tiled
        assert not violated(first, found.structure, H200)


REFUSED = {
    "mods of a head": {
        "score": bind(alibi(4, "cpu"), "score"),
        "config": replace(CONFIG, packed_heads=2),
    },
    "pages of 8": {"page": 8},
    "a contiguous cache": {"page": 0},
    "batch-invariant rows": {"batch_invariant": True},
    "scales of 16 bits": {"scaled": True},
    "packed_heads=3": {"config": replace(CONFIG, packed_heads=3)},
    "packed_heads beside pack_gqa": {"config": replace(CONFIG, packed_heads=2, pack_gqa=True)},
    "a v_box other than 64": {"config": replace(CONFIG, v_box=32)},
    "sections": {"config": replace(CONFIG, order="heads")},
    "dynamic": {"config": replace(CONFIG, tile_scheduler="static")},
    "a cross_tile_pipeline": {"config": replace(CONFIG, BLOCK_N=64, cross_tile_pipeline=True)},
}


@pytest.mark.parametrize("lacking", REFUSED)
def test_what_the_template_has_not(lacking):
    asked = {"page": 16, **REFUSED[lacking]}
    page, config = asked.pop("page"), asked.pop("config", CONFIG)
    found = served(
        2, 1, 128, 1024, 4, 2, 128, 128, torch.bfloat16, torch.bfloat16, page, **asked
    ).structure
    (rule,) = violated(config, found, H200)
    assert rule.name == "serving"
    assert lacking in " ".join(family_of(config).limits.reasons(config, found, H200))
