"""`flexattn render`: what a mod becomes, for any device, without one."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from typing import Any

from rich.console import Console
from rich.syntax import Syntax

from flexattn.cli import options as asking
from flexattn.cli.offline import compiled, problem_called, word_value
from flexattn.cli.options import LENGTH, PARTS, choice
from flexattn.cli.selection import device_of, say_assumed
from flexattn.cli.terminal import indented, say, say_json, say_text
from flexattn.device import Device
from flexattn.errors import InputError
from flexattn.frontend.explain import mod_text
from flexattn.kernels.base.config import describe
from flexattn.kernels.base.features import decays
from flexattn.kernels.choose import options
from flexattn.mods.expr import in_a_line
from flexattn.mods.rules import ONE, REWRITES
from flexattn.problem import Problem, Structure
from flexattn.runtime import build
from flexattn.runtime.candidates import Choice, candidates_of
from flexattn.runtime.codecache import text_file
from flexattn.runtime.dispatch import told
from flexattn.runtime.outcomes import memory
from flexattn.runtime.resources import resources
from flexattn.tuning.tuner import Plugin, plugin_of

# What a term is called, and where it is computed.
_PLACES = {
    "core": "for each score",
    "inner": "times the score, inside: one number before the loop",
    "outer": "times that, outside: one number before the loop",
    "row": "for each row, after the loop",
    "row_slope": "for each row, after the loop, times q_idx - q_start",
    "column": "for each key of a tile, where q_idx is q_start, the tile's first row",
    "diagonal": "for each diagonal of a tile",
    "rest": "for each score",
    "keep": "a mask, in tiles that it cuts",
}

Rewrite = dict[str, str]


@dataclass(frozen=True)
class Rendered:
    """Everything render can say; what was not args for is None."""

    problem: str
    device: str
    config: str
    origin: str
    path: str
    combine_path: str | None
    score_mod: str | None = None
    mask_mod: str | None = None
    source: str | None = None
    ptx: str | None = None
    resources: dict[str, Any] | None = None
    rewrites: list[Rewrite] | None = None


def run(args: asking.Render) -> None:
    """Run `flexattn render`."""
    named = [each.partition("=") for each in args.kernel_option or ()]
    for name, sign, _ in named:
        if not sign:
            raise InputError(f"--option {name}", "it is NAME=VALUE", f"write {name}=64, say")
    chosen = options.parse({name: word_value(value) for name, _, value in named})
    found_q = None if args.kind == "decode" else args.q_len
    keys = next((n for n in (args.kv_len, found_q) if n is not None), LENGTH)
    problem = problem_called(args, keys)
    if problem.structure.score is not None:
        spelled = replace(problem.structure, rules_off=chosen.rules_off, tanh=chosen.tanh)
        problem = replace(problem, structure=spelled)
    shown = args.show or (("expr",) if args.explain else ("expr", "source"))
    wanted = {choice("--show", each, PARTS) for each in shown}
    target = device_of(args.device, neuron=True, compiled=True)
    say_assumed(args.device, target)
    if (plugin := plugin_of(target.backend)) is not None:
        forced_here = chosen != options.NONE
        found = _rendered_nki(plugin, problem, target, forced_here, args.explain, wanted)
    else:
        found = _rendered(problem, target, chosen, wanted)
        if args.explain:
            found = replace(found, rewrites=rewrites(problem.structure))
    if args.as_json:
        say_json(asdict(found))
    else:
        _print(found)


def _expected(problem: Problem, device: Device, chosen: options.Options) -> Choice:
    """The candidate that serves a call, as far as is known without compiling anything."""
    candidates = list(candidates_of(problem, device, chosen))
    for candidate in candidates:
        (attempt,) = told([candidate], device, memory())
        outcome = attempt.outcome
        if outcome is None or candidate.measured or (outcome.built and not outcome.starved):
            return candidate.choice()
    return candidates[0].choice()


def _rendered(
    problem: Problem, device: Device, chosen: options.Options, wanted: set[str]
) -> Rendered:
    ptx, taken = None, None
    if wanted & {"ptx", "resources"}:
        choice, kernel = compiled(problem, device, chosen)
        if "ptx" in wanted:
            ptx = _assembly(choice, kernel, device)
        if "resources" in wanted:
            taken = asdict(resources(kernel, device))
    else:
        choice = _expected(problem, device, chosen)
    structure, expr = problem.structure, "expr" in wanted
    return Rendered(
        problem.describe(),
        f"{device.name} ({device.arch})",
        describe(choice.config),
        choice.origin,
        str(build.path_of(choice.source)),
        None if choice.combine is None else str(build.path_of(choice.combine)),
        mod_text(structure.score) if expr else None,
        mod_text(structure.mask) if expr else None,
        choice.source.text if "source" in wanted else None,
        ptx,
        taken,
    )


def rewrites(structure: Structure) -> list[Rewrite]:
    """Rules, then terms: {"what": "rule" or "term", "name", "says", "to"}; none without a mod."""
    terms = structure.terms
    if terms is None:
        return []
    found = [
        {"what": "rule", "name": step.rule, "says": REWRITES[step.rule], "to": step.to}
        for step in terms.steps
    ]
    if terms.rise is not None and decays(structure):
        text = in_a_line(terms.rise.step)
        found.append(
            {"what": "rule", "name": "decay_skip", "says": REWRITES["decay_skip"], "to": text}
        )
    for name, place in _PLACES.items():
        expr = getattr(terms, name)
        if expr is not None and expr is not ONE:
            found.append({"what": "term", "name": name, "says": place, "to": in_a_line(expr)})
    return found


def _rendered_nki(
    plugin: Plugin,
    problem: Problem,
    device: Device,
    forced: bool,
    explain: bool,
    wanted: set[str],
) -> Rendered:
    if forced or explain or wanted & {"ptx", "resources"}:
        raise InputError(
            f"kernel options, --explain, ptx or resources for {device.name}",
            "an NKI kernel has none of Triton's options, and no compiler of it is installed",
            "--show takes expr and source",
        )
    if problem.structure.kind == "backward":
        raise InputError(f"--kind backward for {device.name}", "gradients run on GPUs")
    kernel = plugin.render_kernel(problem, device)
    structure, expr = problem.structure, "expr" in wanted
    return Rendered(
        problem.describe(),
        f"{device.name} (NKI)",
        describe(kernel.config),
        f"the first that fits; flexattn tune --device {device.name} --dry-run counts the others",
        str(kernel.path),
        None if kernel.combine is None else str(kernel.combine),
        mod_text(structure.score) if expr else None,
        mod_text(structure.mask) if expr else None,
        kernel.text if "source" in wanted else None,
    )


def _assembly(choice: Choice, kernel: Any, device: Device) -> str:
    """Write the compiler's last text, PTX or AMD's assembly, beside the source; its path."""
    kind = "amdgcn" if device.backend == "hip" else "ptx"
    stem = build.path_of(choice.source).stem
    return str(text_file(f"{stem}.{device.arch}.{kind}", kernel.asm[kind]))


def _print(found: Rendered) -> None:
    console = Console()
    for name in ("score_mod", "mask_mod"):
        if (expression := getattr(found, name)) is not None:
            say_text(indented(f"{name:<10}", expression))
    say(f"{'problem':<10}{found.problem}")
    say(f"{'device':<10}{found.device}")
    say(f"{'config':<10}{found.config}")
    say(f"{'':<10}{found.origin}")
    say(f"{'source':<10}{found.path}")
    if found.combine_path is not None:
        say(f"{'combine':<10}{found.combine_path}")
    if found.ptx is not None:
        say(f"{'assembly':<10}{found.ptx}")
    if found.resources is not None:
        text = " ".join(f"{name}={value}" for name, value in found.resources.items())
        say(f"{'resources':<10}{text}")
    for row in found.rewrites or ():
        say(f"{row['what']:<10}{row['name']}: {row['says']}")
        say(f"{'':<12}{row['to']}")
    if found.source is not None:
        say("")
        if console.is_terminal:
            console.print(Syntax(found.source, "python", background_color="default"))
        else:
            say_text(found.source, nl=False)
