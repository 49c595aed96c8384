"""`js.scanned`: turn a Linen model whose blocks run in `nn.scan` into a `Stacked` model.

The user's code stays as it is. The loss is traced, and its jaxpr is split at the scan over stacked parameters into
embedding, block and head (see `scan_split.py`). A jaxpr has fixed shapes, so the model's functions `embed`, `block` and
`head` each trace the loss again for the batch sizes and dtypes that they receive.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn
from flax.traverse_util import flatten_dict, unflatten_dict

from jaxshard.adapt.linen import Linen, check_variables, linen
from jaxshard.adapt.scan_split import Path, ScanCarry, SplitLoss, split_at_scan
from jaxshard.adapt.stacked import Stacked
from jaxshard.adapt.units import check_loss
from jaxshard.core.jaxpr import Program
from jaxshard.core.keys import typed_key
from jaxshard.core.loss import Loss, Mean, Model
from jaxshard.core.tree import BLOCKS, abstract, paths, raise_all
from jaxshard.core.types import PyTree


def scanned(module: nn.Module, loss: Callable[..., Any], batch: PyTree) -> Scanned:
    """Turn a Linen model whose blocks run in one `nn.scan` into a `js.Stacked` model, without changing the module.

    Engines then gather the parameters of one block at a time, and `js.pipelined` places blocks in stages.

    The loss must return a `js.Mean` or `js.Loss`, run the scan once, outside of `jax.jit` and `nn.remat` (the blocks
    themselves may be `nn.remat`), and use none of the scan's per-layer outputs.

    The parameters are the module's parameters in another tree: the scanned parameters [num_blocks, ...] are under
    "blocks", all others at their own paths. `to_variables` and `from_variables` convert between the trees. `init`
    returns the values of `module.init`. The random keys of blocks differ from the keys of `module.apply`: each block
    makes them from a key of its own. Values that all blocks share, and per-layer inputs of the scan, are passed along
    with the activations.

    Args:
      module: the module, not yet initialised.
      loss: `loss(model, batch) -> js.Mean | js.Loss`, as for `js.linen`; it may have a parameter `train`, but no `key`.
      batch: an example batch, arrays or `jax.ShapeDtypeStruct`s.

    Raises:
      ValueError: there is no such scan, or several; the module has state; stacked parameters are used outside of the
        scan; the blocks share a random key.

    Example:
          class Transformer(nn.Module):
              @nn.compact
              def __call__(self, tokens):
                  x = nn.Embed(256, 512)(tokens)
                  rngs = {"params": True, "dropout": True}
                  blocks = nn.scan(Block, variable_axes={"params": 0}, split_rngs=rngs, length=12)
                  x, _ = blocks(512)(x, None)
                  return nn.Dense(256)(x)

          model = js.scanned(Transformer(), loss, batch)
          layout = js.layout(js.compose(js.fsdp(), js.pipeline()), mesh, model.init, tx)
          step = js.make_step(model.loss, tx, layout, engine=js.pipelined(microbatches=8))
    """
    check_loss("js.scanned", loss, ("train",))
    return Scanned(linen(module, loss, batch))


class Scanned(Stacked):
    """A Linen model with an `nn.scan` over its blocks, as a `js.Stacked` model; made by `js.scanned`.

    Attributes:
      adapter: the module with its loss, a `js.linen` pair.
    """

    stacked_for_user = True

    def __init__(self, adapter: Linen):
        self.adapter = adapter
        shapes = jax.eval_shape(adapter.make_params, jax.random.key(0))
        if isinstance(shapes, Model):
            raise_all(paths(shapes.state), ValueError, "js.scanned: a model of blocks has no state, but this one has")
        self._shapes = flatten_dict(shapes)
        # Split once here, so that an unsuitable model is refused now and not in the first step.
        split = split_at_scan(self._trace(shapes, abstract(adapter.batch), train=True))
        self._stacked: frozenset[Path] = frozenset(one.which for one in split.inputs if one.kind == "weight")
        self._prefix = _common_module(self._stacked)
        rest = unflatten_dict({path: x for path, x in self._shapes.items() if path not in self._stacked})
        if BLOCKS in rest:
            raise ValueError(
                f"js.scanned: the module has parameters under {BLOCKS!r} that are not scanned: "
                f"{', '.join(paths(rest[BLOCKS]))}; give that module another name"
            )
        super().__init__(self._embed, self._block, self._head, split.scan.params["length"], adapter.make_params)

    def make_params(self, key: jax.Array) -> PyTree:
        """Initialise the module; return its parameters, with the scanned ones [num_blocks, ...] under "blocks"."""
        return self._to_stacked(self.adapter.make_params(key))

    def dim_names(self, params: PyTree) -> PyTree:
        """Return for every parameter a tuple of names of its dimensions; the scanned dimension is named "blocks"."""
        named = self._to_stacked(self.adapter.dim_names(self._to_module(params)))
        blocks = {path: (BLOCKS, *names[1:]) for path, names in flatten_dict(named[BLOCKS]).items()}
        return named | {BLOCKS: unflatten_dict(blocks)}

    def to_variables(self, params: PyTree) -> PyTree:
        """Convert this model's parameters, {"blocks": ..., ...}, to {"params": ...} for the module's `apply`."""
        return {"params": self._to_module(params)}

    def from_variables(self, variables: PyTree) -> PyTree:
        """Convert the result of the module's `init` to this model's parameters, {"blocks": ..., ...}."""
        return self._to_stacked(nn.unbox(variables)["params"])

    def to_module(self, model: PyTree, key: jax.Array) -> PyTree:
        """Return the variables that the module's `apply` takes; see `to_variables`."""
        return self.to_variables(model)

    def from_module(self, module: Any) -> PyTree:
        """Convert variables of the module to parameters of this model; see `from_variables`."""
        return self.from_variables(check_variables("the layout's model is of js.scanned", module))

    # The scanned module may be at any path. With the prefix ("decoder", "layers") the module's parameter
    # decoder/layers/mlp/kernel is blocks/mlp/kernel in this model.

    def _to_stacked(self, tree: PyTree) -> PyTree:
        flat = flatten_dict(tree)
        rest = {path: x for path, x in flat.items() if path not in self._stacked}
        blocks = {path[len(self._prefix) :]: x for path, x in flat.items() if path in self._stacked}
        return unflatten_dict(rest) | {BLOCKS: unflatten_dict(blocks)}

    def _to_module(self, tree: PyTree) -> PyTree:
        flat = flatten_dict({name: part for name, part in tree.items() if name != BLOCKS})
        flat |= {self._prefix + path: x for path, x in flatten_dict(tree[BLOCKS]).items()}
        return unflatten_dict(flat)

    def _trace(self, params: PyTree, batch: PyTree, *, train: bool) -> Program:
        key = jax.eval_shape(lambda: jax.random.key(0)) if train else None
        return Program.trace(self.adapter.run, params, batch, key)

    def _split(self, rest: PyTree, batch: PyTree, *, train: bool) -> SplitLoss:
        """Trace the loss for the given shapes, and split it into embedding, block and head.

        Args:
          rest: shapes of the parameters outside of the blocks.
          batch: shapes of the batch.
          train: True to trace the loss with a random key, False to trace it as in evaluation.
        """
        flat = flatten_dict(rest)
        # An engine may have cast the parameters (compute_dtype). The embedding and the head do not receive the blocks'
        # parameters, so assume that these were cast like other parameters of the same dtype.
        cast = {self._shapes[path].dtype: x.dtype for path, x in flat.items()}
        blocks = {
            path: jax.ShapeDtypeStruct(x.shape, cast.get(x.dtype, x.dtype))
            for path, x in self._shapes.items()
            if path in self._stacked
        }
        return split_at_scan(self._trace(unflatten_dict(flat | blocks), batch, train=train))

    def _embed(self, params: PyTree, batch: PyTree, key: jax.Array | None) -> ScanCarry:
        shapes = abstract((params, batch))
        leaves, tree = jax.tree.flatten(shapes)
        made = self._split(*shapes, train=key is not None).run_embed(params, batch, key)
        count = jnp.zeros((), jnp.int32) if made.layered else None
        form = tree, tuple((x.shape, x.dtype) for x in leaves), key is not None
        return ScanCarry(made.carry, made.shared, made.layered, made.drawn, count, form)

    def _block(self, params: PyTree, x: ScanCarry, key: jax.Array | None) -> ScanCarry:
        tree, leaves, train = x.form
        rest, batch = tree.unflatten([jax.ShapeDtypeStruct(*leaf) for leaf in leaves])
        split = self._split(rest, batch, train=train)
        weights = {self._prefix + path: weight for path, weight in flatten_dict(params).items()}
        carry = split.run_block(weights, x, None if key is None else typed_key(key))
        return replace(x, carry=carry, count=None if x.count is None else x.count + 1)

    def _head(self, params: PyTree, x: ScanCarry, batch: PyTree, key: jax.Array | None) -> Mean | Loss:
        split = self._split(*abstract((params, batch)), train=key is not None)
        output: Mean | Loss = split.run_head(params, x, batch, key)
        return output


def _common_module(found: frozenset[Path]) -> Path:
    """Return the longest common path of these parameters' modules: {a/b/w, a/c/w} -> a."""
    first, last = min(found), max(found)  # in sorted order all paths between these two share their common prefix
    same = next((i for i, (a, b) in enumerate(zip(first, last)) if a != b), min(len(first), len(last)))
    return first[: min(same, len(first) - 1)]
