"""A lint of rendered sources: it finds what the NKI compiler refuses before anything runs.

The rules are those of the NKI language guide and of the release notes since 0.3. A source that
passes is not known to compile: only the compiler knows that.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator

from flexattn.errors import KernelError

MODULES = {"nki", "nki.isa", "nki.language"}
# Names of the language that exist in the restricted subset: meta-programming runs at compile time.
BUILTINS = {"range", "len", "min", "max"}
REMOVED = {
    "arange",
    "mgrid",
    "load",
    "store",
    "par_dim",
    "affine_range",
    "static_range",
    "sequential_range",
}
ORDER = (ast.Eq, ast.NotEq, ast.Lt, ast.LtE, ast.Gt, ast.GtE)
REFUSED: dict[type[ast.AST], str] = {
    ast.Lambda: "lambda", ast.ListComp: "a comprehension", ast.SetComp: "a comprehension",
    ast.DictComp: "a comprehension", ast.GeneratorExp: "a generator", ast.Try: "try",
    ast.With: "with", ast.Global: "global", ast.Nonlocal: "nonlocal", ast.Yield: "yield",
    ast.ClassDef: "a class", ast.AsyncFunctionDef: "async", ast.Await: "await",
    ast.Starred: "*", ast.Delete: "del", ast.Raise: "raise", ast.Assert: "assert",
    ast.List: "a list", ast.Dict: "a dict", ast.Set: "a set", ast.JoinedStr: "an f-string",
}  # fmt: skip


def lint(source: str) -> None:
    """Raise KernelError that names each line the compiler would refuse."""
    found = findings(source)
    if found:
        raise KernelError("\n        ".join(found), "the NKI compiler refuses these constructs")


def findings(source: str) -> list[str]:
    """Lines that break a rule, each with what it is: "12: `is`"."""
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
    if function.args.kwonlyargs:
        yield function.lineno, "keyword-only parameters"
    if function.args.vararg or function.args.kwarg:
        yield function.lineno, "parameters without a number"
    decorators = [ast.unparse(each) for each in function.decorator_list]
    if decorators != ["nki.jit"]:
        yield function.lineno, f"decorators {decorators}: a kernel has nki.jit alone"
    nodes = list(ast.walk(function))
    names = [node for node in nodes if isinstance(node, ast.Name)]
    known = {"nki", "nl", "nisa", function.name, *(arg.arg for arg in function.args.args)}
    known |= BUILTINS | {name.id for name in names if isinstance(name.ctx, ast.Store)}
    for name in names:
        if name.id not in known:
            yield name.lineno, f"the name {name.id}: a kernel reads its parameters alone"
    for node in nodes:
        if isinstance(node, ast.FunctionDef) and node is not function:
            yield node.lineno, "an inner function"
    if not any(isinstance(node, ast.Return) for node in nodes):
        yield function.lineno, "no result"


def _node(node: ast.AST) -> Iterator[tuple[int, str]]:
    what = REFUSED.get(type(node))
    line = getattr(node, "lineno", 0)
    if what is not None and not _is_pattern(node):
        yield line, what
    elif isinstance(node, ast.Call):
        yield from _call(node)
    elif isinstance(node, ast.Attribute):
        if node.attr in REMOVED:
            yield line, f"{ast.unparse(node)}, which is of the old API"
    elif isinstance(node, ast.Constant):
        if isinstance(node.value, str):
            yield line, "a string: buffers and dtypes are names of nl"
    elif isinstance(node, ast.Compare):
        for op in node.ops:
            if not isinstance(op, ORDER):
                yield line, f"`{type(op).__name__}`"
    elif isinstance(node, ast.Import | ast.ImportFrom):
        modules = [alias.name for alias in node.names]
        if isinstance(node, ast.ImportFrom):
            modules = [node.module or ""]
        for name in modules:
            if name not in MODULES:
                yield line, f"import {name}"


def _is_pattern(node: ast.AST) -> bool:
    """Access patterns are lists of lists of [step, count]."""
    return isinstance(node, ast.List) and bool(node.elts) and isinstance(node.ctx, ast.Load)


def _call(node: ast.Call) -> Iterator[tuple[int, str]]:
    if not isinstance(node.func, ast.Attribute) or not isinstance(node.func.value, ast.Name):
        return
    name = f"{node.func.value.id}.{node.func.attr}"
    keywords = {keyword.arg for keyword in node.keywords}
    if name.startswith("nisa."):
        if node.args:
            yield node.lineno, f"{name} with positional arguments"
        if name == "nisa.nc_matmul" and "accumulate" not in keywords:
            yield node.lineno, "nc_matmul without accumulate"
        if "mask" in keywords:
            yield node.lineno, f"{name} with mask=, which is of the old API"
    if name == "nl.ndarray" and "buffer" not in keywords:
        yield node.lineno, "nl.ndarray without a buffer"
