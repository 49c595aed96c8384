"""The notebook extension installs the CUDA plugin that a GPU needs, and asks for a restart after replaced packages."""

import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from jaxshard.commands import cuda, notebook

JAX = {"jax": "0.10.2", "jaxlib": "0.10.2", "flax": "0.12.8", "optax": "0.2.8", "numpy": "2.4.0"}


def load(monkeypatch: pytest.MonkeyPatch, installed: dict[str, str], modules: dict[str, str]) -> list[str]:
    """Load the extension with these packages and imported modules; returns the lines that it gives to `%pip`."""
    for module in (cuda, notebook):
        monkeypatch.setattr(module, "installed_version", installed.get)
    fakes = {name: SimpleNamespace(__version__=version) for name, version in modules.items()}
    monkeypatch.setattr(notebook, "sys", SimpleNamespace(modules=fakes))
    lines: list[str] = []
    shell = SimpleNamespace(run_line_magic=lambda name, line: lines.append(f"{name} {line}"))
    notebook.load_ipython_extension(shell)
    return lines


@pytest.mark.parametrize(
    ("plugins", "platforms", "requirement"),
    [
        ({}, "", "jax[cuda12]==0.10.2"),
        ({}, "cuda,cpu", "jax[cuda12]==0.10.2"),
        ({"jax-cuda12-plugin": "0.7.2"}, "", "jax[cuda12]==0.10.2"),
        ({"jax-cuda13-plugin": "0.7.2"}, "", "jax[cuda13]==0.10.2"),
        ({"jax-cuda13-plugin": "0.10.2"}, "", None),
        ({}, "cpu", None),
    ],
)
def test_a_gpu_gets_the_plugin_of_this_jax(plugins, platforms, requirement, monkeypatch, tmp_path):
    monkeypatch.setenv("JAX_PLATFORMS", platforms)
    monkeypatch.setattr(cuda, "GPU", tmp_path)  # exists
    lines = load(monkeypatch, JAX | plugins, {})
    assert lines == ([] if requirement is None else [f'pip install --quiet "{requirement}"'])


def test_without_a_gpu_nothing_is_installed(monkeypatch, tmp_path):
    monkeypatch.delenv("JAX_PLATFORMS", raising=False)
    monkeypatch.setattr(cuda, "GPU", tmp_path / "nvidia0")
    assert load(monkeypatch, JAX, JAX) == []


def test_replaced_packages_ask_for_a_restart(monkeypatch):
    restart = r"still holds numpy 1\.26\.4, jax 0\.7\.2: restart it, then run all cells again"
    with pytest.raises(RuntimeError, match=restart):
        load(monkeypatch, JAX, JAX | {"jax": "0.7.2", "numpy": "1.26.4"})


def test_the_extension_imports_no_jax():
    code = "import sys, jaxshard.commands.notebook; print(sorted({'jax', 'numpy'} & sys.modules.keys()))"
    root = Path(__file__).parents[2]
    result = subprocess.run([sys.executable, "-c", code], cwd=root, capture_output=True, text=True, check=True)
    assert result.stdout == "[]\n"
