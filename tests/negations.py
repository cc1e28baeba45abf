"""The smallest kernels that lose a negation, and who loses it.

ptxas of CUDA 12.8 to 13.3 does for sm_90 and sm_100: of a maximum of a maximum it makes one
instruction, VIMNMX3, and forgets that the second of its three was negated. Triton 3.6 and 3.7
assemble for sm_90 with 12.8, 3.8 with 12.9, 3.9 with 13.4. `absolute` goes wrong from Triton 3.8
on, which writes |a| as max(a, -a); `nested` under all that have such a ptxas.
"""

import re
import subprocess

import triton
import triton.language as tl

# The first CUDA whose ptxas keeps the negation.
MENDED = (13, 4)


@triton.jit
def absolute(A, B, C, OUT):
    at = tl.arange(0, 128)
    a, b = tl.load(A + at), tl.load(B + at)
    tl.store(OUT + at, tl.maximum(tl.abs(a), b))


@triton.jit
def nested(A, B, C, OUT):
    at = tl.arange(0, 128)
    a, b, c = tl.load(A + at), tl.load(B + at), tl.load(C + at)
    tl.store(OUT + at, tl.maximum(tl.maximum(a, -b), c))


KERNELS = (absolute, nested)


def release(ptxas):
    """(13, 4) of the file of a ptxas."""
    said = subprocess.run([ptxas, "--version"], capture_output=True, text=True, check=True).stdout
    return tuple(map(int, re.search(r"release (\d+)\.(\d+)", said).groups()))


def loses(ptx, ptxas):
    """Whether that ptxas loses the negation of one of these kernels, whose PTX this is."""
    return release(ptxas) < MENDED and "neg.s32" in ptx


def told(ptx, ptxas):
    """What to do where a test finds another answer than `loses`."""
    return (
        f"ptxas {release(ptxas)} of Triton {triton.__version__}, of PTX with "
        f"{'neg' if 'neg.s32' in ptx else 'no neg'}: not as tests/negations.py has it. Where the "
        "negation is kept this release is mended: say so there, and in negated_extremes.py"
    )
