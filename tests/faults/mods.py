"""Faults of mods: printers, algebra and bounds of masks, and what a trace rests on."""

from tests.faults.fault import Fault

MASK_PARTS = "flexattn/kernels/printers/mask_printer.py"
MASK_FORM = "flexattn/mods/analysis/mask_form.py"
TRITON_PRINTER = "flexattn/kernels/printers/triton_printer.py"
SIMPLIFY = "flexattn/mods/simplify.py"
IN_RUNS = "tests/interpreter/test_runs.py"
IN_MASK_FORM = "tests/unit/mods/analysis/test_mask_form.py"
IN_PRINTER = "tests/unit/kernels/printers/test_printer.py"
IN_MODS_EXPR = "tests/unit/mods/test_mods_expr.py"
BASE_2 = "flexattn/kernels/printers/spelling.py"
IN_FAR_SCORES = "tests/interpreter/test_far_scores.py"

MODS = (
    Fault(
        "a mask's tiles between full ones are not masked",
        MASK_PARTS,
        '"masked & (i >= high_begin)"',
        '"masked & (i > high_begin)"',
        IN_RUNS + "::test_tiles_narrower_than_the_blocks[causal-prefill]",
    ),
    Fault(
        "a bound <= is <",
        MASK_FORM,
        'if found.op in ("le", "gt"):',
        'if found.op in ("gt",):',
        IN_MASK_FORM + "::test_the_catalogue[causal]",
    ),
    Fault(
        "a bound that falls counts as one that rises",
        MASK_FORM,
        'return _rises(term) and (factor > 0 or not reads(term, "q_idx"))',
        "return _rises(term)",
        IN_MASK_FORM + "::test_what_gives_no_bound[<lambda>1]",
    ),
    Fault(
        "an index below 0 does not wrap",
        TRITON_PRINTER,
        "{self.tl}.where({index.text} < 0, {index.text} + {size}, {index.text})",
        "{self.tl}.where({index.text} < 0, {index.text}, {index.text})",
        IN_PRINTER + "::test_an_index_that_may_be_negative_wraps_and_is_checked",
    ),
    Fault(
        "64-bit arithmetic in 32",
        TRITON_PRINTER,
        'return "int64" if wide or not fits else "int32"',
        'return "int64" if wide else "int32"',
        IN_PRINTER + "::test_integers_are_as_wide_as_their_range[product]",
    ),
    Fault(
        "a dropped negation in front of a condition",
        SIMPLIFY,
        '_NEGATED_INT = {"lt": "le", "le": "lt"}',
        '_NEGATED_INT = {"lt": "lt", "le": "le"}',
        IN_MODS_EXPR + "::test_spellings_that_mean_the_same",
    ),
    Fault(
        "x + 0.0 is x though x may be -0.0",
        SIMPLIFY,
        "return _is(node.args[1], -0.0)",
        "return _is(node.args[1], 0.0)",
        IN_MODS_EXPR + "::test_what_differs_keeps_its_own_fingerprint",
    ),
    Fault(
        "a read at a tensor's length, one behind its end",
        TRITON_PRINTER,
        'inside = f"({index.text} < {size})"',
        'inside = f"({index.text} <= {size})"',
        IN_PRINTER + "::test_an_index_that_cannot_be_negative_is_checked_above_alone",
    ),
    Fault(
        "far scores go to base 2 as near ones",
        BASE_2,
        'if not far:\n        return f"{text} * LOG2E"',
        'if True:\n        return f"{text} * LOG2E"',
        IN_FAR_SCORES + "::test_scores_near_the_end_of_float32[where-prefill]",
    ),
)
