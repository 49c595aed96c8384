"""What an import brings with it, counted in modules; benchmarks/startup.py has the seconds."""

import json
import subprocess
import sys

import pytest

HEAVY = ["IPython", "flax.nnx", "matplotlib", "mlflow", "orbax", "tensorboardX", "tensorstore", "wandb"]
"""What only some programs use, and what takes long to import."""

USED = (
    "compose fsdp tensor make_mesh layout init make_step explicit auto batches linen fit Mean save Checkpointer metrics"
)


def imported(code: str) -> list[str]:
    """The modules that Python has after `code`, and does not have before the last line of it."""
    *before, last = code.splitlines()
    program = "\n".join(
        [
            "import json, sys",
            *before,
            "had = set(sys.modules)",
            last,
            "print(json.dumps(sorted(set(sys.modules) - had)))",
        ]
    )
    found = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    return json.loads(found.stdout)


def heavy(modules: list[str]) -> list[str]:
    return [name for name in HEAVY if name in modules]


def test_the_bare_import_brings_neither_jax_nor_anything_heavy():
    modules = imported("import jaxshard")
    assert not heavy(modules) and "jax" not in modules and "numpy" not in modules
    assert sum(name.startswith("jaxshard") for name in modules) <= 3


@pytest.mark.slow
def test_the_names_of_a_training_bring_nothing_heavy():
    modules = imported(
        f"import jax, flax.linen, optax\nimport jaxshard as js; [getattr(js, name) for name in {USED!r}.split()]"
    )
    assert not heavy(modules)


@pytest.mark.parametrize(("words", "absent"), [(["--help"], ["jax", "rich"]), (["train", "--help"], ["jax", "rich"])])
def test_help_does_not_import_jax(words, absent):
    code = (
        "import contextlib, io\n"
        "with contextlib.redirect_stdout(io.StringIO()): "
        f"from jaxshard.commands.main import main; main({words!r})"
    )
    modules = imported(code)
    assert [name for name in absent if name in modules] == []


@pytest.mark.slow
def test_a_plan_imports_neither_data_nor_what_reads_files():
    """A plan of a ready-made model has no corpus, no checkpoint and no weights."""
    rooms = {name.split(".")[1] for name in imported("import jaxshard.commands.plan") if name.startswith("jaxshard.")}
    assert not rooms & {"checkpoint", "data", "generation", "hf"}
