"""The wheel and the source distribution: what they hold, and that the installed package trains outside the checkout."""

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
from pathlib import Path

import pytest

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
        metadata = HeaderParser().parsestr(archive.read(f"{PREFIX}.dist-info/METADATA").decode())
    assert metadata["Name"] == "jaxshard"
    assert metadata["Version"] == jaxshard.__version__
    assert metadata["License-Expression"] == "Apache-2.0"
    assert metadata["License-File"] == "LICENSE"
    assert metadata["Author"] == "The jaxshard authors" and "sharding" in metadata["Keywords"].split(",")
    assert {"cuda12", "tpu", "viz", "grain"} <= set(metadata.get_all("Provides-Extra", []))
    assert "Typing :: Typed" in metadata.get_all("Classifier", [])
    urls = {url.split(",")[0] for url in metadata.get_all("Project-URL", [])}
    assert urls == {"Homepage", "Documentation", "Changelog", "Issues"}


def test_every_extra_that_is_named_exists_and_no_index_is_promised():
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    folders = [ROOT / name for name in ("jaxshard", "docs", "notebooks", "benchmarks", "examples")]
    files = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(path for one in folders for path in one.rglob("*.*"))]
    texts = {path: path.read_text() for path in files if path.suffix in (".py", ".md", ".sh", ".ipynb", ".yaml")}
    named = [
        (path, name) for path, text in texts.items() for name in re.findall(r'(?:jaxshard|")\.?\[([\w,]+)\]"', text)
    ]
    assert len(named) > 3
    wrong = [(path.name, name) for path, name in named if not extras.keys() >= set(name.split(","))]
    assert not wrong
    promised = [
        path.name for path, text in texts.items() if re.search(r"install (-\S+ )*['\"]?jaxshard\b(?!.* @ )", text)
    ]
    assert not promised, "jaxshard is not in the package index: install it from a checkout, a Git URL or a wheel"


def test_the_sdist_holds_what_a_contributor_needs(sdist: Path):
    with tarfile.open(sdist) as archive:
        names = {name.removeprefix(f"{PREFIX}/") for name in archive.getnames()}
    needed = ["LICENSE", "README.md", "CHANGELOG.md", "pyproject.toml", "jaxshard/py.typed", "docs/reference/api.md"]
    assert {*needed, "tests/conftest.py", "examples/linen.py"} <= names
    top = {name.split("/")[0] for name in names}
    assert not [name for name in top if name in ("dist", "build", ".git", ".venv")]
    assert not [name for name in names if name.endswith(".pyc")]


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
