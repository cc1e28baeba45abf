"""`python -m tests.torch_files FILE…`: torch's own tests of flex_attention, run with ours.

FILE is test_flex_attention.py or test_flex_decoding.py of a torch checkout, or an option of
pytest. What they compile with torch.compile runs flexattn.flex_attention instead; what they call
without stays torch's, and is what ours is compared with. Forward passes alone: a backward pass
does nothing.
"""

from __future__ import annotations

import contextvars
import functools
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.nn.attention import flex_attention as theirs

import flexattn

_compiled = contextvars.ContextVar("compiled", default=False)


@functools.wraps(theirs.flex_attention)
def flex_attention(*args: Any, **kwargs: Any) -> Any:
    """Ours below a compiled function, torch's elsewhere."""
    return (flexattn if _compiled.get() else theirs).flex_attention(*args, **kwargs)


def compile_nothing(function: Any = None, **_: Any) -> Any:
    """In place of torch.compile: the function itself, with our flex_attention inside."""
    if function is None:
        return compile_nothing

    @functools.wraps(getattr(function, "func", function))
    def call(*args: Any, **kwargs: Any) -> Any:
        token = _compiled.set(True)
        try:
            return function(*args, **kwargs)
        finally:
            _compiled.reset(token)

    return call


def forward_alone(module: Any) -> None:
    """Compare outputs where a test of this module compares outputs and gradients."""
    for case in vars(module).values():
        if isinstance(case, type) and hasattr(case, "_check_out_and_grad"):
            case._check_out_and_grad = _outputs(case._check_out)


def _outputs(check: Callable[..., None]) -> Callable[..., None]:
    def check_out(
        self: Any, golden: Any, reference: Any, compiled: Any, *_: Any, **__: Any
    ) -> None:
        check(self, golden, reference, compiled)

    return check_out


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Put ours into the modules that were collected."""
    for module in {item.module for item in items if isinstance(item, pytest.Function)}:
        module.flex_attention = flex_attention
        forward_alone(module)


def _zeros(_: Any, inputs: Any, *__: Any, **___: Any) -> Any:
    return tuple(map(torch.zeros_like, inputs))


@pytest.fixture(autouse=True)
def _without_gradients(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(torch, "compile", compile_nothing)
    monkeypatch.setattr(torch.Tensor, "backward", lambda *_, **__: None)
    monkeypatch.setattr(torch.autograd, "grad", _zeros)
    with torch.no_grad():
        yield


if __name__ == "__main__":
    sys.exit(pytest.main(["-q", "-p", "tests.torch_files", *sys.argv[1:]]))
