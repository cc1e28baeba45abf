"""Rendered kernels, the interpreter and stand-ins against the signatures that AWS documents."""

import ast
import inspect
from pathlib import Path

import pytest
import tomllib

from flexattn.neuron.config import NkiDecodeConfig, NkiPrefillConfig
from flexattn.neuron.interpreter import engines
from flexattn.neuron.run import findings
from flexattn.neuron.source import render_nki, render_nki_combine
from flexattn.problem import Shape
from tests import neuron_stand_ins as stand_ins
from tests.cases import CASES
from tests.covering import each_choice
from tests.nki import problem_of

DOCUMENTED = tomllib.loads((Path(__file__).parent / "nki_signatures.toml").read_text())
NAMES = {kind: set(names.split()) for kind, names in DOCUMENTED["names"].items()}
# Python's own, and what a kernel's tensors have.
VALUES = NAMES["dtypes"] | NAMES["buffers"] | NAMES["operators"] | NAMES["activations"]
RENDERED = (
    ("prefill", NkiPrefillConfig(128, 512)),
    ("prefill", NkiPrefillConfig(128, 256, mask="affine")),
    ("prefill", NkiPrefillConfig(64, 256, mask="select")),
    ("decode", NkiDecodeConfig(128, 512, 4)),
)


def parameters(module, name):
    """(all names, those that must be given)."""
    parts = DOCUMENTED[module][name].split(", ")
    return [each.strip("?") for each in parts], {each for each in parts if each[-1] != "?"}


def undocumented(text):
    """The calls and names of a kernel that no document has, each with its line."""
    found = []
    for node in ast.walk(ast.parse(text)):
        where = ast.unparse(node) if isinstance(node, ast.Attribute | ast.Call) else ""
        if isinstance(node, ast.Call) and where.startswith(("nisa.", "nl.")):
            module = {"nisa": "isa", "nl": "language"}[node.func.value.id]
            if node.func.attr not in DOCUMENTED[module]:
                found.append(where)
                continue
            known, required = parameters(module, node.func.attr)
            given = known[: len(node.args)] + [each.arg for each in node.keywords]
            if not required <= set(given) <= set(known) or len(given) > len(set(given)):
                found.append(where)
        elif where.startswith(("nisa.engine.", "nisa.reduce_cmd.")):
            if node.attr not in NAMES[node.value.attr]:
                found.append(where)
        elif where.startswith("nl.") and node.attr not in VALUES | set(DOCUMENTED["language"]):
            found.append(where)
    return found


@each_choice(entry=CASES, rendered=RENDERED)
def test_a_kernel_calls_what_is_documented_and_passes_the_lint(entry, rendered):
    built = entry.make(2, 4, 2, 141, 173)
    kind, config = rendered
    problem, *_ = problem_of(
        kind, Shape(2, 4, 2, 141, 173, 192, 64), score_mod=built.score_mod,
        mask_mod=built.mask_mod, lse=True, max_scores=True,
    )  # fmt: skip
    texts = [render_nki(problem, config, "trn2", "t").text]
    if kind == "decode":
        texts.append(render_nki_combine(problem, "trn2").text)
    for text in texts:
        assert undocumented(text) == [] == findings(text)


@pytest.mark.parametrize(
    "line",
    [
        "nisa.tensor_copy(dst=x, src=x, mask=x)",
        "nisa.tensor_copy(dst=x)",
        "nisa.tensor_copy(x, x, dst=x)",
        "nisa.activate(dst=x, op=nl.exp, data=x)",
        "nisa.tensor_copy(dst=x, src=x, engine=nisa.engine.act)",
        "y = nl.ndarray((1, 1), dtype=nl.float8, buffer=nl.sbuf)",
        "y = nl.program_id(grid=0)",
    ],
)
def test_what_no_document_has_is_found(line):
    assert undocumented(line)


def test_the_interpreter_takes_no_more_than_the_documents():
    made = {name: each for name, each in vars(engines).items() if hasattr(each, "__wrapped__")}
    assert set(made) == set(DOCUMENTED["isa"])
    for name, each in made.items():
        known, required = parameters("isa", name)
        ours = inspect.signature(each.__wrapped__).parameters.values()
        assert {p.name for p in ours} <= set(known), name
        assert required <= {p.name for p in ours}, name


def test_stand_ins_are_called_as_documented():
    """They stand for no more than is documented, so what they accept AWS's packages do."""
    functions = {}
    for module, text in (("nki", stand_ins.NKI), ("torch_neuronx", stand_ins.TORCH_NEURONX)):
        for node in ast.parse(text).body:
            if isinstance(node, ast.FunctionDef):
                plain = node.args.args[: len(node.args.args) - len(node.args.defaults)]
                functions[module, node.name] = [
                    each.arg + "?" * (each not in plain) for each in node.args.args
                ]
    for module, name in (("torch_neuronx", "nki_op"), ("nki", "simulate")):
        assert functions[module, name] == DOCUMENTED[module][name].split(", ")
    assert len(functions["nki", "jit"]) == 1, "it is used as a bare decorator"
