"""Options to a server's parts: the model, its attention, the scheduler, the engine."""

from dataclasses import asdict, dataclass, field

import torch

from examples.serving.attention import CASCADE_FROM, PlanAttention
from examples.serving.engine import Engine, Watch
from examples.serving.model import SHAPES, Model
from examples.serving.request import Limits
from examples.serving.runner import Attention, Runner
from examples.serving.scheduler import Scheduler
from examples.serving.stand_in import TorchAttention
from flexattn.errors import InputError

DTYPES = {name: getattr(torch, name) for name in ("bfloat16", "float16", "float32", "float64")}


@dataclass(frozen=True)
class Options:
    """What a server is made of.

    attention: "plan", the library's, or "torch", the stand-in for a CPU. cascade_from: keys that a
    cascade must save a step, 0 for no cascades. batch_invariant: an answer has the same bits
    whatever runs beside it; it needs a dtype of 16 bits, and there are no cascades.
    """

    model: str = "tiny"
    attention: str = "plan"
    device: str = "cuda"
    dtype: str = "bfloat16"
    batch_invariant: bool = False
    cascade_from: int = CASCADE_FROM
    limits: Limits = field(default_factory=Limits)

    @property
    def cascades(self) -> bool:
        """Whether a step may have a cascade."""
        return bool(self.cascade_from) and self.attention == "plan" and not self.batch_invariant

    @property
    def exact(self) -> bool:
        """Whether the same prompt has the same tokens in any batch.

        In float64 two tokens of a random model are never as near to each other as its rounding.
        """
        return self.batch_invariant or self.dtype == "float64"


def build_model(options: Options) -> Model:
    """The model, random and the same each time. Raises InputError for a name that is not known."""
    if options.model not in SHAPES:
        raise InputError(f"model {options.model!r}", f"models are {', '.join(SHAPES)}")
    return Model(
        SHAPES[options.model], options.limits.longest, torch.device(options.device),
        DTYPES[options.dtype],
    )  # fmt: skip


def build(options: Options, watch: Watch | None = None) -> Engine:
    """An engine that is ready to run: plans are made and graphs captured here, and not later."""
    for name, value in asdict(options.limits).items():
        if value < 1:
            raise InputError(f"{name}={value}", "each limit of a server is at least 1")
    if options.attention == "torch" and options.batch_invariant:
        raise InputError(
            "batch_invariant=True with attention in plain torch",
            "the library's plans alone are batch-invariant",
            "float64 gives the same tokens in any batch",
        )
    model, limits = build_model(options), options.limits
    about = (model.shape, limits, model.device, model.dtype)
    attention: Attention
    if options.attention == "torch":
        attention = TorchAttention(*about)
    else:
        attention = PlanAttention(
            *about, batch_invariant=options.batch_invariant, cascades=options.cascades
        )
    runner = Runner(
        model, attention, limits, padded=options.batch_invariant, cascades=options.cascades
    )
    scheduler = Scheduler(limits, options.cascade_from if options.cascades else 0)
    return Engine(scheduler, runner, watch)
