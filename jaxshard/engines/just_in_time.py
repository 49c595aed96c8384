"""Gather each parameter just before use; reduce each gradient as soon as it exists.

An engine says how to gather one weight and reduce one gradient; this file applies both around the user's function. A
gradient may have another sharding than its parameter (replicated parameters with sharded gradients are ZeRO-2), but the
cotangent of an argument has its shape. So every weight is a function of two arrays, `use(stored, sink)`:

    stored  the stored parameter                            cotangent: zeros
    sink    zeros, of the gradient's stored shape           cotangent: the reduced gradient

and engines differentiate with respect to the sinks.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxshard.adapt.closure import check_closure
from jaxshard.adapt.model_state import check_averages
from jaxshard.adapt.objective import Objective, OfBlocks, OfModule
from jaxshard.adapt.offer import Offer, offering
from jaxshard.adapt.qwix_compat import refuse_scales_over_rows
from jaxshard.adapt.remat import RematPolicy, check_host_memory, check_names, checkpoint_body, make_save_policy
from jaxshard.adapt.stacked import Stacked
from jaxshard.adapt.units import Adapted, Units
from jaxshard.core.compat import is_refused_spec, unbound_axis_name
from jaxshard.core.constrain import follow_layout
from jaxshard.core.keys import advance
from jaxshard.core.known_model import KnownModel
from jaxshard.core.layout import Layout, human_bytes, join_model, split_model
from jaxshard.core.loss import Loss, as_loss
from jaxshard.core.placement import Placement, axes_of
from jaxshard.core.tree import BLOCKS, map_with_path, path_str, raise_all
from jaxshard.core.types import PyTree
from jaxshard.core.unsuited import Unsuited
from jaxshard.engines.pending import Pending, run_on_pending
from jaxshard.layers.weight_chunks import Offered, offer_chunks


class Move(NamedTuple):
    """The functions by which an engine gathers one weight and reduces its gradient.

    Attributes:
      gather: `gather(stored) -> weight`, from this device's shard to an array of the weight's logical shape.
      reduce: `reduce(cotangent of the weight) -> gradient`, summed over devices and sharded for storage.
      reduced_dtype: the dtype in which the gradient is reduced, which therefore holds it exactly; None if it may need
        the parameter's.
    """

    gather: Callable[[jax.Array], jax.Array]
    reduce: Callable[[jax.Array], jax.Array]
    reduced_dtype: jnp.dtype | None = None


MakeMove = Callable[[Placement, Placement | None], Move]
"""Makes the `Move` of one weight from the placements of the parameter and its gradient (None if frozen)."""


def use_weight(move: Move, stored: jax.Array, sink: jax.Array | None) -> jax.Array:
    """Gather a weight for use; in the backward pass, reduce the weight's gradient and pass it to `sink`.

    JAX requires that the gradient of an argument has the argument's shape. But a gradient may be stored in another
    shape than its parameter: under ZeRO-2 the parameter is replicated and the gradient sharded. So the reduced gradient
    becomes the gradient of `sink`, which has the shape of the stored gradient, and the gradient of `stored` is zero.

    Collectives: those of `move.gather` in the forward pass, and those of `move.reduce` in the backward pass.

    Args:
      move: how to gather this weight and reduce its gradient.
      stored: the stored parameter, or several arrays that stand for it, which `move.gather` knows.
      sink: zeros in the shape of the stored gradient, and in a dtype that holds it; None if the parameter is frozen.
    """
    if sink is None:
        return jax.lax.stop_gradient(move.gather(stored))
    zeros = partial(jax.tree.map, _zero_cotangent, stored)
    stored_dtype = jax.tree.leaves(stored)[-1].dtype  # of a rounded weight that of its scales

    # A custom VJP, for two reasons: the cotangent goes to another argument than the weight came from, and JAX's own
    # transpose of a gather (a reduce-scatter over the same axes) is not the sum that the gradient needs.
    @jax.custom_vjp
    def weight(stored: jax.Array, sink: jax.Array) -> jax.Array:
        return move.gather(stored)

    def forward(stored: jax.Array, sink: jax.Array) -> tuple[jax.Array, None]:
        return move.gather(stored), None  # no residuals: the gathered weight is not kept for the backward pass

    def backward(_: None, cotangent: jax.Array) -> tuple[jax.Array, jax.Array]:
        # First cast to the parameter's dtype: computing in bf16 does not imply reducing in bf16.
        return zeros(), move.reduce(cotangent.astype(stored_dtype)).astype(sink.dtype)

    weight.defvjp(forward, backward)
    return weight(stored, sink)


def _zero_cotangent(x: jax.Array) -> Any:
    """Return a zero cotangent for an array: of JAX's dtype for integers, which have no derivative, if it is one."""
    is_float = jnp.issubdtype(x.dtype, jnp.floating)
    return jnp.zeros(x.shape, x.dtype) if is_float else np.zeros(x.shape, jax.dtypes.float0)


def use_weights(make_move: MakeMove, params: PyTree, grads: PyTree, stored: PyTree, sinks: PyTree) -> PyTree:
    """Gather all weights of a tree for use, each by `use_weight`.

    Args:
      make_move: makes the `Move` of a weight from the placements of parameter and gradient.
      params: the placements of the parameters.
      grads: the placements of the gradients; None for frozen parameters.
      stored: the stored parameters.
      sinks: zeros in the shapes of the stored gradients; None for frozen parameters. They are differentiated in place
        of the parameters: the cotangent of a sink is the parameter's reduced gradient.
    """
    return jax.tree.map(lambda p, g, x, sink: use_weight(make_move(p, g), x, sink), params, grads, stored, sinks)


def list_offered(
    layout: Layout, make_move: MakeMove, weights: PyTree, params: PyTree, grads: PyTree, stored: PyTree, sinks: PyTree
) -> list[Offered]:
    """List the weights that a layer may gather in chunks instead of all at once.

    These weights are the matrices that no batch axis splits in use.

    Args:
      layout: the layout.
      make_move: makes the engine's `Move` of each weight.
      weights: the gathered weights that the loss receives. A layer recognises a listed weight by its identity.
      params, grads, stored, sinks: the arguments of `use_weights` for the same parameters.
    """

    def offer(param: Placement, grad: Placement | None, weight: Any, stored: jax.Array, sink: Any) -> list[Offered]:
        # If batch axes split a weight in use, each device sees another part, so its loss can't take all chunks.
        whole = not set(axes_of(param.use)) & set(layout.sum_axes)
        if len(param.view.logical) != 2 or not whole:
            return []
        return [Offered(weight, stored, sink, param, grad, make_move, layout.mesh)]

    found = jax.tree.map(offer, params, grads, weights, stored, sinks)
    return jax.tree.leaves(found, is_leaf=lambda x: isinstance(x, Offered))


Call = Callable[[PyTree, PyTree, PyTree, PyTree, Any, Any], Loss]
"""`call(stored, sinks, state, batch, key, row) -> Loss`; `row` is the global index of the batch's first row."""


def make_call(
    objective: Objective, layout: Layout, make_move: MakeMove, remat: RematPolicy | None, units: Units = ()
) -> Call:
    """Make the function that runs the user's loss on weights that are gathered just in time.

    For a `Stacked` model, each block's weights are gathered inside the scan over blocks, and again in the backward
    pass. For `js.linen` and `js.nnx` the same holds for each of the `units`. For any other loss all weights are
    gathered at once, except weights that it passes unchanged to a model that the library knows (see `adapt/offer.py`).

    Args:
      objective: the loss.
      layout: the layout.
      make_move: makes the engine's `Move` of each weight.
      remat: the activations that the forward pass of a block or unit saves; None for the model's own choice.
      units: classes of modules, such as [Block], that gather their own parameters.

    Raises:
      TypeError: `units` for a `Stacked` model, which has no modules.
      ValueError: the loss closes over arrays on devices that are not the mesh's, or the layout splits the stacked
        dimension of the blocks.
    """
    check_closure(objective.written, layout.mesh)
    if isinstance(objective, OfBlocks) or (units and isinstance(objective, OfModule)):
        run = _make_known_run(objective.model, layout, make_move, remat, units)
    else:
        run = make_opaque_run(objective.loss_fn, layout, make_move, remat, units)

    def call(stored: PyTree, sinks: PyTree, state: PyTree, batch: PyTree, key: Any, row: Any) -> Loss:
        with users_code(layout):
            loss = as_loss(run(stored, sinks, state, batch, key, row))
        check_averages(state, loss)
        return loss

    return call


Run = Callable[[PyTree, PyTree, PyTree, PyTree, Any, Any], Any]
"""`run(stored, sinks, state, batch, key, row)`: runs the user's function on weights that are gathered just in time."""


def make_opaque_run(
    fn: Callable[..., Any], layout: Layout, make_move: MakeMove, remat: RematPolicy | None, units: Units = ()
) -> Run:
    """Make a function that gathers all weights and passes them to `fn(model, batch, key)`, which may be any function.

    If `fn` passes these weights unchanged to a known model (`js.Stacked`, `js.linen`, `js.nnx`), that model gathers its
    weights just in time instead. If `fn` passes other arrays to a known model, and gathering all weights at once costs
    memory, warn once. The result is a `Run`.

    Raises:
      TypeError: when the result runs, if `units` were given and `fn` ran no model with modules.
      Unsuited: when the result runs, if `remat` names activations and `fn` ran no known model.
    """
    warned: list[KnownModel] = []

    def accepts(known: KnownModel) -> bool:
        return bool(units) if isinstance(known, Adapted) else not why_not_by_block(layout)

    def run(stored: PyTree, sinks: PyTree, state: PyTree, batch: PyTree, key: Any, row: Any) -> Any:
        weights = use_weights(make_move, layout.params, layout.grads, stored, sinks)
        own_key = None if key is None else advance(key, row)

        def run_known(known: KnownModel, model: PyTree, batch: PyTree, given: Any) -> Any:
            # The key that the function received counts rows from `row` on; any other key counts from 0.
            start = (key, row) if given is own_key else (given, 0)
            known_run = _make_known_run(known, layout, make_move, remat, units)
            return known_run(stored, sinks, split_model(model)[1], batch, *start)

        offer = Offer(weights, run_known, accepts)
        offered = list_offered(layout, make_move, weights, layout.params, layout.grads, stored, sinks)
        with offering(offer), offer_chunks(offered):
            output = fn(join_model(weights, state), batch, own_key)
        if not offer.taken and (units or isinstance(remat, Mapping)):
            name = getattr(fn, "__qualname__", fn)
            if units:
                raise TypeError(f"units: {name} has no modules for units; make it with js.linen or js.nnx")
            raise Unsuited(
                "remat: activations are kept by name in the blocks of a js.Stacked model and in the units= of js.linen "
                f"and js.nnx; {name} has neither: wrap its parts in jax.checkpoint"
            )
        if offer.missed and not warned:
            warned.extend(offer.missed)
            _warn_of_gathered_weights(layout, [known for known in offer.missed if isinstance(known, Stacked)])
        return output

    return run


def _warn_of_gathered_weights(layout: Layout, missed: list[Stacked]) -> None:
    """Warn that weights of the `missed` models were gathered all at once, not block by block, if this costs memory."""
    gathered = [
        (x, placement)
        for x, placement in zip(jax.tree.leaves(layout.shapes.params), jax.tree.leaves(layout.params), strict=True)
        if placement.store != placement.use
    ]
    if not missed or not gathered:
        return
    size = human_bytes(sum(x.size * x.dtype.itemsize for x, _ in gathered))
    why = why_not_by_block(layout)
    problem = why or "the loss runs it on other arrays than the parameters that it received"
    fix = (
        "pass model.init itself to js.layout" if why else "pass the parameters on unchanged, or pass model.loss itself"
    )
    warnings.warn(
        f"the weights of all {missed[0].num_blocks} blocks are gathered at once and kept for the backward pass ({size} "
        f"in all): {problem}; {fix}",
        stacklevel=2,
    )


def _make_known_run(
    known: KnownModel, layout: Layout, make_move: MakeMove, remat: RematPolicy | None, units: Units
) -> Run:
    if isinstance(known, Stacked):
        if units:
            raise TypeError(
                "units: a js.Stacked model has no modules for units; it gathers block by block without them"
            )
        return _make_stacked_run(known, layout, make_move, _first_given(remat, known.remat, "everything"))
    assert isinstance(known, Adapted), "models are described in adapt/"
    return _make_units_run(known, layout, make_move, _first_given(remat, "everything"), units)


def _first_given(*policies: RematPolicy | None) -> RematPolicy:
    return next(policy for policy in policies if policy is not None)


# The run of a module of js.linen or js.nnx. Parameters of units are `Pending`: each unit gathers its own when it runs.


def _make_units_run(adapted: Adapted, layout: Layout, make_move: MakeMove, remat: RematPolicy, units: Units) -> Run:
    check_host_memory(remat, layout.mesh)
    owned = adapted.unit_params(units, layout.shapes.params)

    def weight(late: bool, param: Placement, grad: Placement | None, stored: jax.Array, sink: Any) -> Any:
        gather = partial(use_weight, make_move(param, grad))
        return Pending((stored, sink), gather) if late else gather(stored, sink)

    def run(stored: PyTree, sinks: PyTree, state: PyTree, batch: PyTree, key: Any, row: Any) -> Any:
        own_key = None if key is None else advance(key, row)

        def run_with(sinks: PyTree) -> Any:
            def run_on(weights: PyTree) -> Any:
                offered = list_offered(layout, make_move, weights, layout.params, layout.grads, stored, sinks)
                model = join_model(weights, state)
                with offer_chunks(offered):
                    return adapted.run(model, batch, own_key, units=units, save=make_save_policy(remat))

            return run_on_pending(run_on, jax.tree.map(weight, owned, layout.params, layout.grads, stored, sinks))

        check_names(remat, run_with, sinks)
        return run_with(sinks)

    return run


# The run of a Stacked model. The blocks' parameters go into its scan as pairs of stacked shards and sinks,
#
#     params["blocks"] = ({"w": [num_blocks, 16 / devices, 16]}, {"w": zeros of the same shape})
#
# and `fetch` makes one block's weights, {"w": [16, 16]}, from a slice of both. The placements of a slice are those of
# the stacked arrays without the first dimension. The scan's backward pass stacks the cotangents of the sinks' slices,
# which gives the stacked gradients.


def _make_stacked_run(stacked: Stacked, layout: Layout, make_move: MakeMove, remat: RematPolicy) -> Run:
    check_stacked(layout)
    check_host_memory(remat, layout.mesh)
    params_tail, grads_tail = (_tails(tree[BLOCKS]) for tree in (layout.params, layout.grads))

    def as_reduced(param: Placement, grad: Placement | None, sink: jax.Array | None) -> jax.Array | None:
        # A block's gradient is all of its slice of the stacked gradient, so nothing is added or rounded in this dtype.
        # The derivative of the cast is a cast to the parameter's dtype, after the loop.
        dtype = make_move(param, grad).reduced_dtype
        if sink is None or dtype is None or dtype.itemsize >= sink.dtype.itemsize:
            return sink
        return sink.astype(dtype)

    def fetch(pair: tuple[PyTree, PyTree]) -> PyTree:
        return use_weights(make_move, params_tail, grads_tail, *pair)

    def run(stored: PyTree, sinks: PyTree, state: PyTree, batch: PyTree, key: Any, row: Any) -> Any:
        del state  # a Stacked model has none

        def run_with(sinks: PyTree) -> Any:
            parts = [without_blocks(tree) for tree in (layout.params, layout.grads, stored, sinks)]
            rest = use_weights(make_move, *parts)
            params = rest | {BLOCKS: (stored[BLOCKS], jax.tree.map(as_reduced, params_tail, grads_tail, sinks[BLOCKS]))}
            with offer_chunks(list_offered(layout, make_move, rest, *parts)):
                return stacked.run(params, batch, key, fetch=fetch, remat=partial(checkpoint_body, remat), row=row)

        check_names(remat, run_with, sinks)
        return run_with(sinks)

    return run


def why_not_by_block(layout: Layout) -> str:
    """Return why the weights of a `js.Stacked` model can't be gathered one block at a time; "" if they can."""
    if layout.pipeline is not None:
        return f"the layout places the blocks in a pipeline over {layout.pipeline.axis!r}"
    if not isinstance(layout.params, dict) or BLOCKS not in layout.params:
        return f'the parameters have no "{BLOCKS}" at their top'
    if _split_stacks(layout):
        return "the layout does not know which dimension stacks the blocks"
    return ""


@contextmanager
def users_code(layout: Layout, what: str = "the loss") -> Iterator[None]:
    """Make a context for calls of the user's functions.

    Inside it, `js.constrain` constrains activations as the layout says, and rules of qwix are refused whose scales
    differ between devices. JAX's errors about axis names and shardings, and errors of the model's library, are raised
    again with an explanation. `what` names the function in these errors.
    """
    explained = nullcontext() if layout.model is None else layout.model.explain_errors(what)
    with follow_layout(layout), explained, refuse_scales_over_rows(layout.sum_axes):
        try:
            yield
        except NameError as error:
            if (name := unbound_axis_name(error)) is None:
                raise
            axes = ", ".join(map(repr, layout.sum_axes)) or "of which there are none"
            raise ValueError(
                f"{what} names an axis that it does not run over ({error}). Under js.auto() it sees the whole batch: "
                "make the module without axis_name, and BatchNorm takes the statistics of all rows; or, of a module "
                "that stays as it is, give the name an axis of size 1: "
                f"jax.vmap(fn, in_axes=None, out_axes=None, axis_size=1, axis_name={name!r}). Under js.explicit()"
                f" name the axes of the batch: {axes}; or call the mesh's axis as the module does: "
                f"js.make_mesh({name}=-1), js.fsdp({name!r})"
            ) from error
        except (ValueError, RuntimeError) as error:
            if not is_refused_spec(error):
                raise
            raise ValueError(
                f"{what} places arrays by itself, over axes that jaxshard places ({error}). Leave out_sharding=, "
                "jax.sharding.reshard and with_sharding_constraint with a PartitionSpec out of the model, or set its "
                "configuration to no sharding: js.layout places the parameters, js.constrain(x, names) activations"
            ) from error


def check_stacked(layout: Layout) -> None:
    """Raise ValueError if the layout does not allow a scan over the blocks of a `js.Stacked` model.

    Refused are a layout that places the blocks in a pipeline, a layout without blocks, and a layout that splits or pads
    the dimension in which the blocks are stacked.
    """
    if layout.pipeline is not None:
        raise ValueError(
            f"the layout places blocks in a pipeline over {layout.pipeline.axis!r}, which this engine does not run: "
            "use engine=js.pipelined(microbatches=...), or take js.pipeline out of the strategy"
        )
    if BLOCKS not in layout.params:
        raise ValueError(f'the layout has no "{BLOCKS}": make it with the init method of the same js.Stacked model')
    raise_all(
        _split_stacks(layout),
        ValueError,
        "the layout does not know which dimension stacks the blocks; pass the method model.init itself to js.layout, "
        "not a function that calls it",
    )


def _split_stacks(layout: Layout) -> list[str]:
    """Find the blocks' parameters and gradients that are split or padded along dimension 0, which stacks the blocks.

    Return a message with the path and the shape of each.
    """
    problems: list[str] = []

    def check(path: Any, placement: Placement) -> None:
        if placement.store[0] is not None or placement.view.stored[0] != placement.view.logical[0]:
            problems.append(f"{BLOCKS}/{path_str(path)}: dim 0 of {list(placement.view.logical)} is split or padded")

    map_with_path(check, layout.params[BLOCKS])
    map_with_path(check, layout.grads[BLOCKS])
    return problems


def _tails(placements: PyTree) -> PyTree:
    return jax.tree.map(lambda placement: placement.drop_first(), placements)


def without_blocks(tree: PyTree) -> PyTree:
    """Return the parameters of a `js.Stacked` model without the entry of the stacked blocks."""
    return {name: part for name, part in tree.items() if name != BLOCKS}


def cast_floats(x: jax.Array, dtype: Any) -> jax.Array:
    """Cast a floating array to the dtype; return other arrays, and any array if the dtype is None, unchanged."""
    return x.astype(dtype) if dtype is not None and jnp.issubdtype(x.dtype, jnp.floating) else x


def cast_shapes(shapes: PyTree, dtype: Any) -> PyTree:
    """Return the shapes of a tree of arrays after `cast_floats`, with `dtype` in place of other floating dtypes."""
    return jax.eval_shape(lambda tree: jax.tree.map(lambda x: cast_floats(x, dtype), tree), shapes)
