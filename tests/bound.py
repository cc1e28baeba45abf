"""What a traced mod computes at one position, by its expression."""

import torch

from flexattn.kernels.printers.torch_printer import evaluate
from flexattn.mods import bind


def value(fn, kind="score", **env):
    bound = bind(fn, kind)
    names = ("score", "b", "h", "q_idx", "kv_idx")
    env = {name: torch.tensor(env.get(name, 0)) for name in names} | {
        "score": torch.tensor(float(env.get("score", 1.0)))
    }
    return evaluate(bound.mod, env, bound.tensors, bound.scalars).item()
