"""flexattn.bench and flexattn.tune: what the verbs do, for the tensors of a call."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask

from flexattn.cli.bench import Benched, RowInputs, print_rows, print_would_time, race_call
from flexattn.cli.selection import users
from flexattn.cli.terminal import say
from flexattn.cli.tune import outcome_line, run_tuning
from flexattn.frontend.attention import PLANLESS, route_of
from flexattn.frontend.call import make_call
from flexattn.frontend.plan import plan
from flexattn.kernels.base.family import Effort
from flexattn.kernels.choose.registry import family_of
from flexattn.measure.task import Task
from flexattn.mods.expr import ScoreMod
from flexattn.records.store import Store
from flexattn.runtime.launch import Lists
from flexattn.tuning.evaluator import method_for
from flexattn.tuning.workload import policy_for
from flexattn.verify.oracle import moved


def bench(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    score_mod: ScoreMod | None = None,
    block_mask: BlockMask | None = None,
    scale: float | None = None,
    *,
    sinks: Tensor | None = None,
    rivals: bool = True,
    rounds: int = 20,
) -> Benched | None:
    """Time a call beside torch's compiled flex_attention and other libraries, and print a table.

    It times the forward on the GPU of the tensors, as `flexattn bench` does. If no kernel of this
    library runs the call, as on CPU tensors, it prints what a GPU would time.

    Args:
        query: [B, Hq, L, E], as of `flex_attention`.
        key: [B, Hkv, S, E].
        value: [B, Hkv, S, Ev].
        score_mod: changes a score.
        block_mask: of `create_block_mask`.
        scale: of the scores; 1/sqrt(E) by default.
        sinks: [Hq], a logit of each head.
        rivals: False times flexattn alone, with its config and with the default config.
        rounds: of the race.

    Returns:
        The medians in microseconds (`us`), each rival's time over ours (`ratio`, above 1 if
        flexattn is faster) and the accuracy gate's verdict (`passed`); None if nothing was timed.

    Raises:
        FlexAttnError: for arguments that `flex_attention` refuses.

    Example::

        flexattn.bench(q, k, v, score_mod=softcap, block_mask=mask)
    """
    x = _inputs(query, key, value, score_mod, block_mask, scale, sinks)
    if isinstance(x, str):
        print_would_time([x], False, rivals)
        return None
    done = race_call(x, rounds, 5.0, "compiled" if rivals else "none", rivals)
    print_rows([done])
    return done


def tune(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    score_mod: ScoreMod | None = None,
    block_mask: BlockMask | None = None,
    scale: float | None = None,
    *,
    sinks: Tensor | None = None,
    effort: Effort = "quick",
    seconds: float | None = None,
    again: bool = False,
) -> dict[str, Any] | None:
    """Find the fastest config of a call's forward, keep its record, and print it to be copied.

    It searches on the first GPU of the tensors' kind, as `flexattn tune` does. Later processes
    use the record by themselves; pass the printed `kernel_options` to use the config at once. If
    no kernel of this library runs the call, as on CPU tensors, it prints what a GPU would do.

    Args:
        query: [B, Hq, L, E], as of `flex_attention`.
        key: [B, Hkv, S, E].
        value: [B, Hkv, S, Ev].
        score_mod: changes a score.
        block_mask: of `create_block_mask`.
        scale: of the scores; 1/sqrt(E) by default.
        sinks: [Hq], a logit of each head.
        effort: "quick" ends within ten seconds; "full" and "exhaustive" search more.
        seconds: of measuring, at most.
        again: tune it again if it has a record.

    Returns:
        The winner as `kernel_options`, as far as there are options for its numbers; None if
        nothing was tuned.

    Raises:
        FlexAttnError: for arguments that `flex_attention` refuses.

    Example::

        options = flexattn.tune(q, k, v, block_mask=mask)
        out = flex_attention(q, k, v, block_mask=mask, kernel_options=options)
    """
    x, store = _inputs(query, key, value, score_mod, block_mask, scale, sinks), Store(users())
    if isinstance(x, str):
        say(
            f"no kernel runs this call here, so nothing was tuned: {x}. On a GPU it times "
            f"configs, judges results, prints the winner's options, and keeps them in {store.root}"
        )
        return None
    (outcome,) = run_tuning([x.task], store, method_for(effort, seconds), 0, again, None).outcomes
    say(outcome_line(outcome))
    if outcome.answer is None:
        return None
    config = outcome.answer.config
    options = family_of(config).options_of(config)
    say(f"kernel_options={options}")
    return options


def _inputs(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    score_mod: ScoreMod | None,
    block_mask: BlockMask | None,
    scale: float | None,
    sinks: Tensor | None,
) -> RowInputs | str:
    """A call for a race or a tuning; its title if no kernel of ours runs it."""
    sizes = f"q {[*q.shape]} k {[*k.shape]} {str(q.dtype).removeprefix('torch.')}"
    with torch.no_grad():
        call = make_call(q, k, v, score_mod, block_mask, scale, True, False, None, None, sinks)
        if route_of(call)[0] in PLANLESS:
            return sizes
        choice = plan(call).launch.choice
    problem, device, lists = choice.problem, choice.device, None
    if (mask := call.block_mask) is not None:
        lists = Lists.of(mask).to(torch.device("cpu"))
    policy = policy_for(problem.structure.kind, device)
    mods = moved(call.score, "cpu"), moved(call.mask, "cpu")
    task = Task(sizes, problem, device, policy, call.scale, *mods, lists)
    return RowInputs(task, call.q, call.k, call.v, call.sinks, score_mod, mask)
