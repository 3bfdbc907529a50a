"""The structure of the code: import rules, effects of imports, and where things are documented."""

import ast
import copy
import os
import re
import subprocess
import sys
import tomllib
from collections import Counter
from collections.abc import Iterator
from importlib.metadata import EntryPoint
from itertools import pairwise
from pathlib import Path

import grimp
import importlinter.configuration
import pytest
from engram_vit.commands.plugins import summarise
from importlinter.contracts.acyclic_siblings import AcyclicSiblingsContract
from importlinter.contracts.forbidden import ForbiddenContract
from importlinter.contracts.layers import LayersContract
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parents[1]
CLIENT = ROOT / "clients" / "python"
PACKAGES = [
    ROOT / "server" / "engram_server",
    ROOT / "task_store" / "engram_bundle",
    ROOT / "task_store" / "engram_store",
    ROOT / "training" / "engram_training",
    CLIENT / "engram_vit",
]
PROJECTS = [ROOT / "pyproject.toml", CLIENT / "pyproject.toml"]
MODULES = sorted(file for package in PACKAGES for file in package.rglob("*.py"))

MOST_MODULES = 14  # in one directory
WEB = {"fastapi", "starlette", "uvicorn"}
OURS = {"benchmarks", "research"}
OTHERS = {"torch", "transformers", "engram_server", "engram_training"}
KINDS_OF_RULE = {
    "forbidden": ForbiddenContract,
    "layers": LayersContract,
    "acyclic_siblings": AcyclicSiblingsContract,
}


def relative(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def read_project(path: Path) -> dict:
    return tomllib.loads(path.read_text(encoding="utf-8"))


# --- import rules ---------------------------------------------------------------------------------


def test_import_rules_hold():
    linter = Path(sys.executable).with_name("lint-imports")
    done = subprocess.run(
        [linter, "--no-cache"], cwd=ROOT, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stdout + done.stderr


LINTER = read_project(ROOT / "pyproject.toml")["tool"]["importlinter"]


@pytest.fixture(scope="module")
def import_graph():
    importlinter.configuration.configure()  # the clock that its rules are timed by
    return grimp.build_graph(
        *LINTER["root_packages"],
        include_external_packages=True,
        exclude_type_checking_imports=True,
    )


def breaches(rule: dict, graph: grimp.ImportGraph) -> Iterator[list[tuple[str, str]]]:
    """Imports that a rule has to notice: of every module it names, at least once."""
    if rule["type"] == "forbidden":
        sources, targets = rule["source_modules"], rule["forbidden_modules"]
        yield from ([(source, targets[0])] for source in sources)
        yield from ([(sources[0], target)] for target in targets)
    elif rule["type"] == "layers":
        for container in rule.get("containers", [""]):
            prefix = f"{container}." if container else ""
            layers = [re.split(r"[|:]", layer) for layer in rule["layers"]]
            for upper, lower in pairwise(layers):
                for high in upper:
                    yield [(f"{prefix}{lower[0].strip()}", f"{prefix}{high.strip()}")]
    else:
        for ancestor in rule["ancestors"]:
            first, second, *_ = sorted(graph.find_children(ancestor))
            yield [(first, second), (second, first)]


@pytest.mark.parametrize("rule", LINTER["contracts"], ids=lambda rule: rule["name"])
def test_each_import_rule_notices_a_breach(rule, import_graph):
    """No rule is vacuous: broken once, in every way it speaks of, it fails."""
    kind = KINDS_OF_RULE[rule["type"]]
    # As the linter reads them from a file: switches are text.
    options = {
        name: str(value) if isinstance(value, bool) else value
        for name, value in rule.items()
        if name not in ("name", "type")
    }
    session = {name: value for name, value in LINTER.items() if name != "contracts"}
    for imports in breaches(rule, import_graph):
        graph = copy.deepcopy(import_graph)
        for importer, imported in imports:
            root = imported.partition(".")[0]
            if root in LINTER["root_packages"]:
                assert imported in graph.modules, f"{rule['name']}: there is no {imported}"
            elif imported not in graph.modules:
                graph.add_module(imported, is_squashed=True)
            assert importer in graph.modules, f"{rule['name']}: there is no {importer}"
            graph.add_import(importer=importer, imported=imported)
        checked = kind(rule["name"], session, options).check(graph, verbose=False)
        assert not checked.kept, imports


# One interpreter has imported torch, which takes seconds and knows nothing of ours; each module
# that needs it is imported in a copy.
IMPORT_IN_COPIES = """if True:
    import importlib, os, sys, torch
    for module in sys.argv[1:]:
        if os.fork() == 0:
            importlib.import_module(module)
            print(module, *sys.modules, flush=True)
            os._exit(0)
        assert os.waitstatus_to_exitcode(os.wait()[1]) == 0, module
"""
WITH_TORCH = (
    "engram_server.model",
    "engram_server.engine.engine",
    "engram_server.app",
    "engram_training",
)


def loaded_by(program: str, *arguments: str) -> dict[str, set[str]]:
    """What each module loads that the program says."""
    printed = subprocess.run(
        [sys.executable, "-c", program, *arguments],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
        timeout=120,
    ).stdout
    return {line.split()[0]: set(line.split()[1:]) for line in printed.splitlines()}


@pytest.fixture(scope="module")
def loaded_beside_torch() -> dict[str, set[str]]:
    return loaded_by(IMPORT_IN_COPIES, *WITH_TORCH)


@pytest.mark.long
@pytest.mark.parametrize(
    ("module", "forbidden"),
    [
        (
            "engram_server.model",
            WEB | OURS | {"engram_store", "engram_training", "engram_vit", "obstore"},
        ),
        (
            "engram_server.engine.engine",
            WEB | OURS | {"pydantic_settings", "engram_training", "engram_vit"},
        ),
        ("engram_server.app", OURS | {"engram_training", "engram_vit", "ray", "opentelemetry.sdk"}),
        ("engram_training", WEB | OURS | {"engram_vit"}),
    ],
)
def test_import_loads_nothing_of_other_layers(loaded_beside_torch, module, forbidden):
    loaded = loaded_beside_torch[module]
    assert module in loaded
    assert not forbidden & loaded


@pytest.mark.parametrize(
    ("module", "forbidden"),
    [
        ("engram_bundle", WEB | OURS | OTHERS | {"obstore", "engram_store", "engram_vit"}),
        ("engram_store", WEB | OURS | OTHERS | {"engram_vit"}),
        ("engram_vit", OURS | OTHERS | {"httpx", "typer", "engram_bundle", "engram_store"}),
    ],
)
def test_import_loads_neither_torch_nor_other_layers(module, forbidden):
    program = f"import sys, {module}; print('{module}', *sys.modules)"
    loaded = loaded_by(program)[module]
    assert module in loaded
    assert not forbidden & loaded


# --- what an import does --------------------------------------------------------------------------


def at_import(node: ast.AST) -> Iterator[ast.AST]:
    """Every node that runs when the module is imported: all but the bodies of functions."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef):
            for part in [*child.decorator_list, child.args]:
                yield from at_import(part)
        elif not isinstance(child, ast.Lambda):
            yield child
            yield from at_import(child)


def reads_environment(node: ast.AST) -> bool:
    match node:
        case ast.Attribute(value=ast.Name(id="os"), attr="environ" | "getenv"):
            return True
        case ast.ImportFrom(module="os", names=names):
            return any(alias.name in {"environ", "getenv"} for alias in names)
    return False


def test_import_reads_no_environment_and_does_no_work():
    found = []
    for file in MODULES:
        tree = ast.parse(file.read_text(encoding="utf-8"))
        lines = [node.lineno for node in at_import(tree) if reads_environment(node)]
        # A call whose result is not used is there for its effect.
        lines += [
            node.lineno
            for node in tree.body
            if isinstance(node, ast.Expr) and isinstance(node.value, ast.Call)
        ]
        found += [f"{relative(file)}:{line}" for line in lines]
    assert not found


def test_directories_stay_small():
    counts = Counter(file.parent for file in MODULES if file.name != "__init__.py")
    assert {relative(folder): n for folder, n in counts.items() if n > MOST_MODULES} == {}


# --- what is written down -------------------------------------------------------------------------


def project_files() -> list[Path]:
    """The files that are, or would be, under version control; without git, all but what we make."""
    if (ROOT / ".git").exists():
        listing = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
        done = subprocess.run(listing, cwd=ROOT, capture_output=True, text=True, timeout=60)
        if done.returncode == 0:
            return [ROOT / name for name in done.stdout.split("\0") if name]
    made = re.compile(r"\.git|\..*_cache|\.hypothesis|__pycache__|build|dist|.*\.egg-info")
    found = []
    for folder, folders, files in os.walk(ROOT):
        folders[:] = [
            name
            for name in folders
            if not made.fullmatch(name) and not Path(folder, name, "pyvenv.cfg").exists()
        ]
        found += [Path(folder, name) for name in files]
    return found


def test_no_file_names_a_folder_of_one_machine():
    pattern = re.compile(rb"/(?:work|farm|root)/")
    offenders = []
    for file in project_files():
        if not file.is_file() or file.is_symlink():
            continue
        content = file.read_bytes()
        if b"\0" not in content and (match := pattern.search(content)):
            line = content.count(b"\n", 0, match.start()) + 1
            offenders.append(f"{relative(file)}:{line}")
    assert not offenders


def test_every_package_is_typed_and_ships_its_marker():
    shipped: dict[str, list[str]] = {}
    for project in PROJECTS:
        shipped |= read_project(project)["tool"]["setuptools"]["package-data"]
    for package in PACKAGES:
        assert (package / "py.typed").is_file(), package.name
        assert "py.typed" in shipped[package.name]


def pins() -> dict[str, Requirement]:
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    found = [Requirement(line) for line in lines if line and not line.startswith("#")]
    return {canonicalize_name(requirement.name): requirement for requirement in found}


def test_every_constraint_is_one_exact_version():
    for requirement in pins().values():
        assert [specifier.operator for specifier in requirement.specifier] == ["=="], requirement


@pytest.mark.parametrize("project", PROJECTS, ids=relative)
def test_every_dependency_is_pinned_to_a_version_it_allows(project):
    content = read_project(project)
    extras = content["project"].get("optional-dependencies", {}).values()
    named = [
        *content["build-system"]["requires"],
        *content["project"]["dependencies"],
        *(text for extra in extras for text in extra),
    ]
    pinned = pins()
    for dependency in map(Requirement, named):
        name = canonicalize_name(dependency.name)
        if name.startswith("engram-vit"):
            version = read_project(PROJECTS[0])["project"]["version"]
            assert str(dependency.specifier) == f"=={version}"
            continue
        assert name in pinned, f"{name} is not in constraints.txt"
        version = next(iter(pinned[name].specifier)).version
        assert dependency.specifier.contains(version, prereleases=True), f"{dependency}: {version}"


def declared(group: str) -> list[EntryPoint]:
    return [
        EntryPoint(name, value, group)
        for project in PROJECTS
        for name, value in read_project(project)["project"]
        .get("entry-points", {})
        .get(group, {})
        .items()
    ]


@pytest.mark.parametrize("entry_point", declared("engram.commands"), ids=lambda each: each.name)
def test_every_declared_command_exists_and_says_what_it_does(entry_point):
    assert callable(entry_point.load())
    summary = summarise(entry_point)
    assert summary
    assert not summary.startswith("unavailable")


@pytest.mark.parametrize("entry_point", declared("engram.errors"), ids=lambda each: each.name)
def test_every_declared_error_is_named_where_it_is_defined(entry_point):
    # The command line compares names, so a re-export would never match.
    error = entry_point.load()
    assert issubclass(error, Exception)
    assert f"{error.__module__}:{error.__qualname__}" == entry_point.value
