"""`js.lora`: a model with a frozen base and low-rank factors beside it, which alone are trained."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxshard.adapt.factored import factor_products, run_factored
from jaxshard.adapt.stacked import Stacked
from jaxshard.adapt.units import Adapted
from jaxshard.core.dim_names import names_by_models
from jaxshard.core.kinds import kind_of
from jaxshard.core.known_model import KnownModel, check_function, known_loss, models_run
from jaxshard.core.layout import join_model, split_model
from jaxshard.core.low_rank import (
    BaseDtype,
    adapt_matrix,
    bind_weight,
    is_low_rank,
    key_of_path,
    map_low_rank,
    matrix_shapes,
    merge_lora,
)
from jaxshard.core.rules import EXPERTS, RULES, Rules, ends_with
from jaxshard.core.tree import BLOCKS, CONTRACTED, LAYERS, Leaf, abstract, leaf_of, map_with_path, paths, raise_all
from jaxshard.core.types import InitFn, LossFn, PyTree


class Lora(NamedTuple):
    """The pair `init_fn, loss_fn` of a model with factors, made by `js.lora`.

    Attributes:
      init: makes the parameters, with a `LowRank` in place of each matched matrix.
      loss: the loss on them.
    """

    init: InitFn
    loss: LossFn

    @property
    def model(self) -> Any:
        """The model with factors, where the loss was that of a model that the library knows (such as js.models.*)."""
        if (known := known_loss(self.loss)) is None:
            raise AttributeError("js.lora of a plain loss function has no model; merge weights with js.merge_lora")
        return known

    @property
    def evaluate(self) -> Callable[..., Any]:
        """The `eval_fn` of `model`, for `js.make_eval_step`."""
        evaluate: Callable[..., Any] = self.model.evaluate
        return evaluate


def lora(
    init_fn: InitFn,
    loss_fn: LossFn,
    *,
    rank: int,
    match: Sequence[str],
    alpha: float | None = None,
    base: BaseDtype | None = None,
) -> Lora:
    """Freeze a model and add trained low-rank factors to some of its matrices, for fine-tuning.

    A matched matrix w[in, out] becomes base + alpha / rank * a @ b, with a[in, rank] drawn from N(0, 1 / in) and
    b[rank, out] zero, so that training starts from the model as it is. Only factors have gradients and optimizer state;
    all else is frozen, matched or not. What is frozen is placed, and gathered just in time, as all parameters are, and
    under every engine; checkpoints hold checksums of it (docs/guides/finetuning.md).

    A product x @ w is computed as x @ base + alpha / rank * (x @ a) @ b, found in the traced program of the loss: under
    `jax.jit`, `jax.checkpoint`, in einsums and transposed, too. Where something else is done with a weight (looking up
    rows, convolutions, a loop over layers in a plain function) it is made of base and factors there.

    To start from weights that exist: `js.init(init_fn, tx, layout, key, init_from=params of the base model)`.

    Args:
      init_fn: of the base model, `init_fn(key) -> parameters | js.Model`.
      loss_fn: its loss: a plain function, or that of `js.Stacked`, `js.linen` and `js.nnx`, whose blocks and units
        engines then see as before.
      rank: of the factors, at most the smaller side of each matrix.
      match: patterns of paths, as in the rules of `js.tensor`: "q_proj/kernel" fits every path that ends so, "*" any
        text. A matrix may have more than two dimensions; they are divided where its two sides are nearest in size, or
        as the layer says. Dimensions that stack blocks, layers or experts have factors each.
      alpha: of the gain alpha / rank; by default `rank`, a gain of 1.
      base: how matched matrices are stored: None as they are; "bf16"; "int8" with one scale per output channel, whose
        error is at most 1 / 254 of the largest magnitude in the channel. Gathers move them as they are stored.

    Returns:
      A pair `init_fn, loss_fn`. It also has `evaluate`, for `js.make_eval_step`, and `model`, if the loss is of a model
      that the library knows. `js.merge_lora` gives the weights with the factors merged in.

    Raises:
      TypeError: `init_fn` or `loss_fn` is no function, or `match` a single string.
      ValueError: a rank below 1, an unknown `base`. When parameters are made: a pattern that matches nothing, a matched
        leaf that is no floating-point matrix, a rank larger than a matrix; each is named.

    Source: Hu et al. 2021, "LoRA: Low-Rank Adaptation of Large Language Models", section 4.1; Dettmers et al. 2023,
    "QLoRA", section 3, for a quantized base (theirs has 4 bits and blocks).

    Example:
        tuned = js.lora(model.init, model.loss, rank=8, match=["q_proj/kernel", "v_proj/kernel"], base="int8")
        layout = js.layout(js.fsdp(), mesh, tuned.init, tx)
        run = js.init(tuned.init, tx, layout, 0, init_from=pretrained)
        step = js.make_step(tuned.loss, tx, layout, engine=js.explicit())
    """
    check_function("init_fn", init_fn, "init_fn(key)")
    check_function("loss_fn", loss_fn, "loss_fn(model, batch, key)")
    if isinstance(match, str):
        raise TypeError(f"lora: match must be a list of patterns, got the string {match!r}; write [{match!r}]")
    if rank < 1:
        raise ValueError(f"lora: rank must be at least 1, got {rank}")
    if base not in (None, "bf16", "int8"):
        raise ValueError(f"lora: base must be None, 'bf16' or 'int8', got {base!r}")
    make = partial(_make_params, init_fn, rank, tuple(match), (rank if alpha is None else alpha) / rank, base)
    known = known_loss(loss_fn)
    if known is None:
        return Lora(make, factor_products(loss_fn))
    model = _with_factors(known, make)
    return Lora(model.init, model.loss)


def _make_params(
    init_fn: InitFn, rank: int, match: tuple[str, ...], gain: float, base: BaseDtype | None, key: jax.Array
) -> PyTree:
    """Make the base model's parameters, with a `LowRank` in place of each matched one."""
    with models_run() as runs:
        params, state = split_model(init_fn(key))
    problems: list[str] = []
    unused = dict.fromkeys(match)

    def adapt(path: Any, x: Any, names: tuple[str | None, ...]) -> Any:
        leaf = leaf_of(path, x, names)
        fits = [pattern for pattern in match if ends_with(leaf.path, pattern)]
        for pattern in fits:
            unused.pop(pattern, None)
        if not fits:
            return x
        stack, inputs = _sides(leaf)
        sides = math.prod(x.shape[stack : stack + inputs]), math.prod(x.shape[stack + inputs :])
        if not inputs or not jnp.issubdtype(x.dtype, jnp.floating):
            problems.append(f"{leaf.path} {x.dtype}{list(x.shape)}: no floating-point matrix")
        elif rank > min(sides):
            problems.append(
                f"{leaf.path} {list(x.shape)}: rank {rank} is larger than a side of {sides[0]} x {sides[1]}"
            )
        else:
            return adapt_matrix(x, key_of_path(key, path), stack=stack, inputs=inputs, rank=rank, gain=gain, base=base)
        return x

    made = map_with_path(adapt, params, names_by_models(runs, abstract(params)))
    kinds = ", ".join(dict.fromkeys(kind_of(path) for path in paths(params)))
    problems += [f"{pattern!r} matches no parameter; there are {kinds}" for pattern in unused]
    raise_all(problems, ValueError, "lora: match must name matrices that are at least as large as the rank")
    return join_model(made, state)


def _sides(leaf: Leaf) -> tuple[int, int]:
    """Return how many dimensions of a parameter stack matrices, and how many of a matrix are inputs (0: it is none).

    The layer may say what it sums over; else a matrix of more than two dimensions is divided where its sides are
    nearest in size: [512, 8, 64] after the first, [8, 64, 512] after the second.
    """
    named = Rules(RULES).name_dims(leaf).names
    is_stack = [BLOCKS, LAYERS, *EXPERTS]
    stack = next((dim for dim, name in enumerate(named) if name not in is_stack), len(named))
    shape, contracted = leaf.shape[stack:], [name == CONTRACTED for name in leaf.names[stack:]]
    told = contracted.index(False) if False in contracted else 0
    if told and True not in contracted[told:]:
        return stack, told
    unevenness = {
        cut: abs(math.log(max(1, math.prod(shape[:cut])) / max(1, math.prod(shape[cut:]))))
        for cut in range(1, len(shape))
    }
    return stack, min(unevenness, key=unevenness.__getitem__, default=0)


def _with_factors(known: KnownModel, make: Callable[[jax.Array], PyTree]) -> KnownModel:
    """Return a model that is `known` but for parameters with factors, which its own functions see as weights."""
    model = copy.copy(known)
    if isinstance(known, Adapted):
        own = _of_module(known)
    else:
        assert isinstance(known, Stacked), "models are described in adapt/"
        names = ("embed", "block", "head", "readout")  # those of a model of js.models too
        own = {name: factor_products(getattr(known, name)) for name in names if hasattr(known, name)}
    vars(model).update(own, make_params=make)
    return model


def _of_module(known: Adapted) -> dict[str, Callable[..., Any]]:
    """Return the methods of a Flax model that take its parameters."""

    def run(model: PyTree, batch: PyTree, key: jax.Array | None, **options: Any) -> Any:
        def run_merged(params: PyTree, *rest: PyTree) -> Any:
            state, batch, key = rest
            return known.run(join_model(map_low_rank(bind_weight, params), state), batch, key, **options)

        return run_factored(run_merged, *split_model(model), batch, key)

    def unit_params(units: Any, params: PyTree) -> PyTree:
        owned = known.unit_params(units, matrix_shapes(params))

        def spread(x: Any, is_owned: bool) -> Any:
            return jax.tree.map(lambda _: is_owned, x) if is_low_rank(x) else is_owned

        return jax.tree.map(spread, params, owned, is_leaf=is_low_rank)

    def apply(model: PyTree, *args: Any, **kwargs: Any) -> Any:
        return known.apply(merge_lora(model), *args, **kwargs)  # type: ignore[attr-defined]

    return {"run": run, "unit_params": unit_params, "apply": apply}
