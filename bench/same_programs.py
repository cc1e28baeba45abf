"""The test that two kernels are one program whose names were changed, by their text or their PTX.

Two modules are equal up to the names that they bind themselves, if numbering these in the order
in which a walk of the syntax tree meets them gives equal trees: alpha-equivalence, by de Bruijn's
idea of names that are numbers. Each function has numbers of its own.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Mapping, Sequence
from functools import lru_cache

# What a launcher asks a compiled module for; its parameters are bound by name. Once it had this
# name in every module; since then a module's template is in it.
ENTRY, ENTRIES = "kernel", "flexattn_"
UNKNOWN_SCOPES = (ast.ClassDef, ast.Global, ast.Nonlocal)


def canonical(text: str, former: Mapping[str, str] | None = None) -> str:
    """A module's syntax tree as text, with its own names as numbers.

    As they are written stay the names of imports, of attributes, of keywords, of `kernel` and of
    its parameters; former: today's names of those parameters by older ones. Docstrings and the
    folders that imports name are left out. A module with classes keeps all its names.
    """
    return _canonical(text, tuple((former or {}).items()))


# Lines of PTX that say where it comes from, or how many registers of a kind there are.
_ABOUT = re.compile(r"^\s*(?:\.(?:loc|file|reg)\b.*|\$L__(?:tmp|info|func)\w*:\s*)$", re.MULTILINE)
_PTX_NAMES = re.compile(r"%[a-z]+\d+\b|\$L__BB\w+")


def canonical_ptx(ptx: str) -> str:
    """A kernel's PTX with its registers and labels as numbers, without what debuggers read."""
    numbers: dict[str, str] = {}

    def number(found: re.Match[str]) -> str:
        kind = found[0].rstrip("0123456789") if found[0][0] == "%" else "$"
        return numbers.setdefault(found[0], f"{kind}{len(numbers)}")

    code = re.split(r"^\s*\.section\s+\.debug", ptx, maxsplit=1, flags=re.MULTILINE)[0]
    code = _PTX_NAMES.sub(number, re.sub(r"//.*", "", _ABOUT.sub("", code)))
    return "\n".join(line.strip() for line in code.splitlines() if line.strip())


@lru_cache(maxsize=4096)
def _canonical(text: str, former: tuple[tuple[str, str], ...]) -> str:
    tree = without_docstrings(text)
    for node in tree.body:
        if isinstance(node, ast.FunctionDef) and node.name.startswith(ENTRIES):
            node.name = ENTRY
    if not any(isinstance(node, UNKNOWN_SCOPES) for node in ast.walk(tree)):
        tree = _Numbered(tree, dict(former)).visit(tree)
    return ast.dump(tree)


def without_docstrings(text: str) -> ast.Module:
    """Python's tree without docstrings, `__all__` and the folders that imports name.

    Files may move, and what a module exports is no part of what it computes.
    """
    tree = ast.parse(text)
    tree.body = [each for each in tree.body if not _exports(each)]
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom):
            node.module = (node.module or "").rpartition(".")[2]
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef)) and ast.get_docstring(
            node
        ):
            node.body = node.body[1:]
    return tree


def _exports(statement: ast.stmt) -> bool:
    targets = statement.targets if isinstance(statement, ast.Assign) else []
    return any(isinstance(each, ast.Name) and each.id == "__all__" for each in targets)


class _Numbered(ast.NodeTransformer):
    """Puts numbers in place of names: %n in a function, %%n in the module."""

    def __init__(self, tree: ast.Module, former: Mapping[str, str]) -> None:
        every = list(ast.walk(tree))
        keywords = {each.arg for each in every if isinstance(each, ast.keyword)}
        self.former = former
        self.kept: set[str | None] = {ENTRY, *keywords}
        self.module: dict[str, str] = {}
        self.bound_by_module = _bound(tree.body, inner=False)
        self.function: dict[str, str] | None = None
        self.bound_by_function: set[str] = set()

    def number(self, name: str) -> str:
        """The number of a name in this scope; the name itself if nothing here binds it."""
        if self.function is not None and name in self.function:
            return self.function[name]
        if name in self.kept:
            return name
        if self.function is not None and name in self.bound_by_function:
            return self.function.setdefault(name, f"%{len(self.function)}")
        if name in self.bound_by_module:
            return self.module.setdefault(name, f"%%{len(self.module)}")
        return name

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.AST:
        node.name = self.number(node.name)
        if self.function is not None:
            return self.generic_visit(node)
        self.function, self.bound_by_function = {}, _bound([node], inner=True)
        if node.name == ENTRY:
            names = [each.arg for each in _parameters(node)]
            self.function = {name: self.former.get(name, name) for name in names}
        self.generic_visit(node)
        self.function, self.bound_by_function = None, set()
        return node

    def visit_If(self, node: ast.If) -> ast.AST:
        """Triton gives a branch the names that both its sides bind, in the alphabet's order."""
        both = _bound(node.body, inner=True) & _bound(node.orelse, inner=True)
        self.generic_visit(node)
        order: list[ast.expr] = [ast.Name(self.number(name), ast.Load()) for name in sorted(both)]
        node.body.insert(0, ast.Expr(ast.Tuple(order, ast.Load())))
        return node

    def visit_Name(self, node: ast.Name) -> ast.AST:
        node.id = self.number(node.id)
        return node

    def visit_arg(self, node: ast.arg) -> ast.AST:
        node.arg = self.number(node.arg)
        return self.generic_visit(node)


def _bound(statements: Sequence[ast.stmt], inner: bool) -> set[str]:
    """Names that statements bind; inner: inside of functions too, but for these statements."""
    found: set[str] = set()
    for statement in statements:
        function = isinstance(statement, ast.FunctionDef)
        if isinstance(statement, ast.FunctionDef) and not inner:
            found.add(statement.name)
        for node in ast.walk(statement) if inner or not function else ():
            if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                found.add(node.id)
            elif isinstance(node, ast.arg):
                found.add(node.arg)
            elif isinstance(node, ast.FunctionDef) and node is not statement:
                found.add(node.name)
    return found


def _parameters(node: ast.FunctionDef) -> list[ast.arg]:
    given = node.args
    variadic = [each for each in (given.vararg, given.kwarg) if each is not None]
    return [*given.posonlyargs, *given.args, *given.kwonlyargs, *variadic]


def used_by(module: str, texts: Sequence[str]) -> ast.Module:
    """A module's syntax tree, without docstrings, as far as kernels that import from it can reach.

    Statements that define a name which the texts import or a kept statement mentions, and those
    that define none. The whole module where the texts import nothing of it, as of a stage of the
    compiler.
    """
    tree = without_docstrings(module)
    statements = (each for text in texts for each in ast.walk(ast.parse(text)))
    mentioned = {
        alias.name for each in statements if isinstance(each, ast.ImportFrom)
        for alias in each.names
    }  # fmt: skip
    defined = [(_defined(each), each) for each in tree.body]
    imports = (ast.Import, ast.ImportFrom)
    if not any(names & mentioned for names, each in defined if not isinstance(each, imports)):
        return tree
    kept: set[int] = set()
    while found := [
        i for i, (names, _) in enumerate(defined)
        if i not in kept and (not names or names & mentioned)
    ]:  # fmt: skip
        kept.update(found)
        for i in found:
            mentioned |= _mentioned(defined[i][1])
    tree.body = [each for i, (_, each) in enumerate(defined) if i in kept]
    return tree


def _defined(statement: ast.stmt) -> set[str]:
    """The names that a statement of a module binds, also inside of branches."""
    if isinstance(statement, (ast.FunctionDef, ast.ClassDef)):
        return {statement.name}
    if isinstance(statement, (ast.Import, ast.ImportFrom)):
        return {(each.asname or each.name).split(".")[0] for each in statement.names}
    stored = (each for each in ast.walk(statement) if isinstance(each, ast.Name))
    return {each.id for each in stored if isinstance(each.ctx, ast.Store)}


def _mentioned(statement: ast.stmt) -> set[str]:
    nodes = [*ast.walk(statement)]
    names = {each.id for each in nodes if isinstance(each, ast.Name)}
    return names | {each.attr for each in nodes if isinstance(each, ast.Attribute)}
