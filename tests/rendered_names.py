"""Which names a rendered kernel uses that nothing defines: found without compiling it."""

import ast
import builtins
from types import ModuleType


def undefined(text):
    """Names and attributes of imported modules that a rendered file reads and nothing defines."""
    tree = ast.parse(text)
    imported = _imported(tree)
    known = {*imported, *vars(builtins)}
    for statement in tree.body:
        known |= _stored(statement, nested=False)
    found = set()
    for statement in tree.body:
        inside = known | (
            _stored(statement, nested=True) if isinstance(statement, ast.FunctionDef) else set()
        )
        for node in ast.walk(statement):
            if isinstance(node, ast.Name) and node.id not in inside:
                found.add(node.id)
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
                module = imported.get(node.value.id)
                if isinstance(module, ModuleType) and not hasattr(module, node.attr):
                    found.add(f"{node.value.id}.{node.attr}")
    return found


def _imported(tree):
    """What the file's imports bind."""
    found = {}
    imports = [node for node in tree.body if isinstance(node, (ast.Import, ast.ImportFrom))]
    exec(compile(ast.Module(imports, []), "imports", "exec"), found)
    return found


def _stored(statement, nested):
    """Names that a statement binds; nested: those of a function's body and arguments too."""
    if isinstance(statement, ast.FunctionDef) and not nested:
        return {statement.name}
    found = set()
    for node in ast.walk(statement):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            found.add(node.id)
        elif isinstance(node, ast.arg):
            found.add(node.arg)
    return found
