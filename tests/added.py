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
from flexattn.device import detect
from flexattn.errors import RenderError
from flexattn.kernels.choose.defaults import candidates, space
from flexattn.kernels.choose.options import NONE
from flexattn.kernels.choose.registry import family_of, short
from flexattn.kernels.hopper import space as hopper
from flexattn.kernels.triton.config import PrefillConfig
from flexattn.mods import bind
from flexattn.records.codec import decode, encode
from flexattn.records.environment import rendering, unlisted
from flexattn.records.record import key_of
from flexattn.reference import Precision, attention
from flexattn.report.numbers import limits_of
from flexattn.runtime.candidates import Candidate, candidates_of
from flexattn.runtime.dispatch import dispatcher
from flexattn.runtime.launch import prepare_launch
from tests.problems import A100, H200, problem


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


RING, PAST = 40, 80


def in_ring(rows):
    """A score_mod that keeps, of rows behind PAST keys, those that a ring of RING still has."""

    def kept(score, b, h, q_idx, kv_idx):
        behind = q_idx + PAST - kv_idx
        return torch.where((behind >= 0) & (behind < RING - rows), score, -torch.inf)

    return kept


def error_in_ring(kind, rows):
    """The problem of a call whose last keys lie in a ring, and the largest error of its kernel."""
    mod, length = in_ring(rows), PAST + rows
    asked = problem(
        kind, 64, dtype="float16", score_mod=mod, group=2, q_len=rows, kv_len=length, lse=False
    )
    asked = replace(asked, structure=replace(asked.structure, keys_ring=RING))
    q = torch.randn(2, asked.Hq, rows, 64, dtype=torch.float16)
    whole = torch.randn(2, 2, asked.Hkv, length, 64, dtype=torch.float16)
    there = torch.arange(length - RING, length)
    k, v = rings = torch.full((2, 2, asked.Hkv, RING, 64), torch.nan, dtype=torch.float16)
    rings[..., there % RING, :] = whole[..., there, :]
    cpu, bound = torch.device("cpu"), bind(mod, "score")
    launch = prepare_launch(asked, detect(cpu), cpu, dispatcher(), NONE, q, k, v, None)
    out = launch.run(q, k, v, 0.125, launch.rest_of(None, bound, None)).out
    exact = attention(q, *whole, score_mod=mod, scale=0.125, precision=Precision.ORACLE).out
    return asked, (out.double() - exact).abs().max().item()


def refused(candidate):
    """True if a config's template does not read rings."""
    try:
        candidate.sources()
    except RenderError as error:
        return "keys_ring" in error.got
    return False


def keys():
    """Keys in a ring, by the launcher of dense ones; templates without the piece are refused."""
    # What nobody writes holds NaN.
    torch.use_deterministic_algorithms(True)
    asked, prefill = error_in_ring("prefill", 21)
    decode = error_in_ring("decode", 3)[1]
    torch.use_deterministic_algorithms(False)
    dense = replace(asked, structure=replace(asked.structure, keys_ring=0))
    back = problem("backward", 64)
    back = replace(back, structure=replace(back.structure, keys_ring=RING))
    by_tma = Candidate(asked, H200, PrefillConfig(64, 64, 4, 2, True), "default", "")
    return {
        "prefill": prefill,
        "decode": decode,
        "refused": [
            refused(next(candidates_of(asked, H200, NONE))),
            refused(by_tma),
            *(refused(next(candidates_of(back, each, NONE))) for each in (H200, A100)),
        ],
        "served": refused(next(candidates_of(asked, A100, NONE))),
        "dense": refused(next(candidates_of(dense, H200, NONE))),
        "a record of its own": key_of(asked) != key_of(dense),
    }


if __name__ == "__main__":
    torch.manual_seed(0)
    parts = (knob, device, family, keys)
    answers = {"home": flexattn.__file__, **{each.__name__: each() for each in parts}}
    print(json.dumps(answers, default=str))
