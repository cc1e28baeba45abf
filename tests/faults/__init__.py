"""Faults that somebody could make in this library, each with the test that must fail with it."""

from tests.faults.blackwell import BLACKWELL
from tests.faults.forward import FORWARD
from tests.faults.gradients import GRADIENTS
from tests.faults.hopper import HOPPER
from tests.faults.host import HOST
from tests.faults.mods import MODS
from tests.faults.serving import SERVING

FAULTS = (*FORWARD, *GRADIENTS, *HOPPER, *BLACKWELL, *SERVING, *MODS, *HOST)
