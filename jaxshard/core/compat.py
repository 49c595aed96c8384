"""The only place with version checks and private names (JAX 0.10 to 0.12, Python 3.11 to 3.14)."""

import os
import threading
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax._src import clusters, distributed, xla_bridge
from jax.experimental.compilation_cache.compilation_cache import reset_cache
from jax.extend.core import Literal as Literal
from jax.interpreters import partial_eval


def backend_is_initialized() -> bool:
    """Whether JAX has touched a device, after which the number of simulated devices is fixed."""
    return xla_bridge.backends_are_initialized()


def cluster_processes() -> int:
    """How many processes `jax.distributed.initialize()` would join in the cluster that it finds; 1 without one.

    JAX takes every pod of Kubernetes for one of a Job, and fails in a notebook's: only those of an indexed Job count.
    """
    kinds = [kind for kind in clusters.ClusterEnv._cluster_types if not kind.opt_in_only_method]
    if "JOB_COMPLETION_INDEX" not in os.environ:
        kinds = [kind for kind in kinds if kind is not clusters.K8sCluster]
    kind = next((kind for kind in kinds if kind.is_env_present()), None)
    return 1 if kind is None else kind.get_process_count()


def joined() -> tuple[int, int]:
    """(number of processes, which one this is) as `jax.distributed` knows them, without touching a device."""
    return distributed.global_state.num_processes, distributed.global_state.process_id


def coordinator() -> Any:
    """The client of JAX's coordinator, whose key-value store all processes share; None in a process on its own."""
    return distributed.global_state.client


def varying_axes(x: Any) -> frozenset[str]:
    """The mesh axes over which the type of `x` varies inside shard_map; always empty under check_vma=False."""
    kind = jax.typeof(x)
    return frozenset(kind.mat.varying if hasattr(kind, "mat") else getattr(kind, "vma", ()))


def open_jaxpr(program: Any) -> tuple[Any, tuple[Any, ...]]:
    """(jaxpr, constants) of a jaxpr, closed or not (0.12 has one class for both)."""
    return getattr(program, "jaxpr", program), tuple(getattr(program, "consts", ()))


def scan_counts(params: dict[str, Any]) -> tuple[int, int]:
    """(number of constants, number of carries) from the parameters of a scan equation; the rest is scanned over."""
    if "num_consts" in params:
        return params["num_consts"], params["num_carry"]
    consts, carry, _ = params["ft_in"].unpack()
    return len(consts), len(carry)


def equation_frames(equation: Any) -> list[tuple[str, int, str]]:
    """(file, line, qualified function name) of the Python frames that made an equation, innermost first."""
    traceback = equation.source_info.traceback
    return [] if traceback is None else [(f.file_name, f.line_num, f.function_name) for f in traceback.frames]


def device_order(compiled: Any) -> tuple[jax.Device, ...] | None:
    """The devices of a compiled program by position; None for a program without arguments and results, or its text."""
    shardings = getattr(compiled, "input_shardings", ()), getattr(compiled, "output_shardings", ())
    return next((tuple(sharding._device_assignment) for sharding in jax.tree.leaves(shardings)), None)


def default_devices() -> list[jax.Device] | None:
    """The devices of the default backend, or None where none of the platforms in JAX_PLATFORMS is there.

    Up to 0.12 an assertion fails inside JAX for a platform without a plugin.
    """
    try:
        return jax.devices()
    except (RuntimeError, AssertionError):
        return None


def without_dead_code(program: Any) -> tuple[Any, list[bool]]:
    """(jaxpr without what its results don't need, which of its inputs are left)."""
    jaxpr, _ = open_jaxpr(program)
    return partial_eval.dce_jaxpr(jaxpr, [True] * len(jaxpr.outvars))


def piece(program: Any, outs: Sequence[Any], ins: Sequence[Any], eqns: Sequence[Any]) -> Callable[..., list[Any]]:
    """`fn(*values of ins) -> values of outs` by these equations of a program, constants filled in."""
    jaxpr, consts = open_jaxpr(program)
    names = jaxpr.debug_info._replace(arg_names=None, result_paths=None)
    part = jaxpr.replace(eqns=list(eqns), invars=list(ins), outvars=list(outs), debug_info=names)
    return lambda *values: list(jax.core.eval_jaxpr(part, consts, *values))


def replayed(program: Any, args: Sequence[Any], rule: Callable[[Any, list[Any]], list[Any] | None]) -> list[Any]:
    """The results of a program of which `rule(equation, values)` computes those equations where it returns a list."""
    jaxpr, consts = open_jaxpr(program)
    return _flat(jaxpr, consts, args, rule)


def inlined(program: Any) -> Any:
    """The program with calls opened: jit, checkpoint, and functions with derivatives of their own."""
    jaxpr, consts = open_jaxpr(program)
    return jax.make_jaxpr(lambda *args: _flat(jaxpr, consts, args))(*jaxpr.in_avals)


_CALLS = {"jit": "jaxpr", "pjit": "jaxpr", "remat2": "jaxpr", "remat": "jaxpr", "checkpoint": "jaxpr"}
_CALLS |= {"closed_call": "call_jaxpr", "core_call": "call_jaxpr", "custom_jvp_call": "call_jaxpr"}
_CALLS |= {"custom_vjp_call": "call_jaxpr", "custom_vjp_call_jaxpr": "fun_jaxpr"}


def _flat(jaxpr: Any, consts: Sequence[Any], args: Sequence[Any], rule: Any = lambda eqn, values: None) -> list[Any]:
    env = dict(zip((*jaxpr.constvars, *jaxpr.invars), (*consts, *args), strict=True))

    def read(var: Any) -> Any:
        return var.val if isinstance(var, Literal) else env[var]

    for eqn in jaxpr.eqns:
        values = [read(var) for var in eqn.invars]
        inner = eqn.params.get(_CALLS.get(eqn.primitive.name, ""))
        with eqn.ctx.manager:
            if inner is not None:
                out = _flat(*open_jaxpr(inner), values, rule)
            elif (out := rule(eqn, values)) is None:
                out = eqn.primitive.bind(*values, **eqn.primitive.get_bind_params(eqn.params))
                out = out if eqn.primitive.multiple_results else [out]
        env.update(zip(eqn.outvars, out, strict=True))
    return [read(var) for var in jaxpr.outvars]


def before_exit(fn: Callable[[], Any]) -> None:
    """Calls a function when the program ends, while threads can still be started: `atexit` comes too late for that.

    What `concurrent.futures` itself uses, to be replaced when Python has a public name for it
    (https://github.com/python/cpython/issues/86128).
    """
    threading._register_atexit(fn)  # type: ignore[attr-defined]  # private, so the stubs lack it


def avoid_compilation_cache(mesh: jax.sharding.Mesh | jax.sharding.AbstractMesh) -> None:
    """Turns JAX's persistent compilation cache off, with a warning, where several CPU devices compute together.

    Loaded from it the collectives of a program that do not depend on each other are no longer in one order: some
    devices wait in one and some in the other, until XLA ends the process after 40 s (seen with JAX 0.10.2; to try it
    with a newer one, run `jaxshard train` out of the cache several times on a busy machine).
    """
    config: Any = jax.config
    if not config.jax_compilation_cache_dir or not config.jax_enable_compilation_cache:
        return
    if mesh.size == 1 or not isinstance(mesh, jax.sharding.Mesh) or mesh.devices.flat[0].platform != "cpu":
        return
    config.update("jax_enable_compilation_cache", False)
    reset_cache()
    warnings.warn(
        f"the compilation cache in {config.jax_compilation_cache_dir} is not used: programs of several CPU devices "
        "that are loaded from it can hang in their collectives",
        stacklevel=3,
    )
