"""In which order blocks of keys start in Hopper's backward, and how many heads side by side."""

import re
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from flexattn.catalogue import causal, relative_bias, sliding_window
from flexattn.kernels.choose.registry import family_of
from flexattn.kernels.hopper_backward.config import HopperBackwardConfig, at_sizes, sizes_of_launch
from flexattn.kernels.hopper_backward.family import defaults
from flexattn.mods import bind
from flexattn.runtime.ragged import packed_backward_problem
from tests.problems import H200, problem

CONFIG = HopperBackwardConfig(64, 128, 2)


@pytest.mark.parametrize(("units", "tiles", "section"), [(6, 3, 4), (5, 1, 128), (7, 4, 1)])
def test_blocks_start_with_the_first_keys_of_a_section(units, tiles, section):
    """Every tile of every head has one block; sections of heads start one after the other."""
    wanted = problem("backward")
    text = family_of(CONFIG).render(wanted.structure, CONFIG, H200, "test").text
    names = {"gl": SimpleNamespace(minimum=min)}
    exec(text[text.index("def locate") : text.index("@gluon.jit\ndef sharing_head")], names)
    found = [names["locate"](each, 2, tiles, units, section) for each in range(units * tiles)]
    assert sorted(found) == sorted((t, u % 2, u // 2) for t in range(tiles) for u in range(units))
    assert [each[0] for each in found[: min(section, units)]] == [0] * min(section, units)


@pytest.mark.parametrize(
    ("units", "tiles", "long", "section"), [(6, 9, 3, 4), (5, 4, 4, 2), (2, 7, 0, 8), (1, 1, 1, 1)]
)
def test_short_tiles_of_packs_start_behind_all_others(units, tiles, long, section):
    q = torch.empty(300, 2, 64, dtype=torch.bfloat16)
    wanted = packed_backward_problem(q, q, q, 3, None, bind(causal, "mask"), ())
    text = family_of(CONFIG).render(wanted.structure, at_sizes(CONFIG, wanted), H200, "test").text
    gl = SimpleNamespace(
        maximum=max, where=lambda kept, a, b: a if kept else b,
        load=lambda place: long if place == 1 else place // 16 - 1,
    )  # fmt: skip
    names = {"gl": gl, "WORDS": 16}
    exec(re.search(r"def locate.*?\n\n", text, re.DOTALL)[0], names)
    found = [names["locate"](i, units, tiles, units, section, 0) for i in range(units * tiles)]
    assert sorted(found) == [(t, u, t) for t in range(tiles) for u in range(units)]
    assert all((tile < long) == (i < long * units) for i, (tile, _, _) in enumerate(found))
    # Where the last section had fewer heads, its longest tiles were the last of all to end.
    heads = [unit for _, unit, _ in found[: long * units]]
    assert len({*heads[-long * min(section, units) :]}) == (min(section, units) if long else 0)


def test_more_heads_of_packs_start_side_by_side_where_a_table_is_learned():
    """Blocks of one head add to the same few places."""
    q, table = torch.empty(300, 2, 64, dtype=torch.bfloat16), torch.zeros(2, 400)
    mods = bind(relative_bias(table, 200), "score"), bind(causal, "mask")
    for slots, waves in ((), 4), ((0,), 16):
        wanted = packed_backward_problem(q, q, q, 3, *mods, slots)
        assert {each.waves for each in defaults(wanted)} == {waves}


@pytest.mark.parametrize(("rows", "waves"), [(8192, 16), (8193, 4)])
def test_more_heads_of_packs_start_side_by_side_in_windows_of_few_rows(rows, waves):
    q = torch.empty(rows, 2, 64, dtype=torch.bfloat16, device="meta")
    wanted = packed_backward_problem(q, q, q, 3, None, bind(sliding_window(128), "mask"), ())
    assert {each.waves for each in defaults(wanted)} == {waves}


def test_short_tiles_of_packs_go_last_where_sections_stay_in_l2():
    for heads, D, tokens, last in (32, 96, 8192, 0), (32, 64, 8192, 1), (32, 96, 32768, 1):
        q = torch.empty(tokens, heads, D, dtype=torch.bfloat16, device="meta")
        wanted = packed_backward_problem(q, q, q, 20, None, bind(causal, "mask"), ())
        assert sizes_of_launch(wanted, next(defaults(wanted)))["short_last"] == last


@pytest.mark.parametrize(
    ("rows", "heads", "parts"),
    [
        (8192, (16, 2), 2), (16384, (16, 2), 1), (1024, (16, 2), 8), (1024, (12, 2), 2),
        (8192, (2, 2), 1),
    ],
)  # fmt: skip
def test_query_heads_of_few_tiles_of_packs_are_parted(rows, heads, parts):
    """Of 132 tiles on 132 SMs the longest took twice the mean. A group is parted evenly."""
    q, k = (torch.empty(rows, each, 128, dtype=torch.bfloat16, device="meta") for each in heads)
    wanted = packed_backward_problem(q, k, k, 6, None, bind(causal, "mask"), ())
    config = next(defaults(wanted))
    assert config.head_parts == parts and config.mha == (heads[0] == parts * heads[1])
    sizes = sizes_of_launch(wanted, config)
    assert sizes["kv_units"] == sizes["num_heads"] == parts * heads[1]
    assert sizes["group"] == sizes["shared_heads"] == heads[0] // heads[1] // parts


def test_sections_fill_the_device():
    for kv_len, heads in ((4096, 4), (16384, 1), (128, 128), (100_000, 1)):
        wanted = problem("backward", kv_len=kv_len)
        assert sizes_of_launch(wanted, CONFIG)["section_heads"] == heads
        waves = sizes_of_launch(wanted, replace(CONFIG, waves=4))["section_heads"]
        assert heads <= waves <= 4 * heads + 3
    # The same machine code in another order: to a search it is no twin.
    more = replace(CONFIG, waves=4)
    assert family_of(CONFIG).launch_key(CONFIG) != family_of(CONFIG).launch_key(more)
