"""Carry shipped records over to this tree's renderer, where their kernels are what they were.

    python -m bench.carry_records OLD

A record holds in the environment it was measured in, whose hash covers all that renders. OLD is a
revision in which the records are hits, as `HEAD`, or a branch before its merge. Both trees render
each record's kernel for the preset's problem that has its key; where programs, arguments and all
that is compiled with them are equal, the record moves to this tree's environment and is otherwise
as it was measured. A program may have its own names changed, one for one (bench/same_programs.py);
of one whose text differs otherwise, both are compiled, and their PTX is compared in that way.
Its winner was raced beside the static default of its time. Where that is another config in this
tree, the winner may be slower than what runs without a record, and the record does not move; one
that holds here already is named too.
Others stay, as hints, and are named: measure them again. Needs no GPU.
"""

from __future__ import annotations

import argparse
import ast
import io
import json
import os
import re
import subprocess
import sys
import tarfile
import tempfile
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

from bench.same_programs import canonical, canonical_ptx, used_by
from flexattn.device import named
from flexattn.errors import BuildError
from flexattn.kernels.base.arguments import Argument
from flexattn.kernels.base.source import Source, digest_of
from flexattn.kernels.ptx.stages import Stages
from flexattn.records.codec import decode_record, encode
from flexattn.records.layers import recorded_default, same_tiles
from flexattn.records.store import Store
from flexattn.runtime.build import compile_source

ROOT = Path(__file__).resolve().parent.parent
CHILD = Path(__file__).with_name("carry_child.py")
CARRIED, THERE = "carried over", "holds here already"
# What a kernel's arguments were named in older trees, whose launchers bind them by those names.
FORMER_ARGUMENTS = {"REACH": "DECAY_WINDOW", "num_units": "num_work_tiles"}


def main(argv: Sequence[str] | None = None) -> int:
    """Carry the records over; the status is 1 where some are left behind."""
    parser = argparse.ArgumentParser(prog="python -m bench.carry_records", description=__doc__)
    parser.add_argument("old", metavar="OLD", help="a revision in which the records are hits")
    parser.add_argument("--records", type=Path, nargs="*", metavar="DIR", help="of configs/")
    parser.add_argument("--dry", action="store_true", help="say what would be done")
    args = parser.parse_args(argv)
    roots = args.records or [path for path in sorted((ROOT / "configs").iterdir()) if _holds(path)]
    counts: Counter[str] = Counter()
    with tempfile.TemporaryDirectory() as folder:
        _extract(args.old, Path(folder))
        for root in roots:
            old, new = _rendered([Path(folder), ROOT], root.resolve())
            counts += carry(root.resolve(), old, new, dry=args.dry)
    for what, count in counts.items():
        print(f"{count:5} {what}")
    return int(bool(set(counts) - {CARRIED, THERE}))


def carry(root: Path, old: dict[str, Any], new: dict[str, Any], *, dry: bool) -> Counter[str]:
    """Move the records below a root; how many had each verdict.

    old, new: what bench.carry_child found in each tree, by the records' paths.
    """
    counts: Counter[str] = Counter()
    for name in new:
        path = root / name
        what, template = verdict(path, old.get(name, {}), new[name])
        counts[what] += 1
        if what not in (CARRIED, THERE):
            print(f"{name}: {what}")
        if what == CARRIED and not dry:
            _move(root, path, template)
    return counts


def verdict(path: Path, old: dict[str, Any], new: dict[str, Any]) -> tuple[str, str]:
    """The fate of a record, in words, and the hash of its new environment."""
    for tree, each in (("the old", old), ("this", new)):
        if "kernels" not in each:
            return f"not rendered by {tree} tree: {each.get('why', 'it is not there')}", ""
    record = decode_record(path.read_bytes())
    template = record.environment.template
    if template not in (old["template"], new["template"]):
        return "a hint in the old tree already", template
    if not same_tiles(encode(recorded_default(record)), new["default"]):
        return "another default", template
    if template == new["template"]:
        return THERE, template
    if not same(old["kernels"], new["kernels"], record.environment.device):
        return "another kernel", template
    return CARRIED, new["template"]


def programs(kernels: dict[str, Any]) -> dict[str, Any]:
    """A record's kernels by what their names leave of them, as bench.carry_child found them."""
    sources = [
        {
            **each,
            "text": canonical(each["text"], FORMER_ARGUMENTS),
            "arguments": [
                [FORMER_ARGUMENTS.get(name, name), *facts] for name, *facts in each["arguments"]
            ],
        }
        for each in kernels["sources"]
    ]
    texts = [each["text"] for each in kernels["sources"]]
    after = [ast.dump(used_by(each, texts)) for each in kernels["after"]]
    return {"sources": sources, "after": after}


def same(old: dict[str, Any], new: dict[str, Any], device: str) -> bool:
    """True if a record's kernels are the same programs, or become the same PTX on its device."""
    before, after = programs(old), programs(new)
    if before == after:
        return True
    beside = [
        (each["after"], [{**source, "text": ""} for source in each["sources"]])
        for each in (before, after)
    ]
    if beside[0] != beside[1]:
        return False
    try:
        return all(
            _ptx(one, device) == _ptx(other, device)
            for one, other in zip(old["sources"], new["sources"], strict=True)
            if one["text"] != other["text"]
        )
    except BuildError as error:
        print(error)
        return False


def _ptx(kernel: dict[str, Any], device: str) -> str:
    """A kernel's PTX without names, as bench.carry_child found the kernel."""
    warps, stages, language, registers = kernel["how"]
    passes, ptxas = kernel["stages"]
    entry = re.findall(r"^def ((?:flexattn_|kernel)\w*)\(", kernel["text"], re.MULTILINE)[-1]
    arguments = tuple(Argument(*each) for each in kernel["arguments"])
    how = Stages(tuple(passes), ptxas)
    source = Source(
        kernel["text"], "", arguments, warps, stages, language, registers, how, entry=entry
    )
    source = replace(source, hash=digest_of(source))
    return canonical_ptx(compile_source(source, named(device)).asm["ptx"])


def _move(root: Path, path: Path, template: str) -> None:
    """Write a record into its new environment; the old file, and a folder left empty, go."""
    record = decode_record(path.read_bytes())
    moved = replace(record, environment=replace(record.environment, template=template))
    if not Store(root).write(moved):
        print(f"{path}: its new place has a record already, which stays")
        return
    path.unlink()
    folder = path.parent.parent
    if not any(path.parent.iterdir()):
        path.parent.rmdir()
    for environment in (folder, Store(root).path(moved.environment, moved.key).parent.parent):
        (environment / ".lock").unlink(missing_ok=True)
    if {each.name for each in folder.iterdir()} <= {"manifest.json"}:
        (folder / "manifest.json").unlink(missing_ok=True)
        folder.rmdir()


def _holds(path: Path) -> bool:
    return path.is_dir() and any(Store(path).paths())


def _extract(revision: str, folder: Path) -> None:
    """The files of a revision, without a work tree that git would have to forget."""
    packed = subprocess.run(
        ["git", "archive", revision, "flexattn", "templates"],
        cwd=ROOT, check=True, capture_output=True,
    ).stdout  # fmt: skip
    with tarfile.open(fileobj=io.BytesIO(packed)) as archive:
        archive.extractall(folder, filter="data")


def _rendered(trees: Sequence[Path], root: Path) -> list[dict[str, Any]]:
    """The kernels that each tree renders of the records below a root, both at once."""
    source = CHILD.read_text(encoding="utf-8")

    def rendered(tree: Path) -> dict[str, Any]:
        done = subprocess.run(
            [sys.executable, "-", str(root)], cwd=tree, text=True, input=source, check=True,
            env={**os.environ, "PYTHONPATH": str(tree)}, stdout=subprocess.PIPE,
        )  # fmt: skip
        return json.loads(done.stdout.splitlines()[-1])

    with ThreadPoolExecutor() as pool:
        return list(pool.map(rendered, trees))


if __name__ == "__main__":
    sys.exit(main())
