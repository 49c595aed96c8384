"""What a guard compiles: a jitted function or a `js.Step` with its arguments, traced for the devices of a target."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.extend.core import Jaxpr, jaxprs_in_params
from jax.sharding import Mesh, NamedSharding

from jaxshard.compiler.topology import Target, target_of
from jaxshard.core.settings import own_settings
from jaxshard.core.tree import abstract
from jaxshard.plan.compiled.target import step_for
from jaxshard.training.step import Step

EXPECTED = (
    "return (step, batch) of a js.Step, or (jitted, arguments): what jax.jit returned, and a tuple of its arguments"
)


class Subject(NamedTuple):
    """A traced program with its mesh.

    Attributes:
      traced: the trace for the first arguments.
      mesh: the mesh of the program.
      programs: the number of different programs that JAX compiles for all given arguments.
    """

    traced: jax.stages.Traced
    mesh: Mesh
    programs: int = 1


def subject_of(made: Any, target: Target | None) -> Subject:
    """Trace what a guard is given for a target.

    Args:
      made: (step, batch) of a `js.Step`; or (jitted, arguments), where arguments are a tuple of arrays or of
        `jax.ShapeDtypeStruct` with shardings; more tuples of arguments may follow, those of later calls.
      target: the topology that a `js.Step` is put on; None for the devices that it was made for. The arguments of a
        jitted function name their devices themselves.

    Raises:
      TypeError: `made` is something else, or the arguments do not fit the function.
      ValueError: the mesh has another number of devices than the target.
    """
    if not isinstance(made, tuple) or len(made) < 2:
        raise TypeError(f"got {_what(made)}; {EXPECTED}")
    fn, *calls = made
    if isinstance(fn, Step):
        step = fn if target is None else step_for(fn, target)
        mesh = step.layout.mesh
        assert isinstance(mesh, Mesh)
        with own_settings(mesh):
            return Subject(step.trace(calls[0]), mesh, len({str(abstract(call)) for call in calls}))
    if not hasattr(fn, "trace") or not callable(fn):
        raise TypeError(f"the first is {_what(fn)}, which can't be traced; wrap it in jax.jit; {EXPECTED}")
    if not all(isinstance(call, tuple) for call in calls):
        raise TypeError(f"the arguments are {_what(next(c for c in calls if not isinstance(c, tuple)))}; {EXPECTED}")
    traces = [fn.trace(*call) for call in calls]
    mesh = _mesh_of(traces[0], calls[0])
    if target is not None and target_of(mesh) != target:
        raise ValueError(
            f"the arguments are on {mesh.size} x {mesh.devices.flat[0].device_kind}, not on {target}: make their mesh "
            f'of the devices that the function is given, or of js.plan.topology_mesh("{target.name}", ...)'
        )
    # JAX traces a function once for arguments of the same types: an equal trace is the same object.
    return Subject(traces[0], mesh, len({id(one.jaxpr) for one in traces}))


def _mesh_of(traced: jax.stages.Traced, arguments: Sequence[Any]) -> Mesh:
    """Find the mesh of a program: of its arguments' shardings, or of a sharding or `shard_map` inside of it.

    A program without a mesh is that of one device.
    """
    shardings = (getattr(leaf, "sharding", None) for leaf in jax.tree.leaves(arguments))
    found = [one.mesh for one in shardings if isinstance(one, NamedSharding)]
    found += _meshes_in(traced.jaxpr.jaxpr)
    meshes = [one for one in found if isinstance(one, Mesh) and not one.empty]
    return max(meshes, key=lambda one: one.size, default=Mesh(np.array(jax.devices()[:1]), ("device",)))


def _meshes_in(jaxpr: Jaxpr) -> Iterable[Any]:
    for equation in jaxpr.eqns:
        for value in jax.tree.leaves(list(equation.params.values()), is_leaf=lambda x: isinstance(x, NamedSharding)):
            if isinstance(value, (NamedSharding, Mesh)):
                yield getattr(value, "mesh", value)
        for inner in jaxprs_in_params(equation.params):
            yield from _meshes_in(inner)


def _what(made: Any) -> str:
    return f"a tuple of {len(made)}" if isinstance(made, tuple) else type(made).__name__
