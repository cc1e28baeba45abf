"""The Hopper template counts hardware barriers down from 15, the compiler takes them from 0."""

import re

import pytest

from flexattn.catalogue import alibi, causal
from flexattn.kernels.hopper.config import HopperPrefillConfig
from flexattn.kernels.hopper.merge_consumers import EVERY_WARP
from flexattn.runtime.build import compile_source
from tests.families import render
from tests.problems import H200, problem

pytestmark = pytest.mark.oldest

MOST = HopperPrefillConfig(3, 64, 3, 160, ping_pong=True, tile_scheduler="static", order="heads")
LISTED = HopperPrefillConfig(2, 128, 2, 240, tile_scheduler="dynamic", order="sections")


def lowest(text):
    """The lowest barrier that the template uses: for empty stages, or for warp_scheduler_sync."""
    given = re.findall(r"(?m)^[KVQ]_EMPTY = gl\.constexpr\((\d+)\)$", text)
    return min(map(int, given + re.findall(r"add\.u32 turn, \$1, (\d+);", text)))


@pytest.mark.parametrize(
    ("config", "mods"),
    [(MOST, {}), (LISTED, {"score_mod": alibi(32, "cpu"), "mask_mod": causal})],
)
def test_compiler_and_template_take_different_barriers(config, mods):
    source = render(problem("prefill", 64, **mods).structure, config, H200, "test")
    ptx = compile_source(source, H200).asm["ptx"]
    taken = set(map(int, re.findall(r"\bbar(?:rier)?(?:\.cta)?\.sync(?:\.\w+)*\s+(\d+)", ptx)))
    # The one where work starts; the consumers' are those below it.
    assert EVERY_WARP in taken and "bar.sync \t%meeting, 128;" in ptx
    assert EVERY_WARP >= config.consumers
    assert max(taken) < lowest(source.text), (taken, lowest(source.text))


def test_release_waits_for_nobody():
    """Consumers release stages without a barrier of their warpgroup: bar.arrive, not mbarrier."""
    source = render(
        problem("prefill", 128).structure, HopperPrefillConfig(2, 128, 2, 240), H200, ""
    )
    ptx = compile_source(source, H200).asm["ptx"]
    assert ptx.count("bar.arrive") >= 3
    assert "mbarrier.arrive.shared" not in ptx
