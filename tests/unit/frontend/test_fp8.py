"""Eight bits: what a launch fills in, what is refused and in which words, the gate, the CPU."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from torch.nn.attention.flex_attention import AuxRequest

import flexattn
from flexattn.catalogue import causal, softcap
from flexattn.errors import ConfigError, InputError, UnsupportedError, WrongKernelError
from flexattn.frontend import attention as frontend, plan as plans
from flexattn.frontend.call import make_call
from flexattn.kernels.choose.defaults import default, reasons, space
from flexattn.kernels.choose.options import NONE, Options
from flexattn.kernels.hopper.config import HopperPrefillConfig
from flexattn.kernels.triton.config import PrefillConfig
from flexattn.problem import Shape
from flexattn.problem.inputs import Descales
from flexattn.records.record import key_of
from flexattn.reference import Precision, attention
from flexattn.runtime import launch as launches
from flexattn.runtime.launch import prepare_launch
from flexattn.tuning.tasks import serving_task
from flexattn.verify.gate import judge
from tests.launches import Recorded
from tests.problems import A100, H200, choices, problem
from tests.support import block_mask, inputs, sinks

E4M3 = torch.float8_e4m3fn


def tensors(*sizes, **more):
    return inputs(*sizes, dtype=E4M3, **more)


def factors(q, k):
    return {
        "q_descale": torch.rand(q.shape[:2]) + 0.5,
        "k_descale": torch.rand(k.shape[:2]) + 0.5,
        "v_descale": torch.rand(k.shape[:2]) - 0.5,
    }


def wide(q, k, v, given):
    """The numbers that e4m3 and its factors stand for."""
    return [
        x.float() * given[f"{name}_descale"][..., None, None]
        for name, x in zip("qkv", (q, k, v), strict=True)
    ]


def test_the_cpu_computes_what_the_numbers_stand_for():
    q, k, v = tensors(2, 6, 2, 37, 53, 64)
    given = factors(q, k)
    call = {"enable_gqa": True, "score_mod": softcap(3.0), "sinks": sinks(6)}
    call["block_mask"] = block_mask(causal, q, k)
    aux = AuxRequest(lse=True, max_scores=True)
    out, got = flexattn.flex_attention(q, k, v, return_aux=aux, **given, **call)
    wanted, other = flexattn.flex_attention(*wide(q, k, v, given), return_aux=aux, **call)
    assert out.dtype == torch.bfloat16 and got.lse.dtype == torch.float32
    torch.testing.assert_close(out.float(), wanted, rtol=2**-8, atol=1e-5)
    torch.testing.assert_close((got.lse, got.max_scores), (other.lse, other.max_scores))


def test_batches_of_one_and_no_keys():
    q, k, v = tensors(3, 4, 2, 7, 9, 16, Bkv=1)
    given = factors(q, k)
    out = flexattn.flex_attention(q, k, v, enable_gqa=True, **given)
    many = [x.expand(3, -1, -1, -1) for x in (k, v)]
    given = {name: x.expand(3, -1) for name, x in given.items()}
    assert torch.equal(out, flexattn.flex_attention(q, *many, enable_gqa=True, **given))
    nothing = flexattn.flex_attention(q, k[:, :, :0], v[:, :, :0], enable_gqa=True)
    assert nothing.dtype == torch.bfloat16 and not nothing.any()


@pytest.mark.parametrize("factor", [0.0, -1.0, float("nan")])
def test_a_factor_that_is_not_above_zero_makes_its_head_nan(factor):
    q, k, v = tensors(1, 2, 2, 7, 9, 16)
    out = flexattn.flex_attention(q, k, v, k_descale=torch.tensor([[factor, 1.0]]))
    assert out[:, 0].isnan().all() and out[:, 1].isfinite().all()


def test_the_oracle_is_that_of_the_numbers_that_e4m3_stands_for():
    q, k, v = tensors(1, 2, 2, 64, 300, 64)
    given = {name: x.abs().exp2().round().exp2() for name, x in factors(q, k).items()}
    half = [x.bfloat16() for x in wide(q, k, v, given)]
    found = attention(q, k, v, descales=Descales(*given.values()), precision=Precision.ORACLE)
    wanted = attention(*half, precision=Precision.ORACLE)
    assert all(map(torch.equal, found, wanted)), "factors of two are exact in bfloat16"


def test_the_gate_rounds_weights_to_eight_bits():
    """Scores err as those of bfloat16 do, for the bits that their sums lack are far below;
    weights with e4m3's three bits, also far below the largest.
    """
    q, k, v = tensors(1, 2, 2, 64, 300, 64)
    half = [x.bfloat16() for x in (q, k, v)]
    exact, found, other = (
        attention(*given, precision=each)
        for given, each in (
            ((q, k, v), Precision.ORACLE),
            ((q, k, v), Precision.ROUNDED),
            (half, Precision.ROUNDED),
        )
    )
    for name in ("lse", "max_scores"):
        more, less = (getattr(x, name) - getattr(exact, name) for x in (found, other))
        assert more.square().mean() < 1.1 * less.square().mean()
    errors = [(each.out.double() - exact.out).square().mean().sqrt() for each in (found, other)]
    assert 4 * errors[1] < errors[0] < 2**-4 * exact.out.square().mean().sqrt()


def test_sums_of_few_bits_are_red():
    """Tensor cores' sums of products of e4m3 made values with a mean too small, by 19 % at 16k."""
    q, k, v = tensors(1, 2, 2, 64, 1024, 64)
    v = (v.float() + 1).to(E4M3)
    exact, rounded = (
        attention(q, k, v, precision=each) for each in (Precision.ORACLE, Precision.ROUNDED)
    )
    assert judge(rounded, exact, rounded, torch.bfloat16).passed
    short = rounded._replace(out=(exact.out * 0.97).bfloat16())
    assert not judge(short, exact, rounded, torch.bfloat16).passed


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"q_descale": torch.ones(6)}, r"\[B, H\]: \(2, 6\)"),
        ({"k_descale": torch.ones(2, 6)}, r"\[B, H\]: \(2, 2\)"),
        ({"v_descale": torch.ones(1, 2)}, r"expand\(2, 2\)"),
        ({"q_descale": torch.ones(2, 6).double()}, "torch.float32"),
        ({"q_descale": torch.ones(2, 6, device="meta")}, "on one device"),
        ({"v_descale": 2.0}, "v_descale is a float"),
    ],
)
def test_descales_that_do_not_fit(given, words):
    q, k, v = tensors(2, 6, 2, 7, 9, 16)
    for call in (flexattn.flex_attention, flexattn.explain):
        with pytest.raises(InputError, match=words):
            call(q, k, v, enable_gqa=True, **given)


def test_descales_belong_to_eight_bits():
    q, k, v = inputs(2, 6, 2, 7, 9, 16)
    with pytest.raises(InputError, match="float8_e4m3fn"):
        flexattn.flex_attention(q, k, v, enable_gqa=True, q_descale=torch.ones(2, 6))


def test_dtypes_do_not_mix():
    q, k, v = tensors(1, 2, 2, 7, 9, 16)
    with pytest.raises(InputError, match="one dtype"):
        flexattn.flex_attention(q, k, v.bfloat16())


def test_gradients_are_refused():
    q, k, v = tensors(1, 2, 2, 7, 9, 16)
    factor = torch.ones(1, 2, requires_grad=True)
    with pytest.raises(UnsupportedError, match="v_descale requires grad"):
        flexattn.flex_attention(q, k, v, v_descale=factor)
    with torch.no_grad():
        flexattn.flex_attention(q, k, v, v_descale=factor)


def test_autocast_leaves_eight_bits_alone():
    q, k, v = tensors(1, 2, 2, 7, 9, 16)
    given = factors(q, k)
    wanted = flexattn.flex_attention(q, k, v, **given)
    with torch.autocast("cpu", torch.float16):
        assert torch.equal(flexattn.flex_attention(q, k, v, **given), wanted)


@pytest.mark.parametrize("D", [16, 64, 80, 96, 128, 160, 192, 256])
@pytest.mark.parametrize("mods", ["noop", "mods"])
def test_every_config_that_is_offered_is_gluon(D, mods):
    more = {"score_mod": softcap(5.0), "mask_mod": causal, "runs": True} if mods == "mods" else {}
    wanted = problem(D=D, dtype="float8_e4m3fn", **more)
    found = space(wanted, H200)
    assert found and {each.language for each in found} == {"gluon"}
    assert found[0] == default(wanted, H200)
    assert key_of(wanted) != key_of(problem(D=D, **more))


@pytest.mark.parametrize(
    ("about", "device", "words"),
    [
        ({"D": 72}, H200, "of 16 in fp8"),
        ({"D": 320}, H200, "of 16 in fp8"),
        ({"D": 64, "Dv": 128}, H200, "the same"),
        ({}, A100, "no wgmma"),
        ({"kind": "decode"}, H200, "Triton template"),
    ],
)
def test_what_hopper_does_not_take(about, device, words):
    wanted = problem(dtype="float8_e4m3fn", **about)
    with pytest.raises(UnsupportedError, match=words) as error:
        plans._check_narrow(wanted, device, NONE)
    assert "bfloat16" in str(error.value), "it says what to do"
    with pytest.raises(ConfigError):
        default(wanted, device)


def test_no_triton_template_takes_it():
    wanted = problem(dtype="float8_e4m3fn").structure
    assert "Gluon template alone" in reasons(PrefillConfig(64, 64, 4, 2), wanted, H200)[0]
    with pytest.raises(UnsupportedError, match="Triton template"):
        plans._check_narrow(problem(dtype="float8_e4m3fn"), H200, Options(language="triton"))


@pytest.mark.parametrize("tile_scheduler", ["grid", "dynamic"])
def test_a_launch_gives_v_in_sixteen_bits(tile_scheduler, monkeypatch):
    """A kernel of its own widens V before each call."""
    wanted = problem(dtype="float8_e4m3fn", group=2, kv_len=77, sinks="float32")
    config = HopperPrefillConfig(2, 128, 2, 240, tile_scheduler=tile_scheduler)
    choice = next(choices(wanted, H200, Options(exact=config)))
    kernel = Recorded(choice.source)
    kernels = SimpleNamespace(choose=lambda *args: replace(choice, kernels=(kernel,)))
    q = torch.zeros(2, 16, 4096, 128).to(E4M3)
    k, v = (torch.randn(2, 77, 8, 128).to(E4M3).transpose(1, 2) for _ in range(2))
    descales = Descales(None, torch.ones(2, 8), torch.ones(1, 1).expand(2, 8))
    widening = []

    def build(source, *where):
        widening.append(Recorded(source))
        return widening[0]

    monkeypatch.setattr(launches, "builder", lambda: SimpleNamespace(kernel=build))
    launch = prepare_launch(
        wanted, H200, torch.device("cpu"), kernels, NONE, q, k, v, None, descales
    )
    given = kernel.fixed
    assert [given[f"{x}_DESCALE"] for x in "QKV"] == [0, None, None], "0 where nothing is given"
    steps = [given[f"{x}_descale_{axis}"] for x in "qkv" for axis in "bh"]
    assert steps == [0, 0, 8, 1, 0, 0]
    shapes = {name: box.shape for name, box in kernel.boxes.items()}
    assert shapes == {"Q": q.shape, "K": k.shape, "V": kernel.boxes["V"].shape, "OUT": q.shape}
    assert kernel.boxes["V"].shape == tuple(v.shape)
    assert kernel.boxes["K"].strides == k.stride()
    assert kernel.boxes["V"].strides == v.contiguous().stride()
    logits = torch.zeros(16)
    outputs = launch.run(q, k, v, 0.1, (), logits, descales)
    assert outputs.out.dtype == torch.bfloat16
    (got,) = kernel.launched
    assert got["Q"] is q and got["K"] is k and got["OUT"] is outputs.out
    assert got["SINKS"] is logits and got["sm_scale"] == 0.1
    assert got["K_DESCALE"] is descales.k and got["V_DESCALE"] is descales.v
    assert got["V"].dtype == torch.bfloat16 and got["V"].is_contiguous()
    (made,) = widening[0].launched
    assert made["V"] is v and made["V_KEYS"] is got["V"]
    assert None not in got.values()


def test_a_plan_has_it_for_caches_alone():
    with pytest.raises(InputError, match="kv_dtype"):
        serving_task(
            "t",
            Shape(1, 8, 8, 1, 1024, 128, 128),
            "float8_e4m3fn",
            H200,
            None,
            0.1,
            None,
            None,
            page=0,
        )


@pytest.mark.parametrize(("D", "rounds"), [(64, False), (128, False), (256, True)])
def test_weights_are_rounded_where_that_is_faster(D, rounds):
    """Up to 128 columns rounded weights took 1.2 to 1.3 times as long as exact ones (H200)."""
    q, k, v = tensors(1, 2, 2, 300, 300, D)
    options = {"FP8_WEIGHTS": "e4m3"}
    call = make_call(q, k, v, None, None, None, False, False, options, None, None)
    assert plans._problem(call, "", None, H200).structure.e4m3_weights is rounds


@pytest.mark.parametrize(
    ("dtypes", "route"),
    [((E4M3, E4M3), None), ((torch.bfloat16, E4M3), None), ((torch.bfloat16,) * 2, "torch")],
)
def test_torch_takes_no_call_of_eight_bits_whose_kernels_are_wrong(dtypes, route):
    """Torch's kernel reads no scales: it was handed calls with them, and one did not compile."""
    q, k = (SimpleNamespace(dtype=dtype, is_cuda=True) for dtype in dtypes)
    call = SimpleNamespace(q=q, k=k, dropout=None, options=NONE)
    error = WrongKernelError("no kernel is right")
    if route is None:
        with pytest.raises(WrongKernelError):
            frontend._without_kernels(call, error)
    else:
        assert frontend._without_kernels(call, error)[0] == route
