"""What commands take as their target: ready-made sizes and functions of a file or module."""

import sys

import jax
import numpy as np
import optax
import pytest

from jaxshard.commands.errors import UsageError
from jaxshard.commands.named_model import NamedModel
from jaxshard.commands.program import program_of

FILE = """
import numpy as np
import optax
from neighbour import SIZE

def make():
    return lambda key: {"w": SIZE}, lambda model, batch, key: 0.0, optax.sgd(0.1), {"x": np.zeros(8)}

def needs(one): ...
def three(): return 1, 2, 3
def list_(): return [1, 2, 3, 4]
def no_loss(): return make, 3, optax.sgd(0.1), {}
def no_tx(): return make, make, 3, {}
def no_batch(): return make, make, optax.sgd(0.1), {"x": "text"}
def fault(): raise ValueError("mine")
number = 3
"""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    (tmp_path / "users_program.py").write_text(FILE)
    (tmp_path / "neighbour.py").write_text("SIZE = 3")
    (tmp_path / "lacking.py").write_text("import a_module_that_is_absent")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.path", [*sys.path])
    for name in ("users_program", "neighbour", "lacking"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    yield tmp_path
    for name in ("users_program", "neighbour", "lacking"):
        sys.modules.pop(name, None)


def test_a_ready_made_size_has_random_tokens_of_the_asked_number():
    program = program_of("gpt-1m", rows=4, seq=8)
    assert program.name == "gpt-1m" and program.init_fn.model is program.loss_fn.model
    assert program.batch["tokens"].shape == (4, 9) and program.batch["tokens"].dtype == np.int32
    again, other = (program_of("gpt-1m", rows=4, seq=8, seed=seed).batch["tokens"] for seed in (0, 1))
    assert (again == program.batch["tokens"]).all() and (other != again).any()
    assert program_of("gpt-1m", rows_multiple=24).batch["tokens"].shape == (72, 33)


@pytest.mark.parametrize("where", ["users_program.py", "users_program", "./users_program.py"])
def test_a_function_of_a_file_or_module(folder, where):
    program = program_of(f"{where}:make")
    assert program.init_fn(0) == {"w": 3} and program.loss_fn(0, 0, 0) == 0.0 and program.batch["x"].shape == (8,)
    assert isinstance(program.tx, optax.GradientTransformation) and program.name == f"{where}:make"


@pytest.mark.parametrize(
    "target, message",
    [
        ("gpt5", "gpt5: there is no such size; did you mean gpt2? Use one of gpt-1m, gpt-10m, gpt2"),
        ("absent.py:make", "the file absent.py does not exist; give path/to/file.py:function, a function without arg"),
        ("absent.module:make", "there is no module 'absent.module'; give package.module:function"),
        (":make", "'' is no module's name"),
        ("users_program.py:absent", "has no function 'absent', its functions are make, needs, three"),
        ("users_program.py:number", "has no function 'number'"),
        ("users_program.py:needs", "needs can't be called without arguments (missing a required argument: 'one')"),
        ("users_program.py:three", "returned 3 things, expected (init_fn, loss_fn, tx, batch)"),
        ("users_program.py:list_", "returned list, expected (init_fn"),
        ("users_program.py:no_loss", "loss_fn must be a function, got int; return (init_fn, loss_fn, tx, batch)"),
        ("users_program.py:no_tx", "tx must be an optax GradientTransformation such as optax.adam(1e-3), got int"),
        ("users_program.py:no_batch", "batch must be a tree of arrays [rows, ...], got dict"),
    ],
)
def test_what_is_expected_is_said_in_one_line(folder, target, message):
    with pytest.raises(UsageError) as error:
        program_of(target)
    assert message in str(error.value) and "\n" not in str(error.value)


def test_numbers_are_for_ready_made_sizes(folder):
    with pytest.raises(UsageError, match=r"users_program\.py:make makes its own model and batch"):
        program_of("users_program.py:make", rows=8)


def test_faults_of_the_user_keep_their_kind(folder):
    with pytest.raises(ValueError, match="mine"):
        program_of("users_program.py:fault")
    with pytest.raises(ModuleNotFoundError, match="a_module_that_is_absent"):
        program_of("lacking:make")


def test_a_ready_made_size_with_other_arguments():
    program = program_of("llama-1m", change="depth=2,head_dim=8,rope_scaling=4:1:2:16,tied=true", rows=8)
    assert program.name == "llama-1m (depth=2,head_dim=8,rope_scaling=4:1:2:16,tied=true)"
    shapes = jax.eval_shape(program.init_fn, jax.random.key(0))
    assert shapes["blocks"]["k_proj"]["kernel"].shape == (2, 144, 4, 8) and "lm_head" not in shapes["head"]
    assert program_of("llama-1m", change="seq=16", rows=8).batch["tokens"].shape == (8, 17)
    assert NamedModel("llama3-70b").depth == 80 and NamedModel("llama3-70b", "depth=3").depth == 3


@pytest.mark.parametrize(
    "change, message",
    [
        (
            "dept=2",
            "--change dept=2: there is no dept; did you mean depth? Use one of vocab, width, depth",
        ),
        ("depth=2,depth=3", "depth comes twice; write each argument once"),
        ("depth", "is not name=value; write each argument once"),
        ("kv_heads=3", "--change kv_heads=3: llama: heads 8 is not divisible by kv_heads 3"),
        ("depth=1.5", "--change depth=1.5: give a whole number"),
    ],
)
def test_arguments_that_a_size_does_not_have_are_refused(change, message):
    with pytest.raises(UsageError) as error:
        program_of("llama-1m", change=change)
    assert message in str(error.value)
    with pytest.raises(UsageError, match="--change, --batch, --seq and --lora are for ready-made sizes"):
        program_of("users_program.py:make", change=change)
