"""Render the last kernel of a cascade: the prefix's parts and own states become one state."""

from __future__ import annotations

from flexattn.device import Device
from flexattn.kernels.base import source as rendering
from flexattn.kernels.base.arguments import Argument
from flexattn.kernels.base.config import padded
from flexattn.kernels.base.source import BASE_2, Source
from flexattn.kernels.paged_decode.config import ServingConfig
from flexattn.kernels.paged_decode.space import workspace
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
    values = f"*{signature_type(form.dtype)}"
    found = []
    for out, lse in (("A", "LSE_A"), ("B", "LSE_B"), ("OUT", "LSE")):
        found += [Argument(out, values, 16), Argument(lse, "*fp32", 4)]
    found.append(Argument("SEQ_LENS", "*i32", 4))
    if form.scaled:
        found.append(Argument("V_SCALE", "*fp32", 4))
    found.append(Argument("WORKSPACE", "*fp32", 16))
    numbers = ["q_rows", "max_keys", *["stride_scale"] * form.scaled]
    return (*found, *(Argument(name, "i32") for name in numbers))


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
    context: dict[str, object] = {
        "v_pieces": rendering.named_pieces("v", form.head_dim_v),
        "constants": (*settings.items(), *BASE_2),
        "element": triton_type(form.dtype),
        "scaled": form.scaled,
    }
    width = 1 << (padded(form.head_dim_v) - 1).bit_length()
    warps = max(1, _ROWS * width // _COLUMNS)
    title = f"serving join {form.dtype} D={form.head_dim_v} for {device.arch}"
    # Told that it may have them, ptxas asks for all parts before it waits for one.
    registers = device.max_registers if device.backend == "cuda" else 0
    return rendering.make_source(
        "paged_decode/join.py.jinja", device, [title], context, join_arguments(form), warps, 1,
        registers=registers,
    )  # fmt: skip
