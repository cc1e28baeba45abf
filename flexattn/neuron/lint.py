"""A lint of rendered sources: it finds what NKI refuses, or does not know, before anything runs.

The rules are those of NKI 0.7, which traces a kernel with Python: all of the language is allowed,
and what is refused is of older interfaces, or state that a cached kernel would not see change. A
source that passes is not known to compile: only the compiler knows that.
"""

from __future__ import annotations

import ast
import builtins
from collections.abc import Iterator

from flexattn.errors import KernelError

MODULES = {"nki", "nki.isa", "nki.language"}
# Names of nl of the interface before 0.2; names that are deprecated, or were removed in 0.7.
OLD = {"arange", "mgrid", "par_dim"}
GONE = {"static_range": "range", "affine_range": "range", "sequential_range": "range",
        "dynamic_range": "nl.fori_loop"}  # fmt: skip


def lint(source: str) -> None:
    """Raise KernelError that names each line that NKI would refuse."""
    found = findings(source)
    if found:
        raise KernelError("\n        ".join(found), "NKI 0.7 refuses these, or has them no more")


def findings(source: str) -> list[str]:
    """Lines that break a rule, each with what it is: "12: import neuronxcc"."""
    tree = ast.parse(source)
    found = [(line, what) for node in ast.walk(tree) for line, what in _node(node)]
    for statement in tree.body:
        if isinstance(statement, ast.FunctionDef):
            found += _function(statement)
        elif not isinstance(statement, ast.Import | ast.ImportFrom):
            found.append(
                (statement.lineno, "a statement at module level: a kernel reads no state")
            )
    return [f"{line}: {what}" for line, what in sorted(set(found))]


def _function(function: ast.FunctionDef) -> Iterator[tuple[int, str]]:
    decorators = [ast.unparse(each) for each in function.decorator_list]
    if decorators != ["nki.jit"]:
        yield function.lineno, f"decorators {decorators}: a kernel has nki.jit alone"
    nodes = list(ast.walk(function))
    names = [node for node in nodes if isinstance(node, ast.Name)]
    known = {"nki", "nl", "nisa", *(node.arg for node in nodes if isinstance(node, ast.arg))}
    known |= {node.name for node in nodes if isinstance(node, ast.FunctionDef)}
    known |= set(vars(builtins)) | {x.id for x in names if isinstance(x.ctx, ast.Store)}
    for name in names:
        if name.id not in known:
            yield name.lineno, f"the name {name.id}: a kernel reads its parameters alone"
    if not any(isinstance(node, ast.Return) for node in nodes):
        yield function.lineno, "no result"


def _node(node: ast.AST) -> Iterator[tuple[int, str]]:
    if isinstance(node, ast.Call):
        name = ast.unparse(node.func)
        for keyword in node.keywords:
            if keyword.arg == "mask" and name.startswith("nisa."):
                yield node.lineno, f"{name} with mask=, which is of the old interface"
            if keyword.arg == "buffer" and isinstance(keyword.value, ast.Constant):
                yield node.lineno, "a buffer that is a string: buffers are names of nl"
    elif isinstance(node, ast.Attribute) and ast.unparse(node.value) == "nl":
        if node.attr in OLD:
            yield node.lineno, f"nl.{node.attr}, which is of the old interface"
        elif node.attr in GONE:
            yield node.lineno, f"nl.{node.attr}: use {GONE[node.attr]}"
    elif isinstance(node, ast.Import | ast.ImportFrom):
        modules = [alias.name for alias in node.names]
        if isinstance(node, ast.ImportFrom):
            modules = [node.module or ""]
        for name in modules:
            if name not in MODULES:
                yield node.lineno, f"import {name}"
