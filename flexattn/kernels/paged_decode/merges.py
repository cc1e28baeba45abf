"""Kernels that merge attention states: two of a kind, a cascade's, and a tree's."""

from __future__ import annotations

from flexattn.device import Device
from flexattn.kernels.base import source as rendering
from flexattn.kernels.base.arguments import Argument, several
from flexattn.kernels.base.config import padded
from flexattn.kernels.base.source import BASE_2, Source
from flexattn.kernels.paged_decode.config import ServingConfig, workspace
from flexattn.kernels.printers.spelling import signature_type, triton_type
from flexattn.problem.serving import ServingForm

# Of a program. A row of up to 128 columns is one warp's, which asks for all of its parts at once
# and waits for no other; of several rows Triton would deal out the parts' weights between warps.
_ROWS = 1
_PARTS = 16
_COLUMNS = 128


def join_programs(form: ServingForm, config: ServingConfig, q_rows: int) -> int:
    """Programs of a run whose q is [q_rows, Hq, D]."""
    units = -(-q_rows * form.group // config.BLOCK_M) * form.kv_heads
    return units * (config.BLOCK_M // _ROWS)


def join_arguments(form: ServingForm) -> tuple[Argument, ...]:
    """Arguments of the kernel: what each run gives, then what its shapes decide."""
    found = _states(form.out_dtype, "A", "B", "OUT")
    found.append(Argument("SEQ_LENS", "*i32", 4))
    if form.scaled:
        found.append(Argument("V_SCALE", "*fp32", 4))
    found.append(Argument("WORKSPACE", "*fp32", 16))
    numbers = ["q_rows", "max_keys", *["stride_scale"] * form.scaled]
    return (*found, *several("i32", *numbers))


def _states(dtype: str, *names: str) -> list[Argument]:
    """Outputs of these names in a dtype, each with its log-sum-exps."""
    found = []
    for name in names:
        lse = "LSE" if name == "OUT" else f"LSE_{name}"
        found += [Argument(name, f"*{signature_type(dtype)}", 16), Argument(lse, "*fp32", 4)]
    return found


def render_join(form: ServingForm, config: ServingConfig, device: Device) -> Source:
    """The kernel that follows the pass of a prefix's form with this config."""
    slots = workspace(form, config, device) // (form.head_dim_v + 1)
    settings = {
        "BLOCK_M": config.BLOCK_M,
        "BLOCK_N": config.BLOCK_N,
        "PACKED": form.group,
        "HEAD_DIM_V": form.head_dim_v,
        "HEADS": form.kv_heads,
        "PROGRAMS": config.programs(device),
        "LEAST": config.least,
        "WEIGHTS": slots * form.head_dim_v,
        "ROWS": _ROWS,
        "ROW_PARTS": config.BLOCK_M // _ROWS,
        "PARTS": _PARTS,
    }
    context = {
        "v_pieces": rendering.named_pieces("v", form.head_dim_v),
        "constants": settings | BASE_2,
        "element": triton_type(form.out_dtype),
        "form": form,
    }
    width = 1 << (padded(form.head_dim_v) - 1).bit_length()
    warps = max(1, _ROWS * width // _COLUMNS)
    title = f"serving join {form.dtype} D={form.head_dim_v} for {device.arch}"
    # Told that it may have them, ptxas asks for all parts before it waits for one.
    registers = device.max_registers if device.backend == "cuda" else 0
    return rendering.make_source(
        "paged_decode/join.py.jinja", device, [title], context, join_arguments(form), warps,
        registers=registers,
    )  # fmt: skip


def render_merge_states(dtype: str, head_dim: int, device: Device) -> Source:
    """The kernel that merges two states of outputs [rows, head_dim] in a dtype."""
    context = {
        "v_pieces": rendering.named_pieces("v", head_dim),
        "constants": {"ROWS": merge_rows(head_dim), "HEAD_DIM_V": head_dim, **BASE_2},
        "element": triton_type(dtype),
    }
    found = [*_states(dtype, "A", "B", "OUT"), Argument("num_rows", "i64")]
    title = f"merge of two states {dtype} D={head_dim} for {device.arch}"
    return rendering.make_source(
        "paged_decode/merge_states.py.jinja", device, [title], context, found
    )


def merge_rows(head_dim: int) -> int:
    """Rows that one program of that kernel takes."""
    return 1 << (max(1, 2048 // padded(head_dim)).bit_length() - 1)


def render_merge_tree(
    dtype: str, heads: int, head_dim: int, levels: int, device: Device
) -> Source:
    """The kernel that merges up to `levels` shared states of a row with its own state."""
    settings = {
        "ROWS": merge_rows(head_dim),
        "HEADS": heads,
        "LEVELS": levels,
        "HEAD_DIM_V": head_dim,
    }
    context = {
        "v_pieces": rendering.named_pieces("v", head_dim),
        "constants": settings | BASE_2,
        "element": triton_type(dtype),
        "levels": levels,
    }
    found = _states(dtype, "SHARED", "OWN", "OUT")
    found += [Argument("SLOTS", "*i32", 4), Argument("num_rows", "i64")]
    title = f"merge of a tree's states {dtype} D={head_dim} for {device.arch}"
    return rendering.make_source(
        "paged_decode/merge_tree.py.jinja", device, [title], context, found
    )
