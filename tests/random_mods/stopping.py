"""Random mods that keep something from autograd: detach and no_grad in random places of a text."""

from __future__ import annotations

import ast
import random
from dataclasses import replace

from tests.random_mods.mods import Part, differentiable

# Of the mods, of the operations of one, and of its statements.
MODS, OPERATIONS, STATEMENTS = 0.5, 0.15, 0.25


def stopping(part: Part, draw: random.Random) -> Part:
    """A score_mod, for half of the draws with stops; as it was where it would learn nothing."""
    if draw.random() >= MODS:
        return part
    lines = [_stopped(line, draw) for line in part.lines]
    lines = [f"with torch.no_grad(): {x}" if draw.random() < STATEMENTS else x for x in lines]
    found = replace(part, lines=tuple(lines), result=_stopped(part.result, draw))
    return found if differentiable(found) else part


def _stopped(text: str, draw: random.Random) -> str:
    found = ast.fix_missing_locations(_Detaching(draw).visit(ast.parse(text)))
    return "; ".join(ast.unparse(found).splitlines())


class _Detaching(ast.NodeTransformer):
    """Detaches some operations that give a tensor, integers among them."""

    def __init__(self, draw: random.Random) -> None:
        self.draw = draw

    def generic_visit(self, node: ast.AST) -> ast.AST:
        super().generic_visit(node)
        found = isinstance(node, ast.BinOp)
        found |= isinstance(node, ast.Subscript) and isinstance(node.ctx, ast.Load)
        # Not of float("inf"), which is no tensor.
        found |= isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)
        if not found or self.draw.random() >= OPERATIONS:
            return node
        return ast.Call(ast.Attribute(node, "detach", ast.Load()), [], [])
