"""Devices as numbers, and the driver's word."""

from flexattn.device.device import (
    INTERPRETER,
    KNOWN,
    NEURON,
    PEAKS,
    Device,
    Peaks,
    detect,
    is_neuron,
    is_rdna,
    named,
    usable,
)
