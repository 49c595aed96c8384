"""The wheel and the source distribution: what they hold, and that the installed package trains outside the checkout."""

import ast
import json
import os
import re
import subprocess
import sys
import sysconfig
import tarfile
import tomllib
import zipfile
from email.parser import HeaderParser
from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement

import jaxshard

ROOT = Path(__file__).parents[2]
PREFIX = f"jaxshard-{jaxshard.__version__}"


def build(source: Path, out: Path, target: str) -> Path:
    """Builds a distribution with the build backend of pyproject.toml; needs no network."""
    command = [sys.executable, "-m", "hatchling", "build", "--directory", str(out), "--target", target]
    subprocess.run(command, cwd=source, check=True, capture_output=True)
    (made,) = out.iterdir()
    return made


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(ROOT, tmp_path_factory.mktemp("wheel"), "wheel")


@pytest.fixture(scope="module")
def sdist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(ROOT, tmp_path_factory.mktemp("sdist"), "sdist")


def wheel_names(wheel: Path) -> set[str]:
    with zipfile.ZipFile(wheel) as archive:
        return set(archive.namelist())


def test_the_wheel_holds_the_package_and_nothing_else(wheel: Path):
    names = wheel_names(wheel)
    package = {path.relative_to(ROOT).as_posix() for path in (ROOT / "jaxshard").rglob("*.py")} | {"jaxshard/py.typed"}
    info = f"{PREFIX}.dist-info"
    files = ("METADATA", "RECORD", "WHEEL", "entry_points.txt", "licenses/LICENSE")
    assert names == package | {f"{info}/{file}" for file in files}


def test_the_wheel_says_what_it_is(wheel: Path):
    with zipfile.ZipFile(wheel) as archive:
        said = HeaderParser().parsestr(archive.read(f"{PREFIX}.dist-info/METADATA").decode())
    assert said["Name"] == "jaxshard"
    assert said["Version"] == jaxshard.__version__
    assert said["License-Expression"] == "Apache-2.0"
    assert said["License-File"] == "LICENSE"
    assert said["Author"] == "The jaxshard authors" and "sharding" in said["Keywords"].split(",")
    assert {"cuda12", "cuda13", "tpu", "viz", "hf"} <= set(said.get_all("Provides-Extra", []))
    assert "Typing :: Typed" in said.get_all("Classifier", [])
    urls = {url.split(",")[0] for url in said.get_all("Project-URL", [])}
    assert urls == {"Homepage", "Documentation", "Changelog", "Issues"}


def test_the_package_index_gets_a_readme_without_relative_links(wheel: Path):
    with zipfile.ZipFile(wheel) as archive:
        readme = HeaderParser().parsestr(archive.read(f"{PREFIX}.dist-info/METADATA").decode()).get_payload()
    links = re.findall(r"\]\(([^)]+)|\b(?:src|srcset)=\"([^\"]+)", readme)
    targets = [link or picture for link, picture in links]
    files = [re.fullmatch(r"https://\S+?/jaxshard/jaxshard/(?:blob/)?main/([^#]+).*", target) for target in targets]
    own = [found[1] for found in files if found]
    assert "docs/pictures/loss_curves_light.svg" in own and "docs/index.md" in own
    assert not [file for file in own if not (ROOT / file).exists()]
    assert not [target for target in targets if not target.startswith(("https://", "#"))]


def test_extras_for_users_name_what_the_package_imports_and_nothing_else():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = {name: {Requirement(one).name for one in ones} for name, ones in project["optional-dependencies"].items()}
    for_users = set().union(*(extras[name] for name in extras.keys() - FOR_DEVELOPERS - FOR_DEVICES))
    always = {Requirement(one).name for one in project["dependencies"]}
    imported = imports_of(ROOT / "jaxshard")
    assert for_users <= imported, f"no file imports {sorted(for_users - imported)}"
    missing = imported - for_users - always - COME_WITH_OTHERS
    assert not missing, f"neither a dependency nor in an extra: {sorted(missing)}"


def test_extras_for_devices_are_those_of_jax():
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    for name in FOR_DEVICES:
        assert extras[name] == [f"jax[{name}]"]
    assert set(FOR_DEVICES) <= set(metadata.metadata("jax").get_all("Provides-Extra", []))


FOR_DEVELOPERS = {"test", "types", "bench", "hf-test", "docs"}
FOR_DEVICES = {"tpu", "cuda12", "cuda13"}
COME_WITH_OTHERS = {"jaxlib", "libtpu", "cycler", "IPython"}
"""Packages that JAX, its extra tpu and matplotlib bring, and every kernel of a notebook."""


def imports_of(folder: Path) -> set[str]:
    """The distributions whose modules the files of a folder import, by their names in the package index."""
    nodes = [node for path in folder.rglob("*.py") for node in ast.walk(ast.parse(path.read_text()))]
    modules = {alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names}
    modules |= {node.module for node in nodes if isinstance(node, ast.ImportFrom) and node.module}
    roots = {name.split(".")[0] for name in modules} - set(sys.stdlib_module_names) - {"jaxshard"}
    return {{"orbax": "orbax-checkpoint", "tomli_w": "tomli-w"}.get(root, root) for root in roots}


def test_every_extra_that_is_named_exists_and_no_index_is_promised():
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    folders = [ROOT / name for name in ("jaxshard", "docs", "notebooks", "benchmarks", "examples")]
    files = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(path for one in folders for path in one.rglob("*.*"))]
    texts = {path: path.read_text() for path in files if path.suffix in (".py", ".md", ".sh", ".ipynb", ".yaml")}
    named = [
        (path, name)
        for path, text in texts.items()
        for name in re.findall(r'(?:jaxshard|["\'])\.?\[([\w,]+)\](?: @|["\'])', text)
    ]
    assert len(named) > 3
    wrong = [(path.name, name) for path, name in named if not extras.keys() >= set(name.split(","))]
    assert not wrong
    promised = [
        path.name
        for path, text in texts.items()
        if re.search(r"(install|uv add) (-\S+ )*['\"]?jaxshard\b(?!.* @ )", text)
    ]
    assert not promised, "jaxshard is not in the package index: install it from a checkout, a Git URL or a wheel"


def test_the_sdist_holds_all_files_of_the_repository_and_nothing_else(sdist: Path):
    if not (ROOT / ".git").exists():
        pytest.skip("not a Git checkout")
    tracked = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True)
    files = {name for name in tracked.stdout.splitlines() if (ROOT / name).exists()}
    with tarfile.open(sdist) as archive:
        names = {member.name.removeprefix(f"{PREFIX}/") for member in archive.getmembers() if member.isfile()}
    assert not files - names
    assert {name.split("/")[0] for name in names} == {name.split("/")[0] for name in files} | {"PKG-INFO"}


def test_the_sdist_builds_the_same_wheel(sdist: Path, wheel: Path, tmp_path: Path):
    with tarfile.open(sdist) as archive:
        archive.extractall(tmp_path, filter="data")
    again = build(tmp_path / PREFIX, tmp_path / "out", "wheel")
    assert wheel_names(again) == wheel_names(wheel)


def test_the_changelog_has_a_dated_entry_for_this_version():
    changelog = (ROOT / "CHANGELOG.md").read_text()
    assert f"\n## {jaxshard.__version__} - 20" in changelog


@pytest.mark.slow
def test_the_installed_wheel_trains_outside_the_checkout(wheel: Path, tmp_path: Path):
    bin_dir = install(wheel, tmp_path / "venv")
    environment = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "XLA_FLAGS")}

    def run(*command: str) -> str:
        program = [str(bin_dir / command[0]), *command[1:]]
        result = subprocess.run(program, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
        assert result.returncode == 0, result.stderr
        return result.stdout

    where = run("python", "-c", "import jaxshard; print(jaxshard.__file__)")
    assert Path(where.strip()).is_relative_to(tmp_path / "venv")
    assert "train" in run("jaxshard", "--help")
    small = ["--batch", "8", "--seq", "32", "--devices", "4"]
    run("jaxshard", "train", "--steps", "2", *small, "--json", "result.json")
    result = json.loads((tmp_path / "result.json").read_text())
    assert len(result["losses"]) == 2


def install(wheel: Path, venv: Path) -> Path:
    """Installs a wheel without its dependencies into a fresh environment that sees ours; returns its bin directory."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(venv)], check=True)
    pip = [sys.executable, "-m", "pip", "--python", str(venv / "bin" / "python")]
    subprocess.run([*pip, "install", "--quiet", "--no-deps", "--no-index", str(wheel)], check=True)
    # A path in a .pth file: our dependencies are found, but not the checkout that an editable install points to.
    (site_packages,) = venv.glob("lib/python*/site-packages")
    (site_packages / "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n")
    return venv / "bin"
