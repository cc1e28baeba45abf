"""Attention of e4m3 on a Hopper GPU: mods, lengths, descales, configs, refusals."""

from dataclasses import replace

import pytest
import torch
from torch.nn.attention.flex_attention import AuxRequest, and_masks

import flexattn
from flexattn.catalogue import alibi, causal, document, relative_bias, sliding_window, softcap
from flexattn.errors import UnsupportedError
from flexattn.frontend.call import make_call
from flexattn.frontend.plan import plan
from flexattn.frontend.quantize import Quantized
from flexattn.kernels.choose.options import Options
from flexattn.kernels.hopper import space as gluon
from flexattn.problem.inputs import Descales
from flexattn.reference import Precision, Reference, attention
from flexattn.runtime.build import builder
from flexattn.runtime.dispatch import dispatcher
from flexattn.runtime.launch import prepare_launch
from flexattn.verify.gate import E4M3_SHARE, judge
from tests.support import (
    ON_SM_90,
    assert_judged,
    block_mask,
    captured,
    heads_inside,
    inputs,
    run,
    sinks,
)

pytestmark = [
    pytest.mark.usefixtures("poisoned"),
    ON_SM_90,
]
E4M3 = torch.float8_e4m3fn


def tensors(*sizes, **more):
    return inputs(*sizes, dtype=E4M3, device="cuda", **more)


def assert_accurate(q, k, v, **call):
    """Held to bfloat16's gate for the numbers that e4m3 stands for: V became bfloat16."""
    with torch.no_grad():
        got = run(q, k, v, **call)
        assert_judged(got, *(x.bfloat16() for x in (q, k, v)), **call)
    return got


def factors(q, k):
    """Descales of every head, from 1/2 to 3/2; those of the keys' batch where it is one."""
    draw = torch.Generator().manual_seed(7)
    shapes = (q.shape[:2], k.shape[:2], k.shape[:2])
    found = [torch.rand(shape, generator=draw).to("cuda") + 0.5 for shape in shapes]
    return dict(zip(("q_descale", "k_descale", "v_descale"), found, strict=True))


MODS = {
    "noop": lambda H, L, S: (None, None),
    "causal": lambda H, L, S: (None, causal),
    "softcap": lambda H, L, S: (softcap(5.0), None),
    "window_softcap": lambda H, L, S: (softcap(5.0), sliding_window(100)),
    "alibi_causal": lambda H, L, S: (alibi(H, "cuda"), causal),
    "relative": lambda H, L, S: (
        relative_bias(torch.randn(H, 2 * max(L, S), device="cuda"), max(L, S)),
        None,
    ),
    "documents": lambda H, L, S: (
        None,
        and_masks(document((torch.arange(max(L, S), device="cuda") // 130).int()), causal),
    ),
}


READING = ("relative", "documents")


@pytest.mark.parametrize(
    ("D", "mod"), [(160, "causal"), (192, "softcap"), *((256, mod) for mod in MODS)]
)
def test_rounded_weights(D, mod):
    """Held to the run that rounds weights to e4m3 as well, by the budget of its own."""
    q, k, v = tensors(2, 6, 2, 301, 419, D)
    score_mod, mask_mod = MODS[mod](6, 301, 419)
    given, made = factors(q, k), {"score_mod": score_mod, "block_mask": block_mask(mask_mod, q, k)}
    with torch.no_grad():
        got = run(q, k, v, kernel_options={"FP8_WEIGHTS": "e4m3"}, **made, **given)
    oracle, rounded = (
        attention(q, k, v, descales=Descales(*given.values()), precision=each, **made)
        for each in (Precision.ORACLE, Precision.ROUNDED)
    )
    verdict = judge(got, oracle, rounded, torch.bfloat16, E4M3_SHARE)
    assert verdict.passed, verdict.message()


@pytest.mark.parametrize("D", [160, 256])
def test_weights_that_are_one_number(D):
    """A score_mod reads numbers of keys and no score: ptxas mixed weights of two tiles."""
    q, k, v = tensors(2, 6, 2, 301, 419, D)
    numbers = torch.randn(419, device="cuda")

    def alike(score, b, h, q_idx, kv_idx):
        return torch.where(numbers[kv_idx] > numbers[kv_idx], score, -4.0)

    with torch.no_grad():
        got = run(q, k, v, score_mod=alike, kernel_options={"FP8_WEIGHTS": "e4m3"})
    wanted = v.double().mean(2, keepdim=True).repeat_interleave(3, 1)
    torch.testing.assert_close(
        got.out.double(), wanted.expand(got.out.shape), rtol=0.01, atol=1e-3
    )


# Each compiles a kernel.
CASES = [(128, mod) for mod in MODS]
CASES += [(D, mod) for D in (64, 80, 96, 160, 192, 256) for mod in ("causal", "window_softcap")]


@pytest.mark.parametrize(("D", "mod"), CASES)
def test_mods(D, mod):
    B, Hq, Hkv, L, S = 2, 6, 2, 301, 419
    q, k, v = tensors(B, Hq, Hkv, L, S, D)
    score_mod, mask_mod = MODS[mod](Hq, L, S)
    call = {"score_mod": score_mod, "block_mask": block_mask(mask_mod, q, k), **factors(q, k)}
    got = assert_accurate(q, k, v, **call)
    assert got.out.dtype == torch.bfloat16
    found = flexattn.explain(q, k, v, enable_gqa=True, **call)
    assert (found.template, found.config.language) == ("prefill", "gluon")


@pytest.mark.parametrize(
    "lengths", [(1, 1), (17, 4099), (4099, 17), (129, 128), (64, 1), (5, 300)]
)
def test_lengths(lengths):
    q, k, v = tensors(2, 6, 3, *lengths, 128)
    for mask_mod in (None, causal):
        mask = block_mask(mask_mod, q, k)
        assert_accurate(q, k, v, block_mask=mask, **factors(q, k))


def test_every_length_around_a_tile():
    """One kernel serves them all: a new length compiles nothing."""
    compiled = None
    for length in range(97, 163):
        q, k, v = tensors(1, 4, 2, length, length, 64)
        assert_accurate(q, k, v, **factors(q, k))
        compiled = compiled or builder().compiled
        assert builder().compiled == compiled, length


@pytest.mark.parametrize("given", ["", "q", "k", "v", "whole"])
def test_descales_that_are_not_given_are_ones(given):
    q, k, v = tensors(3, 8, 2, 211, 345, 128, Bkv=1)
    found = {name: x for name, x in factors(q, k).items() if name[0] == given}
    if given == "whole":  # one factor for a whole tensor
        one = torch.tensor([[0.25]], device="cuda")
        found = {"q_descale": one.expand(3, 8), "k_descale": one.expand(1, 2)}
    assert_accurate(q, k, v, sinks=sinks(8, device="cuda"), **found)


@pytest.mark.parametrize("factor", [0.0, -1.0, float("nan")])
def test_a_factor_that_is_not_above_zero_makes_its_head_nan(factor):
    q, k, v = tensors(1, 2, 2, 70, 90, 64)
    wrong = torch.tensor([[1.0, factor]], device="cuda")
    for name in ("q_descale", "k_descale"):
        got = run(q, k, v, **{name: wrong}).out
        assert got[:, 1].isnan().all() and got[:, 0].isfinite().all()


def first_keys_masked(b, h, q_idx, kv_idx):
    return (kv_idx >= 300) & (q_idx >= 200)


def test_rows_without_a_key():
    q, k, v = tensors(1, 4, 2, 611, 747, 128)
    mask = block_mask(first_keys_masked, q, k)
    got = assert_accurate(q, k, v, block_mask=mask, **factors(q, k))
    assert (got.out[:, :, :200] == 0).all() and (got.lse[:, :, :200] == -torch.inf).all()


def test_heads_inside():
    q, k, v = tensors(2, 4, 2, 205, 345, 64)
    assert_accurate(*map(heads_inside, (q, k, v)), **factors(q, k))


@pytest.mark.parametrize("length", [4099, 16411])
def test_values_with_a_mean(length):
    """Sums of many values of one sign: the tensor cores' sums of e4m3 lose 19 % of them at 16k."""
    q, k, v = tensors(1, 2, 1, 131, length, 128)
    v = (v.float() + 1).to(E4M3)
    assert_accurate(q, k, v, **factors(q, k))


def test_weights_far_below_the_largest_count():
    q, k, v = tensors(1, 1, 1, 64, 8192, 128)
    one, many = torch.zeros_like(q), torch.zeros_like(k)
    one[..., 0], many[:, :, 7, 0] = 1, 16
    v = torch.ones_like(v)
    v[:, :, 7] = 0
    # The others weigh exp(-8) each, more than three times what the first one does together.
    got = assert_accurate(one, many, v, scale=0.5)
    assert 0.7 < got.out.float().mean() < 0.75


def configs():
    each = gluon.config(2, 128, 2)
    yield from (each, replace(each, tile_scheduler="static", ping_pong=True))
    yield replace(each, tile_scheduler="dynamic", order="sections")
    yield replace(gluon.config(3, 64, 2), tile_scheduler="dynamic", ping_pong=True)


def brief(config):
    words = [f"{config.consumers}x{config.BLOCK_N}x{config.num_stages}", config.tile_scheduler]
    return "-".join([*words, *["lazy"] * config.lazy_rescale, *["pingpong"] * config.ping_pong])


def planned(q, k, v, config, given, max_scores=True, **call):
    """A call that wants lse, and what it launches with a config of one's own."""
    aux = AuxRequest(lse=True, max_scores=max_scores)
    score_mod, mask = call.get("score_mod"), call.get("block_mask")
    scale, logits = call.get("scale"), call.get("sinks")
    made = plan(
        make_call(q, k, v, score_mod, mask, scale, True, False, None, aux, logits, *given.values())
    )
    launch = prepare_launch(
        made.launch.problem, made.launch.choice.device, q.device, dispatcher(),
        Options(exact=config), q, k, v, made.lists, Descales(*given.values()),
    )  # fmt: skip
    return made._replace(launch=launch)


@pytest.mark.parametrize("config", list(configs()), ids=brief)
def test_configs_give_the_same_bits_at_every_run(config):
    q, k, v = tensors(2, 16, 4, 1611, 1347, 128)
    given = factors(q, k)
    for mask_mod in (None, causal):
        mask = block_mask(mask_mod, q, k, per_batch=False, per_head=False)
        made = planned(q, k, v, config, given, block_mask=mask)
        first = Reference(*made.run())
        assert_judged(first, *(x.bfloat16() for x in (q, k, v)), block_mask=mask, **given)
        for _ in range(20):
            assert all(map(torch.equal, made.run(), first))


def test_calls_again_with_other_factors():
    """The second call is recalled, not planned."""
    q, k, v = tensors(1, 4, 2, 130, 131, 64)
    given = factors(q, k)
    for _ in range(3):
        given = {name: x + 0.25 for name, x in given.items()}
        assert_accurate(q, k, v, **given)
    assert_accurate(q, k, v)


def test_a_graph_replays_with_inputs_that_change_in_place():
    q, k, v = tensors(2, 8, 2, 611, 747, 128)
    given = factors(q, k)
    with torch.no_grad():
        graph, got = captured(lambda: run(q, k, v, **given))
    for x in (q, k, v):
        x.copy_(torch.randn(x.shape, device="cuda").to(E4M3))
    graph.replay()
    torch.cuda.synchronize()
    assert_judged(got, q, k, v, **given)


@pytest.mark.parametrize("block", [None, 64, 128])
@pytest.mark.parametrize("smooth", [False, True])
def test_quantized_numbers_are_those_of_torch(block, smooth, monkeypatch):
    q, k, v = inputs(2, 6, 2, 301, 419, 128, dtype=torch.bfloat16, device="cuda")
    k = k + 20 * torch.randn(128, device="cuda", dtype=k.dtype)
    got = flexattn.quantize(q, k, v, block=block, smooth=smooth)
    monkeypatch.setattr("flexattn.frontend.quantize._by_kernel", lambda x: False)
    wanted = flexattn.quantize(q, k, v, block=block, smooth=smooth)
    for one, other in zip(got[:6], wanted[:6], strict=True):
        assert one.dtype == other.dtype
        assert torch.equal(one.float(), other.float())


BLOCK_MODS = {
    "noop": (None, None),
    "causal": (None, causal),
    "window_softcap": (softcap(5.0), sliding_window(100)),
    "softcap": (softcap(5.0), None),
    "alibi_causal": (alibi(6, "cuda"), causal),
    "turned": (lambda score, b, h, q_idx, kv_idx: -score, causal),
}
BLOCK_CASES = [(128, block, mod) for block in (64, 128) for mod in BLOCK_MODS]
BLOCK_CASES += [(D, block, "causal") for D in (64, 96, 256) for block in (64, 128)]
BLOCK_CASES += [(64, 64, "noop"), (256, 64, "noop"), (256, 128, "window_softcap")]


@pytest.mark.parametrize(("D", "block", "mod"), BLOCK_CASES)
def test_factors_of_blocks(D, block, mod):
    """A kernel reads them once a tile of keys; a factor of 0 or below is a number like others."""
    q, k, v = tensors(2, 6, 2, 301, 419, D)
    draw = torch.Generator().manual_seed(3)
    blocks = [
        (torch.rand(*x.shape[:2], -(-x.shape[2] // block), generator=draw) + 0.5).to("cuda")
        for x in (q, k)
    ]
    blocks[1][0, 0, :2] = torch.tensor([-1.0, 0.0])
    made = Quantized(q, k, v, *blocks, None, block)
    inner, mask_mod = BLOCK_MODS[mod]
    mask, descale = block_mask(mask_mod, q, k), factors(q, k)["v_descale"]
    call = {"score_mod": made.score_mod(inner), "block_mask": mask, "v_descale": descale}
    assert_accurate(q, k, v, **call)
    with torch.no_grad():
        got = run(q, k, v, max_scores=True, **call)
        assert_judged(got, *(x.bfloat16() for x in (q, k, v)), **call)


def test_rounded_weights_with_factors_of_blocks():
    q, k, v = inputs(2, 6, 2, 301, 419, 256, dtype=torch.bfloat16, device="cuda")
    made = flexattn.quantize(q, k, v, block=64)
    call = {"score_mod": made.score_mod(), "block_mask": block_mask(causal, q, k)}
    with torch.no_grad():
        got = run(*made.tensors, kernel_options={"FP8_WEIGHTS": "e4m3"}, **call, **made.descales)
    oracle, rounded = (
        attention(*made.tensors, descales=Descales(v=made.v_descale), precision=each, **call)
        for each in (Precision.ORACLE, Precision.ROUNDED)
    )
    verdict = judge(got, oracle, rounded, torch.bfloat16, E4M3_SHARE)
    assert verdict.passed, verdict.message()


def test_what_cannot_run_says_so():
    q, k, v = tensors(1, 2, 2, 70, 90, 320)
    with pytest.raises(UnsupportedError, match="of 16 in fp8"):
        run(q, k, v)
    q, k, v = tensors(1, 2, 2, 70, 90, 64)
    for backend in ("TRITON", "TRITON_DECODE"):
        with pytest.raises(UnsupportedError, match="Triton template"):
            run(q, k, v, kernel_options={"BACKEND": backend})
