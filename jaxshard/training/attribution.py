"""`attribution`: how much each input element contributes to a model's output, under any layout.

Shape suffixes: B rows.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, NamedTuple, get_args

import jax
import jax.numpy as jnp
import numpy as np

from jaxshard.core.foreign_arrays import as_arrays, convert_foreign
from jaxshard.core.known_model import check_function
from jaxshard.core.layout import Layout
from jaxshard.core.mesh import axis_size
from jaxshard.core.narrowing import check_narrowing
from jaxshard.core.settings import own_settings
from jaxshard.core.tree import abstract, paths, row_count, same_structure
from jaxshard.core.types import PyTree
from jaxshard.distributed.watchdog import waits_for_devices
from jaxshard.engines.auto import auto, make_move
from jaxshard.engines.just_in_time import make_opaque_run, users_code
from jaxshard.training.placing import place_model
from jaxshard.training.state import TrainState, check_run
from jaxshard.training.views import use_stored

Method = Literal["integrated_gradients", "gradient_x_input"]
Target = Any
"""The output to explain: a class, a class for each row, or a function of the outputs; None for outputs f[B]."""


class Attribution(NamedTuple):
    """The result of `js.attribution`: global arrays, whose rows are split over devices as those of a batch.

    Attributes:
      values: the contribution of each input element to the output: a tree like the inputs with None for integers, or
        with `embed` a tree like the result of `embed`.
      outputs: the output that is explained, f[B].
      baseline_outputs: the same output for the baseline, f[B].
      gap: for each row the sum of `values` minus (outputs - baseline_outputs): 0 for exact integrated gradients, and
        the error of the finite number of steps otherwise. For gradient x input it may be any number.
    """

    values: PyTree
    outputs: jax.Array
    baseline_outputs: jax.Array
    gap: jax.Array


@waits_for_devices
def attribution(
    apply: Callable[[PyTree, PyTree], PyTree],
    params: TrainState | PyTree,
    inputs: PyTree,
    layout: Layout,
    *,
    target: Target = None,
    method: Method = "integrated_gradients",
    steps: int = 32,
    baseline: PyTree = 0.0,
    embed: Callable[[PyTree, PyTree], PyTree] | None = None,
) -> Attribution:
    """Compute the contribution of each input element to a model's output (feature importance).

    For inputs x, a baseline b and the explained output f of a row

        gradient x input        (x - b) * f'(x)
        integrated gradients    (x - b) * the mean of f'(b + a (x - b)) over a from 0 to 1

    The mean is approximated by Gauss-Legendre quadrature with `steps` points, computed one after another, so that
    memory does not grow with `steps`. Exact integrated gradients of a row add up to f(x) - f(b); `gap` is the error.

    Rows are split as the layout splits a batch, and padded if the number of devices does not divide them. Model weights
    that a tensor axis splits stay split. All other weights are gathered once; but `js.models.logits_of_embedded` of a
    `js.Stacked` model gathers the weights of one block at a time, again for every step. Collectives: these all-gathers,
    and whatever the compiler adds for split weights. Calls with the same functions, layout and shapes share a compiled
    program, so define the functions once.

    Args:
      apply: `apply(model, inputs) -> outputs`, where `model` is like the result of `init_fn`. It must use no randomness
        and compute each row by itself. With `embed` its inputs are the result of `embed`.
      params: a `TrainState`, or parameters (or a `js.Model`) in model order, which are placed as the layout says.
      inputs: floating arrays [B, ...], or a tree with some floating arrays; integers do not change.
      layout: the layout of the parameters.
      target: the output to explain. For outputs [B, classes], a class (an integer) or a class for each row (int[B]).
        For others, a function `target(outputs) -> f[B]`; None if the outputs are f[B] already.
      method: "integrated_gradients" or "gradient_x_input".
      steps: the number of points at which integrated gradients compute a gradient.
      baseline: a neutral input: a number for every element, or a tree of arrays that broadcast to the inputs. For
        tokens, give other tokens, such as padding; a number would be the value of every element of the embedding.
      embed: `embed(model, inputs) -> floats [B, ...]`, for inputs without a gradient such as tokens. `apply` then
        receives the result of `embed`, and the contributions are those of this result's elements.

    Returns:
      An `Attribution`.

    Raises:
      ValueError: no floating inputs and no `embed`; a run, parameters or inputs that do not fit the layout; outputs
        that the target does not fit; steps below 1; no such method.
      TypeError: `apply` or `embed` is no function.

    Example:
        found = js.attribution(logits, run, images, layout, target=labels)
        found.values.sum(-1)        # f32[rows, height, width]: how much each pixel contributes to the label's logit

    Source: Sundararajan et al. 2017, "Axiomatic Attribution for Deep Networks", section 3 and equation 1; completeness
      is proposition 1. Shrikumar et al. 2016, "Not Just a Black Box", for gradient x input.
    """
    check_function("apply", apply, "apply(model, inputs)")
    if embed is not None:
        check_function("embed", embed, "embed(model, inputs)")
    if method not in get_args(Method):
        raise ValueError(f"attribution: method must be one of {', '.join(get_args(Method))}, got {method!r}")
    if isinstance(steps, bool) or not isinstance(steps, int) or steps < 1:
        raise ValueError(f"attribution: steps must be a whole number from 1 on, got {steps!r}")
    inputs, target = as_arrays("the inputs", inputs), convert_foreign("the target", target)
    if embed is None and not any(map(_is_float, jax.tree.leaves(inputs))):
        raise ValueError(
            f"attribution: the inputs ({_shown_all(inputs)}) have no gradient: "
            "integers can't be changed a little. Cast them to floats (images), or pass embed=, a function "
            "embed(model, inputs) to what apply goes on from (tokens)"
        )
    stored, state = _stored(params, layout)
    rows = row_count(inputs)
    padding = -rows % axis_size(layout.mesh, layout.batch_axes)
    classes = None if callable(target) or target is None else np.broadcast_to(np.asarray(target), (rows,))
    if classes is not None and not np.issubdtype(classes.dtype, np.integer):
        raise ValueError(f"attribution: target must be a class, int[{rows}] or a function, got {classes.dtype}")
    start = _baseline_like(inputs, baseline, embed is not None)
    padded = jax.tree.map(partial(_pad, count=padding), (inputs, start, classes))
    layout.plan_batch(padded[0]).check(1, whole=True)
    check_narrowing(padded, "the inputs")
    question = _Question(apply, embed, target if callable(target) else None, method, steps, layout)
    scale = baseline if start is None else 0.0
    with own_settings(layout.mesh):
        placed = jax.tree.map(jax.device_put, padded, jax.tree.map(layout.batch_sharding, abstract(padded)))
        found: Attribution = _answer(question, stored, state, *placed, scale)
        found = jax.tree.map(lambda x: x[:rows], found) if padding else found
    jax.block_until_ready(found)
    return found


@dataclass(frozen=True, eq=False)
class _Question:
    """The static arguments of the jitted `_answer`.

    Two `_Question`s are equal if they have equal functions and options and the same layout object. So jit compiles once
    for equal questions.
    """

    apply: Callable[[PyTree, PyTree], PyTree]
    embed: Callable[[PyTree, PyTree], PyTree] | None
    target: Callable[[PyTree], jax.Array] | None
    method: Method
    steps: int
    layout: Layout

    def parts(self) -> tuple[Any, ...]:
        """Return the values by which `_Question`s are compared and hashed."""
        return self.apply, self.embed, self.target, self.method, self.steps, id(self.layout)

    def __hash__(self) -> int:
        return hash(self.parts())

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Question) and other.parts() == self.parts()


@partial(jax.jit, static_argnums=0)
def _answer(
    question: _Question, stored: PyTree, state: PyTree, inputs: PyTree, start: PyTree, classes: Any, scale: Any
) -> Attribution:
    """Compute the attribution of a padded batch under jit: gather the weights, then call `_explain`.

    Args:
      question: the functions and options.
      stored: the parameters as stored.
      state: the model's state as stored.
      inputs: the inputs to explain.
      start: a baseline array for each input; None if `scale` is the baseline.
      classes: the class of outputs to explain for each row, or None.
      scale: a number that is the baseline of every element if `start` is None.
    """
    layout = question.layout
    frozen = jax.tree.map(lambda _: None, layout.shapes.params)
    run = make_opaque_run(
        lambda model, batch, key: _explain(question, model, *batch), layout, make_move(layout, auto()), "everything"
    )
    with users_code(layout, "the function"):
        answer: Attribution = run(
            stored, frozen, use_stored(layout, layout.state, state), (inputs, start, classes, scale), None, 0
        )
    return answer


def _explain(
    question: _Question, model: PyTree, inputs: PyTree, start: PyTree, classes: Any, scale: Any
) -> Attribution:
    """Compute the attribution with gathered weights, in global-view code; for the arguments see `_answer`."""
    if question.embed is not None:
        inputs, start = (None if x is None else question.embed(model, x) for x in (inputs, start))
        if not any(map(_is_float, jax.tree.leaves(inputs))):
            raise ValueError(
                f"attribution: embed must return floats, got {', '.join(map(_shown, jax.tree.leaves(inputs)))}"
            )
    leaves, tree = jax.tree.flatten(inputs)
    floats = [x for x in leaves if _is_float(x)]
    bases = [jnp.full_like(x, scale) for x in floats]
    if start is not None:
        bases = [b.astype(x.dtype) for b, x in zip(jax.tree.leaves(start), leaves, strict=True) if _is_float(x)]

    def whole(floats: list[Any], rest: Callable[[Any], Any] = lambda x: x) -> PyTree:
        given = iter(floats)
        return jax.tree.unflatten(tree, [next(given) if _is_float(x) else rest(x) for x in leaves])

    def explained(floats: list[jax.Array]) -> jax.Array:
        return _pick(question.apply(model, whole(floats)), question.target, classes, leaves[0].shape[0])

    def gradient(floats: list[jax.Array]) -> list[jax.Array]:
        # Rows are independent, so the gradient of the sum is each row's own gradient.
        grads: list[jax.Array] = jax.grad(lambda floats: explained(floats).astype(jnp.float32).sum())(floats)
        return grads

    ways = [x - b for x, b in zip(floats, bases, strict=True)]
    if question.method == "gradient_x_input":
        slopes = [g.astype(jnp.float32) for g in gradient(floats)]
    else:
        points, weights = np.polynomial.legendre.leggauss(question.steps)  # on -1 to 1, where weights add up to 2

        def add(sums: list[jax.Array], at: tuple[jax.Array, jax.Array]) -> tuple[list[jax.Array], None]:
            point, weight = at
            grads = gradient([b + point.astype(b.dtype) * way for b, way in zip(bases, ways, strict=True)])
            return [total + weight * g.astype(jnp.float32) for total, g in zip(sums, grads, strict=True)], None

        zeros = [jnp.zeros(x.shape, jnp.float32) for x in floats]
        at = jnp.asarray((points + 1) / 2, jnp.float32), jnp.asarray(weights / 2, jnp.float32)
        slopes, _ = jax.lax.scan(add, zeros, at)
    values = [way.astype(jnp.float32) * slope for way, slope in zip(ways, slopes, strict=True)]
    outputs, at_base = explained(floats).astype(jnp.float32), explained(bases).astype(jnp.float32)
    total = jnp.stack([x.sum(tuple(range(1, x.ndim))) for x in values]).sum(0)
    return Attribution(whole(values, lambda x: None), outputs, at_base, total - (outputs - at_base))


def _pick(outputs: PyTree, target: Callable[[PyTree], jax.Array] | None, classes: Any, rows: int) -> jax.Array:
    """Select the output to explain, f[rows]; raise ValueError if `target` or `classes` does not fit the outputs."""
    if target is not None:
        outputs = target(outputs)
    elif classes is not None:
        if getattr(outputs, "ndim", 0) != 2:
            shapes = _shown_all(outputs)
            raise ValueError(
                f"attribution: a class is one of outputs [rows, classes], but apply returned {shapes}; pass a function "
                "target(outputs) -> [rows], such as lambda logits: logits[:, -1, 7]"
            )
        # An invalid class gives NaN, not the nearest class.
        outputs = jnp.take_along_axis(outputs, classes[:, None], axis=1, mode="fill", fill_value=jnp.nan)[:, 0]
    if getattr(outputs, "shape", None) != (rows,) or not _is_float(outputs):
        shapes = _shown_all(outputs)
        what = "target" if target is not None else "apply"
        raise ValueError(
            f"attribution: one number for each of {rows} rows is explained, but {what} returned {shapes}; pass target="
        )
    picked: jax.Array = outputs
    return picked


def _stored(params: TrainState | PyTree, layout: Layout) -> tuple[PyTree, PyTree]:
    """Return (parameters, model state) as the layout stores them, placing parameters that are not in a TrainState."""
    if isinstance(params, TrainState):
        check_run(layout, params)
        return params.params, params.state
    return place_model(params, layout, "attribution: the parameters")


def _baseline_like(inputs: PyTree, baseline: PyTree, embedded: bool) -> PyTree:
    """Broadcast the baseline arrays to the shapes of the inputs; return None if the baseline is a single number."""
    if isinstance(baseline, (int, float)) and not isinstance(baseline, bool):
        return None
    if not same_structure(baseline, inputs):
        raise ValueError(
            f"attribution: the baseline must be a number, or arrays like the inputs ({', '.join(paths(inputs))}), got "
            f"{jax.tree.structure(baseline)}"
        )

    def spread(x: Any, base: Any) -> np.ndarray:
        base = np.asarray(base)
        if embedded and base.dtype != x.dtype and not _is_float(x):
            base = base.astype(x.dtype, casting="same_kind")
        try:
            return np.array(np.broadcast_to(base, np.shape(x)))
        except ValueError as error:
            raise ValueError(f"attribution: a baseline {_shown(base)} is not like its input {_shown(x)}") from error

    return jax.tree.map(spread, inputs, baseline)


def _pad(x: Any, count: int) -> Any:
    """Append `count` copies of the last row."""
    if not count or not np.ndim(x):
        return x
    return np.concatenate([np.asarray(x), np.repeat(np.asarray(x[-1:]), count, axis=0)])


def _is_float(x: Any) -> bool:
    return bool(jnp.issubdtype(jnp.result_type(x), jnp.floating))


def _shown(x: Any) -> str:
    return f"{jnp.result_type(x)}{list(np.shape(x))}"


def _shown_all(tree: PyTree) -> str:
    return ", ".join(map(_shown, jax.tree.leaves(tree))) or "nothing"
