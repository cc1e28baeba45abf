"""House rules: imports run one way, one part reads the environment, files stay short."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[2] / "flexattn"
FILES = sorted(PACKAGE.rglob("*.py"))
BASE = {"errors", "settings", "lru", "files", "closing", "printable"}

# What a part may import, with all that those may import, and BASE. A new edge is a decision.
EDGES = {
    "errors": set(),
    "printable": set(),
    "settings": {"errors", "printable"},
    "lru": set(),
    "files": {"errors"},
    "closing": set(),
    "mods": set(),
    # What AWS documents of its cores, as numbers: the device table and the space both read it.
    "neuroncore": set(),
    "device": {"mods", "neuroncore"},
    "problem": {"mods", "device"},
    "space": {"problem", "ptx"},
    # What happens to a kernel's PTX: a source says which of it, a compile does it.
    "ptx": {"errors"},
    "render": {"space", "ptx"},
    "binary": set(),
    "cuda_driver": set(),
    # A kernel's description is decoded as strictly as a record, by the same code.
    "binary_store": {"binary", "cache"},
    "source_store": {"cache"},
    "cuda_launch": {"render", "binary", "cuda_driver"},
    # What a rendered Gluon kernel imports.
    "gluon_api": set(),
    # Kernels' texts as files and as modules, whoever rendered them: it takes a name and a text.
    "codecache": set(),
    "compiler_context": set(),
    "build": {"cuda_launch", "binary_store", "compiler_context", "ptx", "codecache"},
    # Which of several configs serves, by what became of building each; kept where records are.
    "fallback": {"build", "cache", "resources"},
    # The environment of a record hashes the renderer that its config was measured with, and names
    # the driver, which torch does not always tell.
    "cache": {"space", "render", "cuda_driver"},
    # Facts of a BlockMask's lists, which a launch passes on.
    "runs": set(),
    "mask_class": {"runs"},
    # Of a cubin it asks for the size of its stack before it has it disassembled.
    "resources": {"machine_code"},
    "machine_code": {"device"},
    # Above build, for the kernel that makes a block mask; a Problem takes plain facts of the mask.
    "block_kernels": {"build"},
    "block_kinds": {"block_kernels"},
    "block_lists": {"block_kinds"},
    "lazy_mask": {"block_lists"},
    # What mods read of captured tensors, for FLEXATTN_CHECK: by their expressions, with torch.
    "read_checks": {"mods", "dense_blocks", "descales"},
    "masks": {"lazy_mask", "read_checks"},
    "visual": {"block_kinds"},
    # Names alone: what torch's lowering reads, which torch changes more often than we our options.
    "option_names": set(),
    "options": {"space", "option_names"},
    "checks": {"problem", "descales"},
    "dispatch": {"cache", "build", "options", "source_store", "fallback"},
    # A leaf, like sinks: factors of each head, which a launch, its checks and the oracle read.
    "descales": set(),
    "narrow_values": {"build"},
    # Keys are left out where the kernels that find them build.
    "reach": {"fallback"},
    "counters": set(),
    "launch": {"dispatch", "runs", "descales", "narrow_values", "reach", "counters"},
    "training": set(),
    "sinks": set(),
    "rounding": {"problem"},
    "dense_blocks": set(),
    "reference": {"sinks", "descales", "rounding", "dense_blocks"},
    # A candidate is launched by what serves users, so that what is timed is what will run.
    "measure": {"launch", "reference", "serving"},
    # What a kernel takes and whose code it shares is known before it is timed.
    # It makes a workload's BlockMasks, and checks its numbers as a call's are checked.
    "tune": {"measure", "cache", "resources", "machine_code", "masks", "mask_class", "checks"},
    # DESIGN.md has neuron below space, render and build, "used by their target alone". It stands
    # above measure and tune instead, since what they need of NKI is data and lies below them
    # (neuroncore, space/nki.py, render/nki), while what is left is the place of a device: it takes
    # a Task, interprets, simulates or measures its kernels, judges them by measure's oracle and
    # hands the tuner's loop a Measurer. Below tune it could do none of that, and nothing of
    # NVIDIA's path would gain: space, render, build, measure and tune import nothing of it.
    "neuron": {"measure", "cache", "tune"},
    "serving": {"dispatch", "checks"},
    "plan": {"launch", "checks", "mask_class"},
    "graph_break": set(),
    "transforms": {"errors"},
    # Knows plans, that it need not make one again.
    "repeat": {"plan", "read_checks"},
    "attention": {"repeat", "reference", "training", "graph_break", "transforms"},
    "explain": {"attention"},
    "catalogue": {"masks"},
    "presets": {"catalogue"},
    # It compiles what dispatch would choose, for the tasks of a workload.
    "binaries": {"tune"},
    # Reads records and nothing of how they were made; its page is a template like a kernel's.
    "report": {"cache", "measure", "render"},
    "cli": {
        "report", "binaries", "explain", "catalogue", "presets", "measure", "resources", "serving",
        "tune", "neuron",
    },
    # Another library's attention, made of calls that any user could write.
    "integrations": {"attention", "masks", "catalogue"},
    # It reads a workload as the tuner does, when it is called.
    "warm": {"tune"},
    # A document mask of the catalogue's, with nested tensors packed for it.
    "nested": {"catalogue"},
    "__init__": {"explain", "catalogue", "serving", "visual", "warm", "nested"},
    "__main__": {"cli"},
}  # fmt: skip
REFERENCE_USERS = {"reference", "measure", "attention"}

# At the top level these would make a plain `import flexattn` need them; the place named may do it.
OPTIONAL = {
    "typer": "cli/",
    "rich": "cli/",
    "sympy": "space/stated/",  # what is stated there is printed as Python: no call imports it
    "numpy": "render/interpreted_math.py",  # loaded for Triton's interpreter, which needs numpy
    **dict.fromkeys(
        (
            "matplotlib",
            "optuna",
            "sqlalchemy",
            "psycopg",
            "scipy",
            "hypothesis",
            "pytest",
            "pydantic",
            "transformers",
        ),
        "nowhere",
    ),
}


def part(path: Path) -> str:
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def reachable(name: str) -> set[str]:
    below = set(EDGES[name])
    for other in EDGES[name]:
        below |= reachable(other)
    return below


def imports(tree: ast.AST, path: Path) -> Iterator[str]:
    """Dotted names that the tree imports, made absolute; `from a import b` gives a.b."""
    package = ("flexattn", *path.relative_to(PACKAGE).parent.parts)
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else ()
            source = ".".join([*base, *filter(None, [node.module])])
            yield from (f"{source}.{alias.name}" for alias in node.names)


def imported_parts(path: Path) -> set[str]:
    names = imports(ast.parse(path.read_text()), path)
    parts = {
        dotted[1] for name in names if (dotted := name.split("."))[0] == "flexattn" and dotted[1:]
    }
    return {
        name for name in parts if (PACKAGE / name).is_dir() or (PACKAGE / f"{name}.py").exists()
    }


def at_import(node: ast.AST) -> Iterator[ast.stmt]:
    """Imports that run with the module: not in a function, not for the type checker."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)):
            continue
        if isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test):
            continue
        if isinstance(child, (ast.Import, ast.ImportFrom)):
            yield child
        yield from at_import(child)


def each_file(test):
    return pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(PACKAGE)))(test)


@each_file
def test_imports_run_one_way(path):
    name = part(path)
    assert name in EDGES, f"{name} is a new part: say in EDGES what it may import"
    allowed = reachable(name) | {name} | (BASE if name not in BASE else set())
    if name not in REFERENCE_USERS:
        allowed -= {"reference"}
    assert imported_parts(path) <= allowed, f"{name} may import {sorted(allowed)} alone"


@each_file
def test_environment_is_read_in_settings_alone(path):
    tree = ast.parse(path.read_text())
    names = {n.attr for n in ast.walk(tree) if isinstance(n, ast.Attribute)}
    names |= {n.rpartition(".")[2] for n in imports(tree, path)}
    assert part(path) == "settings" or not names & {"environ", "environb", "getenv", "putenv"}


@each_file
def test_optional_packages_are_imported_where_they_are_used(path):
    where = path.relative_to(PACKAGE).as_posix()
    for node in at_import(ast.parse(path.read_text())):
        for name in imports(node, path):
            home = OPTIONAL.get(name.split(".")[0], "")
            allowed = where.startswith(home) and not (home and where == "cli/__init__.py")
            assert allowed, f"import {name} where it is used"


@each_file
def test_files_stay_short(path):
    assert len(path.read_text().splitlines()) <= 400, "split it by idea"


def test_the_table_has_no_cycle():
    for name in EDGES:
        assert name not in reachable(name)


@pytest.mark.parametrize(
    ("line", "where", "expected"),
    [
        ("from .errors import X", "space/triton.py", "flexattn.space.errors.X"),
        ("from ..build import Kernel", "space/triton.py", "flexattn.build.Kernel"),
        ("from flexattn import cli", "masks.py", "flexattn.cli"),
        ("def f():\n    import flexattn.cache", "masks.py", "flexattn.cache"),
    ],
)
def test_the_reader_of_imports_sees(line, where, expected):
    assert list(imports(ast.parse(line), PACKAGE / where)) == [expected]
