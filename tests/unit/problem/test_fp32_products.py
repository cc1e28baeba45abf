"""How float32 is multiplied: as asked, else as torch has it, by parts where that was measured."""

from types import SimpleNamespace

import pytest
import torch

from flexattn.device import KNOWN, named
from flexattn.problem.facts import products_for, setting_of

H200, A100 = named("nvidia-h200").capability, named("nvidia-a100").capability


@pytest.mark.parametrize(
    ("asked", "set_in_torch", "expected"),
    [
        (None, "none", "auto"), (None, "ieee", "ieee"), (None, "tf32", "tf32"),
        ("ieee", "tf32", "ieee"), ("tf32", "none", "tf32"), ("bf16x6", "ieee", "bf16x6"),
    ],
)  # fmt: skip
def test_the_setting_is_as_asked_else_as_torch_has_it(asked, set_in_torch, expected, monkeypatch):
    monkeypatch.setattr(torch.version, "hip", None)
    matmul = SimpleNamespace(fp32_precision=set_in_torch)
    monkeypatch.setattr(torch.backends.cuda, "matmul", matmul)
    assert setting_of(SimpleNamespace(dtype=torch.float32, is_cuda=True), asked) == expected
    for dtype, is_cuda in ((torch.bfloat16, True), (torch.float32, False)):
        assert setting_of(SimpleNamespace(dtype=dtype, is_cuda=is_cuda), asked) == "ieee"
    monkeypatch.setattr(torch.version, "hip", "6.4")
    assert setting_of(SimpleNamespace(dtype=torch.float32, is_cuda=True), asked) == "ieee"


def products(setting, kind="prefill", D=64, Dv=None, capability=H200, narrower=False):
    return products_for(setting, kind, (D, Dv or D), capability, narrower)


@pytest.mark.parametrize("setting", ["auto", "tf32", "bf16x6"])
@pytest.mark.parametrize("D", [32, 64, 128])
@pytest.mark.parametrize("kind", ["prefill", "backward"])
def test_parts_are_the_default_where_they_were_measured(kind, D, setting):
    assert products(setting, kind, D) == "bf16x6"
    assert products("ieee", kind, D) == "ieee"


@pytest.mark.parametrize(
    "about",
    [
        {"D": 16}, {"D": 80}, {"D": 256}, {"D": 64, "Dv": 128}, {"kind": "decode"},
        {"capability": A100}, {"narrower": True},
    ],
    ids=str,
)  # fmt: skip
def test_elsewhere_they_are_asked_for(about):
    assert products("auto", **about) == "ieee"
    assert products("tf32", **about) == "tf32x3"
    fits = about.get("D", 0) <= 128
    assert products("bf16x6", **about) == ("bf16x6" if fits else "ieee")


@pytest.mark.parametrize("device", KNOWN.values(), ids=lambda device: device.name)
def test_what_has_no_units_for_them_multiplies_by_fma(device):
    found = products("bf16x6", capability=device.capability)
    in_tensor_memory = device.capability in range(100, 120)
    assert found == ("ieee" if device.backend == "hip" or in_tensor_memory else "bf16x6")
