"""The front of the command line: help and completion without torch, choices, and near words."""

import re
import resource
from typing import get_args

import pytest

from flexattn import __version__
from flexattn.cli import options as choices
from flexattn.cli.app import VERBS
from flexattn.errors import InputError
from flexattn.kernels.base.family import Effort
from flexattn.problem import ITEMSIZE, Kind
from flexattn.util.text import DTYPE_NAMES
from tests.processes import ROOT, python


def test_help_takes_less_than_half_a_second():
    """It took four: torch was imported for the types of options."""

    def spent():
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        assert "replay-study" in python("-m", "flexattn", "--help")[0]
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        return after.ru_utime - before.ru_utime + after.ru_stime - before.ru_stime

    # The processor's time, and the least of three: others may be at work here.
    assert min(spent() for _ in range(3)) < 0.5


def test_nothing_that_only_tells_imports_torch():
    code = """
import sys
from typer.testing import CliRunner
from flexattn.cli.app import VERBS, app
for words in (["--version"], ["-h"], *([verb, "-h"] for verb in VERBS)):
    result = CliRunner().invoke(app, words)
    assert result.exit_code == 0, result.output
print([name for name in ("torch", "triton", "sympy", "rich") if name in sys.modules])
"""
    assert python("-c", code)[0] == "[]\n"


def test_public_names_come_at_their_first_use():
    code = """
import sys, flexattn
assert "torch" not in sys.modules and "flex_attention" in dir(flexattn)
assert callable(flexattn.flex_attention) and "torch" in sys.modules
assert flexattn.serving.DecodePlan and not hasattr(flexattn, "no_such_name")
from flexattn import *
print(sorted(set(flexattn.__all__) - set(globals())))
"""
    assert python("-c", code)[0] == "[]\n"


def test_version_and_short_help(flexattn):
    assert flexattn("--version").stdout == f"flexattn {__version__}\n"
    for verb in VERBS:
        assert flexattn(verb, "-h").stdout == flexattn(verb, "--help").stdout


@pytest.mark.parametrize("verb", VERBS)
def test_help_breaks_no_name_at_its_hyphen(flexattn, verb):
    """A device's name ended a line as nvidia-, and went on below."""
    shown = flexattn(verb, "--help").stdout
    assert not [line for line in shown.splitlines() if re.search(r"\w-$", line.strip())]


def test_completion_is_there_and_help_says_how():
    shown = python("-m", "flexattn", "--help")[0]
    assert "flexattn --install-completion" in shown and "TAB" in shown
    page = (ROOT / "docs/commands.md").read_text(encoding="utf-8")
    assert "TAB" in page and all(f"--{word}-completion" in page for word in ("install", "show"))

    def completed(*words):
        """What TAB offers behind the words; the last one is begun."""
        given = {"_FLEXATTN_COMPLETE": "complete_bash", "COMP_WORDS": " ".join(words),
                 "COMP_CWORD": str(len(words) - 1)}  # fmt: skip
        code = "import sys; sys.argv[0] = 'flexattn'; from flexattn.cli import main; main()"
        return python("-c", code, **given)[0].split()

    assert completed("flexattn", "re") == ["report", "replay-study", "render"]
    assert completed("flexattn", "render", "causal", "--kind", "de") == ["decode"]
    assert completed("flexattn", "why", "--device", "nvidia-h") == ["nvidia-h100", "nvidia-h200"]
    assert "llama3-8b" in completed("flexattn", "tune", "--preset", "ll")


@pytest.mark.parametrize(
    ("verb", "shown"),
    [
        ("render", ["prefill|decode|backward", "float16|bfloat16", "NAME=VALUE", "devices`"]),
        ("render", ["score|mask", "expr|source|ptx|resources"]),
        ("build", ["quick|full|exhaustive"]),
        ("show", ["prefill|decode|backward|serving"]),
        ("tune", ["tune --list-presets`", "flexattn devices`", "TOML, YAML or JSON"]),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_choices_are_shown_in_help(flexattn, verb, shown):
    text = re.sub(r"\s+", " ", re.sub(r"-\n +", "-", flexattn(verb, "-h").stdout))
    for words in shown:
        assert words in text


def test_choices_are_those_of_the_package():
    """They stand apart from it, for it imports torch."""
    assert get_args(Kind) == choices.RECORDED_CHOICES
    assert get_args(Effort) == choices.EFFORTS
    assert set(choices.DTYPE_CHOICES) == set(ITEMSIZE)
    assert set(DTYPE_NAMES.values()) == set(ITEMSIZE)


@pytest.mark.parametrize(
    ("word", "name"),
    [
        ("h200", "nvidia-h200"),
        ("H200", "nvidia-h200"),
        ("NVIDIA H200", "nvidia-h200"),
        ("mi300x", "amd-mi300x"),
        ("rtx-4090", "nvidia-rtx-4090"),
        ("nvidia-b200", "nvidia-b200"),
        ("trn2", "trn2"),
    ],
)
def test_a_device_is_known_without_its_maker(word, name):
    assert choices.device_name(word) == name


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (["--dtype", "bf16"], "prefill bfloat16"),
        (["--dtype", "fp16", "--kind", "Decode"], "decode float16"),
        (["--dtype", "fp32", "--device", "h100"], "prefill float32"),
        (["--dtype", "e4m3"], "prefill float8_e4m3fn"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_short_names_of_dtypes(flexattn, arguments, problem):
    assert problem in flexattn("render", "noop", *arguments, "--show", "expr").stdout
    kind = ["--q-len", "64"] if "--kind" not in arguments else []
    assert problem in flexattn("why", "noop", *arguments, *kind).stdout


@pytest.mark.parametrize(
    ("arguments", "near"),
    [
        (["rendr"], "Did you mean 'render'?"),
        (["render", "causal", "--dytpe", "bf16"], "--dtype"),
        (["render", "causal", "--kind", "prefil"], "did you mean prefill?"),
        (["render", "causal", "--dtype", "bfloat"], "did you mean bfloat16?"),
        (["render", "causal", "--as", "mas"], "did you mean mask?"),
        (["render", "causal", "--show", "sources"], "did you mean source?"),
        (["render", "causal", "--option", "TANH=exac"], "('auto', 'fast', 'exact')"),
        (["render", "causal", "--option", "BLOKC_M=64"], "did you mean 'BLOCK_M'?"),
        (["render", "causal", "--option", "BLOCK_M"], "it is NAME=VALUE"),
        (["render", "alibi", "--option", "RULES_OFF=row_slop"], "did you mean row_slope?"),
        (["build", "causal", "--effort", "quik"], "did you mean quick?"),
        (["why", "causal", "--kind", "decod"], "did you mean decode?"),
        (["show", "--kind", "servic"], "did you mean serving?"),
        (["bench", "--preset", "gema3"], "did you mean gemma3?"),
        (["export", "out", "--preset", "qwen", "--device", "h200"], "did you mean qwen3?"),
        (["doctor", "--device", "nvidia-h201"], "did you mean nvidia-h200?"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_what_is_nearly_right_is_named(flexattn, arguments, near):
    assert near in flexattn(*arguments, status=2).stderr


def test_what_is_near_nothing_has_no_guess():
    with pytest.raises(InputError) as found:
        choices.choice("--kind", "xyz", choices.KIND_CHOICES)
    assert found.value.do == "" and found.value.rule == "it is prefill, decode or backward"


@pytest.mark.parametrize(
    "arguments",
    [
        ["why", "noop"],
        ["render", "noop", "--json"],
        ["doctor"],
        ["tune", "--preset", "sd21", "--only", "level 3", "--dry-run", "--json"],
    ],
    ids=lambda value: value[0],
)
def test_a_device_that_was_assumed_is_said_to_be(flexattn, arguments, monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    said = "device: nvidia-h200, assumed: no GPU was found; --device names another"
    assert said in flexattn(*arguments).stderr
    assert "assumed" not in flexattn(*arguments, "--device", "h200").stderr
