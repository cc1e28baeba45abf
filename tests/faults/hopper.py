"""Faults of Hopper's kernels, which are run in plain Python: barriers, stages, work tiles."""

from tests.faults.fault import Fault

PREFILL = "templates/hopper/prefill.py.jinja"
PRODUCER = "templates/hopper/producer.jinja"
SCORES = "templates/hopper/scores.jinja"
ROWS = "templates/hopper/rows.jinja"
KEYS = "templates/hopper/keys.jinja"
MASKED = "templates/base/masked_scores.jinja"
EPILOGUE = "templates/hopper/epilogue.jinja"
CONSUMER = "templates/hopper/consumer.jinja"
SCORES_PY = "templates/hopper_backward/scores.jinja"
WALKED = "templates/hopper_backward/walked.jinja"
E4M3_WEIGHTS = "templates/hopper/e4m3_weights.jinja"
WIDEN = "templates/hopper/widen.jinja"
IN_EIGHT_BITS = "tests/unit/kernels/hopper/test_eight_bit_pages.py"
IN_E4M3 = "tests/unit/kernels/hopper/test_e4m3_weights.py"
IN_WIDE = "tests/unit/kernels/hopper/test_wide.py"
IN_EMULATED = "tests/unit/kernels/hopper_backward/test_emulated.py"
IN_PACKED_GRADIENTS = "tests/interpreter/test_packed_gradients.py::test_gradients"
IN_BANDS = "tests/unit/kernels/hopper_backward/test_bands.py"

HOPPER = (
    Fault(
        "eight bits: a stage is widened over before consumers have multiplied it",
        WIDEN,
        "            producer_acquire(empty + stage)\n        for half",
        "            pass\n        for half",
        IN_EIGHT_BITS + "::test_pages_of_eight_bits[256]",
    ),
    Fault(
        "eight bits: the second half is not waited for",
        WIDEN,
        "mbarrier.wait(narrow_full.index(first + 1), phase)",
        "pass",
        IN_EIGHT_BITS + "::test_pages_of_eight_bits[256]",
    ),
    Fault(
        "eight bits: a half is loaded before the one there has been read",
        KEYS,
        "            narrow_acquire(NARROW_EMPTY + {{ first }} + half)",
        "            narrow_acquire(NARROW_EMPTY + {{ first }})",
        IN_EIGHT_BITS + "::test_pages_of_eight_bits[256]",
    ),
    Fault(
        "eight bits: no word ends V's warp",
        PRODUCER,
        "store_scalar(narrow_more.index({{ first // 2 }}), 0)",
        "store_scalar(narrow_more.index(0), 0)",
        IN_EIGHT_BITS + "::test_pages_of_eight_bits[256]",
    ),
    Fault(
        "eight bits: Q keeps its sign where K's scale is negative",
        WIDEN,
        "gl.where(k_scale < 0.0, -values, values)",
        "gl.where(k_scale < 0.0, values, values)",
        IN_EIGHT_BITS + "::test_eight_bits[a scale of 0, and one below]",
    ),
    Fault(
        "eight bits: parts of keys lack V's scale",
        EPILOGUE,
        'broadcast_rows({{ "v_descale" if scaled else "1.0" }} / l_safe',
        "broadcast_rows(1.0 / l_safe",
        IN_EIGHT_BITS + "::test_eight_bits[keys in parts]",
    ),
    Fault(
        "weights of e4m3: rows shift as the other row's maximum rose",
        E4M3_WEIGHTS,
        '"add.f32 t{{ e }}, t{{ e }}, n{{ e // 2 % 2 }}; "',
        '"add.f32 t{{ e }}, t{{ e }}, n{{ 1 - e // 2 % 2 }}; "',
        IN_E4M3 + "::test_scores_that_rise_from_tile_to_tile",
    ),
    Fault(
        "weights of e4m3: sums before are not rescaled",
        E4M3_WEIGHTS,
        "ex2.approx.ftz.f32 a{{ r }}, u; mov.f32 m{{ r }}",
        "mov.f32 m{{ r }}",
        IN_E4M3 + "::test_scores_that_rise_from_tile_to_tile",
    ),
    Fault(
        "weights of e4m3: a maximum may rise beyond the largest number",
        E4M3_WEIGHTS,
        "{{ float_bits(max_offset + max_rise) }}, p; ",
        "{{ float_bits(2 * max_offset) }}, p; ",
        IN_E4M3 + "::test_scores_that_rise_from_tile_to_tile",
    ),
    Fault(
        "weights of e4m3: halves of a word are the other's keys",
        E4M3_WEIGHTS,
        "{h{{ r }}, h{{ r + 2 }}}",
        "{h{{ r + 2 }}, h{{ r }}}",
        IN_E4M3 + "::test_numbers[128-causal-default]",
    ),
    Fault(
        "weights of e4m3: V's keys are in another order than weights",
        "templates/hopper/transpose_v.py.jinja",
        "((place & 2) << 2)",
        "((place & 2) << 1)",
        "tests/interpreter/test_transpose_v.py::test_the_order_is_what_its_template_says",
    ),
    Fault(
        "Hopper: the phase of a ring turns early",
        PREFILL,
        "return gl.where(last, 0, stage + 1), gl.where(last, phase ^ 1, phase)",
        "return gl.where(last, 0, stage + 1), phase",
        IN_WIDE + "::test_numbers[two stages-full-dims9]",
    ),
    Fault(
        "Hopper: V arrives in the stage of the next K",
        PRODUCER,
        "    filled += 1\n    v_stage = stage\n    stage, phase = advance(stage, phase)\n",
        "    filled += 1\n    stage, phase = advance(stage, phase)\n    v_stage = stage\n",
        IN_WIDE + "::test_numbers[two stages-full-dims9]",
    ),
    Fault(
        "Hopper: keys past the end count",
        MASKED,
        "inside = gl.expand_dims(start_n + gl.arange(0, BLOCK_N, BY_KEY) < kv_len, 0)",
        "inside = gl.expand_dims(start_n + gl.arange(0, BLOCK_N, BY_KEY) <= kv_len, 0)",
        IN_WIDE + "::test_numbers[default-full-dims0]",
    ),
    Fault(
        "Hopper: rows of the second consumer",
        ROWS,
        '" + consumer * %s"',
        '" + consumer * 0 * %s"',
        IN_WIDE + "::test_numbers[default-full-dims0]",
    ),
    Fault(
        "Hopper: the head of a packed group",
        ROWS,
        "return m_block, h * HEADS, b",
        "return m_block, h, b",
        IN_WIDE + "::test_numbers[packed-full-dims15]",
    ),
    Fault(
        "Hopper: keys of another head",
        PRODUCER,
        "off_hkv = h // group",
        "off_hkv = h % (group + 1)",
        IN_WIDE + "::test_numbers[default-full-dims0]",
    ),
    Fault(
        "Hopper: tiles that need the mask are a block less",
        SCORES,
        "if {{ i }} < num_masked:",
        "if {{ i }} < num_masked - TILES_PER_KV:",
        IN_WIDE + "::test_numbers[default-lists-dims4]",
    ),
    Fault(
        "Hopper: lse in base 2",
        EPILOGUE,
        '"(%s + gl.log2(l_safe))")',
        '"(%s + gl.log2(l_safe) * 1.01)")',
        IN_WIDE + "::test_numbers[default-full-dims0]",
    ),
    Fault(
        "Hopper: K is released before it is read",
        CONSUMER,
        "    qk = warpgroup_mma_wait(1, deps=[qk])\n"
        "    consumer_release(K_EMPTY + stage * K_PARTS + K_PARTS - 1)",
        "    consumer_release(K_EMPTY + stage * K_PARTS + K_PARTS - 1)\n"
        "    qk = warpgroup_mma_wait(1, deps=[qk])",
        # Whether a case shows it hangs on when threads run: several do in each run.
        IN_WIDE + "::test_numbers",
    ),
    Fault(
        "Hopper backward: delta is added",
        SCORES_PY,
        "ds = p * (dp - gl.expand_dims(delta, 0))",
        "ds = p * (dp + gl.expand_dims(delta, 0))",
        IN_EMULATED + "::test_gradients[plain-full-(64, 128, 2)-(4, 2)]",
    ),
    Fault(
        "Hopper backward: a tile that is added is stored",
        WALKED,
        'if found == 0:\n    {{ copy("store") | block(4) }}',
        'if found != 0:\n    {{ copy("store") | block(4) }}',
        IN_EMULATED + "::test_gradients[dq_tma-full-(64, 128, 2)-(4, 2)]",
    ),
    Fault(
        "Hopper backward: a band of keys is one wider",
        WALKED,
        "return ((rows & ~6) >= apart + {{ band.low }}) & ((rows & ~6) <= apart + {{ "
        "band.high }})",
        "return ((rows & ~6) >= apart + {{ band.low }}) & ((rows & ~6) <= apart + {{ "
        "band.high }} + 1)",
        IN_EMULATED + "::test_gradients[dk-window-(64, 128, 2)-(2, 2)]",
    ),
    Fault(
        "Hopper backward: the semaphore of another tile",
        WALKED,
        "release_semaphore(DQ_SEMAPHORES + unit + m, order + 1)",
        "release_semaphore(DQ_SEMAPHORES + unit + m, order)",
        IN_EMULATED + "::test_gradients[deterministic-documents-(64, 128, 2)-(2, 2)]",
    ),
    Fault(
        "Hopper backward: the turn of a tile",
        WALKED,
        "return found * TILES_PER_KV + tile - block * TILES_PER_KV",
        "return found * TILES_PER_KV",
        IN_EMULATED + "::test_gradients[deterministic dk-documents-(64, 64, 2)-(4, 2)]",
    ),
    Fault(
        "Hopper backward: of 96 keys dQ has the second 32 twice, and not the last",
        "templates/hopper_backward/chunks.jinja",
        "gl.convert_layout(ds_rest, OPERAND), rows_of(k_tile, here + {{ 3 * chunk + 2 }}, 32)",
        "gl.convert_layout(ds_rest, OPERAND), rows_of(k_tile, here + {{ 3 * chunk + 1 }}, 32)",
        IN_EMULATED
        + "::test_products_as_narrow_as_heads[(192, 192)-by product-full-(64, 96, 2)-(4, 2)]",
    ),
    Fault(
        "Hopper backward: stages of Q",
        WALKED,
        "slot = gl.where(slot == STAGES - 1, 0, slot + 1)",
        "slot = gl.where(slot == STAGES, 0, slot + 1)",
        IN_EMULATED + "::test_gradients[plain-full-(64, 128, 2)-(4, 2)]",
    ),
    Fault(
        "Hopper: the last row of a window is taken for the first",
        MASKED,
        "if start_n < {{ mask.last_low.result }}:",
        "if start_n > {{ mask.last_low.result }}:",
        IN_WIDE + "::test_numbers[default-window-dims2]",
    ),
    Fault(
        "Hopper backward: a run goes on in the next head",
        WALKED,
        "end = gl.minimum(gl.load(run + 3) * TILES_PER_Q, num_queries)",
        "end = gl.load(run + 3) * TILES_PER_Q",
        IN_BANDS + "::test_rows_that_end_early_in_their_block",
    ),
    Fault(
        "Hopper: the tile behind a run's full ones counts as one",
        SCORES,
        "(end - 1 - {{ i }} >= full_end)",
        "(end - 1 - {{ i }} > full_end)",
        IN_WIDE + "::test_numbers[default-causal-dims1]",
    ),
    Fault(
        "Hopper: a consumer's run begins where another's does",
        KEYS,
        "before = gl.where(run_begin < run_end, end - run_end, {{ count }})",
        "before = 0",
        IN_WIDE + "::test_numbers[default-causal-dims1]",
    ),
    Fault(
        "Hopper backward: all tiles of keys before count among those that add to a tile of dq",
        WALKED,
        "return start_n // BLOCK_N - first ",
        "return start_n // BLOCK_N ",
        IN_PACKED_GRADIENTS + "[in order-window-odd-(4, 2)]",
    ),
)
