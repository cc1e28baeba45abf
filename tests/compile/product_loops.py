"""What the innermost loops of a kernel's products spill, told from what stands around them."""

import re

from flexattn.runtime.resources import _BRANCH, _INSTRUCTION, _LABEL, _SPILL, _disassembled


def product_loops(cubin, instruction="HGMMA"):
    """(instructions, loads and stores of spilled registers) of each innermost loop with wgmma.

    instruction: the name of another one, as a regular expression.
    """
    return [
        (
            sum(bool(_INSTRUCTION.match(each)) for each in lines),
            sum(bool(_SPILL.search(each)) for each in lines),
        )
        for lines in loops_with_products(cubin, instruction)
    ]


def loops_with_products(cubin, instruction="HGMMA"):
    """The lines of each innermost loop with wgmma, or with another instruction.

    A loop ends with a branch under a predicate. What waits for a barrier in vain stands behind the
    kernel and jumps back without one: `resources` takes all between for a loop, prologue and all.
    """
    lines = _disassembled(cubin).splitlines()
    labels, loops = {}, []
    for number, line in enumerate(lines):
        if label := _LABEL.match(line):
            labels[label.group(1)] = number
        elif (branch := _BRANCH.search(line)) and branch.group(1) in labels and "@" in line:
            inside = lines[labels[branch.group(1)] : number]
            if any(re.search(rf"\b{instruction}\b", each) for each in inside):
                loops.append((labels[branch.group(1)], number))
    inner = [
        (a, z) for a, z in loops
        if not any((a, z) != other and a <= other[0] and other[1] <= z for other in loops)
    ]  # fmt: skip
    return [lines[a:z] for a, z in inner]
