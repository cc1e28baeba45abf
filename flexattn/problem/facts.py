"""The facts of tensors, beside their numbers, that decide kernels; and float32's products."""

from __future__ import annotations

from math import ceil, inf
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from flexattn.problem.problem import (
    NEAR_BYTES,
    Fp32Products,
    Kind,
    Layout,
    Problem,
    Shape,
    Sparsity,
)


class TensorFacts(NamedTuple):
    """The layout of a tensor in memory.

    kind: its class. device: the index of its GPU, -1 for none. offset: bytes of its address above
    a multiple of 16. negated: it is a view that stands for the negative of its memory, as a
    conjugate's imaginary part is.
    """

    kind: type
    shape: torch.Size
    strides: tuple[int, ...]
    dtype: torch.dtype
    device: int
    offset: int
    negated: bool

    @property
    def aligned(self) -> bool:
        """True if the address and the strides but the last are multiples of 16 bytes.

        No stride is 0 but the batch's: kernels that read through tensor descriptors, which know
        none, ask for that one alone.
        """
        divisor = 16 // self.dtype.itemsize
        pairs = list(zip(self.shape, self.strides, strict=True))[:3]
        if self.offset or any(size > 1 and stride % divisor for size, stride in pairs):
            return False
        return all(size == 1 or stride > 0 for size, stride in pairs[1:])

    @property
    def near(self) -> bool:
        """True if no element lies 2 GiB or more behind the first one."""
        pairs = zip(self.shape, self.strides, strict=True)
        last = sum(max(0, size - 1) * stride for size, stride in pairs)
        return (last + 1) * self.dtype.itemsize <= NEAR_BYTES


def facts_of(tensor: Tensor | None) -> Any:
    """The values of TensorFacts, in their order, for keys: a plain tuple takes half the time."""
    if tensor is None:
        return None
    return (
        type(tensor), tensor.shape, tensor.stride(), tensor.dtype, tensor.get_device(),
        tensor.data_ptr() % 16, tensor.is_neg(),
    )  # fmt: skip


def layout_of(q: Tensor, k: Tensor, v: Tensor) -> Layout:
    """The layout of query, key and value in memory, as far as a kernel's code depends on it."""
    facts = [TensorFacts(*facts_of(x)) for x in (q, k, v)]
    whole = all(x.aligned for x in facts) and (q.shape[0] == 1 or q.stride(0) > 0)
    near = all(x.near for x in facts)
    return Layout(q.stride(-1) == 1, k.stride(-1) == 1, v.stride(-1) == 1, whole, near)


# What is asked: no tf32 and no parts of numbers, tf32's accuracy, parts wherever they compile, or
# the best that holds float32's budget.
Fp32Setting = Literal["ieee", "tf32", "bf16x6", "auto"]
_TORCHS: dict[str, Fp32Setting] = {"ieee": "ieee", "tf32": "tf32"}
# Of sm_90, where six products of bfloat16 ran on a GPU within float32's budget, forward and
# backward: of kinds of kernels, and of head dimensions.
_MEASURED_KINDS, _MEASURED = ("prefill", "backward"), (32, 64, 128)


def torch_setting() -> Fp32Setting:
    """torch's setting of float32 products; "none", its default, leaves the choice to a library."""
    return _TORCHS.get(torch.backends.cuda.matmul.fp32_precision, "auto")


def setting_of(q: Tensor, asked: Fp32Setting | None = None) -> Fp32Setting:
    """The setting as asked, else torch's; "ieee" where NVIDIA's units do not multiply q."""
    if q.dtype != torch.float32 or not q.is_cuda or torch.version.hip is not None:
        return "ieee"
    return torch_setting() if asked is None else asked


def products_for(
    setting: Fp32Setting, kind: str, head_dims: tuple[int, int], capability: int, narrower: bool
) -> Fp32Products:
    """The products of float32 that a setting means for a kind of kernel on a device.

    head_dims: of q and k, and of v. capability: 90 for sm_90, 0 for what is not NVIDIA's.
    narrower: k and v have another dtype than q.

    Six products of bfloat16 are the default where they were measured. Where asked for, they serve
    up to 128 columns: parts of wider tiles fill more registers than there are. sm_100 keeps sums
    of 64 rows in tensor memory, which is too small for theirs.
    """
    if setting == "ieee" or capability < 80:
        return "ieee"
    qk, v = head_dims
    measured = capability == 90 and kind in _MEASURED_KINDS and not narrower and qk == v
    if measured and qk in _MEASURED:
        return "bf16x6"
    if setting == "tf32":
        return "tf32x3"
    fits = max(head_dims) <= 128 and capability not in range(100, 120)
    return "bf16x6" if setting == "bf16x6" and fits else "ieee"


# At most so many query rows always decode: one tile holds them with all heads of a group.
FEW_ROWS = 16
# Rows of a tile of decode's where there are more than 16; keys of a chunk for each of its rows.
_DECODE_ROWS, _CHUNKED, _PREFILL_ROWS = 64, 8, 128
# Up to so many columns: rows of a tile of prefill's, and how many tiles of decode's an SM takes in
# the time of one. By 109 chunks on an H200 (bench/results/h200-chunks.json): in the mean the kind
# that these numbers choose takes 1.009 of the faster one's time. Where SMs have more than one tile
# of prefill's, each takes longer.
_TILES, _SEVERAL = ((64, 192, 1.1), (128, _PREFILL_ROWS, 0.7), (inf, _PREFILL_ROWS, 0.3)), 1.2


def kind_for(
    sizes: Shape | Problem,
    num_sms: int,
    fp8: bool = False,
    packs: bool = False,
    sparsity: Sparsity | None = None,
) -> tuple[Kind, str]:
    """Decode or prefill for these lengths, with the reason in words.

    At most FEW_ROWS query rows always decode. More rows may be a chunk of a prompt over a long
    cache. Prefill's tiles are then few, so SMs are idle, or mostly empty. Decode packs a group's
    heads into its tiles and splits the keys over all SMs, but multiplies at a lower rate. It is
    chosen where it is expected to be faster. packs: two heads of a group share a tile of prefill's
    that either would half fill (Hopper's, in 16 bits). sparsity: of a mask, whose blocks of fewer
    rows than a tile's fill one with the heads of a group.
    """
    q_len, group = sizes.q_len, sizes.Hq // sizes.Hkv
    if fp8:
        return "prefill", "fp8 has no decode template"
    if q_len <= FEW_ROWS:
        return "decode", f"q_len {q_len} is at most {FEW_ROWS}"
    if sparsity is not None and sparsity.q_block < FEW_ROWS and not sparsity.per_head:
        why = f"the mask has blocks of few rows ({sparsity.q_block}), whose heads share a tile"
        return "decode", why
    if sizes.kv_len >= _CHUNKED * max(q_len, _PREFILL_ROWS):
        columns = _columns(sizes)
        rows, able = next(each[1:] for each in _TILES if columns <= each[0])
        tiles = sizes.B * sizes.Hq * ceil(q_len / rows)
        if packs and group % 2 == 0 and 2 * q_len <= _PREFILL_ROWS:
            tiles //= 2
        waves = ceil(tiles / num_sms)
        able *= num_sms * waves * (_SEVERAL if waves > 1 else 1)
        if sizes.B * sizes.Hkv * ceil(q_len * group / _DECODE_ROWS) < able:
            return "decode", f"{tiles} prefill tiles would be empty or leave SMs of {num_sms} idle"
    return "prefill", f"q_len {q_len} fills prefill tiles"


def _columns(sizes: Shape | Problem) -> float:
    """The mean number of columns of a key and of a value."""
    if isinstance(sizes, Problem):
        return (sizes.structure.head_dim_qk + sizes.structure.head_dim_v) / 2
    return (sizes.D + sizes.Dv) / 2
