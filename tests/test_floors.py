"""The structure of the package: which folder may import which, and the rules that every file keeps.

FLOORS is the plan of the house. A folder (a "room") imports only from rooms on lower floors. The same plan is a picture
in docs/concepts/architecture.md, and the docstring of each room's `__init__.py` names the rooms that it imports.
"""

import ast
import functools
import itertools
import re
from collections.abc import Iterator
from pathlib import Path

import jaxshard

FLOORS = {
    8: ("__main__", "__init__", "commands"),
    7: ("plan", "hf", "profile", "generation"),
    6: ("checks", "checkpoint", "reshard"),
    5: ("training",),
    4: ("engines", "models", "data"),
    3: ("adapt", "layers", "optim", "compiler"),
    2: ("proofs", "hlo", "schedules", "distributed", "cost", "storage"),
    1: ("core",),
}

PACKAGE = Path(jaxshard.__file__).parent
ARCHITECTURE = PACKAGE.parent / "docs" / "concepts" / "architecture.md"
FLOOR_OF = {room: floor for floor, rooms in FLOORS.items() for room in rooms}
FOLDERS = [room for room in FLOOR_OF if not room.startswith("__")]
FILES = sorted(PACKAGE.rglob("*.py"))

MAX_FLOORS = 8
MAX_FUNCTION_LINES = 80
MAX_PARAMETERS = 12

# What other libraries do not document, and the only file that may use it. A module stands for everything in it.
UNDOCUMENTED = {
    "jax._src": "core/compat.py",
    "jax.interpreters": "core/compat.py",
    "jax.experimental.compilation_cache": "core/compat.py",
    "jaxlib": "compiler/child.py",
    "flax.core.apply": "adapt/compat.py",
    "flax.core.meta": "adapt/compat.py",
    "flax.nnx.graph": "adapt/compat.py",
    "flax.nnx.statelib": "adapt/compat.py",
    "flax.nnx.variablelib": "adapt/compat.py",
    "orbax.checkpoint.experimental": "checkpoint/compat.py",
    "orbax.checkpoint.type_handlers.ArrayHandler": "checkpoint/compat.py",
    "orbax.checkpoint.type_handlers.get_json_tspec_write": "checkpoint/compat.py",
    "tensorstore.ocdbt": "checkpoint/compat.py",
    "qwix._src": "adapt/qwix_compat.py",
}
COMPAT_FILES = set(UNDOCUMENTED.values())

# Documented by the standard library in spite of their underscore: NamedTuple's methods, `os._exit` and the like.
DOCUMENTED_NAMES = {"_asdict", "_fields", "_make", "_replace", "_exit", "_current_frames"}


# Floors


def test_there_are_at_most_eight_floors_and_every_folder_is_on_one():
    assert len(FLOORS) <= MAX_FLOORS
    folders = {path.parent.name for path in PACKAGE.glob("*/__init__.py")}
    assert set(FOLDERS) == folders


def test_imports_between_rooms_go_to_lower_floors():
    upward = [
        f"{shown(path)} imports {module}"
        for path in FILES
        for module in imported_modules(path)
        if room_of_module(module) != room_of(path) and FLOOR_OF[room_of_module(module)] >= FLOOR_OF[room_of(path)]
    ]
    assert not upward, "\n".join(upward)


def test_each_room_says_which_rooms_it_imports():
    wrong = []
    for room in FOLDERS:
        said = rooms_said(room)
        files = (PACKAGE / room).rglob("*.py")
        imported = {room_of_module(module) for path in files for module in imported_modules(path)} - {room}
        if said != imported:
            wrong.append(f"jaxshard/{room}/__init__.py says {sorted(said)}, its files import {sorted(imported)}")
    assert not wrong, "\n".join(wrong)


def test_no_files_import_each_other_in_a_circle():
    graph = {module_name(path): set(imported_modules(path)) - {module_name(path)} for path in FILES}
    while graph:
        free = {module for module, targets in graph.items() if not targets & graph.keys()}
        if not free:
            break
        graph = {module: targets for module, targets in graph.items() if module not in free}
    assert sorted(graph) == []  # what stays is in a circle, or imports one


def test_files_of_the_package_import_files_never_the_package_itself():
    offenders = [
        shown(path)
        for path in FILES
        if path != PACKAGE / "__init__.py"
        for node in nodes_of(path)
        if (isinstance(node, ast.ImportFrom) and node.module == "jaxshard")
        or (isinstance(node, ast.Import) and any(alias.name == "jaxshard" for alias in node.names))
    ]
    assert not offenders, "\n".join(offenders)


def test_the_picture_in_the_architecture_page_shows_these_floors():
    picture = re.search(r"## The floors\n.*?```text\n(.*?)```", ARCHITECTURE.read_text(), re.DOTALL)
    assert picture is not None
    rows = [row.split("|")[0].split() for row in picture[1].splitlines() if row[:1].isdigit()]
    assert {int(number): tuple(name.rstrip("/") for name in names) for number, *names in rows} == FLOORS


# Files


def test_the_root_holds_folders_and_three_files():
    files = {path.name for path in PACKAGE.iterdir() if path.is_file()}
    assert files == {"__init__.py", "__main__.py", "py.typed"}


def test_no_file_or_folder_begins_with_an_underscore():
    names = {path.name for path in PACKAGE.rglob("*") if path.suffix in ("", ".py")}
    names -= {"__init__.py", "__main__.py", "__pycache__"}
    assert [name for name in sorted(names) if name.startswith("_")] == []


# What belongs to other libraries


def test_what_libraries_do_not_document_is_used_by_one_file_for_each_of_them():
    offenders = [
        f"{shown(path)} imports {module}"
        for path in FILES
        for module in external_imports(path)
        for name, owner in UNDOCUMENTED.items()
        if is_below(module, name) and inside(path) != owner
    ]
    hidden = [
        f"{shown(path)} imports {module}"
        for path in FILES
        if inside(path) not in COMPAT_FILES
        for module in external_imports(path)
        if any(is_private(part) for part in module.split("."))
    ]
    assert not offenders + hidden, "\n".join(offenders + hidden)


def test_private_attributes_are_touched_by_their_own_object_alone():
    offenders = [
        f"{shown(path)}:{node.lineno} {ast.unparse(node)}"
        for path in FILES
        if inside(path) not in COMPAT_FILES
        for node in nodes_of(path)
        if isinstance(node, ast.Attribute)
        and is_private(node.attr)
        and not (isinstance(node.value, ast.Name) and node.value.id in ("self", "cls"))
    ]
    assert not offenders, "\n".join(offenders)


# The public names


def test_the_two_lists_of_public_names_agree():
    checked = {}
    for node in type_checking_block(tree_of(PACKAGE / "__init__.py")):
        assert isinstance(node, ast.ImportFrom) and node.module
        for alias in node.names:
            assert alias.asname == alias.name, f"{alias.name}: `import x as x` makes a name public for type checkers"
            checked[alias.name] = node.module
    parents = {name: module.rpartition(".")[0] for name, module in jaxshard._SUBMODULES.items()}
    assert checked == jaxshard._MODULE_OF | parents
    assert jaxshard.__all__ == sorted(checked)
    assert [name for name in jaxshard.__all__ if not hasattr(jaxshard, name)] == []


# Functions and their docstrings


def test_docstrings_begin_with_a_plain_sentence():
    wrong = []
    for path in FILES:
        for name, node, is_method in public_definitions(tree_of(path)):
            docstring = ast.get_docstring(node)
            if docstring is None and is_method:
                continue  # the name and the class say it
            first = (docstring or "").split("\n")[0]
            if not first.endswith(".") or first.split(" ")[0] in ("What", "Whether", "How"):
                wrong.append(f"{shown(path)}:{node.lineno} {name}: {first or 'no docstring'}")
    assert not wrong, "\n".join(wrong)


MANY_PARAMETERS = ("fit", "attention", "llama", "moe", "gemma")
"""Functions that users call with a choice of many words: a model has one for every size."""


def test_functions_are_short_and_take_few_parameters():
    wrong = []
    for path in FILES:
        for node in nodes_of(path):
            if isinstance(node, ast.FunctionDef) and node.name not in MANY_PARAMETERS:
                lines, parameters = code_lines(path, node), len(all_parameters(node))
                if lines > MAX_FUNCTION_LINES or parameters > MAX_PARAMETERS:
                    wrong.append(f"{shown(path)}:{node.lineno} {node.name}: {lines} lines, {parameters} parameters")
    assert not wrong, "\n".join(wrong)


# Reading the package


@functools.cache
def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


@functools.cache
def nodes_of(path: Path) -> list[ast.AST]:
    return list(ast.walk(tree_of(path)))


@functools.cache
def lines_of(path: Path) -> list[str]:
    return path.read_text(encoding="utf-8").splitlines()


def inside(path: Path) -> str:
    """The path of a file inside the package, such as core/mesh.py."""
    return path.relative_to(PACKAGE).as_posix()


def shown(path: Path) -> str:
    return f"jaxshard/{inside(path)}"


def module_name(path: Path) -> str:
    """The dotted name by which a file is imported."""
    parts = ("jaxshard", *path.relative_to(PACKAGE).with_suffix("").parts)
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def room_of(path: Path) -> str:
    """The folder at the root of the package in which a file lies; the file `__main__` starts the commands."""
    room = path.relative_to(PACKAGE).with_suffix("").parts[0]
    return "commands" if room == "__main__" else room


def room_of_module(module: str) -> str:
    return module.split(".")[1] if "." in module else "__init__"


MODULES = {module_name(path) for path in FILES}


@functools.cache
def imported_modules(path: Path) -> list[str]:
    """The files of this package that a file imports, anywhere in it: inside functions and for type checkers too."""
    return sorted(MODULES.intersection(all_imports(path)))


@functools.cache
def external_imports(path: Path) -> list[str]:
    """The modules, and names in modules, of other libraries that a file imports or reaches by dots from a module."""
    found = {module for module in all_imports(path) if not is_below(module, "jaxshard")}
    aliases = dict(module_aliases(path))
    for node in nodes_of(path):
        if isinstance(node, ast.Attribute):
            root, *rest = parts_of(node)
            if root in aliases:
                found.add(".".join([aliases[root], *rest]))
    return sorted(found)


def parts_of(node: ast.expr) -> list[str]:
    """The names in `a.b.c`; of anything but names and dots an empty name first."""
    if isinstance(node, ast.Attribute):
        return [*parts_of(node.value), node.attr]
    return [node.id if isinstance(node, ast.Name) else ""]


def all_imports(path: Path) -> Iterator[str]:
    """Every module that a file imports; `from a import b` gives a.b where that is a module of ours, else both."""
    for node in nodes_of(path):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0 and node.module, f"{shown(path)}: a relative import"
            names = {f"{node.module}.{alias.name}" for alias in node.names}
            yield from names if names <= MODULES else {node.module, *names}


def module_aliases(path: Path) -> Iterator[tuple[str, str]]:
    """(name in the file, what it stands for) of everything imported from other libraries."""
    for node in nodes_of(path):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield (alias.asname, alias.name) if alias.asname else (alias.name.split(".")[0],) * 2
        elif isinstance(node, ast.ImportFrom) and node.module and not is_below(node.module, "jaxshard"):
            for alias in node.names:
                yield alias.asname or alias.name, f"{node.module}.{alias.name}"


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__") and name not in DOCUMENTED_NAMES


def is_below(module: str, parent: str) -> bool:
    return module == parent or module.startswith(f"{parent}.")


def rooms_said(room: str) -> set[str]:
    """The rooms in the sentence "Imports `core/` and `adapt/`." of a room's docstring."""
    docstring = ast.get_docstring(tree_of(PACKAGE / room / "__init__.py")) or ""
    sentence = re.search(r"\bImports ([^.;]*)[.;]", docstring)
    assert sentence, f"jaxshard/{room}/__init__.py does not say which rooms it imports"
    return set(re.findall(r"`(\w+)/`", sentence[1]))


def type_checking_block(tree: ast.Module) -> list[ast.stmt]:
    (block,) = (node for node in tree.body if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING")
    return block.body


Definition = ast.FunctionDef | ast.ClassDef


def public_definitions(tree: ast.Module) -> Iterator[tuple[str, Definition, bool]]:
    """(name, node, whether it is a method) of the functions and classes of a file, without those with an underscore."""
    for node in tree.body:
        if isinstance(node, Definition) and not node.name.startswith("_"):
            yield node.name, node, False
            if isinstance(node, ast.ClassDef):
                methods = (inner for inner in node.body if isinstance(inner, ast.FunctionDef))
                yield from ((f"{node.name}.{m.name}", m, True) for m in methods if not m.name.startswith("_"))


def code_lines(path: Path, node: ast.FunctionDef) -> int:
    """The lines of a function without its docstring, comments and blank lines."""
    assert node.end_lineno is not None
    numbers = set(range(node.lineno, node.end_lineno + 1))
    for inner in ast.walk(node):
        if isinstance(inner, ast.FunctionDef | ast.ClassDef) and ast.get_docstring(inner) is not None:
            numbers -= set(range(inner.body[0].lineno, (inner.body[0].end_lineno or 0) + 1))
    lines = lines_of(path)
    texts = (lines[number - 1].strip() for number in numbers)
    return sum(1 for text in texts if text and not text.startswith("#"))


def all_parameters(node: ast.FunctionDef) -> list[ast.arg]:
    return list(itertools.chain(node.args.posonlyargs, node.args.args, node.args.kwonlyargs))
