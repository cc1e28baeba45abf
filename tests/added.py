"""What a copy of the package says of the examples of docs/adding.md that were applied to it.

Run as a program, in a process that interprets its kernels; tests/unit/test_adding.py reads it.
"""

import json
from dataclasses import replace

import torch
from typer.testing import CliRunner

import flexattn
from flexattn.catalogue import causal, softcap
from flexattn.cli.app import app
from flexattn.kernels.choose.defaults import candidates, space
from flexattn.kernels.choose.registry import family_of, short
from flexattn.kernels.hopper import space as hopper
from flexattn.records.codec import decode, encode
from flexattn.records.environment import rendering, unlisted
from flexattn.report.numbers import limits_of
from tests.problems import A100, problem


def command(*arguments):
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 0, result.output
    return result.output


def is_turned(config):
    return getattr(config, "q_first", False)


def knob():
    """q_first of Triton's prefill, and `probe` that the test gave Hopper's config."""
    masked = problem(mask_mod=causal)
    found = [each for each in space(masked, A100) if is_turned(each)]
    turned, rested = found[0], replace(found[0], q_first=False)
    family = family_of(turned)
    texts = [
        family.render(masked.structure, each, A100, "t").text.partition(
            "def flexattn_triton_prefill"
        )[2]
        for each in (turned, rested)
    ]
    return {
        "searched": len(found),
        "where nothing is masked": any(map(is_turned, space(problem(), A100))),
        "short": short(turned),
        "one tile": family.tile(turned) == family.tile(rested),
        "before the counts": [each.find("tl.load(") < each.find("mask_row =") for each in texts],
        "read back": decode(type(turned), encode(turned), "") == turned,
        "of Hopper": sorted({each.probe for each in hopper.axes(masked, False)}),
    }


def device():
    name = "nvidia-l40s"
    return {
        "listed": name in command("devices"),
        "rendered": "for sm_89" in command("render", "causal", "--device", name),
        "limits": limits_of("NVIDIA L40S").half,
    }


def family():
    asked = {"D": 64, "lse": False}
    plain, modified = problem(**asked), problem(**asked, score_mod=softcap(20.0))
    q, k, v = (torch.randn(2, heads, 70, 32, dtype=torch.float16) for heads in (4, 2, 2))
    out = flexattn.flex_attention(q, k, v, enable_gqa=True)
    doubles = (x.double() for x in (q, k, v))
    exact = torch.nn.functional.scaled_dot_product_attention(*doubles, enable_gqa=True)
    first = [type(next(candidates(each, A100))).__name__ for each in (plain, modified)]
    return {
        "first": first,
        "meant by kernel_options": type(next(candidates(plain, A100, "triton"))).__name__,
        "searched": sum(type(each).__name__ == "DenseConfig" for each in space(plain, A100)),
        "explained": flexattn.explain(q, k, v, enable_gqa=True).config,
        "error": (out.double() - exact).abs().max().item(),
        "hashed": "flexattn.kernels.dense.source" in rendering(*unlisted("prefill", A100)),
    }


if __name__ == "__main__":
    torch.manual_seed(0)
    answers = {"home": flexattn.__file__, "knob": knob(), "device": device(), "family": family()}
    print(json.dumps(answers, default=str))
