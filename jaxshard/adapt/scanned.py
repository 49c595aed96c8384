"""`js.scanned`: a Linen model whose blocks run in `nn.scan`, as a `Stacked` model.

The loss is traced, and the one scan over stacked parameters is found among its equations. What comes before it is the
embedding, its body is the block, and what comes after it is the head; each is traced again for the shapes at hand.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import linen as nn
from flax.traverse_util import flatten_dict, unflatten_dict
from jax.extend.core import Literal

from jaxshard.adapt.linen import Linen, linen
from jaxshard.adapt.stacked import Stacked
from jaxshard.core.compat import scan_counts
from jaxshard.core.jaxpr import (
    Program,
    assign,
    dependent_variables,
    needed_equations,
    open_jaxpr,
    subprogram,
    variables,
)
from jaxshard.core.keys import typed_key
from jaxshard.core.loss import Loss, Mean, Model
from jaxshard.core.tree import BLOCKS, abstract, paths, raise_all
from jaxshard.core.types import PyTree

Path = tuple[str, ...]


def scanned(module: nn.Module, loss: Callable[..., Any], batch: PyTree) -> Scanned:
    """A Linen model whose blocks run in one `nn.scan`, as it is, as a `Stacked` model.

        blocks = nn.scan(Block, variable_axes={"params": 0}, split_rngs={"params": True, "dropout": True}, length=12)

    The arguments are those of `js.linen`. The loss must be a `js.Mean` or `js.Loss`, run the scan once, outside of
    `jax.jit` and `nn.remat` (blocks themselves may be `nn.remat`), and use no per-layer output of it.

    The parameters are those of the module in another order: the scanned ones under "blocks", the others where they
    are; `to_variables` and `from_variables` convert. `init` draws what `module.init` does. Random keys of a block come
    from its own key, whatever scan splits: another stream than `module.apply` has, of the same kind. What the blocks
    share, and inputs of single layers, travel with the activations.

    Raises:
      ValueError: no such scan, or several; a module with state; stacked parameters that are used outside of the scan.
    """
    return Scanned(linen(module, loss, batch))


class Scanned(Stacked):
    """A scanned Linen model as a `Stacked` model; see `scanned`."""

    stacked_for_user = True

    def __init__(self, adapter: Linen):
        self.adapter = adapter
        shapes = jax.eval_shape(adapter.make_params, jax.random.key(0))
        if isinstance(shapes, Model):
            raise_all(paths(shapes.state), ValueError, "js.scanned: a model of blocks has no state, but this one has")
        self._shapes = flatten_dict(shapes)
        self._stacked: frozenset[Path] = frozenset()
        trace = self._program(shapes, abstract(adapter.batch), train=True)
        scan, self._stacked = _find(trace)
        self._prefix = _common(self._stacked)
        rest = unflatten_dict({path: x for path, x in self._shapes.items() if path not in self._stacked})
        if BLOCKS in rest:
            raise ValueError(
                f"js.scanned: the module has parameters under {BLOCKS!r} that are not scanned: "
                f"{', '.join(paths(rest[BLOCKS]))}; give that module another name"
            )
        super().__init__(self._embed, self._block, self._head, scan.params["length"], adapter.make_params)
        _Pieces.of(trace, self)

    def make_params(self, key: jax.Array) -> PyTree:
        """What `module.init` draws: {"blocks": the scanned parameters, and the others}."""
        return self._parted(self.adapter.make_params(key))

    def dim_names(self, params: PyTree) -> PyTree:
        """For every parameter the names in its metadata; the scanned dimension is that of the blocks."""
        named = self._parted(self.adapter.dim_names(self._joined(params)))
        blocks = {path: (BLOCKS, *names[1:]) for path, names in flatten_dict(named[BLOCKS]).items()}
        return named | {BLOCKS: unflatten_dict(blocks)}

    def to_variables(self, params: PyTree) -> PyTree:
        """{"params": ...} as the module's `apply` takes them."""
        return {"params": self._joined(params)}

    def from_variables(self, variables: PyTree) -> PyTree:
        """The parameters of this model, from what the module's `init` returned."""
        return self._parted(nn.unbox(variables)["params"])

    def _parted(self, tree: PyTree) -> PyTree:
        flat = flatten_dict(tree)
        rest = {path: x for path, x in flat.items() if path not in self._stacked}
        blocks = {path[len(self._prefix) :]: x for path, x in flat.items() if path in self._stacked}
        return unflatten_dict(rest) | {BLOCKS: unflatten_dict(blocks)}

    def _joined(self, tree: PyTree) -> PyTree:
        flat = flatten_dict({name: part for name, part in tree.items() if name != BLOCKS})
        flat |= {self._prefix + path: x for path, x in flatten_dict(tree[BLOCKS]).items()}
        return unflatten_dict(flat)

    def _program(self, params: PyTree, batch: PyTree, *, train: bool) -> Program:
        key = jax.eval_shape(lambda: jax.random.key(0)) if train else None
        return Program.trace(self.adapter.run, params, batch, key)

    def _pieces(self, rest: PyTree, batch: PyTree, *, train: bool) -> _Pieces:
        """The parts of the model for these shapes; blocks have been cast as the other parameters are."""
        flat = flatten_dict(rest)
        cast = {self._shapes[path].dtype: x.dtype for path, x in flat.items()}
        blocks = {
            path: jax.ShapeDtypeStruct(x.shape, cast.get(x.dtype, x.dtype))
            for path, x in self._shapes.items()
            if path in self._stacked
        }
        return _Pieces.of(self._program(unflatten_dict(flat | blocks), batch, train=train), self)

    def _embed(self, params: PyTree, batch: PyTree, key: jax.Array | None) -> Flow:
        shapes = abstract((params, batch))
        leaves, tree = jax.tree.flatten(shapes)
        pieces = self._pieces(*shapes, train=key is not None)
        moving = pieces.program.run(pieces.moving, pieces.given(self, params, batch, key), pieces.before)
        count = jnp.zeros((), jnp.int32) if moving.layered else None
        form = tree, tuple((x.shape, x.dtype) for x in leaves), key is not None
        return Flow(moving.carry, moving.shared, moving.layered, moving.drawn, count, form)

    def _block(self, params: PyTree, x: Flow, key: jax.Array | None) -> Flow:
        tree, leaves, train = x.form
        rest, batch = tree.unflatten([jax.ShapeDtypeStruct(*leaf) for leaf in leaves])
        pieces = self._pieces(rest, batch, train=train)
        weights = {self._prefix + path: weight for path, weight in flatten_dict(params).items()}
        carry = pieces.block(weights, x, None if key is None else typed_key(key))
        return replace(x, carry=carry, count=None if x.count is None else x.count + 1)

    def _head(self, params: PyTree, x: Flow, batch: PyTree, key: jax.Array | None) -> Mean | Loss:
        pieces = self._pieces(*abstract((params, batch)), train=key is not None)
        given = pieces.given(self, params, batch, key)
        given |= assign(pieces.results, x.carry) | assign(pieces.moving.drawn, x.drawn)
        output: Mean | Loss = pieces.program.run(pieces.program.out, given, pieces.outside)
        return output


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Flow:
    """What flows from block to block: the scan's carry, and what else the blocks and the head need.

    `shared` is the same for all blocks, `layered` has a slice for each ([num_blocks, ...], of which block `count` takes
    its own), `drawn` are random values for the head. `form` is (tree, shapes and dtypes of parameters and batch,
    whether there are keys): with that a block traces itself.
    """

    carry: list[jax.Array]
    shared: list[jax.Array]
    layered: list[jax.Array]
    drawn: list[jax.Array]
    count: jax.Array | None
    form: Any = field(metadata={"static": True})


class _Moving(NamedTuple):
    """Variables from before the scan: lists of those that make a `Flow`."""

    carry: list[Any]
    shared: list[Any]
    layered: list[Any]
    drawn: list[Any]


class _Pieces(NamedTuple):
    """A traced loss with its scan, taken apart."""

    program: Program
    scan: Any
    before: list[Any]
    after: list[Any]
    moving: _Moving
    sources: list[tuple[str, Any]]  # of every input of the scan's body

    @classmethod
    def of(cls, program: Program, model: Scanned) -> _Pieces:
        scan, stacked = _find(program)
        where = program.eqns.index(scan)
        before, after = program.eqns[:where], program.eqns[where + 1 :]
        consts, carries = scan_counts(scan.params)
        flat = flatten_dict(program.args[0])
        keys, blocks = set(jax.tree.leaves(program.args[2])), {flat[path]: path for path in stacked}
        inputs = variables(jax.tree.leaves(program.args))
        random, moved = dependent_variables(before, keys), dependent_variables(before, inputs)
        moving, problems, split = _Moving([], [], [], []), [], 0
        sources: list[tuple[str, Any]] = []
        for place, var in enumerate(scan.invars):
            kept = not isinstance(var, Literal)
            if consts <= place < consts + carries:
                sources.append(("carry", len(moving.carry)))
                moving.carry.append(var)
            elif kept and var in blocks:
                sources.append(("weight", blocks[var]))
            elif kept and var in random and _is_key(var):
                if place < consts:
                    problems.append("blocks share one random key: pass split_rngs={'params': True, 'dropout': True}")
                sources.append(("key", split))
                split += 1
            elif place < consts and (not kept or var not in moved):
                sources.append(("fixed", var))
            else:
                kind = "shared" if place < consts else "layered"
                sources.append((kind, len(getattr(moving, kind))))
                getattr(moving, kind).append(var)
        given = inputs | set(scan.outvars[:carries])
        _, free = needed_equations(after, jax.tree.leaves(program.out), given)
        if not free.isdisjoint(scan.outvars[carries:]):
            problems.append("what the blocks return beside the carry (or sow) is used after the scan")
        made = [var for eqn in before for var in eqn.outvars]
        moving.drawn.extend(var for var in made if var in free and var in random and not _is_key(var))
        every = [*before, *after]
        problems += [
            f"{'/'.join(path)}: used outside of the scan"
            for var, path in blocks.items()
            if any(var in variables(eqn.invars) for eqn in every)
        ]
        raise_all(problems, ValueError, "js.scanned: the blocks can't be taken out of this model")
        return cls(program, scan, before, after, moving, sources)

    @property
    def results(self) -> list[Any]:
        return list(self.scan.outvars[: len(self.moving.carry)])

    @property
    def outside(self) -> list[Any]:
        """What the head may compute: all but the scan."""
        return [*self.before, *self.after]

    def given(self, model: Scanned, rest: PyTree, batch: PyTree, key: jax.Array | None) -> dict[Any, Any]:
        """The values of the program's arguments but for the blocks."""
        names = flatten_dict(self.program.args[0])
        values = {names[path]: x for path, x in flatten_dict(rest).items()} | assign(self.program.args[1], batch)
        return values if key is None else values | {self.program.args[2]: typed_key(key)}

    def block(self, weights: dict[Path, jax.Array], x: Flow, key: jax.Array | None) -> list[jax.Array]:
        """The carry after one turn of the scan."""
        fixed = [var for kind, var in self.sources if kind == "fixed"]
        numbers = dict(zip(map(id, fixed), self.program.run(fixed, {}, self.before), strict=True))
        body = self.scan.params["jaxpr"]
        jaxpr, _ = open_jaxpr(body)

        def value(kind: str, which: Any, aval: Any) -> Any:
            if kind == "weight":
                return weights[which]
            if kind == "fixed":
                return numbers[id(which)]
            if kind == "key":
                assert key is not None, "without a key nothing depends on it"
                mine = jax.random.fold_in(key, which)
                return jax.random.split(mine, aval.shape) if aval.shape else mine
            if kind == "layered":
                return jax.lax.dynamic_index_in_dim(x.layered[which], x.count, keepdims=False)
            return getattr(x, kind)[which]

        values = [value(*source, var.aval) for source, var in zip(self.sources, jaxpr.invars, strict=True)]
        outs = jaxpr.outvars[: len(self.moving.carry)]
        return subprogram(body, outs, jaxpr.invars, jaxpr.eqns)(*values)


def _find(program: Program) -> tuple[Any, frozenset[Path]]:
    """The scan over stacked parameters, and the paths of those."""
    params = {var: path for path, var in flatten_dict(program.args[0]).items()}
    found = []
    for eqn in program.eqns:
        if eqn.primitive.name == "scan":
            over = variables(eqn.invars[sum(scan_counts(eqn.params)) :])
            if stacked := frozenset(params[var] for var in over if var in params):
                found.append((eqn, stacked))
    runs = [f"one over {', '.join('/'.join(path) for path in sorted(stacked))}" for _, stacked in found]
    backwards = [f"{run}, backwards" for run, (eqn, _) in zip(runs, found, strict=True) if eqn.params["reverse"]]
    if len(found) != 1 or backwards:
        raise ValueError(
            "js.scanned: the loss must run one nn.scan, forward, over parameters that are stacked along axis 0 "
            '(variable_axes={"params": 0}), outside of jax.jit and nn.remat, but this runs '
            f"{'; '.join(backwards or runs) or 'none'}; blocks in a Python loop are for js.stack"
        )
    return found[0]


def _common(found: frozenset[Path]) -> Path:
    """The longest path of a module that all parameters have in common."""
    first, last = min(found), max(found)
    same = next((i for i, (a, b) in enumerate(zip(first, last)) if a != b), min(len(first), len(last)))
    return first[: min(same, len(first) - 1)]


def _is_key(var: Any) -> bool:
    return bool(jnp.issubdtype(var.aval.dtype, jax.dtypes.prng_key))
