"""Make the program that a command looks at: of a ready-made size, or of a function in the user's own file."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple, cast

import jax
import numpy as np
import optax

from jaxshard.commands.errors import UsageError, usage_errors
from jaxshard.commands.low_rank import add_factors
from jaxshard.commands.named_model import NamedModel
from jaxshard.core.local_path import check_local
from jaxshard.core.near_words import one_of
from jaxshard.core.transform import check_transform
from jaxshard.core.types import InitFn, LossFn, PyTree
from jaxshard.models.sizes import SIZES

_ORDER = "(init_fn, loss_fn, tx, batch)"
_RETURNS = f"a function without arguments that returns {_ORDER}"


class Program(NamedTuple):
    """The parts of a training step (`batch` is global), and the name of the model or function that they come from."""

    init_fn: InitFn
    loss_fn: LossFn
    tx: optax.GradientTransformation
    batch: PyTree
    name: str


def program_of(
    target: str,
    change: str | None = None,
    *,
    lora: str | None = None,
    rows: int | None = None,
    seq: int | None = None,
    seed: int | None = 0,
    rows_multiple: int = 1,
) -> Program:
    """Make the parts of a training step (init_fn, loss_fn, tx, batch) from the name of a model or a function.

    A ready-made size has its recipe's optimizer, no dropout, and a batch {"tokens": int32[rows, seq + 1]} of random
    tokens. A function of the user's file or module makes its own batch.

    This runs the user's code, which may touch devices: choose them first. Do not call it inside `usage_errors`, so that
    faults of the user's code keep their traceback.

    Args:
      target: a size such as "gpt-1m", "hf:PATH" for the shape of a folder's model, or "path/to/file.py:make" or
        "package.module:make", where `make` is a function without arguments that returns (init_fn, loss_fn, tx, batch).
      change: arguments of a ready-made size that are replaced, see `NamedModel.changes`.
      lora: low-rank factors to add to the frozen model of a ready-made size, such as "rank=8".
      rows: the rows of a ready-made size's batch; by default the recipe's number.
      seq: the tokens in a row of a ready-made size's batch; by default the size's number.
      seed: draws the tokens of a ready-made size; None for a batch of shapes alone, which takes no memory.
      rows_multiple: the recipe's number of rows is rounded up to a multiple of it.

    Raises:
      UsageError: there is no such size, file, module or function; the function returns something else; or `change`,
        `lora`, `rows` or `seq` is given for a function.
    """
    named = NamedModel(target, change)
    if not named.is_known and ":" in target:
        return _users_own(target, any(one is not None for one in (change, lora, rows, seq)))
    if not named.is_known:
        raise UsageError(
            f"{target}: there is no such size; {one_of(target, SIZES)}, or hf:PATH, or path/to/file.py:function "
            f"or package.module:function, {_RETURNS}"
        )
    with usage_errors():
        size = named.resize(seq=seq, batch=rows, rows_multiple=rows_multiple)
        model = size.model() if lora is None else add_factors(size.model(), lora)
    shape = (size.recipe.batch, size.shape["seq"] + 1)
    tokens: Any = jax.ShapeDtypeStruct(shape, np.int32)
    if seed is not None:
        tokens = np.random.default_rng(seed).integers(0, size.shape["vocab"], shape, np.int32)
    tx = model.optimizer(size.recipe.optimizer())
    return Program(model.init, model.loss, tx, {"tokens": tokens}, str(named) + (f" --lora {lora}" if lora else ""))


def _users_own(target: str, has_numbers: bool) -> Program:
    """Import and call the user's function, such as "file.py:make"; UsageError if sizes of a model are given too."""
    if has_numbers:
        raise UsageError(
            f"--change, --batch, --seq and --lora are for ready-made sizes ({', '.join(SIZES)}); {target} makes its "
            "own model and batch: change them there"
        )
    return _check_program(find_function(target, _RETURNS)(), target)


def find_function(target: str, returns: str, *arguments: Any) -> Callable[..., Any]:
    """Import a function of the user's file or module.

    Args:
      target: "path/to/file.py:make" or "package.module:make".
      returns: what kind of function is expected, for messages.
      *arguments: the arguments with which it will be called.

    Raises:
      UsageError: there is no such file, module or function, or it can't be called with these arguments.
    """
    with usage_errors():
        check_local(target)
    where, _, name = target.rpartition(":")
    module = _import_module(where, target, returns)
    make = getattr(module, name, None)
    if not callable(make):
        own = [n for n, x in vars(module).items() if inspect.isfunction(x) and x.__module__ == module.__name__]
        has = f"its functions are {', '.join(own)}" if own else "it has no function of its own"
        raise UsageError(f"{target}: {module.__name__} has no function {name!r}, {has}; give {returns}")
    try:
        inspect.signature(make).bind(*arguments)
    except TypeError as error:
        given = f"with {len(arguments)} arguments" if arguments else "without arguments"
        raise UsageError(f"{target}: {name} can't be called {given} ({error}); give {returns}") from error
    return cast(Callable[..., Any], make)


def _import_module(where: str, target: str, returns: str) -> ModuleType:
    """Import a file or module; as Python does, put the file's folder or the current folder on `sys.path` first."""
    file = Path(where)
    if file.suffix != ".py":
        _put_on_path(Path.cwd())
        try:
            return importlib.import_module(where)
        except ModuleNotFoundError as error:
            # A module that the user's own module lacks is a fault of theirs and keeps its traceback.
            if error.name is None or not f"{where}.".startswith(f"{error.name}."):
                raise
            raise UsageError(
                f"{target}: there is no module {where!r}; give package.module:function or path/to/file.py:function"
            ) from error
        except (TypeError, ValueError) as error:
            raise UsageError(f"{target}: {where!r} is no module's name; give package.module:function") from error
    if not file.is_file():
        raise UsageError(f"{target}: the file {file} does not exist; give path/to/file.py:function, {returns}")
    _put_on_path(file.resolve().parent)
    name = file.stem
    if name in sys.modules and getattr(sys.modules[name], "__file__", None) == str(file.resolve()):
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, file.resolve())
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    # Dataclasses and pickles look their module up by name; another module of that name is left where it is.
    sys.modules.setdefault(name, module)
    spec.loader.exec_module(module)
    return module


def _put_on_path(folder: Path) -> None:
    if str(folder) not in sys.path:
        sys.path.insert(0, str(folder))


def _check_program(made: Any, target: str) -> Program:
    """Convert the result of the user's function, (init_fn, loss_fn, tx, batch), to a `Program`, or raise UsageError."""
    if not isinstance(made, tuple) or len(made) not in (4, len(Program._fields)):
        what = f"{len(made)} things" if isinstance(made, tuple) else type(made).__name__
        raise UsageError(f"{target} returned {what}, expected (init_fn, loss_fn, tx, batch)")
    init_fn, loss_fn, tx, batch = made[:4]
    for name, fn in (("init_fn", init_fn), ("loss_fn", loss_fn)):
        if not callable(fn):
            raise UsageError(f"{target}: {name} must be a function, got {type(fn).__name__}; return {_ORDER}")
    try:
        check_transform(tx)
    except TypeError as error:
        raise UsageError(f"{target}: {error}; return {_ORDER}") from error
    leaves = jax.tree.leaves(batch)
    if not leaves or any(not hasattr(x, "shape") or not hasattr(x, "dtype") for x in leaves):
        raise UsageError(f"{target}: batch must be a tree of arrays [rows, ...], got {type(batch).__name__}")
    return Program(init_fn, loss_fn, tx, batch, target)
