"""AWS Neuron alone: kernels for Trainium, an interpreter of NKI, a lint and a cost model.

    attend = flexattn.neuron.kernel(score_mod, mask_mod, q.shape, k.shape)

No kernel of it has run on a device.
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from flexattn.neuron.run import kernel as kernel


def __getattr__(name: str) -> object:
    """`kernel`, imported at its first use: a record of a config needs nothing of it."""
    if name == "kernel":
        from flexattn.neuron.run import kernel

        return kernel
    raise AttributeError(f"module 'flexattn.neuron' has no attribute {name!r}")
