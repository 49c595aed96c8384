"""`js.lora`: freeze a model and train low-rank factors that are added to its matrices."""

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
      loss: the loss of these parameters.
    """

    init: InitFn
    loss: LossFn

    @property
    def model(self) -> Any:
        """Return the model that has the loss, such as a `js.Stacked`, with low-rank factors in its parameters.

        The base loss must be that of a model from js.models, js.linen, js.nnx or js.Stacked.

        Raises:
          AttributeError: the loss is a plain function.
        """
        if (known := known_loss(self.loss)) is None:
            raise AttributeError("js.lora of a plain loss function has no model; merge weights with js.merge_lora")
        return known

    @property
    def evaluate(self) -> Callable[..., Any]:
        """Return the evaluation function of the model with factors, for `js.make_eval_step`.

        Raises:
          AttributeError: the loss is a plain function.
        """
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
    b[rank, out] zero, so that training starts from the unchanged model. Only the factors have gradients and optimizer
    state; the base matrices and all parameters that do not match are frozen. Under every engine frozen parameters are
    sharded, and all-gathered just before use, like trained parameters; checkpoints store checksums of them instead of
    their values (docs/guides/finetuning.md).

    A product x @ w is computed as x @ base + alpha / rank * (x @ a) @ b. Such products are found in the jaxpr of the
    loss, also inside `jax.jit` and `jax.checkpoint`, in einsums and with a transposed w. For any other use of w
    (looking up rows, convolutions, a loop over layers in a plain function) w is computed from base and factors.

    To start from pretrained parameters: `js.init(init_fn, tx, layout, key, init_from=params of the base model)`.

    Args:
      init_fn: makes the base model, `init_fn(key) -> parameters | js.Model`.
      loss_fn: the loss of the base model: a plain function, or the loss of a `js.Stacked`, `js.linen` or `js.nnx`
        model, of which engines gather one block or unit at a time, as they do without factors.
      rank: the rank of the factors, at most the smaller side of each matrix.
      match: patterns of paths, as in the rules of `js.tensor`: "q_proj/kernel" matches every path that ends with it,
        "*" matches any text. If a matrix has more than two dimensions, its Flax layer says which dimensions are inputs;
        without such a layer they are divided into inputs and outputs of the most similar sizes. Every block, layer or
        expert of a stacked parameter has its own factors.
      alpha: the gain of the factors is alpha / rank; by default alpha is `rank`, for a gain of 1.
      base: the dtype in which matched matrices are stored and all-gathered: None for their own dtype; "bf16"; "int8"
        with one scale per output channel, whose error is at most 1 / 254 of the largest magnitude in the channel.

    Returns:
      A pair `init_fn, loss_fn`. If the loss is that of a `js.Stacked`, `js.linen` or `js.nnx` model, it also has
      `evaluate`, for `js.make_eval_step`, and `model`. `js.merge_lora` returns parameters with the factors merged in.

    Raises:
      TypeError: `init_fn` or `loss_fn` is not a function, or `match` is a single string.
      ValueError: a rank below 1, an unknown `base`. When parameters are made: a pattern that matches nothing, a matched
        leaf that is not a floating-point matrix, a rank larger than a side of a matrix; each is named.

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
    """Make the base model's parameters, with a `LowRank` (base and factors) for each matrix whose path fits a pattern.

    Args:
      init_fn: makes the base model.
      rank: the rank of the factors.
      match: the patterns of paths.
      gain: the factor by which the product of the factors is multiplied, alpha / rank.
      base: the dtype in which the base is stored; None for the matrix's own.
      key: the random key.
    """
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
    for pattern in unused:
        is_layer = any(ends_with(path, f"{pattern}/kernel") for path in paths(params))
        meant = f"did you mean '{pattern}/kernel'?" if is_layer else f"there are {kinds}"
        problems.append(f"{pattern!r} matches no parameter; {meant}")
    raise_all(problems, ValueError, "lora: match must name matrices that are at least as large as the rank")
    return join_model(made, state)


def _sides(leaf: Leaf) -> tuple[int, int]:
    """Return (the number of leading dimensions that stack matrices, the number of input dimensions of each matrix).

    For example (1, 1) for 12 stacked blocks' matrices [12, 512, 2048]. The second number is 0 if the parameter is no
    matrix.

    If the layer does not say which dimensions it contracts, a matrix of more than two dimensions is divided so that
    inputs and outputs have the most similar sizes: [512, 8, 64] after the first dimension, [8, 64, 512] after the
    second.
    """
    named = Rules(RULES).name_dims(leaf).names
    is_stack = [BLOCKS, LAYERS, *EXPERTS]
    stack = next((dim for dim, name in enumerate(named) if name not in is_stack), len(named))
    shape, contracted = leaf.shape[stack:], [name == CONTRACTED for name in leaf.names[stack:]]
    told = contracted.index(False) if False in contracted else 0
    if told and True not in contracted[told:]:
        return stack, told
    # By logarithms, so that a ratio and its inverse count alike.
    unevenness = {
        cut: abs(math.log(max(1, math.prod(shape[:cut])) / max(1, math.prod(shape[cut:]))))
        for cut in range(1, len(shape))
    }
    return stack, min(unevenness, key=unevenness.__getitem__, default=0)


def _with_factors(known: KnownModel, make: Callable[[jax.Array], PyTree]) -> KnownModel:
    """Return a copy of the model `known` for parameters with low-rank factors; its functions still see ordinary arrays.

    `make(key)` makes the parameters with factors.
    """
    model = copy.copy(known)
    if isinstance(known, Adapted):
        own = _of_module(known)
    else:
        assert isinstance(known, Stacked), "models are described in adapt/"
        names = ("embed", "block", "head", "readout")  # only ready-made models (js.models) have a readout
        own = {name: factor_products(getattr(known, name)) for name in names if hasattr(known, name)}
    vars(model).update(own, make_params=make)
    return model


def _of_module(known: Adapted) -> dict[str, Callable[..., Any]]:
    """Return replacements for the methods of a Flax model that take parameters, for parameters with low-rank factors.

    Returns:
      {name of a method: the function that replaces it}.
    """

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
