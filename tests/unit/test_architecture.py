"""House rules: imports run one way, one part reads the environment, files stay short."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from flexattn.kernels.choose.registry import ROWS
from flexattn.tuning.tuner import Plugin, plugin_of
from tests.package_files import FILES, PACKAGE, each_file

# Every part may import these.
BASE = {"errors", "settings", "util"}

# What a folder may import, with all that those may import, and BASE. A new edge is a decision.
EDGES = {
    "errors": set(),
    "settings": {"errors", "util"},
    "util": {"errors"},
    # What a rendered Gluon kernel imports.
    "gluon_api": set(),
    "mods": set(),
    "device": set(),
    "problem": {"mods"},
    "reference": {"problem"},
    "kernels": {"problem", "device"},
    # The environment of a record hashes the renderer that its config was measured with, and names
    # the driver, which torch does not always tell.
    "records": {"kernels"},
    # Outcomes and binaries are decoded as strictly as a record, by the same code.
    "runtime": {"records"},
    # A mask's blocks are classified by a kernel of their own.
    "block_mask": {"runtime"},
    "catalogue": {"mods"},
    # The catalogue has the document mask of nested tensors that were packed.
    # The tuner's gate and the check of a kernel's first launch are one rule.
    "verify": {"runtime", "reference"},
    "frontend": {"block_mask", "verify", "catalogue"},
    "serving": {"verify"},
    # A candidate is launched by what serves users, so that what is timed is what will run.
    "measure": {"serving", "verify"},
    # It makes a workload's BlockMasks.
    "tuning": {"measure", "block_mask"},
    # A plug-in: AWS Neuron's kernels, their interpreter, cost model and Measurer. What the core
    # knows of these devices is in device.neuroncore.
    "neuron": {"tuning"},
    "presets": {"catalogue"},
    # Attention of published models, as any user could write it.
    "sparse": {"frontend"},
    "deploy": {"tuning"},
    # A plug-in: it reads records and nothing of how they were made.
    "report": {"measure"},
    "cli": {"report", "deploy", "frontend", "presets"},
    # Another library's attention, made of calls that any user could write.
    "integrations": {"frontend", "serving"},
    # What users import, at the first use of it.
    "__init__": {"public", "deploy", "cli"},
    "public": {"frontend"},
    "__main__": {"cli"},
}
# On top of the package; everything else is in a folder.
LOOSE = {"__init__.py", "__main__.py", "errors.py", "settings.py", "gluon_api.py", "public.py"}
# Fronts that users and their type checkers read.
LISTED = {
    *("__init__.py", "catalogue/__init__.py", "serving/__init__.py", "sparse/__init__.py"),
}
# Folders that nothing imports but what is named: the registry's row finds the first by its name.
PLUGINS = {"neuron": set(), "report": {"cli/records.py", "cli/bench.py", "cli/demo.py"}}
REFERENCE_USERS = {"reference", "verify", "measure", "frontend", "serving"}

KERNELS = PACKAGE / "kernels"
# Folders of kernels/ that are no family: what families are made of, and what knows them all.
COMMON, CHOOSERS = {"base", "printers", "ptx"}, {"choose"}
FOLDERS = {path.name for path in KERNELS.iterdir() if path.is_dir() and path.name[0] != "_"}
FAMILIES = FOLDERS - COMMON - CHOOSERS
# What a folder of kernels/ may import of the others; the registry imports families by their names.
KERNEL_EDGES = {
    **dict.fromkeys(FAMILIES, COMMON),
    **dict.fromkeys(COMMON, COMMON),
    "choose": COMMON,
}

# At the top level these would make a plain `import flexattn` need them; the place named may do it.
OPTIONAL = {
    "typer": "cli/",
    "rich": "cli/",
    "sympy": "nowhere",  # base/room.py imports it for explain: no call does
    "numpy": "kernels/printers/interpreted_math.py",  # Triton's interpreter needs it
    # Classes of a server's, made when it loads a backend.
    "vllm": "integrations/vllm.py",
    "sglang": "integrations/sglang.py",
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
    names = imports(tree_of(path), path)
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


@cache
def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


@each_file
def test_imports_run_one_way(path):
    name = part(path)
    assert name in EDGES, f"{name} is a new part: say in EDGES what it may import"
    allowed = reachable(name) | {name} | (BASE if name not in BASE else set())
    if name not in REFERENCE_USERS:
        allowed -= {"reference"}
    assert imported_parts(path) <= allowed, f"{name} may import {sorted(allowed)} alone"


def test_every_edge_is_taken():
    """The catalogue once might have imported block_mask, and with it all below; it never did."""
    taken = {name: set() for name in EDGES}
    for path in FILES:
        taken[part(path)] |= imported_parts(path)
    assert {
        name: EDGES[name] - found for name, found in taken.items() if EDGES[name] - found
    } == {}


@pytest.mark.parametrize("plugin", PLUGINS)
def test_a_plugin_is_imported_by_nothing_else(plugin):
    users = {
        path.relative_to(PACKAGE).as_posix()
        for path in FILES
        if part(path) != plugin and plugin in imported_parts(path)
    }
    assert users == PLUGINS[plugin]


def test_the_registry_finds_the_plugin_of_a_backend():
    (row,) = (row for row in ROWS if row.plugin)
    assert row.folder in PLUGINS
    asked = {name for name in vars(Plugin) if not name.startswith("_")}
    assert asked <= set(vars(plugin_of(row.folder)))
    assert plugin_of("cuda") is None


def kernel_folders(path: Path) -> set[str]:
    """Folders of kernels/ that a file imports, or names in a string as a module to import."""
    tree = tree_of(path)
    texts = (n.value for n in ast.walk(tree) if isinstance(n, ast.Constant))
    names = [*imports(tree, path), *(text for text in texts if isinstance(text, str))]
    prefix = "flexattn.kernels."
    return {name.split(".")[2] for name in names if name.startswith(prefix)} & FOLDERS


@pytest.mark.parametrize("folder", sorted(FOLDERS))
def test_families_import_neither_one_another_nor_what_chooses_between_them(folder):
    for path in (KERNELS / folder).rglob("*.py"):
        assert kernel_folders(path) <= KERNEL_EDGES[folder] | {folder}, path.name
        assert "tuning" not in imported_parts(path), path.name


def config_classes() -> dict[str, str]:
    """Config classes of families, each with its folder, as the registry has them."""
    rows = (row for row in ROWS if not row.plugin)
    found = {name: row.folder for row in rows for name in row.configs}
    assert set(found.values()) <= FAMILIES
    return found


def asked_classes(tree: ast.AST) -> Iterator[str]:
    """Names of the classes in the second argument of each isinstance and issubclass."""
    for node in ast.walk(tree):
        if (
            isinstance(node, ast.Call)
            and isinstance(node.func, ast.Name)
            and node.func.id in ("isinstance", "issubclass")
        ):
            for name in ast.walk(node.args[1]):
                if isinstance(name, (ast.Name, ast.Attribute)):
                    yield name.id if isinstance(name, ast.Name) else name.attr


def test_only_its_family_asks_which_class_a_config_is_of():
    classes = config_classes()
    outside = [
        (str(path.relative_to(PACKAGE)), name)
        for path in FILES
        for name in asked_classes(tree_of(path))
        if name in classes and not path.is_relative_to(KERNELS / classes[name])
    ]
    assert outside == []


def test_the_reader_of_isinstance_sees_unions_and_tuples():
    line = "isinstance(a, X | m.Y) or issubclass(b, (Z,))"
    assert set(asked_classes(ast.parse(line))) == {"X", "m", "Y", "Z"}


@each_file
def test_environment_is_read_in_settings_alone(path):
    tree = tree_of(path)
    names = {n.attr for n in ast.walk(tree) if isinstance(n, ast.Attribute)}
    names |= {n.rpartition(".")[2] for n in imports(tree, path)}
    assert part(path) == "settings" or not names & {"environ", "environb", "getenv", "putenv"}


@each_file
def test_optional_packages_are_imported_where_they_are_used(path):
    where = path.relative_to(PACKAGE).as_posix()
    for node in at_import(tree_of(path)):
        for name in imports(node, path):
            home = OPTIONAL.get(name.split(".")[0], "")
            allowed = where.startswith(home) and not (home and where == "cli/__init__.py")
            assert allowed, f"import {name} where it is used"


@each_file
def test_names_are_listed_where_the_list_is_read(path):
    """Elsewhere an underscore says it: of 1,278 names in such lists 254 were wrong or unread."""
    tree = tree_of(path)
    listed = any(isinstance(n, ast.Name) and n.id == "__all__" for n in ast.walk(tree))
    assert not listed or path.relative_to(PACKAGE).as_posix() in LISTED


def test_files_stay_short():
    """Templates, tests and benches as well."""
    root = PACKAGE.parent
    for folder in ("flexattn", "templates", "tests", "bench", "examples"):
        for path in (root / folder).rglob("*"):
            if path.suffix in (".py", ".jinja", ".toml"):
                assert len(path.read_text().splitlines()) <= 500, f"{path}: split it by idea"


def test_the_table_is_short_and_has_no_cycle():
    for name in EDGES:
        assert name not in reachable(name)
    assert len(EDGES) - len(LOOSE) <= 25, "at most 25 rows for folders"
    assert len(LOOSE) <= 6, "at most six modules on top"
    assert LOOSE == {path.name for path in PACKAGE.glob("*.py")}


@pytest.mark.parametrize(
    ("line", "where", "expected"),
    [
        ("from .errors import X", "mods/trace.py", "flexattn.mods.errors.X"),
        ("from ..errors import X", "mods/trace.py", "flexattn.errors.X"),
        ("from flexattn import cli", "settings.py", "flexattn.cli"),
        ("def f():\n    import flexattn.records", "settings.py", "flexattn.records"),
    ],
)
def test_the_reader_of_imports_sees(line, where, expected):
    assert list(imports(ast.parse(line), PACKAGE / where)) == [expected]
