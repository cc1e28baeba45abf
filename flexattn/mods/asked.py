"""What code may ask a traced tensor that has no answer: words for each way to ask."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from flexattn.mods.refusal import Refusal

_RULE = "a mod is run once, for all positions together: there is no single value to look at"
_CHOICE = "use torch.where for a choice, and & | ~ for conditions"


class Asked(Refusal):
    """Something asks a traced tensor for its value, and nothing says how."""

    def __init__(self) -> None:
        super().__init__("branches on a traced value, or reads it in Python", _RULE, _CHOICE)


_FLOAT = (
    "reads a traced value as a Python float, as math.exp and its like do",
    "use torch's function: torch.exp(score) for math.exp(score)",
)
_INT = (
    "reads a traced value as a Python int",
    "leave it a tensor: it can be an index, // and % take it, and x.long() rounds towards 0",
)
_INDEX = (
    "indexes a Python list, tuple or range by a traced value",
    "capture torch.tensor(the_list), made once outside of the mod, and index that",
)
_ITEM = "reads a traced value in Python", "compute with the tensor itself"
_ARRAY = (
    "gives a tensor to numpy",
    "use torch's function of that name, and capture arrays as torch.from_numpy(array)",
)
# The method that was called: what that means in the user's code, and what to write instead.
WORDS: dict[Any, tuple[str, str]] = {
    Tensor.__float__: _FLOAT,
    Tensor.__int__: _INT,
    Tensor.__index__: _INDEX,
    Tensor.item: _ITEM,
    Tensor.tolist: _ITEM,
    Tensor.__array__: _ARRAY,
    Tensor.numpy: _ARRAY,
    Tensor.__dlpack__: _ARRAY,
}
# What else takes the values of a captured tensor, and says nothing of a traced one.
READS = frozenset((
    Tensor.__repr__, Tensor.__format__, Tensor.__reduce_ex__, Tensor.__deepcopy__,
    Tensor.storage, Tensor.untyped_storage,
))  # fmt: skip
_NUMPY = "a mod is read as torch's operations, and numpy computes at once with values"


def asked(func: Any, *args: Any, **kwargs: Any) -> Any:
    """What a method of a tensor returns; raises Refusal, with words for it, where it cannot."""
    got, do = WORDS.get(func, _ITEM)
    # Of a captured tensor it would take the values of this moment for good.
    if WORDS.get(func) is _ARRAY:
        raise Refusal(got, _NUMPY, do)
    if not isinstance(args[0], FakeTensor):
        raise read_in_python(func.__name__)
    try:
        return func(*args, **kwargs)
    except Asked:
        raise Refusal(got, _RULE, do) from None


def read_in_python(how: str) -> Refusal:
    """The refusal of what asks a captured tensor for its values."""
    return Refusal(
        f"reads the value of a captured tensor in Python ({how})",
        "captured tensors are read when the kernel runs, not when a mod is traced",
        "compute with the tensor itself, or capture a Python number",
    )


def looked_up(error: Exception) -> Refusal | None:
    """The refusal of a dict that was asked for a traced key, if that is what an error says."""
    keys = error.args if isinstance(error, KeyError) else ()
    parts = [part for key in keys for part in (key if isinstance(key, tuple) else (key,))]
    if not any(isinstance(part, Tensor) for part in parts):
        return None
    return Refusal(
        "looks a traced value up in a dict",
        _RULE,
        "capture a tensor of the dict's values and index it: torch.tensor([...])[h]",
    )
