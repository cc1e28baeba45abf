"""The former place of `rank`, for one release."""

from __future__ import annotations

import warnings

from flexattn.neuron.model import rank as rank

warnings.warn(
    "flexattn.neuron.tune is deprecated: import rank from flexattn.neuron.model",
    DeprecationWarning,
    stacklevel=2,
)
