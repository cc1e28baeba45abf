import os

from tests.quick_interpreter import hurry

if os.environ.get("TRITON_INTERPRET") == "1":
    hurry()
