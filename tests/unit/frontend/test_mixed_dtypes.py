"""Keys and values narrower than the queries: what is computed, what is refused, the records."""

import pytest
import torch

import flexattn
from flexattn.catalogue import causal, softcap
from flexattn.device import named
from flexattn.errors import CacheError, InputError, UnsupportedError
from flexattn.frontend import plan as plans
from flexattn.kernels.choose.defaults import default, reasons, space
from flexattn.kernels.choose.options import NONE, Options
from flexattn.kernels.hopper.config import HopperPrefillConfig
from flexattn.problem import FP8, NARROWER
from flexattn.records import untuned
from flexattn.records.record import key_of
from flexattn.records.untuned import note, read_untuned, untuned_path
from flexattn.reference import Precision, attention
from flexattn.reference.rounding import Rounding
from flexattn.settings import override
from flexattn.verify.oracle import make_inputs
from tests.families import gluon_refused
from tests.problems import choices, problem
from tests.support import block_mask, inputs, run, sinks

E4M3 = torch.float8_e4m3fn
H200, A100, MI300X = (named(name) for name in ("nvidia-h200", "nvidia-a100", "amd-mi300x"))
PAIRS = [(q, kv) for q, narrower in NARROWER.items() for kv in narrower]
each_pair = pytest.mark.parametrize(("wide", "narrow"), PAIRS, ids=str)


def tensors(wide, narrow, *sizes, **more):
    q, k, v = inputs(*sizes, **more)
    return q.to(wide), k.to(narrow), v.to(narrow)


@each_pair
def test_the_cpu_computes_what_the_numbers_stand_for(wide, narrow):
    """As torch's own tests have it: the output has the dtype of the queries, bit for bit."""
    q, k, v = tensors(wide, narrow, 2, 6, 2, 37, 53, 16)
    call = {"score_mod": softcap(3.0), "block_mask": block_mask(causal, q, k), "sinks": sinks(6)}
    got, wanted = (run(q, *kv, **call) for kv in ((k, v), (k.to(wide), v.to(wide))))
    assert got.out.dtype == wide
    assert all(map(torch.equal, got, wanted))


@each_pair
def test_every_number_of_the_narrow_dtype_is_one_of_the_wide(wide, narrow):
    bits = torch.arange(2 ** (8 * narrow.itemsize)).to(
        getattr(torch, f"uint{8 * narrow.itemsize}")
    )
    x = bits.view(narrow).float()
    assert torch.equal(x.to(wide).float().nan_to_num(7.0), x.nan_to_num(7.0))


def test_the_gate_rounds_weights_to_the_dtype_of_the_queries():
    """They were rounded to bfloat16 beside values of eight bits: eight times what fp16 may err."""
    q, k, v = tensors(torch.float16, E4M3, 1, 2, 2, 37, 53, 16)
    assert Rounding.of(Precision.ROUNDED, q, v).weight == torch.float16
    got, wanted = (
        attention(q, *kv, precision=Precision.ROUNDED) for kv in ((k, v), (k.half(), v.half()))
    )
    assert all(map(torch.equal, got, wanted))


@pytest.mark.parametrize(
    "dtypes",
    [
        (torch.bfloat16, torch.float32, torch.float32),
        (torch.float16, torch.bfloat16, torch.bfloat16),
        (torch.float32, E4M3, torch.float32),
        (torch.float32, torch.float16, torch.bfloat16),
        (E4M3, torch.bfloat16, torch.bfloat16),
        (torch.float16, torch.float8_e5m2, torch.float8_e5m2),
    ],
    ids=str,
)
def test_other_mixtures_are_refused(dtypes):
    q, k, v = (x.to(dtype) for x, dtype in zip(inputs(), dtypes, strict=True))
    with pytest.raises(InputError, match="key and value have one dtype"):
        flexattn.flex_attention(q, k, v, enable_gqa=True)


def test_gradients_and_descales_are_refused_in_words():
    q, k, v = tensors(torch.bfloat16, E4M3)
    with pytest.raises(InputError, match="score_mod multiplies"):
        flexattn.flex_attention(q, k, v, enable_gqa=True, k_descale=torch.ones(2, 1))
    with pytest.raises(UnsupportedError, match="mixed dtypes has no backward"):
        flexattn.flex_attention(q.requires_grad_(), k, v, enable_gqa=True)
    with torch.no_grad():
        flexattn.flex_attention(q, k, v, enable_gqa=True)


def test_autocast_leaves_keys_of_eight_bits_as_they_are():
    q, k, v = tensors(torch.float32, E4M3)
    wanted = flexattn.flex_attention(q.bfloat16(), k, v, enable_gqa=True)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(flexattn.flex_attention(q, k, v, enable_gqa=True), wanted)


@pytest.mark.parametrize("kind", ["prefill", "decode"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_every_config_that_is_offered_is_tritons(kind, dtype):
    wanted, plain = (
        problem(kind, dtype=dtype, mask_mod=causal, runs=True, kv_dtype=kv)
        for kv in ("float8_e4m3fn", "")
    )
    found = space(wanted, H200, "quick")
    assert {each.language for each in found} == {"triton"}
    assert found[0] == default(wanted, H200)
    assert key_of(wanted) != key_of(plain)
    assert "over float8_e4m3fn" in wanted.describe()
    types = {each.name: each.type for each in next(choices(wanted, H200, NONE)).source.arguments}
    assert "fp8e4nv" in types["K"] and "fp8e4nv" in types["V"] and "fp8" not in types["Q"]


def test_the_hopper_template_refuses_it():
    wanted = problem(kv_dtype="float8_e4m3fn")
    assert "in the dtype of q" in gluon_refused(wanted, H200)
    config = HopperPrefillConfig(2, 128, 2, 240)
    assert "in the dtype of q" in reasons(config, wanted.structure, H200)[0]
    with pytest.raises(UnsupportedError, match="Gluon template"):
        plans._check_narrow(wanted, H200, Options(language="gluon"))


def test_eight_bits_need_the_instructions_that_convert_them():
    eight, sixteen = (problem(dtype="float32", kv_dtype=kv) for kv in ("float8_e4m3fn", "float16"))
    with pytest.raises(UnsupportedError, match=r"sm_89[^$]*pass key and value in float32"):
        plans._check_narrow(eight, A100, NONE)
    for wanted, device in ((sixteen, A100), (eight, H200), (eight, MI300X)):
        plans._check_narrow(wanted, device, NONE)


def test_what_is_measured_and_listed_has_the_dtypes_of_the_problem(tmp_path):
    wanted = problem("decode", 16, kv_len=33, group=1, kv_dtype="float8_e4m3fn")
    made = make_inputs(wanted, torch.device("cpu"))
    assert [x.dtype for x in made] == [torch.bfloat16, E4M3, E4M3]
    untuned._noted.clear()
    with override(cache_dir=tmp_path, mode="replay"):
        note(wanted, H200, "default", None, None)
        (found,) = read_untuned(untuned_path())
        assert found.problem == wanted
        line = untuned_path().read_bytes().replace(b"bfloat16", b"float8_e4m3fn")
    with pytest.raises(CacheError, match="narrower than float8_e4m3fn"):
        untuned._untuned(line)


def test_names_of_the_narrower_dtypes():
    assert set(untuned._NARROWER["float32"]) == {"float16", "bfloat16", *FP8.values()}
