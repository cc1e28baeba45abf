"""Faults of the host: keys, launches, layouts, lists of masks, records, the accuracy gate."""

from tests.faults.fault import Fault

LAUNCH = "flexattn/runtime/launch.py"
BINDING = "flexattn/kernels/base/binding.py"
KEY = "flexattn/records/record.py"
PROBLEM = "flexattn/problem/problem.py"
LAYERS = "flexattn/records/layers.py"
CLOSURE = "flexattn/records/environment.py"
CALL = "flexattn/frontend/call.py"
RUNS = "flexattn/problem/mask_lists.py"
LAUNCH_CACHE = "flexattn/frontend/launch_cache.py"
CUDA_LAUNCH = "flexattn/runtime/cuda_launch.py"
CLASSIFY = "flexattn/block_mask/classify.py"
KIND = "flexattn/problem/facts.py"
COMPILED_SEQUENCES = "flexattn/frontend/compiled/sequences.py"
IN_OUTPUT_STRIDES = "tests/unit/frontend/test_output_strides.py"
IN_SHAPES = "tests/interpreter/test_shapes.py"
IN_MIXED_DTYPES = "tests/unit/frontend/test_mixed_dtypes.py"
IN_SINKS = "tests/unit/problem/test_sinks.py"
IN_DROPOUT = "tests/unit/frontend/test_dropout.py"
IN_BACKWARD_KEY = "tests/unit/records/test_backward_key.py"
IN_CACHE_KEY = "tests/unit/records/test_cache_key.py"
IN_SHIPPED = "tests/unit/records/test_shipped.py"
IN_CACHE_LAYERS = "tests/unit/records/test_cache_layers.py"
IN_CLOSURE = "tests/unit/records/test_closure.py"
IN_CALL = "tests/unit/frontend/test_call.py"
IN_MODS = "tests/interpreter/test_mods.py"
IN_RUNS = "tests/unit/problem/test_runs.py"
IN_LAUNCH = "tests/unit/runtime/test_launch.py"
IN_CUDA_LAUNCH = "tests/unit/runtime/test_cuda_launch.py"
IN_BLOCK_KINDS = "tests/unit/block_mask/test_block_kinds.py"
IN_KIND = "tests/unit/problem/test_kind.py"
SOURCE = "flexattn/kernels/triton/source.py"
TILES = "flexattn/kernels/triton/config.py"
FACTS = "flexattn/problem/facts.py"
IN_COMPILED_SEQUENCES = (
    "tests/unit/frontend/test_compiled_sequences.py::test_the_op_is_an_eager_call"
)
IN_CATALOGUE = "tests/interpreter/test_catalogue.py"
IN_REPEAT = "tests/interpreter/test_repeat.py"
IN_BINDING = "tests/unit/kernels/base/test_binding.py"
IN_ORACLE = "tests/unit/verify/test_oracle.py"

HOST = (
    Fault(
        "a template that does not read where keys lie is taken",
        "flexattn/runtime/candidates.py",
        "if same or skips_far(structure, config):",
        "if skips_far(structure, config):",
        "tests/unit/runtime/test_dispatch.py"
        "::test_a_template_that_does_not_read_where_keys_lie_is_refused",
    ),
    Fault(
        "an output in the order of BHSD, whatever q's is",
        LAUNCH,
        "order = sorted(range(3), key=lambda dim: (like[dim], -dim), reverse=True)",
        "order = [0, 1, 2]",
        IN_OUTPUT_STRIDES + "::test_the_strides_are_torchs[(0, 2, 1, 3)]",
    ),
    Fault(
        "a batch of masks is read as one",
        LAUNCH,
        "b: 0 if B == 1 else H * blocks,",
        "b: 0,",
        IN_SHAPES + "::test_masks_per_head_and_per_batch[per_head-per_batch-prefill]",
    ),
    Fault(
        "a stride of a dimension of one element is stepped",
        BINDING,
        "0 if n == 1 else step for axis, n, step in steps",
        "step for axis, n, step in steps",
        IN_SHAPES + "::test_keys_of_batch_one_against_many_queries",
    ),
    Fault(
        "a record's key misses whether k and v are narrower",
        PROBLEM,
        'found += [f"kv={s.kv_dtype}"] * (s.kv_dtype != "")',
        "found += []",
        IN_MIXED_DTYPES + "::test_every_config_that_is_offered_is_tritons[bfloat16-prefill]",
    ),
    Fault(
        "a record's key misses sinks",
        KEY,
        'sinks=s.sinks != "",',
        "sinks=False,",
        IN_SINKS + "::test_a_key_with_sinks_is_another_one_and_those_without_keep_their_names",
    ),
    Fault(
        "a record's key misses dropout",
        PROBLEM,
        'return " ".join(found + ["dropout"] * s.dropout)',
        'return " ".join(found)',
        IN_DROPOUT + "::test_a_kernel_with_it_is_filed_apart_and_others_where_they_were",
    ),
    Fault(
        "a record's key misses which gradients are asked for",
        PROBLEM,
        "found += [f\"grads={','.join(map(str, s.grads))}\"] * bool(s.grads)",
        "found += []",
        IN_BACKWARD_KEY + "::test_keys_of_a_backward",
    ),
    Fault(
        "a record's key misses the alignment",
        PROBLEM,
        'return "".join(found) + " aligned" * layout.aligned',
        'return "".join(found)',
        IN_CACHE_KEY
        + "::test_what_decides_the_config_is_in_the_key_and_statistics_are_not[layout]",
    ),
    Fault(
        "a key's sizes are rounded down",
        PROBLEM,
        "return 0 if size <= 0 else 1 << (size - 1).bit_length()",
        "return 0 if size <= 0 else 1 << (size.bit_length() - 1)",
        IN_CACHE_KEY + "::test_rounding_is_monotone_idempotent_and_never_down",
    ),
    Fault(
        "a new field changes the names of old records",
        KEY,
        "if name not in _DEFAULTS or value != _DEFAULTS[name]",
        "if True",
        IN_SHIPPED + "::test_it_loads_and_stands_where_its_key_says[03124c-b2-q1024-k1024]",
    ),
    Fault(
        "a hint comes before a hit of a later layer",
        LAYERS,
        "        if 0 < (away := distance(sizes, key.sizes)) <= MAX_DISTANCE",
        "        if 0 <= (away := distance(sizes, key.sizes)) <= MAX_DISTANCE + 9",
        IN_CACHE_LAYERS + "::test_too_far_away_is_no_neighbour",
    ),
    Fault(
        "a hint of a former default is taken",
        LAYERS,
        "elif not former_default(stored, problem, device, first):",
        "else:",
        IN_CACHE_LAYERS + "::test_a_hint_that_raced_a_former_default_is_not_taken",
    ),
    Fault(
        "a template's hash misses what it imports",
        CLOSURE,
        "homes = {home(*each) for each in imports if each[0] not in files}",
        "homes = {each[0] for each in imports if each[0] not in files}",
        IN_CLOSURE + "::test_a_name_is_followed_to_the_module_that_defines_it",
    ),
    Fault(
        "a call's key misses alignment",
        CALL,
        "type(q), rows, q.stride(), q.dtype, q.get_device(), q.data_ptr() % 16, q.is_neg()",
        "type(q), rows, q.stride(), q.dtype, q.get_device(), 0, q.is_neg()",
        IN_CALL + "::test_a_fact_of_a_tensor_that_differs[offset]",
    ),
    Fault(
        "a call's key misses the strides of values",
        CALL,
        "lie = k.shape, v.shape, k.stride(), v.stride()",
        "lie = k.shape, v.shape, k.stride(), k.stride()",
        IN_CALL + "::test_a_fact_of_a_tensor_that_differs[strides]",
    ),
    Fault(
        "a mod's identity misses a stride",
        CALL,
        "[t.stride()[-1:] == (1,) for t in bound.tensors]",
        "[True for t in bound.tensors]",
        IN_MODS + "::test_strides_of_a_captured_tensor",
    ),
    Fault(
        "a repeated call ignores lists that were written",
        RUNS,
        "if each._version != version or each.data_ptr() != place:",
        "if each.data_ptr() != place:",
        IN_RUNS + "::test_every_write_of_torch_is_seen[item-kv_num_blocks]",
    ),
    Fault(
        "dropout of a repeated call draws the same weights",
        LAUNCH_CACHE,
        "or call.dropout is not None\n",
        "",
        IN_DROPOUT + "::test_calls_are_not_remembered",
    ),
    Fault(
        "a decode that grew takes the bucket of another length",
        LAUNCH,
        "longest_of_bucket(keys) != longest_of_bucket(before.kv_len)",
        "longest_of_bucket(keys) == 0",
        IN_LAUNCH + "::test_with_kv_len_is_what_is_prepared[8]",
    ),
    Fault(
        "a decode that grew keeps its strides",
        LAUNCH,
        "values = _kv_arguments_of(problem, key_strides(problem, k, v))",
        "values = (keys, *self.kv_arguments[1:])",
        IN_LAUNCH + "::test_with_kv_len_is_what_is_prepared[8]",
    ),
    Fault(
        "a decode that grew keeps its grid",
        LAUNCH,
        "        if grid != self.geometry:\n            return None\n",
        "",
        IN_LAUNCH + "::test_with_kv_len_is_what_is_prepared[1]",
    ),
    Fault(
        "a launch's tensors are those of the first call",
        CUDA_LAUNCH,
        "if frame.mapped[which] != slots[slot]:",
        "if not frame.mapped[which]:",
        IN_CUDA_LAUNCH + "::test_a_descriptor_is_encoded_when_its_address_changes",
    ),
    Fault(
        "an address takes 32 bits",
        CUDA_LAUNCH,
        'kinds = ("Q" if kind[0] in "*t" else _FORMATS.get(kind, "q") for kind in types)',
        'kinds = ("Q" if kind[0] in "*t" else _FORMATS.get(kind, "i") for kind in types)',
        IN_CUDA_LAUNCH + "::test_arguments_arrive_in_order",
    ),
    Fault(
        "a launch runs on the stream of the first one",
        CUDA_LAUNCH,
        "if frame.stream != stream:",
        "if frame.stream is None:",
        IN_CUDA_LAUNCH + "::test_arguments_arrive_in_order",
    ),
    Fault(
        "a box of a descriptor has a stride of 0",
        LAUNCH,
        "return DescriptorBox(tuple(tensor.shape), (b or span, h or span, n or span, 1))",
        "return DescriptorBox(tuple(tensor.shape), (b, h, n, 1))",
        IN_CUDA_LAUNCH + "::test_a_box_has_strides_that_the_copy_engine_takes[(1, 1, 1, 100)]",
    ),
    Fault(
        "a group's heads share a tile though their lists differ",
        LAUNCH,
        "per_head = group > 1 and self.kv_num.shape[1] > 1",
        "per_head = False",
        IN_SHAPES + "::test_masks_per_head_and_per_batch[per_head-per_batch-decode]",
    ),
    Fault(
        "a run that is no run",
        RUNS,
        "rising = (indices[..., 1:] > indices[..., :-1]) | ~listed[..., 1:]",
        "rising = (indices[..., 1:] >= indices[..., :-1]) | ~listed[..., 1:]",
        IN_RUNS + "::test_runs_of_lists[given5-None]",
    ),
    Fault(
        "partial blocks between full ones are lost",
        RUNS,
        "joined = joined & rising & full.all() & ~between.any()",
        "joined = joined & rising & full.all()",
        IN_RUNS + "::test_runs_of_lists[given7-None]",
    ),
    Fault(
        "a block past the end is full",
        CLASSIFY,
        "if self.sizes[2 + dim] % self.block[dim]:",
        "if False:",
        IN_BLOCK_KINDS + "::test_intervals_never_contradict_the_lanes",
    ),
    Fault(
        "a block's last row is no corner",
        CLASSIFY,
        "((at + 1) * (size * step)).clamp(max=length) - 1",
        "((at + 1) * (size * step)).clamp(max=length) - 2",
        IN_BLOCK_KINDS + "::test_intervals_never_contradict_the_lanes",
    ),
    Fault(
        "a chunk of many rows decodes",
        KIND,
        "if q_len <= FEW_ROWS:",
        "if q_len < FEW_ROWS:",
        IN_KIND + "::test_a_handful_of_rows_decodes[heads0]",
    ),
    Fault(
        "a negated view of keys is taken for its memory",
        CALL,
        "type(k), k.dtype, k.get_device(), k.data_ptr() % 16, k.is_neg(),",
        "type(k), k.dtype, k.get_device(), k.data_ptr() % 16, False,",
        IN_CALL + "::test_a_fact_of_a_tensor_that_differs[negated]",
    ),
    Fault(
        "a decode's key misses how many heads values have",
        CALL,
        "(kb, kh, kd, k3, vb, vh, vd, v3, whole,",
        "(kb, kh, kd, k3, vb, vd, v3, whole,",
        IN_CALL + "::test_a_fact_of_a_tensor_that_differs[shape]",
    ),
    Fault(
        "two calls with options are one",
        CALL,
        "repr(options) if options else None, return_aux,",
        "bool(options), return_aux,",
        IN_CALL + "::test_other_options_are_another_call",
    ),
    Fault(
        "a stride of 0 counts as one that descriptors know",
        FACTS,
        "return all(size == 1 or stride > 0 for size, stride in pairs[1:])",
        "return True",
        IN_ORACLE + "::test_a_batch_of_queries_with_stride_0_is_not_aligned",
    ),
    Fault(
        "blocks that a list has as full are masked, the others not",
        SOURCE,
        "i < num_kv",
        "i >= num_kv",
        IN_CATALOGUE + "::test_several_tiles_and_full_blocks[random_blocks-prefill-fp16]",
    ),
    Fault(
        "strides of any number of bytes count as aligned",
        FACTS,
        "if self.offset or any(size > 1 and stride % divisor for size, stride in pairs):",
        "if self.offset:",
        IN_ORACLE + "::test_strides_and_addresses_of_whole_16_bytes_are_aligned",
    ),
    Fault(
        "a call that is known ignores a record that was written since",
        LAUNCH_CACHE,
        "self.settings is not current() or self.generation != generation()",
        "self.settings is not current()",
        IN_REPEAT + "::test_a_record_that_was_written_since_is_looked_for",
    ),
    Fault(
        "a grid has no tile for the last rows",
        TILES,
        "tiles = -(-problem.q_len * structure.packed_heads // config.BLOCK_M)",
        "tiles = max(1, problem.q_len * structure.packed_heads // config.BLOCK_M)",
        IN_SHAPES + "::test_lengths[1-130-prefill]",
    ),
    Fault(
        "a descriptor is made for a call's first keys alone",
        BINDING,
        "tuple((i, places[name]) for i, name in enumerate(names) if name not in fixed)",
        "tuple((i, i) for i, name in enumerate(names) if name not in fixed)",
        IN_BINDING + "::test_values_are_found_by_name",
    ),
    Fault(
        "a compiled pack: keys are taken to have the lengths of queries",
        COMPILED_SEQUENCES,
        "cu_k = cu_q if cu_k is None else cu_k",
        "cu_k = cu_q",
        IN_COMPILED_SEQUENCES + "[other keys]",
    ),
)
