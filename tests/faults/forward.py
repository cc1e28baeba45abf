"""Faults of the forward kernels: masks, bounds, the softmax and its statistics, sinks, dropout."""

from tests.faults.fault import Fault

SHARED = "templates/base/shared.jinja"
PREFILL = "templates/triton/prefill.py.jinja"
DROPOUT = "templates/base/dropout.jinja"
MAINLOOP = "templates/triton/mainloop.jinja"
SEGMENTS = "templates/base/segments.jinja"
DECODE = "templates/triton/decode.py.jinja"
COMBINE = "templates/triton/combine.py.jinja"
NORMS = "templates/decay_skip/norms.py.jinja"
HELPERS = "templates/base/helpers.jinja"
IN_SHAPES = "tests/interpreter/test_shapes.py"
IN_BLOCKS = "tests/interpreter/test_blocks.py"
IN_RUNS = "tests/interpreter/test_runs.py"
IN_SINKS = "tests/interpreter/test_sinks.py"
IN_DROPOUT = "tests/interpreter/test_dropout.py"
IN_SCORE_TERMS = "tests/interpreter/test_score_terms.py"
IN_DECAY_SKIP = "tests/interpreter/test_decay_skip.py"
IN_MODS = "tests/interpreter/test_mods.py"
IN_DIVISORS = "tests/interpreter/test_divisors.py"
WINDOW = "templates/decay_skip/window.py.jinja"
IN_CATALOGUE = "tests/interpreter/test_catalogue.py"

FORWARD = (
    Fault(
        "a score past the last key counts",
        SHARED,
        "(start_n + tl.arange(0, BLOCK_N) < end_n)[None, :]",
        "(start_n + tl.arange(0, BLOCK_N) <= end_n)[None, :]",
        IN_SHAPES + "::test_head_dimensions[16-16-decode]",
    ),
    Fault(
        "the key behind a ragged block's last one counts",
        SHARED,
        'if start_n + BLOCK_N > end_n:\n    qk = tl.where({{ "keys_below(end_n - start_n)"',
        'if start_n + BLOCK_N > end_n + 1:\n    qk = tl.where({{ "keys_below(end_n - start_n)"',
        IN_BLOCKS + "::test_block_sizes[(17, 31)-384-prefill]",
    ),
    Fault(
        "keys below a bound include it",
        PREFILL,
        "return (keys & ~6) < bound - (keys & 6)",
        "return (keys & ~6) <= bound - (keys & 6)",
        IN_RUNS + "::test_tiles_narrower_than_the_blocks[causal-prefill]",
    ),
    Fault(
        "a row's maximum starts at 0",
        SHARED,
        'm_i = tl.full([BLOCK_M], float("-inf"), tl.float32)',
        "m_i = tl.full([BLOCK_M], 0.0, tl.float32)",
        IN_SHAPES + "::test_any_number_of_query_heads_per_key_head[1-prefill]",
    ),
    Fault(
        "a row without keys takes -inf from -inf",
        SHARED,
        'm_safe = tl.where(m_new == float("-inf"), 0.0, m_new)\np = ',
        "m_safe = m_new\np = ",
        IN_BLOCKS + "::test_block_sizes[(48, 80)-384-prefill]",
    ),
    Fault(
        "the sum of a row is not rescaled",
        SHARED,
        "l_i = l_i * alpha + tl.sum(p, 1)",
        "l_i = l_i + tl.sum(p, 1)",
        IN_SHAPES + "::test_any_number_of_query_heads_per_key_head[1-prefill]",
    ),
    Fault(
        "the values of a row are not rescaled",
        SHARED,
        '"acc_" ~ piece.name ~ " * alpha[:, None]"',
        '"acc_" ~ piece.name',
        IN_SHAPES + "::test_head_dimensions[192-128-prefill]",
    ),
    Fault(
        "the softmax scale is multiplied twice",
        SHARED,
        "qk = qk * (sm_scale * LOG2E)",
        "qk = qk * (sm_scale * sm_scale * LOG2E)",
        IN_SHAPES + "::test_bfloat16_and_scalar_scales[fp32]",
    ),
    Fault(
        "lse in base 2",
        SHARED,
        '"(%s + tl.log2(l_safe))" % ("m_all" if sinks else "m_i")',
        '"(%s + tl.log(l_safe))" % ("m_all" if sinks else "m_i")',
        IN_SHAPES + "::test_any_number_of_query_heads_per_key_head[1-prefill]",
    ),
    Fault(
        "a sink joins the sum without the row's maximum",
        SHARED,
        "m_all = tl.maximum(m_i, sink)",
        "m_all = m_i",
        IN_SINKS + "::test_every_kind_of_mod[random_blocks_empty_rows-prefill-fp16]",
    ),
    Fault(
        "a sink that is the maximum does not rescale the keys",
        SHARED,
        "l_i = l_i * keep + tl.exp2(sink - m_safe)",
        "l_i = l_i + tl.exp2(sink - m_safe)",
        IN_SINKS + "::test_every_kind_of_mod[noop-prefill-fp32]",
    ),
    Fault(
        "the values are not rescaled beside a sink",
        SHARED,
        'inverse = {{ "keep" if sinks else "1.0" }}',
        "inverse = 1.0",
        IN_SINKS + "::test_every_kind_of_mod[noop-prefill-fp32]",
    ),
    Fault(
        "another head's sink",
        PREFILL,
        'shared.store_rows("h_row", "q_row", "in_rows", "h_row")',
        'shared.store_rows("h_row", "q_row", "in_rows", "off_hkv")',
        IN_SINKS + "::test_every_kind_of_mod[noop-prefill-fp32]",
    ),
    Fault(
        "the head of a group reads the keys of the next group",
        PREFILL,
        "off_hkv = h // group",
        "off_hkv = h % (Hq // group)",
        IN_SHAPES + "::test_any_number_of_query_heads_per_key_head[3-prefill]",
    ),
    Fault(
        "dropout leaves the weights that it drops in place",
        SHARED,
        "p = tl.where(undropped, p, nothing)",
        "p = tl.where(undropped, p, p)",
        IN_DROPOUT + "::test_tiles_drop_the_same_weights[64-16-64]",
    ),
    Fault(
        "dropout takes its weights out of the sum",
        SHARED,
        "m_i = m_new\nundropped = ",
        "m_i = m_new\nl_i = l_i * 0.99  {? if dropout ?}\nundropped = ",
        IN_DROPOUT + "::test_tiles_drop_the_same_weights[64-16-64]",
    ),
    Fault(
        "kept weights are not scaled",
        SHARED,
        "inverse = inverse * keep_scale",
        "inverse = inverse * 1.0",
        IN_DROPOUT + "::test_tiles_drop_the_same_weights[64-16-64]",
    ),
    Fault(
        "all heads drop the same weights",
        PREFILL,
        "dropout_head = b * Hq + h",
        "dropout_head = b * Hq",
        IN_DROPOUT + "::test_tiles_drop_the_same_weights[64-16-64]",
    ),
    Fault(
        "dropout compares with a wrong bit",
        DROPOUT,
        "kept = still_above(c2, kept, last_dropped, 12)",
        "kept = still_above(c2, kept, last_dropped, 11)",
        IN_DROPOUT + "::test_tiles_drop_the_same_weights[64-16-64]",
    ),
    Fault(
        "a list's full blocks are read one too far",
        MAINLOOP,
        "full_list = (mask_row * FULL_WIDTH).to(tl.int32) - blocks\n",
        "full_list = (mask_row * FULL_WIDTH).to(tl.int32) - blocks + 1\n",
        IN_BLOCKS + "::test_block_sizes[(17, 31)-127-prefill]",
    ),
    Fault(
        "a ragged block ends with the keys",
        MAINLOOP,
        '    end_n = {{ "tl.minimum((kv_block + 1) * SPARSE_KV, kv_len)" if sparsity.kv_block % '
        'config.BLOCK_N else "kv_len" }}\n'
        "    {{ shared.step() | block(4) }}\n"
        "{% endmacro %}\n"
        "\n"
        "{# The tiles that mask_row",
        "    end_n = kv_len\n"
        "    {{ shared.step() | block(4) }}\n"
        "{% endmacro %}\n"
        "\n"
        "{# The tiles that mask_row",
        IN_BLOCKS + "::test_block_sizes[(17, 31)-127-prefill]",
    ),
    Fault(
        "a run's last tile is left out",
        MAINLOOP,
        "end = tl.minimum(end, tl.maximum(tl.cdiv({{ mask.high.last }}, BLOCK_N), full_end))",
        "end = tl.minimum(end, tl.maximum({{ mask.high.last }} // BLOCK_N, full_end))",
        IN_RUNS + "::test_tiles_narrower_than_the_blocks[causal-prefill]",
    ),
    Fault(
        "a run starts behind its first tile",
        MAINLOOP,
        "begin = tl.maximum(begin, tl.minimum({{ mask.low.first }} // BLOCK_N, full_begin))",
        "begin = tl.maximum(begin, tl.minimum(tl.cdiv({{ mask.low.first }}, BLOCK_N), "
        "full_begin))",
        IN_RUNS + "::test_tiles_narrower_than_the_blocks[window-decode]",
    ),
    Fault(
        "tiles of a window are visited before its first",
        MAINLOOP,
        "begin = tl.maximum(begin, tl.minimum({{ mask.low.first }} // BLOCK_N, full_begin))",
        "begin = begin",
        IN_RUNS + "::test_tiles_that_no_row_keeps_are_not_visited[decode]",
    ),
    Fault(
        "documents: the first one's keys leak",
        SEGMENTS,
        "others = tl.max((({{ mask.segments.rows }} != one) & rows).to(tl.int32), 0)",
        "others = 0",
        IN_RUNS + "::test_tiles_narrower_than_the_blocks[documents_sorted-prefill]",
    ),
    Fault(
        "a split of the keys begins one late",
        DECODE,
        "    per_split = tl.cdiv(num_keys, num_splits)\n    begin = split * per_split",
        "    per_split = num_keys // num_splits\n    begin = split * per_split",
        IN_BLOCKS + "::test_splits_of_the_keys[noop-7]",
    ),
    Fault(
        "a split without keys changes the maximum",
        COMBINE,
        'mask=there, other=float("-inf"))',
        "mask=there, other=0.0)",
        IN_SCORE_TERMS + "::test_a_row_and_a_split_of_the_keys[fp32-decode]",
    ),
    Fault(
        "splits are merged with equal weights",
        COMBINE,
        "weight = tl.exp2(m - m_safe)",
        "weight = tl.exp2(m - m)",
        IN_BLOCKS + "::test_splits_of_the_keys[noop-7]",
    ),
    Fault(
        "partial sums lie where maxima do",
        COMBINE,
        "WORKSPACE + num_slots * (HEAD_DIM_V + 1) + slots",
        "WORKSPACE + num_slots * HEAD_DIM_V + slots",
        IN_BLOCKS + "::test_splits_of_the_keys[noop-7]",
    ),
    Fault(
        "far keys: the window ends one tile late",
        MAINLOOP,
        "begin = tl.maximum(begin, (kept - decay_window) // BLOCK_N)",
        "begin = tl.maximum(begin, (kept - decay_window) // BLOCK_N + 1)",
        IN_DECAY_SKIP + "::test_the_same_bits_as_without_the_rule[causal-(97, 69)]",
    ),
    Fault(
        "far keys: norms lose NaN",
        NORMS,
        'norms = tl.where(norms < float("inf"), norms, float("inf"))',
        'norms = tl.where(norms < float("inf"), norms, 0.0)',
        IN_DECAY_SKIP + "::test_what_is_no_number_in_q_or_k_is_where_it_was[nan-k]",
    ),
    Fault(
        "a floor division truncates",
        HELPERS,
        "return quotient - ((rest != 0) & ((rest < 0) != (b < 0))).to(quotient.dtype)",
        "return quotient",
        IN_MODS + "::test_division_floors_as_torch_does[7]",
    ),
    Fault(
        "a remainder has the dividend's sign",
        HELPERS,
        "    rest = a % b\n"
        "    return rest + {{ tl }}.where((rest != 0) & ((rest < 0) != (b < 0)), b, 0)",
        "    rest = a % b\n    return rest",
        IN_MODS + "::test_division_floors_as_torch_does[7]",
    ),
    Fault(
        "an invariant division loses its sign",
        HELPERS,
        "return sign ^ fast_div(sign ^ a, multiplier, shift)",
        "return fast_div(a, multiplier, shift)",
        IN_DIVISORS + "::test_scores_that_divide_by_a_number_of_the_call[prefill]",
    ),
    Fault(
        "heads that share a tile read the keys of another head",
        DECODE,
        "off_hkv = head * PACKED // group",
        "off_hkv = head // group",
        IN_SHAPES + "::test_strides[heads_inside-decode]",
    ),
    Fault(
        "the last tile of the last listed block is left out",
        MAINLOOP,
        "num_kv = blocks * TILES_PER_KV\n",
        "num_kv = blocks * TILES_PER_KV - (TILES_PER_KV > 1)\n",
        IN_CATALOGUE + "::test_several_tiles_and_full_blocks[random_blocks-prefill-fp16]",
    ),
    Fault(
        "documents: keys of the last block are taken for its first ones",
        SEGMENTS,
        "tail_first = 2 * (tail_sum % 1048576) == tail_count * (tail_count - 1)",
        "tail_first = tail_sum >= 0",
        IN_RUNS + "::test_blocks_listed_against_what_the_mask_says[documents_resumed-prefill]",
    ),
    Fault(
        "documents: keys of the first block are taken for its last ones",
        SEGMENTS,
        "head_last = 2 * (head_sum % 1048576) == head_count * (2 * head_held - head_count - 1)",
        "head_last = head_sum >= 0",
        IN_RUNS + "::test_tiles_narrower_than_the_blocks[documents_sorted-prefill]",
    ),
    Fault(
        "far keys: one key head's norms serve all",
        WINDOW,
        "k_head = (b * stride_kb + h // group).to(tl.int64)",
        "k_head = (b * stride_kb + h * 0).to(tl.int64)",
        IN_DECAY_SKIP + "::test_the_keys_of_each_head_are_as_long_as_they_are",
    ),
    Fault(
        "what a row adds is in no statistic",
        SHARED,
        'm_i = tl.where(empty, float("-inf"), m_i + shift)',
        'm_i = tl.where(empty, float("-inf"), m_i)',
        IN_SCORE_TERMS + "::test_what_a_row_adds_returns_in_its_statistics[0.25-fp32-prefill]",
    ),
)
