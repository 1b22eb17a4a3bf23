"""The structure of the package: imports point down only, no file is where everything meets, and imports are cheap."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Container, Iterator
from functools import cache
from pathlib import Path

import pytest

import streamline

PACKAGE = Path(streamline.__file__).parent
TESTS = Path(__file__).parent

MOST_TEST_NAME_CHARS = 80

MOST_ATTRIBUTES, MOST_PARAMETERS = 12, 8
"""Of a class, set by itself; of a function. With more, it does too much."""

PUBLIC_PARAMETERS = {"pipeline.map", "readers.stream_http"}
"""Functions that users call, with a keyword for each option."""

MOST = {
    "modules": 288,
    "lines": 69_900,
    "classes of more than 12 attributes": 10,
    "classes of more than 15 attributes": 0,
    "functions of more than 8 parameters": 1,
    "attributes of another object set, in 10,000 lines": 54,
    "strings multiplied by a condition": 0,
}
"""What the house may have at the most: the numbers of today, which may only fall."""

FLOORS: list[set[str]] = [
    {"errors"},
    {"core"},
    {"observe"},
    {"sharding"},
    {"io"},
    {"sources"},
    {"transforms", "merge"},
    {"transfer"},
    {"plan"},
    {"backends"},
    {"snapshot"},
    {"runtime"},
    {"training"},
    {"pipeline"},
    {"readers", "constructors"},
    {"streamline"},
    {"demo"},
    {"cli"},
    {"__main__"},
    {"testing"},
]
"""From the ground up; a folder is one name. "streamline" is the package's own `__init__`: what users import."""

LONGEST_CHAIN = {"imports that run": 14, "all imports": 20}
"""Modules of the library, each of which imports the next; without `__init__`, `__main__`, cli, demo and testing. The
first leaves out what stands under TYPE_CHECKING."""

UNLISTED = {
    "typing_of_api.py", "backends/hosts/echo_client.py", "backends/hosts/echo_host.py", "backends/hosts/kit.py",
    "backends/hosts/shared_rank.py", "backends/remote/recording_trainer.py", "snapshot/functions.py",
    "transfer/arrays.py",
}  # fmt: skip
"""Helpers of one or two test modules beside them."""

MOST_FOLDERS, MOST_LOOSE = 14, 6
"""At the first level, dunder files aside."""

HEAVY = ("numpy", "torch", "jax", "ray", "pyarrow", "aiohttp", "hypothesis", "pytest")
"""What `import streamline` must not import."""

FLOOR_OF = {name: number for number, names in enumerate(FLOORS) for name in names}


@cache
def modules() -> dict[str, Path]:
    """Return every module of the package by its dotted name: "transforms.map", and "streamline" for its `__init__`."""
    found = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        name = ".".join(path.relative_to(PACKAGE).with_suffix("").parts)
        found["streamline" if name == "__init__" else name.removesuffix(".__init__")] = path
    return found


@cache
def tree(name: str) -> ast.Module:
    return ast.parse(modules()[name].read_text(encoding="utf-8"))


def imports(module: ast.Module, known: Container[str], *, running: bool = False) -> Iterator[tuple[str, int]]:
    """Yield what a module imports of the package, with the line, wherever in the module it stands.

    Args:
      running: leave out what stands under TYPE_CHECKING.
    """
    ifs = (node for node in module.body if running and isinstance(node, ast.If))
    typed = {child for node in ifs if "TYPE_CHECKING" in ast.unparse(node.test) for child in ast.walk(node)}
    for node in ast.walk(module):
        if node in typed:
            continue
        if isinstance(node, ast.Import):
            targets = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"line {node.lineno}: imports are absolute, so that this test can read them"
            targets = [f"{node.module}.{alias.name}" for alias in node.names]
        else:
            continue
        for target in targets:
            if (found := _module_of(target, known)) is not None:
                yield found, node.lineno


@cache
def imported(name: str, *, running: bool = False) -> tuple[tuple[str, int], ...]:
    """Return what a module of the package imports of it, with the lines, as `imports` finds it."""
    return tuple(imports(tree(name), modules(), running=running))


def _module_of(target: str, known: Container[str]) -> str | None:
    """Return the module that "streamline.flow.Flow" or "streamline.flow" means; None if it isn't the package's."""
    head, _, rest = target.partition(".")
    if head != "streamline":
        return None
    while rest and rest not in known:
        rest = rest.rpartition(".")[0]
    return rest or "streamline"


def place(module: str) -> str:
    """Return the name by which a module stands on a floor: its folder's, or its own."""
    return module.partition(".")[0]


def wrong_imports(name: str) -> list[str]:
    found, here = [], place(name)
    for target, line in imported(name):
        there = place(target)
        assert here in FLOOR_OF, f"{name}: say in FLOORS on which floor {here} is"
        if here != there and FLOOR_OF[there] >= FLOOR_OF[here]:
            found.append(
                f"{name}, line {line}, imports {target}: {here} is on floor {FLOOR_OF[here]}, {there} on floor "
                f"{FLOOR_OF[there]}, and imports point down only"
            )
    return found


def test_the_page_on_the_house_names_every_module_once_from_the_top_down() -> None:
    page = (Path(__file__).parent.parent / "docs" / "architecture.md").read_text(encoding="utf-8")
    table = page.partition("| module | what it is |")[2].partition("## ")[0]
    first_cells = [row.split("|")[1] for row in table.splitlines() if row.startswith("| ")]
    named = [name for cell in first_cells for name in re.findall(r"`(\w+)(?:\.py|/)`", cell)]
    named = ["streamline" if name == "__init__" else name for name in named]
    assert sorted(named) == sorted(FLOOR_OF), f"missing or twice: {set(FLOOR_OF).symmetric_difference(named)}"
    floors = [FLOOR_OF[name] for name in named]
    assert floors == sorted(floors, reverse=True)


def test_every_module_has_its_floor() -> None:
    lost = {place(name) for name in modules()} - set(FLOOR_OF)
    assert not lost, f"say in FLOORS of {Path(__file__).name} where these belong: {sorted(lost)}"
    gone = set(FLOOR_OF) - {place(name) for name in modules()}
    assert not gone, f"these are on a floor, but not in the package: {sorted(gone)}"
    assert sum(map(len, FLOORS)) == len(FLOOR_OF), "a name stands on two floors"


def test_the_first_level_reads_like_a_page() -> None:
    first = {name.partition(".")[0] for name in modules()} - {"streamline", "__main__"}
    folders = {name for name in first if (PACKAGE / name).is_dir()}
    assert len(folders) <= MOST_FOLDERS, sorted(folders)
    assert len(first - folders) <= MOST_LOOSE, sorted(first - folders)


def test_a_class_name_occurs_once() -> None:
    """So that a search and a traceback lead to one place."""
    places: dict[str, list[str]] = {}
    for name, path in modules().items():
        for found in re.findall(r"^class _*(\w+)", path.read_text(encoding="utf-8"), re.MULTILINE):
            places.setdefault(found, []).append(name)
    assert {name: where for name, where in places.items() if len(where) > 1} == {}


def test_imports_point_down_only() -> None:
    wrong = [said for name in modules() for said in wrong_imports(name)]
    assert not wrong, "\n".join(wrong)


def test_modules_of_one_folder_do_not_import_each_other_in_a_circle() -> None:
    edges = {name: {to for to, _ in imported(name) if place(to) == place(name) != to} for name in modules()}
    while leaves := [name for name, to in edges.items() if not to & set(edges)]:
        for name in leaves:
            del edges[name]
    assert not edges, f"in a circle, or above one: {sorted(edges)}"


@pytest.mark.parametrize("counted", LONGEST_CHAIN)
def test_chains_of_imports_are_short(counted: str) -> None:
    apart = {"streamline", "__main__", "cli", "demo"}
    library = {
        name
        for name, path in modules().items()
        if path.name != "__init__.py" and name not in apart and place(name) != "testing"
    }

    @cache
    def longest_from(name: str) -> tuple[str, ...]:
        found = {to for to, _ in imported(name, running=counted == "imports that run")}
        return (name, *max((longest_from(to) for to in sorted(found & library - {name})), key=len, default=()))

    chain = max((longest_from(name) for name in sorted(library)), key=len)
    assert len(chain) <= LONGEST_CHAIN[counted], (
        f"{len(chain)} modules: {' > '.join(chain)}. Import what only annotations need under TYPE_CHECKING, or join two"
    )


def test_the_reader_of_imports_sees_them_all() -> None:
    """Inside functions, under TYPE_CHECKING, modules and names out of modules."""
    text = """
if TYPE_CHECKING:
    import streamline.flow
def f():
    from streamline.transforms import map
    from streamline.flow import Flow
    from streamline import Snapshot
    import numpy
"""
    known = {name: Path() for name in ("streamline", "flow", "transforms", "transforms.map")}
    assert [name for name, _ in imports(ast.parse(text), known)] == ["flow", "transforms.map", "flow", "streamline"]
    running = [name for name, _ in imports(ast.parse(text), known, running=True)]
    assert running == ["transforms.map", "flow", "streamline"]


def test_the_house_grows_in_nothing_that_makes_it_hard_to_read() -> None:
    found = {what: len(where) for what, where in large().items()}
    lines = sum(len(path.read_text(encoding="utf-8").splitlines()) for path in modules().values())
    found["attributes of another object set, in 10,000 lines"] = round(
        10_000 * found.pop("attributes of another object set") / lines
    )
    found |= {"modules": len(modules()), "lines": lines}
    for what, number in found.items():
        print(f"{number:8,} {what}, of {MOST[what]:,}")  # pytest -s
    more = {what: large().get(what, number) for what, number in found.items() if number > MOST[what]}
    assert not more, more
    assert set(found) == set(MOST)


@cache
def large() -> dict[str, list[str]]:
    """Return where there is what `MOST` counts."""
    found: dict[str, list[str]] = {what: [] for what in MOST if what not in ("modules", "lines")}
    found["attributes of another object set"] = found.pop("attributes of another object set, in 10,000 lines")
    for name in modules():
        for node in ast.walk(tree(name)):
            place = f"{name}:{getattr(node, 'lineno', 0)}"
            if isinstance(node, ast.ClassDef):
                count = len({target.attr for target in attributes_set(node) if owner(target) == "self"})
                for most in (MOST_ATTRIBUTES, 15):
                    if count > most:
                        found[f"classes of more than {most} attributes"].append(f"{place} {node.name}: {count}")
            elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                arguments = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
                count = len([each for each in arguments if each.arg not in ("self", "cls")])
                if count > MOST_PARAMETERS and f"{name}.{node.name}" not in PUBLIC_PARAMETERS:
                    found[f"functions of more than {MOST_PARAMETERS} parameters"].append(
                        f"{place} {node.name}: {count}"
                    )
            elif isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mult):
                sides = [node.left, node.right]
                text = any(isinstance(side, ast.JoinedStr) or isinstance(literal(side), str) for side in sides)
                if text and any(is_condition(side) for side in sides):
                    found["strings multiplied by a condition"].append(place)
        found["attributes of another object set"] += [
            f"{name}:{target.lineno}" for target in attributes_set(tree(name)) if owner(target) not in ("self", "cls")
        ]
    return found


def attributes_set(node: ast.AST) -> Iterator[ast.Attribute]:
    """Yield what is assigned to, of any object's attributes, in a piece of code."""
    for each in ast.walk(node):
        if isinstance(each, ast.Attribute) and isinstance(each.ctx, ast.Store):
            yield each


def owner(target: ast.Attribute) -> str:
    return target.value.id if isinstance(target.value, ast.Name) else ""


def literal(node: ast.expr) -> object:
    return node.value if isinstance(node, ast.Constant) else None


def is_condition(node: ast.expr) -> bool:
    return isinstance(node, ast.Compare | ast.BoolOp) or ast.unparse(node).startswith(("not ", "bool("))


def test_no_test_module_imports_another_and_test_names_are_short() -> None:
    """What two test modules share stands in a helper module; a name is a sentence that a report shows in one line."""
    wrong = []
    for path in sorted(TESTS.rglob("*.py")):
        text = path.read_text(encoding="utf-8")
        names = re.findall(r"^ *(?:async )?def (test_\w+)", text, re.MULTILINE)
        wrong += [f"{path}: {name}" for name in names if len(name) > MOST_TEST_NAME_CHARS]
        imports = re.findall(r"^ *(?:from|import) tests\b.*\btest_.*", text, re.MULTILINE)
        wrong += [f"{path}: {line}" for line in imports if path.stem not in line]  # a program of its own
    assert not wrong, "\n".join(wrong)


def test_the_index_of_helpers_names_what_is_there() -> None:
    named = set(re.findall(r"`([\w/]+\.py|[\w/]+/)`", (TESTS / "README.md").read_text(encoding="utf-8")))
    assert {name for name in named if not (TESTS / name).exists()} == set()
    programs = {
        path.name
        for path in TESTS.rglob("*.py")
        if re.search(r"^(test_|own_)|_run\.py$|^(__init__|conftest)", path.name)
    }
    helpers = {str(path.relative_to(TESTS)) for path in TESTS.rglob("*.py") if path.name not in programs}
    folders = tuple(name for name in named if name.endswith("/"))
    assert {name for name in helpers - named if not name.startswith(folders)} <= UNLISTED


def test_importing_it_imports_nothing_heavy() -> None:
    program = (
        "import sys, time\n"
        "began = time.perf_counter()\n"
        "import streamline.constructors, streamline.backends.processes\n"
        "print(f'import streamline: {1000 * (time.perf_counter() - began):.0f} ms')\n"
        f"print('heavy:', *(name for name in {HEAVY!r} if name in sys.modules))\n"
    )
    took, heavy = printed(program)
    print(took)  # for information: `pytest -s`
    assert heavy == "heavy:"


def test_numpy_is_imported_by_what_uses_it_and_by_no_import_of_a_module() -> None:
    """All take it from `core.lazy_numpy`, but for the demo and the law kit, which need it for all that they do."""
    taken = [name for name in modules() if name not in ("demo", "core.lazy_numpy") and place(name) != "testing"]
    wrong = [
        f"{name}, line {node.lineno}"
        for name in taken
        for node in ast.walk(tree(name))
        if (isinstance(node, ast.Import) and any(alias.name == "numpy" for alias in node.names))
        or (
            isinstance(node, ast.ImportFrom)
            and (node.module or "").partition(".")[0] == "numpy"
            and node.col_offset == 0
        )
    ]
    assert not wrong, f"import np from streamline.core.lazy_numpy: {wrong}"


def test_a_command_imports_what_it_needs_itself() -> None:
    heavy = ("rich", "anyio", *HEAVY)
    program = f"import sys, streamline.cli\nprint('heavy:', *(name for name in {heavy!r} if name in sys.modules))\n"
    assert printed(program) == ["heavy:"]


def printed(program: str) -> list[str]:
    """Return the lines that a program prints in an interpreter of its own."""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=200)
    return done.stdout.splitlines()


def test_what_users_import_is_where_it_is_said_to_be() -> None:
    """For type checkers and editors the imports stand in the text; a program imports each name when it uses it."""
    guarded = {
        alias.name: node.module
        for node in ast.walk(tree("streamline"))
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("streamline")
        for alias in node.names
    }
    assert {name: f"{guarded.pop(name)}.{name}" for name in streamline._SUBMODULES} == streamline._SUBMODULES
    assert guarded == streamline._MODULES
    assert set(streamline.__all__) == {*guarded, *streamline._SUBMODULES, "__version__"}
    assert set(streamline.__all__) <= set(dir(streamline))
    assert all(getattr(streamline, name).__name__ == name for name in guarded)
    with pytest.raises(AttributeError, match="module 'streamline' has no attribute 'from_item'"):
        streamline.from_item  # type: ignore[attr-defined]  # noqa: B018


def test_importing_it_imports_none_of_it_yet() -> None:
    program = (
        "import streamline, sys; print(*(name for name in sys.modules if name.startswith(('streamline', 'numpy'))))\n"
        "print(streamline.errors.__name__)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=200)
    assert done.stdout.split() == ["streamline", "streamline.errors"]


ASKED_MOST = 5
"""Places that ask for a concrete stage, source or merge by its class; what must be known of one, it says itself, by a
member of its base class."""


@cache
def concrete_kinds() -> dict[str, ast.ClassDef]:
    """Return the package's stages and sources by name."""
    classes = [node for name in modules() for node in tree(name).body if isinstance(node, ast.ClassDef)]
    found: dict[str, ast.ClassDef] = {}
    while more := {
        node.name: node
        for node in classes
        if node.name not in found
        and {ast.unparse(base).partition("[")[0] for base in node.bases} & {"Stage", "Source", *found}
    }:
        found |= more
    return found


def asked_outside() -> Iterator[tuple[str, str]]:
    """Yield the modules, but for those of tests, in which `isinstance` stands outside the kind's own folder."""
    kinds = {*concrete_kinds(), "Strict", "BestEffort"}
    for name in modules():
        if place(name) in ("sources", "transforms", "merge", "testing") or name == "transfer.stage":
            continue
        for node in ast.walk(tree(name)):
            if isinstance(node, ast.Call) and ast.unparse(node.func) in ("isinstance", "issubclass"):
                asked = {part.id for part in ast.walk(node.args[1]) if isinstance(part, ast.Name)} & kinds
                if asked:
                    yield name, f"{name}, line {node.lineno}, asks for {', '.join(sorted(asked))}"


def test_what_must_be_known_of_a_stage_or_source_it_says_itself() -> None:
    assert {"Take", "Unbatch", "Transfer", "Live", "Mix", "Script"} <= concrete_kinds().keys()
    asked = list(asked_outside())
    assert len(asked) <= ASKED_MOST, "\n".join(f"{name}: {line}" for name, line in asked)


def test_each_kind_of_stage_and_source_is_written_down() -> None:
    """It is saved in fingerprints: derived from a class's name, it would change with that."""
    unnamed = {name for name, node in concrete_kinds().items() if not any(map(_names_kind, node.body))}
    assert unnamed == {"Several", "Cut", "IteratedSource", "DatasetSource"}  # abstract


def _names_kind(part: ast.stmt) -> bool:
    if isinstance(part, ast.AnnAssign):
        return ast.unparse(part.target) == "kind"
    return isinstance(part, ast.FunctionDef) and part.name == "kind"
