"""The device's part of a step: static inputs, the model, and one captured graph a form of step."""

from typing import Protocol

import torch
from torch import Tensor

from examples.serving.inputs import Inputs
from examples.serving.model import Model
from examples.serving.request import Limits, Request, Token
from examples.serving.scheduler import Step


class Attention(Protocol):
    """Writes a layer's new keys into their pages, and attends to them."""

    def attend(
        self, inputs: Inputs, layer: int, q: Tensor, k: Tensor, v: Tensor, shared: bool
    ) -> Tensor: ...


class Runner:
    """Runs steps, one at a time.

    On a GPU one graph serves every step, and a second one those with a cascade: nothing is
    compiled or allocated later. padded: every step has the rows of the largest one, as a graph
    needs it, so products have one shape, and a row's bits do not depend on how many there are.
    """

    def __init__(
        self,
        model: Model,
        attention: Attention,
        limits: Limits,
        *,
        padded: bool,
        cascades: bool,
    ) -> None:
        self.model, self._attention, self._limits = model, attention, limits
        self._inputs = Inputs(limits, model.device)
        self._padded = padded or model.device.type == "cuda"
        self._graphs: dict[bool, tuple[torch.cuda.CUDAGraph, Tensor]] = {}
        if model.device.type == "cuda":
            for shared in (False, True)[: 1 + cascades]:
                self._graphs[shared] = self._captured(shared)

    def seat(self, request: Request) -> None:
        """A request takes its place; it and its pages stay there until it ends."""
        self._inputs.seat(request)

    @torch.no_grad()
    def run(self, step: Step) -> list[Token | None]:
        """What each piece gives: a token where its last row is the last of its request."""
        used = self._inputs.fill(step)
        shared = step.shared is not None
        if shared in self._graphs:
            graph, result = self._graphs[shared]
            graph.replay()
        else:
            result = self._compute(shared, self._limits.rows if self._padded else used)
        tokens, logprobs = result.tolist()
        return [
            Token(int(tokens[p.request.slot]), logprobs[p.request.slot]) if p.wanted else None
            for p in step.pieces
        ]

    def _compute(self, shared: bool, rows: int) -> Tensor:
        """Tokens and log-probabilities [2, B] of each slot's last row, the greedy choice."""
        on = self._inputs.on

        def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return self._attention.attend(self._inputs, layer, q, k, v, shared)

        hidden = self.model.hidden(on["tokens"][:rows], on["positions"][:rows], attend)
        logprobs = self.model.logits(hidden[on["last"].long()]).log_softmax(-1)
        best = logprobs.max(-1)
        # One tensor, so that one copy brings both back; 256 tokens are exact in any dtype of it.
        return torch.stack([best.indices.to(best.values.dtype), best.values])

    @torch.no_grad()
    def _captured(self, shared: bool) -> tuple[torch.cuda.CUDAGraph, Tensor]:
        side = torch.cuda.Stream()
        # Weights and inputs are there first: what memory held before may name any page.
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            self._compute(shared, self._limits.rows)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            result = self._compute(shared, self._limits.rows)
        return graph, result
