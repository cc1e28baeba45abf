"""flexattn.neuron.kernel, and flex_attention of `neuron` tensors, held to the float64 oracle."""

import os
import sys

import pytest
import torch

import flexattn
from flexattn.catalogue import causal
from flexattn.errors import ConfigError, InputError, UnsupportedError
from flexattn.neuron.config import NkiPrefillConfig
from flexattn.reference import Precision, attention
from flexattn.verify.gate import judge
from flexattn.verify.oracle import oracle as oracle_of
from tests import neuron_stand_ins as stand_ins
from tests.cases import case
from tests.processes import ROOT, python
from tests.support import block_mask, inputs

TEN = (
    "noop", "causal", "sliding_window", "prefix_lm", "softcap_30", "alibi", "t5_bias", "padding",
    "document", "alibi_causal_document",
)  # fmt: skip
each_cores = pytest.mark.parametrize("cores", [1, 2])


def check(
    shape, cores, dtype=torch.bfloat16, score_mod=None, mask_mod=None, target="trn2", **more
):
    """The public call in the interpreter against the oracle; returns what was prepared."""
    q, k, v = inputs(*shape, dtype=dtype)
    run = flexattn.neuron.kernel(
        score_mod, mask_mod, q.shape, k.shape, v.shape, dtype=dtype, return_lse=True, cores=cores,
        target=target, **more,
    )  # fmt: skip
    got = run.interpret(q, k, v)
    call = {"score_mod": score_mod, "block_mask": block_mask(mask_mod, q, k)}
    call["scale"] = q.shape[-1] ** -0.5
    if shape[3] < 4096:
        oracle = attention(q, k, v, precision=Precision.ORACLE, **call)
        rounded = attention(q, k, v, precision=Precision.ROUNDED, **call)
        verdict = judge((got.out, got.lse, None), oracle, rounded, dtype)
    else:  # some rows of three heads
        some = oracle_of(q, k, v, call["scale"], None, None, None, None)
        verdict = some((got.out, got.lse, None))
        assert not got.out.isnan().any()
    assert verdict.passed, verdict.message()
    assert run.cores == cores and len(run.extra[1]) == cores
    return run


@each_cores
@pytest.mark.parametrize("name", TEN)
def test_ten_mods_of_the_catalogue(name, cores):
    built = case(name).make(2, 4, 2, 150, 170, dtype=torch.bfloat16)
    check((2, 4, 2, 150, 170), cores, score_mod=built.score_mod, mask_mod=built.mask_mod)


@each_cores
@pytest.mark.parametrize(
    ("dims", "more"),
    [
        (64, 1),
        pytest.param(64, 10, marks=pytest.mark.long),
        pytest.param(40, 8, marks=pytest.mark.long),
    ],
)
def test_stable_diffusions_shape(dims, more, cores):
    """Self-attention over 4096 positions: 8 or 10 heads, or one for each core."""
    heads = max(more, cores)
    config = NkiPrefillConfig(128, 2048, score_buffers=1)
    run = check((1, heads, heads, 4096, 4096, dims), cores, config=config)
    sizes = [sum(len(section[5]) for section in part) for part in run.extra[1]]
    assert sizes == [heads * 32 // cores] * cores


@each_cores
@pytest.mark.parametrize("sizes", [(2, 8, 2, 1, 700), (1, 8, 1, 1, 700), (1, 4, 1, 5, 200)])
def test_decode_with_grouped_heads(sizes, cores):
    """Cores that would have no rows share the keys: their splits are merged."""
    built = case("alibi").make(*sizes, dtype=torch.float32)
    run = check((*sizes, 64), cores, torch.float32, score_mod=built.score_mod)
    assert run.config.num_splits == (cores if sizes[0] == 1 and sizes[4] > 256 else 1)
    idle = sum(not part for part in run.extra[1])
    assert idle == (cores - 1 if sizes[4] == 200 else 0), "a few keys are no work for two"


def test_a_causal_head_is_cut_where_half_of_the_keys_are_behind():
    run = check((1, 1, 1, 1024, 1024, 16), 2, mask_mod=causal)
    rows = [sum(visit[2] for section in part for visit in section[5]) for part in run.extra[1]]
    assert rows == [640, 384], "the last rows visit most keys"


def test_one_core_works_through_both_parts():
    """A graph whose compiler was told of one core launches the same kernel."""
    q, k, v = inputs(1, 2, 1, 300, 300, dtype=torch.float32)
    run = flexattn.neuron.kernel(None, causal, q.shape, k.shape, dtype=q.dtype, cores=2)
    alone = flexattn.neuron.kernel(None, causal, q.shape, k.shape, dtype=q.dtype, cores=1)
    lone = run.run(q, k, v, lambda source, given: _interpreted(source, given))
    torch.testing.assert_close(lone.out, alone.interpret(q, k, v).out, rtol=0, atol=0)
    assert run.source.text == alone.source.text


def _interpreted(source, given, programs=1):
    from flexattn.device.neuroncore import CORES
    from flexattn.neuron.interpreter.interpret import interpret

    return interpret(source.text, given, CORES["trn2"], programs=programs).results


def test_what_cannot_be_is_said(monkeypatch):
    shape = (1, 2, 64, 16)
    with pytest.raises(InputError, match="target='trn9'"):
        flexattn.neuron.kernel(None, None, shape, shape, target="trn9")
    for cores, target in ((3, "trn2"), (2, "trn1")):
        with pytest.raises(ConfigError, match=f"{cores} physical cores"):
            flexattn.neuron.kernel(None, None, shape, shape, cores=cores, target=target)
    monkeypatch.setenv("NEURON_LOGICAL_NC_CONFIG", "1")
    run = flexattn.neuron.kernel(None, None, shape, shape)
    assert run.cores == 1
    with pytest.raises(InputError, match="was made for"):
        run.interpret(*inputs(1, 2, 2, 65, 64, 16, dtype=torch.bfloat16))
    with pytest.raises(InputError):
        flexattn.neuron.kernel(None, None, shape, (1, 3, 64, 16))
    with pytest.raises(UnsupportedError, match="sin of float32"):
        flexattn.neuron.kernel(lambda s, b, h, q, k: torch.sin(s), None, shape, shape)


def test_without_awss_packages_a_call_says_where_they_are(tmp_path, monkeypatch):
    q, k, v = inputs(1, 2, 2, 64, 64, dtype=torch.bfloat16)
    run = flexattn.neuron.kernel(None, None, q.shape, k.shape)
    with pytest.raises(UnsupportedError, match=r"(?s)nki is not installed.*interpret\(q, k, v\)"):
        run(q, k, v)
    stand_ins.install(tmp_path)
    (tmp_path / "torch_neuronx.py").write_text("")
    monkeypatch.syspath_prepend(tmp_path)
    from flexattn.neuron.instance import nki_op

    with pytest.raises(UnsupportedError, match=r"torch-neuronx==2\.14"):
        nki_op()
    sys.modules.pop("torch_neuronx", None)


ON_DEVICE = """
import torch, flexattn, torch_neuronx
from flexattn.catalogue import causal
from torch_neuronx import Neuron
from flexattn.errors import UnsupportedError
from flexattn.reference import attention

def given(*shape):
    draw = torch.Generator().manual_seed(sum(shape))
    return torch.randn(shape, generator=draw)

def held(q, k, v, out, lse, **mods):
    ref = attention(q, k, v, scale=q.shape[-1] ** -0.5, **mods)
    assert out.device.type == "neuron" and lse.shape == q.shape[:3]
    torch.testing.assert_close(out.data_here, ref.out.float(), rtol=2e-5, atol=2e-5)
    torch.testing.assert_close(lse.data_here, ref.lse.float(), rtol=2e-5, atol=2e-5)

blocks = flexattn.create_block_mask(causal, None, None, 200, 200, "cpu")
q, k, v = given(1, 4, 200, 16), given(1, 2, 200, 16), given(1, 2, 200, 16)
there = tuple(map(Neuron, (q, k, v)))
for turn in range(2):
    got = flexattn.flex_attention(*there, block_mask=blocks, enable_gqa=True, return_lse=True)
    held(q, k, v, *got, block_mask=blocks)
slopes = given(4)
mod = lambda score, b, h, q_idx, kv_idx: score + slopes[h] * (kv_idx - q_idx)
q, k, v = given(1, 4, 1, 16), given(1, 1, 300, 16), given(1, 1, 300, 16)
there = tuple(map(Neuron, (q, k, v)))
got = flexattn.flex_attention(*there, score_mod=mod, enable_gqa=True, return_lse=True)
held(q, k, v, *got, score_mod=mod)
assert flexattn.explain(*there, enable_gqa=True).route == "plugin"
assert set(torch_neuronx.calls) == {2}, torch_neuronx.calls
made = [name for name in torch_neuronx.operators if name.startswith("flexattn::nki_")]
assert len(made) == 3, made
try:
    flexattn.flex_attention(there[0].requires_grad_(), *there[1:], enable_gqa=True)
except UnsupportedError as error:
    assert "query requires grad" in str(error), error
else:
    raise AssertionError
print("served")
"""


def test_flex_attention_of_neuron_tensors(tmp_path):
    """In a process of its own, whose torch has the device: by torch_neuronx's nki_op."""
    stand_ins.install(tmp_path / "packages")
    paths = [str(tmp_path / "packages"), str(ROOT), os.environ.get("PYTHONPATH", "")]
    said, _ = python(
        "-c", ON_DEVICE, PYTHONPATH=os.pathsep.join(filter(None, paths)),
        NEURON_PLATFORM_TARGET_OVERRIDE="trn2", FLEXATTN_CACHE_DIR=str(tmp_path / "cache"),
    )  # fmt: skip
    assert "served" in said


def test_an_exported_kernel_runs_by_its_own_files(tmp_path, monkeypatch):
    """What `flexattn export --device trn2` writes for each problem of a workload."""
    built = case("alibi_causal_document").make(1, 4, 1, 3, 700, dtype=torch.float32)
    q, k, v = inputs(1, 4, 1, 3, 700, 16)
    run = flexattn.neuron.kernel(
        built.score_mod, built.mask_mod, q.shape, k.shape, dtype=q.dtype, cores=2
    )
    run.write(tmp_path)
    facts = {}
    exec((tmp_path / "arguments.py").read_text(), facts)
    tables = torch.load(tmp_path / "tables.pt", weights_only=True)
    rows = q.view(1, 1, 12, 16)
    first = {"q": rows, "k": k, "v": v, **tables}
    given = [first[n] if n in first else facts[n.upper()] for n in facts["NAMES"]]
    from flexattn.device.neuroncore import CORES
    from flexattn.neuron.interpreter.interpret import interpret

    found = given
    for name in ("kernel", "combine"):
        text = (tmp_path / f"{name}.py").read_text()
        ran = interpret(text, found, CORES["trn2"], programs=facts["CORES"])
        found = (rows, *ran.results)
    torch.testing.assert_close(ran.results[0].view(1, 4, 3, 16), run.interpret(q, k, v).out)
