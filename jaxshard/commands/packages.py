"""Compare installed packages with requirements: versions, missing packages and packages that do not fit."""

from __future__ import annotations

import importlib
import importlib.util
import platform
from collections.abc import Iterator, Sequence
from importlib import metadata

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

from jaxshard.commands.findings import Finding, broken
from jaxshard.core.installed import installed_version
from jaxshard.core.version import __version__

_PACKAGES = ("jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "numpy")
_OPTIONAL = {
    "libtpu": "compiling for TPU topologies (extra tpu)",
    "tensorboardX": "jaxshard train --tensorboard (extra viz)",
    "wandb": "jaxshard train --wandb (extra logging)",
    "mlflow": "jaxshard train --mlflow (extra logging)",
    "matplotlib": "pictures (extra viz)",
    "qwix": "products in 8 bits (extra quant)",
    "tokenizers": "text for models of Hugging Face (extra hf)",
    "jinja2": "chat templates of Hugging Face (extra hf)",
    "huggingface_hub": "models of the Hugging Face hub (extra hf)",
}

_EXTRAS = ("tpu", "cuda12", "cuda13", "with-cuda", "viz", "logging", "hf", "quant")
"""Extras whose packages must fit if they are installed."""


def missing_packages() -> list[str]:
    """List the optional packages that are not installed, each with its purpose: "libtpu, for compiling ..."."""
    return [f"{name}, for {use}" for name, use in _OPTIONAL.items() if importlib.util.find_spec(name) is None]


def judge_versions(packages: Sequence[str]) -> Iterator[Finding]:
    """Yield a `Finding` for each requirement of `packages`, on Python or on other packages, that is not met."""
    mine, wrong = platform.python_version(), dict[str, Finding]()
    for package in packages:
        wanted = "".join(metadata.metadata(package).get_all("Requires-Python", []))
        if wanted and not SpecifierSet(wanted).contains(mine, prereleases=True):
            yield broken(f"{package} needs Python {wanted}, this is {mine}", "use another Python")
        wrong |= {requirement.name: _misfit(package, requirement) for requirement in _unmet(package)}
    yield from wrong.values()


def judge_imports() -> Iterator[Finding]:
    """Import the packages that every run needs, and yield a `Finding` for each import that fails."""
    for module in ("flax.linen", "flax.nnx", "optax", "orbax.checkpoint"):
        try:
            importlib.import_module(module)
        except Exception as error:  # whatever a package of another version stumbles over
            reason = " ".join(str(error).split())
            yield broken(f"import {module} fails with {type(error).__name__}: {reason}", "")


def _unmet(package: str) -> Iterator[Requirement]:
    """Yield the requirements of a package that are not met; a package that only an extra requires may be missing."""
    for requirement in map(Requirement, metadata.requires(package) or ()):
        version, extra = installed_version(requirement.name), _extra_of(requirement)
        is_needed = extra == "" or (extra is not None and version is not None)
        if is_needed and not (version and requirement.specifier.contains(version, prereleases=True)):
            yield requirement


def _extra_of(requirement: Requirement) -> str | None:
    """Return the extra, such as "tpu", that adds a requirement; "" without an extra, None if it does not apply here."""
    marker = requirement.marker
    return next((name for name in ("", *_EXTRAS) if marker is None or marker.evaluate({"extra": name})), None)


def _misfit(package: str, requirement: Requirement) -> Finding:
    version, extra = installed_version(requirement.name), _extra_of(requirement)
    whose = f"{package}[{extra}]" if extra else package
    has = "is not installed" if version is None else f"{version} is installed"
    wanted = f"{requirement.name}{requirement.specifier}"
    needs = f"{whose} {installed_version(package)} needs {wanted}"
    return broken(f"{requirement.name} {has}, but {needs}", f'pip install "{wanted}"')


def versions() -> dict[str, str | None]:
    """Return the versions of Python and of the packages that a result depends on; None for an absent one."""
    own = {"python": platform.python_version(), "jaxshard": __version__}
    return own | {name: installed_version(name) for name in _PACKAGES}
