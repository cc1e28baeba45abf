"""Call: the arguments of one flex_attention, as given and as `admit` makes them for kernels.

`facts` are what decides its launch. `admit` checks the arguments once, torch's transforms among
them (which tensors have values that a kernel can read), and has the mods traced.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from types import NoneType
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.autograd import forward_ad
from torch.fx.experimental.proxy_tensor import get_proxy_mode
from torch.nn import Parameter
from torch.nn.attention.flex_attention import AuxRequest, BlockMask

from flexattn.block_mask.lists import decided
from flexattn.errors import (
    ConfigError,
    InputError,
    InputTypeError,
    NoKernelError,
    UnsupportedError,
)
from flexattn.kernels.choose import options
from flexattn.kernels.choose.options import NONE, Options
from flexattn.mods import Bound, Identity, bind, look
from flexattn.mods.expr import ScoreMod
from flexattn.problem import DTYPES, FP8, checks, rounded
from flexattn.problem.facts import FEW_ROWS, facts_of, setting_of
from flexattn.problem.inputs import NO_DESCALES, Descales, Dropout
from flexattn.problem.mask_lists import keeps_all
from flexattn.problem.read_checks import check_reads
from flexattn.settings import current, say_once
from flexattn.util.locks import Lru

# flex_attention's names for `Call.tensors`.
TENSORS = ("query", "key", "value", "sinks", "q_descale", "k_descale", "v_descale")

# A tensor of another class may mean more than its memory: its calls are not remembered.
PLAIN = frozenset((Tensor, Parameter, NoneType))
_FLOAT32 = torch.float32
_PRE_DISPATCH: Any = torch._C.DispatchKey.PreDispatch
_is_included: Callable[[Any], bool] = torch._C._dispatch_tls_is_dispatch_key_included


class Call(NamedTuple):
    """flex_attention's arguments, in its order: as given, then as `admit` makes them for kernels.

    Every argument that a launch depends on has an entry in `facts`, the key of launches; nothing
    of the call that stands in no key goes into the Problem. score, mask, options, dropout: what
    `admit` found the mods, kernel_options and dropout_p to be.
    looks: the Identity of score_mod and of mask_mod by which `look` found them, from which `watch`
    makes their guards. beyond: why no kernel computes the mods, which are not bound then.
    A tuple, which is made in a fifth of the time of a frozen dataclass.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    score_mod: ScoreMod | None = None
    block_mask: BlockMask | None = None
    scale: Any = None  # a float, once admitted
    enable_gqa: bool = False
    return_lse: bool = False
    kernel_options: Mapping[str, Any] | None = None
    return_aux: AuxRequest | None = None
    sinks: Tensor | None = None
    q_descale: Tensor | None = None
    k_descale: Tensor | None = None
    v_descale: Tensor | None = None
    dropout_p: Any = 0.0
    score: Bound | None = None
    mask: Bound | None = None
    options: Options = NONE
    looks: tuple[Identity | None, Identity | None] = (None, None)
    dropout: Dropout | None = None
    beyond: NoKernelError | None = None

    def facts(self) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
        """The facts that all calls of one launch share, in two parts.

        The second has what a cache that grows changes: the numbers of keys and values, and their
        strides. It is empty for more than FEW_ROWS query rows, whose first part has all. The mods,
        the mask and the scale are in neither: each key tells those in its own way.
        """
        (
            q, k, v, _, _, _, enable_gqa, return_lse, options, return_aux, sinks, q_descale,
            k_descale, v_descale, dropout_p, _, _, _, _, _, _,
        ) = self  # fmt: skip
        descales = None
        if not q_descale is k_descale is v_descale is None:
            descales = facts_of(q_descale), facts_of(k_descale), facts_of(v_descale)
        rows = q.shape
        # facts_of, written out: three calls of it take 3 % of the host time of a repeated call.
        rest = (
            type(q), rows, q.stride(), q.dtype, q.get_device(), q.data_ptr() % 16, q.is_neg(),
            type(k), k.dtype, k.get_device(), k.data_ptr() % 16, k.is_neg(),
            type(v), v.dtype, v.get_device(), v.data_ptr() % 16, v.is_neg(),
            enable_gqa, return_lse, repr(options) if options else None, return_aux,
            None if sinks is None else facts_of(sinks), descales,
            q.dtype is _FLOAT32 and setting_of(q), dropout_p != 0.0,
        )  # fmt: skip
        lie = k.shape, v.shape, k.stride(), v.stride()
        if rows[2] > FEW_ROWS:
            return (rest, lie), ()
        (kb, kh, keys, kd), (vb, vh, values, vd), (k0, k1, k2, k3), (v0, v1, v2, v3) = lie
        # The last bits of strides say if kernels can read whole lines. Another power of two may
        # have another record.
        whole = (k0 | k1 | k2 | v0 | v1 | v2) & 15
        shared = rest, (kb, kh, kd, k3, vb, vh, vd, v3, whole, rounded(keys))
        # Of numbers alone, which are compared and looked up in a quarter of the time of `lie`.
        return shared, (keys, values, k0, k1, k2, v0, v1, v2)

    @property
    def tensors(self) -> tuple[Tensor | None, ...]:
        """The tensor arguments, in the order of TENSORS."""
        return (
            self.q, self.k, self.v, self.sinks, self.q_descale, self.k_descale, self.v_descale,
        )  # fmt: skip

    @property
    def descales(self) -> Descales:
        """The factors of fp8 inputs."""
        if self.q_descale is self.k_descale is self.v_descale is None:
            return NO_DESCALES
        return Descales(self.q_descale, self.k_descale, self.v_descale)

    @property
    def statistics(self) -> AuxRequest:
        """The outputs that are asked for beside the attention itself."""
        return self.return_aux or AuxRequest(lse=self.return_lse)

    def check_reads(self) -> None:
        """That its mods read inside their tensors; raises CaptureError."""
        check_reads(
            (*self.q.shape[:3], self.k.shape[2]), self.q.device, self.score_mod, self.score,
            self.block_mask, self.mask,
        )  # fmt: skip


# The fields of a call that was not admitted, behind the arguments.
NOT_ADMITTED = tuple(Call._field_defaults.values())[-6:]


def identity(bound: Bound | None) -> object:
    """The facts of a mod that decide a launch: its expression, and which inner strides are 1."""
    if bound is None:
        return None
    return (bound.mod.fingerprint, *[t.stride()[-1:] == (1,) for t in bound.tensors])


# kernel_options that were read before, by the setting that they leave out and their text.
_options: Lru[tuple[bool, str], options.Options] = Lru(256)


def make_call(*arguments: Any, **more: Any) -> Call:
    """flex_attention's arguments as a call that was admitted; raises what `admit` raises."""
    return admit(Call(*arguments, **more))


def admit(given: Call) -> Call:
    """The call as kernels take it; raises InputError, ConfigError and ModError for what none can.

    Tensors have autocast's dtype under autocast, and no negative bit (`is_neg`); sinks are
    contiguous, the scale is a float, and a mask that keeps everything is None. No seed is drawn.
    A mod that plain torch may compute, and no kernel, is left to `route_of`.
    """
    if torch._C._is_tracing():
        raise UnsupportedError(
            "called under torch.jit.trace",
            "TorchScript holds no kernel of ours, and would keep torch's part of a call alone",
            "use torch.compile",
        )
    asked = current().batch_invariant, repr(given.kernel_options)
    chosen = _options.get(asked)
    if chosen is None:
        chosen = options.parse(given.kernel_options)
        _options.put(asked, chosen)
    _check_statistics(given)
    q, k, v, sinks = given.q, given.k, given.v, given.sinks
    checks.check_dense(q, k, v)
    check_transforms((q, k, v, sinks))
    checks.check_devices(q)
    # Kernels read memory as it is; a conjugate's imaginary part is the negative of its own.
    q, k, v = autocast(q.resolve_neg(), k.resolve_neg(), v.resolve_neg())
    checks.check_tensors(q, k, v, given.enable_gqa)
    if chosen.fp8_weights != "exact" and q.dtype not in FP8:
        raise ConfigError(
            f"FP8_WEIGHTS={chosen.fp8_weights!r} with a query of {q.dtype}",
            "weights are rounded to e4m3 where query, key and value are float8_e4m3fn",
            "leave it out, or pass them in eight bits",
        )
    if sinks is not None:
        checks.check_sinks(sinks, q)
        sinks = sinks.contiguous().resolve_neg()
    descales = given.descales
    if descales is not NO_DESCALES:
        checks.check_descales(descales, q, k)
        descales = Descales(*(None if x is None else x.resolve_neg() for x in descales))
    scale = checks.check_scale(given.scale, q.shape[-1])
    dropout_p = checks.check_dropout(given.dropout_p)
    dropout = Dropout.of(dropout_p)
    if dropout is None:  # a share that rounds to 0 is none, to those that remember launches, too
        dropout_p = 0.0
    block_mask = given.block_mask
    score = mask = look_at_score = look_at_mask = None
    beyond: NoKernelError | None = None
    if given.score_mod is not None:
        try:
            score, look_at_score = bind_on(given.score_mod, "score", q)
        except NoKernelError as why:
            beyond = why
    if isinstance(block_mask, BlockMask) and keeps_all(block_mask):
        block_mask = None
    if block_mask is not None:
        checks.check_block_mask(block_mask, q, k)
        try:
            mask, look_at_mask = bind_on(block_mask.mask_mod, "mask", q)
            _say_shared(block_mask, mask, q)
        except NoKernelError as why:
            beyond = why
    return Call(
        q, k, v, given.score_mod, block_mask, scale, given.enable_gqa, given.return_lse,
        given.kernel_options, given.return_aux, sinks, *descales, dropout_p, score, mask, chosen,
        (look_at_score, look_at_mask), dropout, beyond,
    )  # fmt: skip


def _say_shared(block_mask: BlockMask, mask: Bound, q: Tensor) -> None:
    """Say it once where create_block_mask decided for index 0 what the mask has for each.

    Lists that somebody made otherwise may hold what every head keeps, and serve all of them.
    """
    if not decided(block_mask):
        return
    given = block_mask.kv_num_blocks.shape
    shared = [
        (name, argument, size)
        for name, argument, made, size in zip("bh", "BH", given, q.shape, strict=False)
        if made == 1 < size
    ]
    if not shared:
        return
    for name, argument, size in shared:
        if name in mask.mod.expr.variables:
            say_once(
                f"block_mask: its mask_mod reads {name}, and its blocks were decided for {name}=0 "
                f"alone, so {name}=1 and further ones may lack keys that they keep, or keep keys "
                f"that they do not: pass {argument}={size} to create_block_mask"
            )


def _check_statistics(given: Call) -> None:
    asked = given.return_aux
    if given.return_lse and asked is not None:
        raise InputError("return_lse and return_aux", "only one of them may be given")
    if not isinstance(asked, (AuxRequest, NoneType)):
        raise InputTypeError(
            f"return_aux is {asked!r:.80}", "it is an AuxRequest", "pass AuxRequest(lse=True)"
        )


def autocast(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Under autocast the inputs take its dtype, as torch's flex_attention lets them."""
    where = q.device.type
    if not torch.is_autocast_enabled(where) or q.dtype not in DTYPES:
        return q, k, v
    dtype = torch.get_autocast_dtype(where)
    # Eight bits are converted where they are multiplied, to the same numbers.
    k, v = (x if x.dtype in FP8 else x.to(dtype) for x in (k, v))
    return q.to(dtype), k, v


def bind_on(fn: Callable[..., Any] | Bound, kind: str, q: Tensor) -> tuple[Bound, Identity | None]:
    """Trace a mod; what it captures is on q's device, with negative bits resolved.

    A plug-in reads it on the host, wherever it is.
    """
    bound, identity = look(fn, kind)
    if q.device.type in checks.PLUGINS:
        return bound, identity
    if any(x.device != q.device or x.is_neg() for x in bound.tensors):
        bind(fn, kind, q.device)  # says what is wrong, unless it is a number on the CPU
    return on_device(bound, q), identity


def on_device(bound: Bound, q: Tensor) -> Bound:
    """The bound mod, its tensors on q's device with negative bits resolved."""
    where = q.device
    if all([x.device == where and not x.is_neg() for x in bound.tensors]):
        return bound
    return bound._replace(tensors=tuple(x.to(where).resolve_neg() for x in bound.tensors))


functorch: Any = torch._C._functorch


def check_transforms(tensors: Sequence[Tensor | None]) -> None:
    """That tensors have values to read: raises UnsupportedError for those of torch.vmap, export.

    What torch.func differentiates is no matter of this check: plain torch can.
    """
    if is_traced() or any(isinstance(x, FakeTensor) for x in tensors):
        raise UnsupportedError(
            "flex_attention is traced, as by torch.export or make_fx",
            "flexattn launches kernels of its own, which no graph of torch's holds",
            "export with strict=True, which leaves torch's own flex_attention in the program; "
            "torch.compile takes the call as it is",
        )
    for tensor in tensors:
        while isinstance(tensor, Tensor) and functorch.is_functorch_wrapped_tensor(tensor):
            if functorch.is_batchedtensor(tensor):
                raise UnsupportedError(
                    "flex_attention is called under torch.vmap",
                    "a kernel reads tensors as they lie in memory, and has one batch dimension",
                    "fold the mapped dimension into the batch: x.flatten(0, 1)",
                )
            tensor = functorch.get_unwrapped(tensor)


def check_memory(tensors: Iterable[Tensor | None]) -> None:
    """That kernels can read tensors where they lie: raises UnsupportedError for wrappers.

    A DTensor, and whatever else is made of other tensors, has the address 0, or none to ask for.
    """
    for tensor in tensors:
        if not isinstance(tensor, Tensor) or type(tensor) is Tensor or not tensor.numel():
            continue
        try:
            address = tensor.data_ptr()
        except RuntimeError:
            address = 0
        if not address:
            raise UnsupportedError(
                f"a {type(tensor).__name__} of shape {list(tensor.shape)}",
                "a kernel reads a tensor's own memory, and this one stands for others'",
                "pass the tensor that it wraps, as to_local() of a DTensor",
            )


def functionals(tensors: Iterable[Tensor | None]) -> str:
    """Words for a tensor that torch.func differentiates, or nothing."""
    for tensor in tensors:
        if tensor is not None and functorch.is_functorch_wrapped_tensor(tensor):
            return "a tensor of this call"
    return ""


def in_forward_mode() -> bool:
    """True if tensors may have tangents, as within torch.func.jvp."""
    return forward_ad._current_level >= 0


def is_traced() -> bool:
    """True while a graph is made of what runs, as by make_fx."""
    # get_proxy_mode alone takes half a microsecond, of the ten of a repeated call.
    modes = torch._C._len_torch_dispatch_stack() or _is_included(_PRE_DISPATCH)
    return bool(modes) and get_proxy_mode() is not None


def tangent(named: Iterable[tuple[str, Tensor | None]]) -> str:
    """The name of the first tensor with a tangent (torch.func.jvp, dual numbers), or nothing."""
    if not in_forward_mode():
        return ""
    for name, tensor in named:
        if tensor is not None and forward_ad.unpack_dual(tensor).tangent is not None:
            return name
    return ""


def check_kernels_drop(call: Call) -> None:
    """Raises UnsupportedError if no kernel can drop weights of a call."""
    got = f"dropout_p={call.dropout_p} on {call.q.device}"
    why = ""
    if call.q.dtype in FP8:
        why = "dropout is for training, and float8 has no backward"
    elif call.options.kind == "decode":
        why = "kernel_options ask for split-KV decode, and prefill alone drops weights"
    if why:
        raise UnsupportedError(got, why, "leave one of them out")


def without_torch(call: Call, why: str) -> UnsupportedError:
    """The error of a call that only torch's flex_attention could differentiate."""
    return UnsupportedError(
        f"dropout_p={call.dropout_p}, and {why}",
        "torch's flex_attention, which would differentiate the call, has no dropout",
        "pass dropout_p=0.0, or write the score_mod without it",
    )


def drawn(call: Call) -> Call:
    """The call with a seed, where it drops weights: once, when it is run."""
    if call.dropout is None:
        return call
    return call._replace(dropout=call.dropout.drawn(call.q.device))
