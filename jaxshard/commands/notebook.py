"""Extension of IPython, `%load_ext jaxshard.commands.notebook`: prepare a notebook after jaxshard was installed."""

from __future__ import annotations

import sys
from typing import Any

from jaxshard.commands.cuda import missing_plugin
from jaxshard.core.installed import installed_version

_PRELOADED = ("numpy", "jaxlib", "jax", "flax", "optax")
"""Packages that a session may have imported before an installation replaced them."""


def load_ipython_extension(shell: Any) -> None:
    """Install JAX's CUDA plugin if a GPU needs it, and ask for a restart if the session holds replaced packages.

    IPython calls this function. It imports no JAX, because the session may hold parts of an older one.

    Args:
      shell: the `InteractiveShell` of IPython.

    Raises:
      RuntimeError: the session has imported a package that is installed in another version now.
    """
    if requirement := missing_plugin():
        print(f"This machine has an NVIDIA GPU: installing {requirement}")
        shell.run_line_magic("pip", f'install --quiet "{requirement}"')
    loaded = {name: sys.modules[name].__version__ for name in _PRELOADED if name in sys.modules}
    if old := [f"{name} {version}" for name, version in loaded.items() if version != installed_version(name)]:
        raise RuntimeError(f"This session still holds {', '.join(old)}: restart it, then run all cells again.")
