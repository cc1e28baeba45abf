"""Faults of serving: pages, lengths, shares and their merges, scales, appends."""

from tests.faults.fault import Fault

PROGRAM = "templates/paged_decode/program.py.jinja"
RESULTS = "templates/paged_decode/results.jinja"
PAGES = "templates/paged_decode/pages.jinja"
SPAN = "flexattn/kernels/printers/mask_printer.py"
SCALES = "templates/paged_decode/scales.jinja"
MERGE = "templates/paged_decode/merge.jinja"
MAINLOOP = "templates/paged_decode/mainloop.jinja"
SPLIT = "templates/paged_decode/split.jinja"
STATES = "templates/paged_decode/states.jinja"
MERGE_TREE = "templates/paged_decode/merge_tree.py.jinja"
CACHE_APPEND = "templates/cache_append/cache_append.py.jinja"
ROUNDING = "templates/cache_append/rounding.jinja"
IN_SERVING_FAULTS = "tests/interpreter/test_serving_faults.py"
IN_SERVING = "tests/interpreter/test_serving.py"
IN_SERVING_SCALES = "tests/interpreter/test_serving_scales.py"
IN_SERVING_WARPS = "tests/interpreter/test_serving_warps.py"
IN_BATCH_INVARIANCE = "tests/interpreter/test_batch_invariance.py"
IN_SERVING_CALLS = "tests/interpreter/test_serving_calls.py"
IN_SERVING_TREES = "tests/interpreter/test_serving_trees.py"
IN_APPEND = "tests/interpreter/test_append.py"
CACHE = "flexattn/serving/cache.py"
IN_PIPELINES = "tests/interpreter/test_serving_pipelines.py"
IN_PREFILLS = "tests/interpreter/test_serving_prefills.py"
ROW_TILES = "templates/hopper/row_tiles.py.jinja"
IN_ROW_TILES = "tests/interpreter/test_row_tiles.py"
REQUESTS = "templates/base/requests.jinja"
KEYS = "templates/hopper/keys.jinja"
IN_RAGGED = "tests/unit/kernels/hopper/test_ragged.py"
IN_VLLM = "tests/interpreter/test_vllm.py"
IN_SGLANG = "tests/interpreter/test_sglang.py"
ADAPTORS = "flexattn/integrations/"

SERVING = (
    Fault(
        "a page that was guessed for a warm-up replaces that of vLLM's cache",
        ADAPTORS + "vllm.py",
        "            if self._ready is None:",
        "            if self._ready is not None:",
        IN_VLLM + "::test_a_page_that_was_guessed_does_not_replace_the_right_one",
    ),
    Fault(
        "values have the scales of their keys",
        ADAPTORS + "vllm.py",
        '"v_scale": places[..., 1]}',
        '"v_scale": places[..., 0]}',
        IN_VLLM + "::test_a_cache_of_eight_bits[fp8_per_token_head-dtype1]",
    ),
    Fault(
        "a row of an image is taken for that of the request before",
        ADAPTORS + "plans.py",
        "torch.sub(ends[1:], lens,",
        "torch.sub(ends[:-1], lens,",
        IN_VLLM + "::test_rows_of_an_image_see_each_other",
    ),
    Fault(
        "a draft's mask is read where its first key's is",
        ADAPTORS + "plans.py",
        "- widths * n + past",
        "- widths * n",
        IN_SGLANG + "::test_drafts_are_verified[0.5.17-False]",
    ),
    Fault(
        "new keys of a layer with a window go to the slots of the other layers",
        ADAPTORS + "sglang.py",
        "slots = self._window_slots if self._more_slots is None else self._more_slots",
        "slots = forward_batch.out_cache_loc",
        IN_SGLANG + "::test_a_chunk_longer_than_the_buffers_has_slots_in_its_window",
    ),
    Fault(
        "the first-use check leaves its prefills to the streaming kernel",
        "flexattn/serving/verified.py",
        "plan._num_sms = 1",
        "pass",
        IN_PREFILLS + "::test_the_first_use_check_makes_prefills_of_its_batch",
    ),
    Fault(
        "the streaming kernel serves a prefill too",
        PAGES,
        "q_len = tl.where(tl.load(PREFILLS + b, mask=here, other=0) > 0, 0, q_len)",
        "q_len = tl.where(tl.load(PREFILLS + b, mask=here, other=0) > 1, 0, q_len)",
        IN_PREFILLS + "::test_decodes_alone_are_written",
    ),
    Fault(
        "of two requests whose parts are as long neither is first",
        ROW_TILES,
        "((longer == 0) & (others < b))",
        "(longer == 0)",
        IN_ROW_TILES + "::test_order[equal]",
    ),
    Fault(
        "more tiles of rows than there is room for are stored",
        ROW_TILES,
        "kept = (tile < num_tiles) & (rank + part < capacity)",
        "kept = tile < num_tiles",
        IN_ROW_TILES + "::test_more_tiles_than_were_planned_for",
    ),
    Fault(
        "the counter of tiles is not set back",
        ROW_TILES,
        "tl.store(COUNTER, 0)",
        "tl.store(COUNTER, 1)",
        IN_ROW_TILES + "::test_order[one-1]",
    ),
    Fault(
        "decodes that the kernel of prefills serves have no tiles",
        ROW_TILES,
        "q_len = tl.where(is_prefill | light, q_len, 0)",
        "q_len = tl.where(is_prefill, q_len, 0)",
        IN_ROW_TILES + "::test_few_decodes_are_served_with_the_prefills[few]",
    ),
    Fault(
        "tiles of rows are read before they are listed",
        "templates/hopper/prefill.py.jinja",
        "    wait_for_row_tiles() ",
        "    # ",
        "tests/compile/test_hopper_ragged.py::test_each_kernel_waits_for_the_one_before",
    ),
    Fault(
        "rows of a prefill stand at the first keys",
        REQUESTS,
        "row_start = gl.maximum(kv_len - q_len, 0) + first_row",
        "row_start = first_row",
        IN_RAGGED + "::test_pages[16]",
    ),
    Fault(
        "a part of a tile's keys ends where all do",
        "templates/base/kv_tiles.jinja",
        "end = begin + num_n_blocks * (part_idx + 1) // num_parts",
        "end = begin + num_n_blocks",
        IN_RAGGED + "::test_keys_in_parts[causal]",
    ),
    Fault(
        "the log-sum-exp of a part is its maximum",
        "templates/hopper/epilogue.jinja",
        "m_row + gl.log2(l_safe))\n{% endmacro %}",
        "m_row)\n{% endmacro %}",
        IN_RAGGED + "::test_keys_in_parts[causal]",
    ),
    Fault(
        "parts of two requests are left in one place",
        ROW_TILES,
        "slot += tl.sum(counts * parts, 0)",
        "slot += tl.sum(counts, 0)",
        IN_ROW_TILES + "::test_drawn_batches[1]",
    ),
    Fault(
        "a second head's rows are merged into other positions",
        "templates/hopper/merge_parts.py.jinja",
        "row + lane // PACKED_HEADS % TILE_TOKENS",
        "row + lane // PACKED_HEADS",
        "tests/interpreter/test_merge_parts.py::test_merge[heads of consumers]",
    ),
    Fault(
        "a sequence has the keys before it, too",
        REQUESTS,
        "gl.minimum(end_k, total_k) - first_key",
        "gl.minimum(end_k, total_k)",
        IN_RAGGED + "::test_packed_sequences[odd lengths]",
    ),
    Fault(
        "every sequence's keys are those of the first one",
        KEYS,
        '"0, off_hkv, first_key + "',
        '"0, off_hkv, "',
        IN_RAGGED + "::test_packed_sequences[odd lengths]",
    ),
    Fault(
        "a work tile's last values are of the next one's sequence",
        KEYS,
        '"0, %s, %s + " % (hkv, b)',
        '"0, %s, first_key + " % hkv',
        IN_RAGGED + "::test_packed_sequences[odd lengths]",
    ),
    Fault(
        "the first rows of the next sequence are multiplied by weights of 0",
        REQUESTS,
        "if part * PAGE_ROWS + PAGE_ROWS > kept:",
        "if part * PAGE_ROWS > kept:",
        IN_RAGGED + "::test_a_sequence_of_nan_spoils_no_other[None]",
    ),
    Fault(
        "queries of a packed sequence stand at its last keys",
        REQUESTS,
        "    row_start = first_row ",
        "    row_start = gl.maximum(kv_len - q_len, 0) + first_row ",
        IN_RAGGED + "::test_packed_sequences[more keys than queries]",
    ),
    Fault(
        "rows of no head are stored",
        REQUESTS,
        " & (h % GROUP + row % PACKED_HEADS < GROUP)",
        "",
        IN_RAGGED + "::test_what_a_plan_asks[seven heads in a tile]",
    ),
    Fault(
        "the second tile of a group begins behind the heads of one",
        REQUESTS,
        "h = head_tile // HEAD_TILES * GROUP + head_tile % HEAD_TILES * HEADS",
        "h = head_tile * HEADS",
        IN_RAGGED + "::test_what_a_plan_asks[some of five heads]",
    ),
    Fault(
        "each row of a tile is a position",
        "templates/base/masked_scores.jinja",
        '" // PACKED_HEADS" if ragged',
        '"" if ragged',
        IN_RAGGED + "::test_what_a_plan_asks[two heads in a tile]",
    ),
    Fault(
        "a page id past the cache is read",
        PROGRAM,
        "page = tl.minimum(page_next.to(tl.uint32), num_pages - 1).to(tl.uint64)",
        "page = page_next.to(tl.uint64)",
        IN_SERVING_FAULTS + "::test_lengths_and_pages_that_change_under_a_launch[last]",
    ),
    Fault(
        "pages: `there` includes the key behind the last",
        PROGRAM,
        "(first_key + keys < high)",
        "(first_key + keys <= high)",
        IN_SERVING + "::test_caches[0-NHD-apart]",
    ),
    Fault(
        "a merge begins in the wrong slot",
        RESULTS,
        "slot = 2 * (first_program + part) + (part == 0).to(tl.int32)",
        "slot = 2 * (first_program + part)",
        IN_SERVING + "::test_pieces_of_any_size_merge[1-1-last]",
    ),
    Fault(
        "lengths are not clamped to the plan's",
        PAGES,
        "kv_len = tl.minimum(tl.maximum(kv_len, first_key), first_key + max_keys)",
        "kv_len = kv_len",
        IN_SERVING_FAULTS + "::test_lengths_and_pages_that_change_under_a_launch[last]",
    ),
    Fault(
        "a window of pages begins one late",
        PAGES,
        "begin = (low - first_key) // {{ unit }}",
        "begin = (low - first_key + {{ unit }} - 1) // {{ unit }}",
        IN_SERVING + "::test_every_mod_of_the_catalogue[sliding_window]",
    ),
    Fault(
        "an edge is taken at the wrong end",
        SPAN,
        'return "q_first" if self.lowest == (self.slope > 0) else "q_last"',
        'return "q_last" if self.lowest == (self.slope > 0) else "q_first"',
        IN_SERVING + "::test_every_mod_of_the_catalogue[causal]",
    ),
    Fault(
        "free keys are taken at the loose end",
        SPAN,
        'return "q_last" if self.query == "q_first" else "q_first"',
        "return self.query",
        IN_SERVING + "::test_a_mixed_batch_of_chunks_and_single_tokens",
    ),
    Fault(
        "shares: the last tile of the batch is nobody's",
        PAGES,
        "tiles_per_program = tl.maximum((total + ({{ programs }} - 1)) // {{ programs }}, LEAST)",
        "tiles_per_program = tl.maximum(total // {{ programs }}, LEAST)",
        IN_SERVING + "::test_pieces_of_any_size_merge[2-1-launch]",
    ),
    Fault(
        "a decode's queries are the first positions",
        PROGRAM,
        "offs_q = past + offs_m\n",
        "offs_q = offs_m\n",
        IN_SERVING + "::test_a_mixed_batch_of_chunks_and_single_tokens",
    ),
    Fault(
        "a page's scales are those of its first token",
        SCALES,
        'page_next.to(tl.uint32), num_pages - 1).to(tl.uint64) * stride_sp + {{ "keys % PAGE '
        '* stride_sn"',
        'page_next.to(tl.uint32), num_pages - 1).to(tl.uint64) * stride_sp + {{ "keys // PAGE '
        '* stride_sn"',
        IN_SERVING_SCALES + "::test_scales_of_pages_and_tokens[tile-token-NHD]",
    ),
    Fault(
        "a value's scale is its key's",
        SCALES,
        "p = p * v_scales[None, :]",
        "p = p * k_scales[None, :]",
        IN_SERVING_SCALES + "::test_scales_of_pages_and_tokens[tile-page-NHD]",
    ),
    Fault(
        "K's scale of a tensor is applied to values",
        RESULTS,
        '{{ "v_scale" if form.scaled else "1.0" }} / {{ tag }}_l',
        "1.0 / {{ tag }}_l",
        IN_SERVING + "::test_a_cache_of_eight_bits[torch.float8_e4m3fn-per_tensor]",
    ),
    Fault(
        "warps: the words that a merge reads stay",
        MERGE,
        "tl.store(words + WEIGHTS + workspace_row_o, no_weight, mask=row_o < num_rows)",
        "tl.store(words + WEIGHTS + workspace_row_o, no_weight, mask=row_o < 0)",
        IN_SERVING_WARPS + "::test_who_awaits_a_part_leaves_its_words_empty[(1, 4)-heads]",
    ),
    Fault(
        "warps: a page of NaN behind the last key",
        MAINLOOP,
        "(start_n + v_in < high), 2), v, 0)",
        "(start_n + v_in < high + BLOCK_N), 2), v, 0)",
        IN_SERVING_WARPS + "::test_caches[0-NHD]",
    ),
    Fault(
        "batch invariance: splits are folded in the order of programs",
        SPLIT,
        "split_begin = tl.maximum(split * TILES_PER_SPLIT, begin)",
        "split_begin = tl.maximum(split * TILES_PER_SPLIT - 1, begin)",
        IN_BATCH_INVARIANCE
        + "::test_rows_of_any_batch_have_the_bits_of_a_prefill_of_their_own[causal]",
    ),
    Fault(
        "states: a state without keys adds NaN",
        STATES,
        "a = tl.where((weight_a > 0)[:, None], a * (weight_a / total)[:, None], 0.0)",
        "a = a * (weight_a / total)[:, None]",
        IN_SERVING_CALLS + "::test_a_state_without_keys_adds_nothing",
    ),
    Fault(
        "states: the joint lse is in base 2",
        STATES,
        "tl.store(LSE + at, top + tl.log2(total) * LN2, mask=rows)",
        "tl.store(LSE + at, top + tl.log2(total), mask=rows)",
        IN_SERVING_CALLS + "::test_states_merge[16-dtype0]",
    ),
    Fault(
        "trees: a level that a row has not is taken",
        MERGE_TREE,
        'mask=slot_{{ level }} >= 0, other=float("-inf"))',
        'mask=rows, other=float("-inf"))',
        IN_SERVING_TREES
        + "::test_a_tree_is_attention_over_each_path_and_own_keys[program-shared0]",
    ),
    Fault(
        "append: a slot behind the cache is written",
        CACHE_APPEND,
        "there = there & (slot >= 0) & (slot < num_pages.to(tl.int64) * PAGE)",
        "there = there & (slot >= 0) & (slot <= num_pages.to(tl.int64) * PAGE)",
        IN_APPEND + "::test_nothing_is_written_outside_the_cache[torch.int32-numbers0]",
    ),
    Fault(
        "append: rounding is towards zero",
        ROUNDING,
        "normal = ((kept + HALF_UNIT + ((kept >> SHIFT) & 1)) >> SHIFT) - REBIAS",
        "normal = (kept >> SHIFT) - REBIAS",
        IN_APPEND + "::test_every_number_is_rounded_as_torch_does[0-torch.float8_e4m3fn]",
    ),
    Fault(
        "append: ties go up",
        ROUNDING,
        "normal = ((kept + HALF_UNIT + ((kept >> SHIFT) & 1)) >> SHIFT) - REBIAS",
        "normal = ((kept + HALF_UNIT + 1) >> SHIFT) - REBIAS",
        IN_APPEND + "::test_every_number_is_rounded_as_torch_does[0-torch.float8_e4m3fn]",
    ),
    Fault(
        "append: the rotation turns the other way",
        CACHE_APPEND,
        "k = k * cosine + tl.where(is_first[None, :], -other, other) * sine",
        "k = k * cosine + tl.where(is_first[None, :], other, -other) * sine",
        IN_APPEND + "::test_keys_are_rotated_first[base-halves-False]",
    ),
    Fault(
        "append: a token's page is the next one's",
        CACHE_APPEND,
        "position = tl.load(SEQ_LENS + request) - (row_end - token)",
        "position = tl.load(SEQ_LENS + request) - (row_end - token) + 1",
        IN_APPEND + "::test_tokens_that_a_page_table_places[False-ragged]",
    ),
    Fault(
        "append: a scale that another row computed",
        CACHE_APPEND,
        "{{ x }}_scale = tl.maximum(tl.div_rn({{ x }}_most, MOST * one), LEAST_SCALE)",
        "{{ x }}_scale = tl.maximum({{ x }}_most / (MOST * 1.01), LEAST_SCALE)",
        IN_APPEND + "::test_eight_bits[torch.float8_e4m3fn-token-NHD]",
    ),
    Fault(
        "parts of programs are merged with the first ones' weights",
        RESULTS,
        "l_m = l_m * rescale + tl.sum(weight, 1)\n"
        "m_m = m_next\n"
        "acc_m_{{ piece.name }} = acc_m_{{ piece.name }} * rescale + tl",
        "l_m = l_m + tl.sum(weight, 1)\n"
        "m_m = m_next\n"
        "acc_m_{{ piece.name }} = acc_m_{{ piece.name }} + tl",
        IN_SERVING + "::test_more_parts_than_a_program_holds_at_a_time[last]",
    ),
    Fault(
        "a page of a cache that shares keys is described with its stride of 0",
        CACHE,
        "tensor = tensor[:1]",
        "tensor = tensor",
        IN_PIPELINES + "::test_requests_that_share_keys_by_a_stride_of_0[mla]",
    ),
    Fault(
        "a ragged batch's last row is nobody's",
        PAGES,
        "row_end = tl.load(CU_SEQLENS + b + 1, mask=here, other=0)",
        "row_end = tl.load(CU_SEQLENS + b + 1, mask=here, other=0) - 1",
        IN_SERVING + "::test_a_mixed_batch_of_chunks_and_single_tokens",
    ),
)
