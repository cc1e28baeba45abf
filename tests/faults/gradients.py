"""Faults of gradients: the kernels of a backward, its lists and plans, derivatives of mods."""

from tests.faults.fault import Fault

BACKWARD = "templates/triton_backward/backward.py.jinja"
DELTA = "templates/base/delta.jinja"
PARTS = "templates/triton_backward/parts.jinja"
HELPERS = "templates/base/helpers.jinja"
GRADIENT_PRINTER = "flexattn/kernels/printers/gradient_printer.py"
OPS = "flexattn/mods/ops.py"
DERIVATIVE = "flexattn/mods/derivative.py"
KEY_LISTS = "flexattn/runtime/key_lists.py"
GRADIENTS_PY = "flexattn/frontend/gradients.py"
AUTOGRAD = "flexattn/frontend/autograd.py"
IN_BACKWARD = "tests/interpreter/test_backward.py"
IN_DROPOUT = "tests/interpreter/test_dropout.py"
IN_DERIVATIVE = "tests/unit/mods/test_derivative.py"
IN_STOPS = "tests/unit/mods/test_stops.py"
IN_EMULATED = "tests/unit/kernels/hopper_backward/test_emulated.py"
IN_KEY_LISTS = "tests/unit/runtime/test_key_lists.py"
IN_BACKWARD_LAUNCH = "tests/unit/runtime/test_backward_launch.py"
IN_REPEATED_GRADIENTS = "tests/interpreter/test_repeated_gradients.py"

GRADIENTS = (
    Fault(
        "dK is not scaled",
        BACKWARD,
        "(dk_{{ piece.name }} * sm_scale).to({{ element }})",
        "(dk_{{ piece.name }}).to({{ element }})",
        IN_BACKWARD + "::test_lengths[1-1]",
    ),
    Fault(
        "delta is added",
        BACKWARD,
        "ds = p * (dp - delta[:, None])",
        "ds = p * (dp + delta[:, None])",
        IN_BACKWARD + "::test_lengths[1-1]",
    ),
    Fault(
        "delta leaves out the gradient of lse",
        DELTA,
        "delta -= tl.load(DLSE + place, mask=inside, other=0.0)",
        "delta -= 0.0 * tl.load(DLSE + place, mask=inside, other=0.0)",
        IN_BACKWARD + "::test_lengths[1-1]",
    ),
    Fault(
        "a row without keys has a delta",
        DELTA,
        'delta = tl.where(lse == float("-inf"), 0.0, delta)',
        "delta = delta",
        IN_BACKWARD + "::test_rows_without_a_key_have_no_gradient",
    ),
    Fault(
        "gradients of keys leave out the last head of their group",
        BACKWARD,
        "for shared_head in tl.range(0, shared_heads):",
        "for shared_head in tl.range(0, shared_heads - (shared_heads > 1)):",
        IN_BACKWARD + "::test_dtypes_and_heads[gqa-fp16]",
    ),
    Fault(
        "gradients of keys of one batch are those of its first queries",
        BACKWARD,
        "b = kv_b + shared_head // group",
        "b = kv_b",
        IN_BACKWARD + "::test_keys_and_values_of_one_batch",
    ),
    Fault(
        "a derivative that is no number reaches a weight of 0",
        PARTS,
        "ds = tl.where(p == 0.0, 0.0, ds * {{ grad.factor }})",
        "ds = ds * {{ grad.factor }}",
        IN_BACKWARD + "::test_removed_scores_have_no_gradient_whatever_the_derivative_is_there",
    ),
    Fault(
        "a row's only place gets its sum twice",
        HELPERS,
        "add_steps(grad, last, high, first < last)",
        "add_steps(grad, last, high, first <= last)",
        IN_BACKWARD + "::test_what_a_score_mod_captures[by triangles]",
    ),
    Fault(
        "scores of a row's first place are added once more",
        HELPERS,
        "return inside & (place > first) & (place < last)",
        "return inside & (place >= first) & (place < last)",
        IN_BACKWARD + "::test_what_a_score_mod_captures[by tiles of both]",
    ),
    Fault(
        "what goes to one place is added score by score",
        GRADIENT_PRINTER,
        "if self.steps and self.row and self.key:",
        "if False:",
        IN_BACKWARD + "::test_what_goes_to_one_place_is_summed_in_its_tile_first[by triangles]",
    ),
    Fault(
        "a score_mod that does not read the score hands it a gradient",
        PARTS,
        "ds = tl.zeros_like(ds)",
        "ds = ds",
        IN_BACKWARD + "::test_a_score_that_is_not_read",
    ),
    Fault(
        "dropout: dP is not scaled",
        BACKWARD,
        '            {{ "dp = tl.where(undropped, dp * keep_scale, 0.0)" if dropout }}\n',
        '            {{ "dp = tl.where(undropped, dp, 0.0)" if dropout }}\n',
        IN_DROPOUT + "::test_gradients[plain]",
    ),
    Fault(
        "dropout: dV is not scaled",
        BACKWARD,
        '"(dv_%s * keep_scale)" % piece.name',
        '"(dv_%s)" % piece.name',
        IN_DROPOUT + "::test_gradients[plain]",
    ),
    Fault(
        "dropout: the backward draws others for keys",
        BACKWARD,
        'drop.kept("start_m", "lanes_m[None, :]", rows_aligned, "start_n", "lanes_n[:, '
        'None]", keys_aligned)',
        'drop.kept("start_n", "lanes_m[None, :]", rows_aligned, "start_n", "lanes_n[:, '
        'None]", keys_aligned)',
        IN_DROPOUT + "::test_gradients[plain]",
    ),
    Fault(
        "lists of a backward: full blocks are masked",
        PARTS,
        "masked = i < num_masked",
        "masked = i >= num_masked",
        IN_BACKWARD + "::test_blocks_of_masks[causal-24]",
    ),
    Fault(
        "a run's full tiles are all but the last",
        PARTS,
        "masked = (i < full_begin) | (i >= full_end)",
        "masked = (i < full_begin) | (i > full_end)",
        IN_BACKWARD + "::test_blocks_of_masks[causal-16]",
    ),
    Fault(
        "a captured table's gradient is scattered one key off",
        GRADIENT_PRINTER,
        '"diagonal_kv = start_n + lanes_n - turn * BLOCK_N2"',
        '"diagonal_kv = start_n + lanes_n - turn * BLOCK_N2 + 1"',
        IN_BACKWARD + "::test_what_a_score_mod_captures[by distance]",
    ),
    Fault(
        "the derivative of tanh",
        OPS,
        "g * (1.0 - x.tanh() * x.tanh())",
        "g * (1.0 - x.tanh())",
        IN_DERIVATIVE + "::test_derivatives_are_torchs[softcap]",
    ),
    Fault(
        "a quotient's derivative by its divisor",
        OPS,
        "-g * ((x / y) / y)",
        "-g * (x / y)",
        IN_DERIVATIVE + "::test_derivatives_are_torchs[product of loads]",
    ),
    Fault(
        "a detached value has a gradient",
        DERIVATIVE,
        "if node.op == DETACH:\n            continue",
        "if node.op == DETACH:\n            pass",
        IN_STOPS + "::test_gradients_are_those_of_autograd[detach]",
    ),
    Fault(
        "order of blocks that add to dQ",
        KEY_LISTS,
        "listed.cumsum(-2, dtype=torch.int32) - listed.int()",
        "listed.cumsum(-2, dtype=torch.int32)",
        IN_EMULATED + "::test_gradients[deterministic-documents-(64, 128, 2)-(2, 2)]",
    ),
    Fault(
        "lists by key of padding rows",
        KEY_LISTS,
        "listed = dense_blocks(num[..., :rows], idx[..., :rows, :], kv_blocks)",
        "listed = dense_blocks(num, idx, kv_blocks)",
        IN_KEY_LISTS + "::test_rows_past_the_last_query_are_in_no_list[causal]",
    ),
    Fault(
        "a gradient of keys that batches share lies at a stride of 0",
        GRADIENTS_PY,
        "if x.shape[0] > 1 and not x.stride(0) else x",
        "if x.shape[0] > 9 and not x.stride(0) else x",
        IN_BACKWARD_LAUNCH + "::test_descriptors_of_keys_that_batches_share_stay_in_their_memory",
    ),
    Fault(
        "a gradient's layout is no part of a plan",
        AUTOGRAD,
        "same = facts == self.facts and decided",
        "same = facts[:3] == self.facts[:3] and decided",
        IN_REPEATED_GRADIENTS + "::test_gradients_of_the_output_in_other_layouts",
    ),
    Fault(
        "weights of a row without keys are -inf less -inf",
        PARTS,
        'lse = tl.where(lse == float("-inf"), 0.0, lse){{',
        "lse = lse{{",
        IN_BACKWARD + "::test_rows_without_a_key_have_no_gradient",
    ),
    Fault(
        "a backward keeps its plan when a setting changed since its forward",
        AUTOGRAD,
        "same = facts == self.facts and decided == self.decided and len(parts) == len(self.parts)",
        "same = facts == self.facts and len(parts) == len(self.parts)",
        IN_REPEATED_GRADIENTS + "::test_what_decides_a_backward_anew",
    ),
    Fault(
        "both sides of equals have the whole derivative",
        OPS,
        "return (g * 0.5).where(x == y, g).where(first(x, y), 0.0)",
        "return g.where(first(x, y), 0.0)",
        IN_DERIVATIVE + "::test_derivatives_are_torchs[equal extremes]",
    ),
)
