"""All code that depends on the version of JAX or Python, or on their private names (JAX 0.10 to 0.12, Python 3.11 on).

Each function says which private or undocumented name it needs, and what happens when a new version changes that name:
an error where the name is used, or no error but a wrong or slower result. Changes without an error are tested in
tests/core/test_compat.py, as are the names of primitives and compiler passes that other files compare with.
"""

import functools
import importlib
import io
import logging
import os
import re
import threading
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import jax
from jax._src import api_util, clusters, compiler, distributed, profiler, xla_bridge
from jax.experimental.compilation_cache.compilation_cache import reset_cache
from jax.extend import source_info_util
from jax.extend.core import Primitive, Var
from jax.interpreters import ad, batching, mlir, partial_eval

NEWEST_TESTED = (0, 12)
"""The newest minor version of JAX with which the tests were run."""


# Versions.


def untested_version() -> str | None:
    """Return a warning text if the installed JAX is newer than `NEWEST_TESTED`; else None."""
    if jax.__version_info__[:2] <= NEWEST_TESTED:
        return None
    newest = ".".join(map(str, NEWEST_TESTED))
    return (
        f"JAX {jax.__version__} is newer than {newest}, the newest that jaxshard is tested with: a newer jaxshard may "
        f'know it, or install "jax<{NEWEST_TESTED[0]}.{NEWEST_TESTED[1] + 1}"'
    )


def warn_if_untested() -> None:
    """Warn, once in a process, if JAX is newer than `NEWEST_TESTED`."""
    if message := untested_version():
        _warn_once(message)


@functools.cache
def _warn_once(message: str) -> None:
    # The stack: this function, warn_if_untested, the two functions of js.layout, and the user's call.
    warnings.warn(message, stacklevel=5)


# Compiler passes.


KEEP_REPEATED_GATHERS = {"xla_disable_hlo_passes": "cse_barrier_expander"}
"""Compiler options that keep the CPU compiler from merging the all-gathers of forward and backward pass.

Undocumented: the name of a pass of XLA. It expands the barrier of `jax.checkpoint` too early (JAX 0.10), after which
equal gathers are merged. If it changes, there is no error: under another name nothing is disabled, and gathered weights
are kept for the backward pass. Tested by its effect.
"""


class CompilerInput(NamedTuple):
    """The program and options that JAX gives to a compiler.

    Attributes:
      program: MLIR bytecode.
      options: serialized `CompileOptions`, without the overrides.
      overrides: (name, value) of each compiler option that differs from its default, sorted.
      devices: the ids of the devices, in the order of the program's partitions.
      version: the compiler's own description of its version.
    """

    program: bytes
    options: bytes
    overrides: tuple[tuple[str, Any], ...]
    devices: tuple[int, ...]
    version: str


class _Taken(Exception):
    pass


_taking = threading.Lock()


def compiler_input(lowered: jax.stages.Lowered) -> CompilerInput:
    """Return what `lowered.compile()` would give to the compiler, so that another process can compile it.

    Private: `jax._src.compiler.compile_or_get_cached`, which every compilation calls; it is replaced for this thread
    while `compile` runs. If it changes: an AttributeError, or an IndexError after the program was compiled here.
    """
    taken: list[CompilerInput] = []
    private: Any = compiler
    thread = threading.get_ident()

    def take(backend: Any, module: Any, devices: Any, options: Any, *rest: Any, **more: Any) -> Any:
        if threading.get_ident() != thread:
            return compile_program(backend, module, devices, options, *rest, **more)
        program = io.BytesIO()
        module.operation.write_bytecode(program)
        overrides = tuple(sorted(options.env_option_overrides))
        options.env_option_overrides = []  # serialized in no fixed order
        ids = tuple(int(device.id) for device in devices.flat)
        taken.append(
            CompilerInput(
                program.getvalue(), options.SerializeAsString(), overrides, ids, f"{backend.platform_version}"
            )
        )
        raise _Taken

    with _taking:  # the lock also guards the restored function
        compile_program = private.compile_or_get_cached
        private.compile_or_get_cached = take
        try:
            lowered.compile()
        except _Taken:
            pass
        finally:
            private.compile_or_get_cached = compile_program
    return taken[0]


NonFiniteResult = api_util.InternalFloatingPointError
"""The exception that a program compiled ahead of its call raises under `jax.debug_nans`.

Private: `jax._src.api_util`. `jax.jit` itself catches it and runs the function again, operation by operation. If it
changes: an AttributeError with `import jaxshard`.
"""


# Devices and processes.


def backend_is_initialized() -> bool:
    """Return whether JAX has started a backend, after which the number of simulated devices is fixed.

    Private: `jax._src.xla_bridge`. There is no public way to ask without starting the backend. If it changes: an
    ImportError or AttributeError with `import jaxshard`.
    """
    return xla_bridge.backends_are_initialized()


def cluster_processes() -> int:
    """Return the number of processes in the cluster that `jax.distributed.initialize()` finds; 1 without a cluster.

    A Kubernetes pod counts as part of a cluster only if it belongs to an indexed Job. JAX assumes this of every pod,
    and fails in others, such as a pod for notebooks.

    Private: `jax._src.clusters`, `ClusterEnv._cluster_types` and its methods. JAX can't be asked without joining. If it
    changes: an AttributeError in `js.initialize`.
    """
    kinds = [kind for kind in clusters.ClusterEnv._cluster_types if not kind.opt_in_only_method]
    if "JOB_COMPLETION_INDEX" not in os.environ:
        kinds = [kind for kind in kinds if kind is not clusters.K8sCluster]
    kind = next((kind for kind in kinds if kind.is_env_present()), None)
    return 1 if kind is None else kind.get_process_count()


def place_in_cluster(timeout: int) -> tuple[str, int, int, Sequence[int] | None]:
    """Return what `jax.distributed.initialize()` would find out about the cluster and this process.

    Call it only if `cluster_processes` returned more than 1. On TPU pods it waits, up to `timeout` seconds, until the
    first host has an address.

    Private: `jax._src.clusters`, `ClusterEnv.auto_detect_unset_distributed_params`. JAX can't be asked without joining.
    If it changes: an AttributeError or TypeError in `js.initialize`.

    Returns:
      (host:port of process 0, number of processes, index of this process, ids of its devices or None if JAX chooses).
    """
    address, count, index, devices = clusters.ClusterEnv.auto_detect_unset_distributed_params(
        os.environ.get("JAX_COORDINATOR_ADDRESS"), None, None, None, None, timeout
    )
    assert address is not None and count is not None and index is not None, "a cluster that was counted is known"
    # The environment variable overrides the cluster; JAX reads it if the argument is None.
    return address, count, index, None if os.environ.get("JAX_LOCAL_DEVICE_IDS") else devices


def process_count_and_id() -> tuple[int, int]:
    """Return (number of processes, index of this process) without starting JAX's backend.

    Private: `jax._src.distributed.global_state`. `jax.process_count()` would start the backend, which has to wait until
    the number of simulated devices is set. If it changes: an AttributeError.
    """
    return distributed.global_state.num_processes, distributed.global_state.process_id


def coordinator_client() -> Any:
    """Return the client of JAX's coordinator, whose key-value store all processes share; None in a single process.

    `put_key` and the functions after it use the client.

    Private: `jax._src.distributed.global_state.client`, the only way to the store that JAX itself uses. If it changes:
    an AttributeError.
    """
    return distributed.global_state.client


def coordinator_address() -> str:
    """Return "host:port" of JAX's coordinator, as it was given to this process, which has joined others.

    Private: `jax._src.distributed.global_state.coordinator_address`. If it changes: an AttributeError.
    """
    return str(distributed.global_state.coordinator_address)


def default_devices() -> list[jax.Device] | None:
    """Return the devices of the default backend, or None if no platform in JAX_PLATFORMS is available.

    Undocumented: for a platform without a plugin JAX raises an AssertionError (up to 0.12), which is caught. If it
    changes: another error, which is not caught.
    """
    try:
        return jax.devices()
    except (RuntimeError, AssertionError):
        return None


def shorten_plugin_errors() -> None:
    """Make JAX report a plugin that can't start, such as that of GPUs without a driver, in one line.

    JAX then goes on without the plugin; its own report is a traceback of 20 lines at every start.

    Private: the name of the logger of `jax._src.xla_bridge`, and how its message begins. If they change, there is no
    error: the traceback is printed.
    """
    logging.getLogger(xla_bridge.__name__).addFilter(_shorten_plugin_error)  # once: it is the same function


def _shorten_plugin_error(record: logging.LogRecord) -> bool:
    if record.exc_info and "plugin configuration error: Exception when calling" in str(record.msg):
        record.msg = f"JAX goes on without its plugin %s, which can't start: {record.exc_info[1]}".partition("\n")[0]
        record.exc_info = None
    return True


def start_plugin(module: str) -> None:
    """Start a plugin of JAX for GPUs, which refused to start without a driver, for its compiler alone.

    The plugin checks the driver unless JAX_PLATFORMS leaves out GPUs or an environment variable skips the check. The
    backends of JAX start first: they would look for GPUs of a plugin that is there.

    Private: the variable and `initialize`, which are not documented.

    Args:
      module: the name of the plugin's module.
    """
    jax.devices()
    os.environ["JAX_SKIP_CUDA_CONSTRAINTS_CHECK"] = "1"
    try:
        importlib.import_module(module).initialize()
    finally:
        del os.environ["JAX_SKIP_CUDA_CONSTRAINTS_CHECK"]


def has_cudnn() -> bool:
    """Return whether cuDNN can be loaded; JAX needs its version to trace attention for a GPU.

    Private: `jax._src.lib.cuda_versions`, None without a CUDA plugin. If it changes: an ImportError.
    """
    from jax._src.lib import cuda_versions

    if cuda_versions is None:
        return False
    try:
        return bool(cuda_versions.cudnn_get_version())
    except RuntimeError:  # "cuDNN not found."
        return False


def device_order(compiled: Any) -> tuple[jax.Device, ...] | None:
    """Return the devices of a compiled program, in the order of its partitions.

    Return None if the program has neither arguments nor results, or if `compiled` is the text of a program.

    Private: `Sharding._device_assignment`. `device_set` is public, but has no order. If it changes: an AttributeError.
    """
    shardings = getattr(compiled, "input_shardings", ()), getattr(compiled, "output_shardings", ())
    return next((tuple(sharding._device_assignment) for sharding in jax.tree.leaves(shardings)), None)


# Traced programs; core/jaxpr.py is made of these.


def varying_axes(x: Any) -> frozenset[str]:
    """Return the mesh axes over which the type of `x` varies inside shard_map; none under check_vma=False.

    Undocumented: the type's attribute `vma`, from 0.12 on `mat.varying`. If it changes, there is no error: the result
    would always be empty, and `js.optim` would add no gradients over devices. A test checks the names.
    """
    kind = jax.typeof(x)
    return frozenset(kind.mat.varying if hasattr(kind, "mat") else getattr(kind, "vma", ()))


def scan_counts(params: dict[str, Any]) -> tuple[int, int]:
    """Return (number of constants, number of carries) from the parameters of a `scan` equation.

    Its operands are the constants, the carries and then the arrays that are scanned over.

    Undocumented: the parameters `num_consts` and `num_carry`, from 0.12 on `ft_in`. If they change: a KeyError or
    ValueError.
    """
    if "num_consts" in params:
        return params["num_consts"], params["num_carry"]
    consts, carry, _ = params["ft_in"].unpack()
    return len(consts), len(carry)


def newly_manual_axes(params: dict[str, Any]) -> frozenset[str]:
    """Return the mesh axes that a `shard_map` makes manual and that are automatic outside of it.

    Args:
      params: the parameters of the equation of the `shard_map` in a jaxpr.

    Undocumented: that JAX calls this parameter "newly_manual_axes". If it changes: a KeyError with the name.
    """
    return frozenset(params["newly_manual_axes"])


def contracted_kernel_dims(params: dict[str, Any]) -> tuple[int, ...]:
    """Return the dimensions of a convolution's kernel that are summed over: its input features and the window.

    With feature groups this needs no correction: the kernel then has only the input features of one group.

    Undocumented: that the equation has a parameter `dimension_numbers` and `rhs_spec` begins with the output features.
    If it changes, there is no error: FLOPs of convolutions would be counted wrong.

    Args:
      params: the parameters of the convolution's equation in a jaxpr.
    """
    _, *summed = params["dimension_numbers"].rhs_spec
    return tuple(summed)


def equation_frames(equation: Any) -> list[tuple[str, int, str]]:
    """Return (file, line, qualified function name) of the Python frames that made an equation, innermost first.

    Private: `source_info.traceback`, needed to name the user's line in errors. If it changes: an AttributeError.
    """
    traceback = equation.source_info.traceback
    return [] if traceback is None else [(f.file_name, f.line_num, f.function_name) for f in traceback.frames]


@contextmanager
def equation_context(equation: Any) -> Iterator[None]:
    """Enter the context in which to evaluate an equation again: mesh, `check_vma`, precision, source line.

    Private: `eqn.ctx.manager` and `eqn.source_info`, which `jax.core.eval_jaxpr` uses itself. If it changes: an
    AttributeError.
    """
    source = equation.source_info
    names = source_info_util.current_name_stack() + source.name_stack
    with source_info_util.user_context(source.traceback, name_stack=names), equation.ctx.manager:
        yield


def cast_primitive(name: str) -> Primitive:
    """Make a primitive `bind(x, dtype=dtype)` that casts an array, with a name of its own.

    A jaxpr then shows which casts are deliberate: all other casts are equations of JAX's `convert_element_type`.

    Undocumented: `jax.interpreters.mlir`. If it changes: an AttributeError with the import.
    """

    def cast(x: jax.Array, dtype: Any) -> jax.Array:
        return jax.lax.convert_element_type(x, dtype)

    primitive = Primitive(name)
    primitive.def_impl(cast)
    primitive.def_abstract_eval(lambda x, dtype: x.update(dtype=dtype, weak_type=False))
    mlir.register_lowering(primitive, mlir.lower_fun(cast, multiple_results=False))
    return primitive


def function_primitive(name: str, fn: Callable[..., Sequence[jax.Array]]) -> Primitive:
    """Make a primitive `bind(*arrays, **params)` that computes `fn(*arrays, **params)` as one equation of a jaxpr.

    It returns a list of arrays, as `fn` does, and is compiled, differentiated and mapped as `fn` is.

    Undocumented: `jax.interpreters.mlir`, `ad.primitive_jvps`, `ad.Zero` and `batching.primitive_batchers`. If it
    changes: an AttributeError with the import, or JAX's own error that there is no rule.
    """
    primitive = Primitive(name)
    primitive.multiple_results = True
    primitive.def_impl(fn)

    def shapes_of(*avals: Any, **params: Any) -> list[Any]:
        made = jax.eval_shape(functools.partial(fn, **params), *avals)
        return [avals[0].update(shape=one.shape, dtype=one.dtype, weak_type=False) for one in made]

    def jvp(primals: Sequence[Any], tangents: Sequence[Any], **params: Any) -> Any:
        moving = [i for i, tangent in enumerate(tangents) if type(tangent) is not ad.Zero]

        def of_moving(*chosen: Any) -> Sequence[jax.Array]:
            values = dict(zip(moving, chosen, strict=True))
            return fn(*(values.get(i, x) for i, x in enumerate(primals)), **params)

        _, made = jax.jvp(of_moving, [primals[i] for i in moving], [tangents[i] for i in moving])
        return primitive.bind(*primals, **params), made

    def mapped(operands: Sequence[Any], dims: Sequence[Any], **params: Any) -> Any:
        made = jax.vmap(functools.partial(fn, **params), list(dims))(*operands)
        return made, [0] * len(made)

    primitive.def_abstract_eval(shapes_of)
    mlir.register_lowering(primitive, mlir.lower_fun(fn, multiple_results=True))
    ad.primitive_jvps[primitive] = jvp
    batching.primitive_batchers[primitive] = mapped
    return primitive


def mark_primitive(name: str) -> Primitive:
    """Make a primitive `bind(*arrays, results=avals, **params)` that marks a place in a jaxpr and computes nothing.

    Under `jax.vmap` operands and results get the new dimension in front. It has no derivatives and can't be compiled.

    Undocumented: `jax.interpreters.batching.primitive_batchers` and the form of its rules. If it changes: an
    AttributeError with the import, or a TypeError under `jax.vmap`.
    """
    primitive = Primitive(name)
    primitive.multiple_results = True
    primitive.def_abstract_eval(lambda *arrays, results, **params: list(results))

    def mapped(operands: Sequence[Any], dims: Sequence[Any], *, results: Any, **params: Any) -> Any:
        size = next(x.shape[dim] for x, dim in zip(operands, dims, strict=True) if dim is not None)
        moved = [batching.bdim_at_front(x, dim, size) for x, dim in zip(operands, dims, strict=True)]
        wider = tuple(aval.update(shape=(size, *aval.shape)) for aval in results)
        return primitive.bind(*moved, results=wider, **params), [0] * len(results)

    batching.primitive_batchers[primitive] = mapped
    return primitive


def splash_gradients(blocks: Any, mask_infos: Any, residuals: Any, d_out: Any, **options: Any) -> Any:
    """Return (dq, dk, dv), the gradients of splash attention on TPU, for a given output and softmax normalizer.

    Ring attention needs this function: in each step it computes the gradients of some keys and values, but its output
    and normalizer are those of attention to all keys. The public function only takes gradients of its own output.

    Args:
      blocks: the block sizes of the kernel.
      mask_infos: the kernel's tables of its mask, for the two backward kernels.
      residuals: (q, k, v, segment ids, output, log of the sum of exp(logits)); q, k and v are
        [heads, positions, width].
      d_out: the gradient of the output.
      **options: `mask_function`, `soft_cap` and `interpret`, as the kernel takes them.

    Private: `splash_attention_kernel._splash_attention_bwd`, its arguments and the order of its results. If it changes:
    an AttributeError or TypeError.
    """
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel

    q, k, v, segments, out, logsumexp = residuals
    _, _, _, dq, dk, dv, *_ = splash_attention_kernel._splash_attention_bwd(
        False,
        splash_attention_kernel.DEFAULT_MASK_VALUE,
        False,
        blocks,
        None,
        options.get("mask_function"),
        options.get("soft_cap"),
        options.get("interpret", False),
        (q, k, v, segments, None, out, logsumexp, *mask_infos),
        d_out,
    )
    return dq, dk, dv


def forget_profile() -> None:
    """Make JAX forget a running profile that could not be written, so that another profile can be started.

    Private: `jax._src.profiler._profile_state`, which `jax.profiler.stop_trace` resets only if it succeeds. If it
    changes: an AttributeError.
    """
    with profiler._profile_state.lock:
        profiler._profile_state.reset()


@contextmanager
def quiet_profile_types() -> Iterator[None]:
    """Ignore the deprecation warnings that Python 3.13 raises about `jax.profiler.ProfileData`'s own types.

    jaxlib makes the types when they are first used (0.12), and a warning that is made an error ends the process there.
    To be deleted when reading a profile under `-W error` works.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        yield


def hlo_text(program: bytes) -> str:
    """Return the text of a compiled program that is given as a serialized `HloModuleProto`, as profiles hold it.

    Private: `jax._src.lib.hlo.HloModule`. If it changes: an AttributeError.
    """
    from jax._src.lib import hlo  # type: ignore[attr-defined]  # not exported

    return str(hlo.HloModule.from_serialized_hlo_module_proto(program).to_string())


def dce_jaxpr(jaxpr: Any) -> tuple[Any, list[bool]]:
    """Remove the equations of a jaxpr whose results are not used, and the inputs that are then not used.

    Returns:
      (the new jaxpr, True or False for each old input: whether it is kept).

    Undocumented: `jax.interpreters.partial_eval.dce_jaxpr`, which knows which inputs each primitive with inner jaxprs
    (scan, cond, jit, ...) needs. If it changes: an AttributeError.
    """
    return partial_eval.dce_jaxpr(jaxpr, [True] * len(jaxpr.outvars))


def without_callbacks(program: Any) -> Any:
    """Remove the effects of callbacks from a jaxpr, so that dead code elimination can drop the callbacks.

    `jax.debug.print` is such a callback. Inner jaxprs of calls and control flow are changed too, but not
    inner jaxprs of kernels.

    Private: `Jaxpr.replace`, and the names of the effects. If the names change, there is no error: callbacks would stay
    in the program and run a second time. A test runs such a callback.
    """
    if hasattr(program, "jaxpr") and program.jaxpr is not program:
        return program.replace(jaxpr=without_callbacks(program.jaxpr))

    def enter(value: Any) -> Any:
        if isinstance(value, tuple) and value and all(hasattr(one, "eqns") or hasattr(one, "jaxpr") for one in value):
            return tuple(map(without_callbacks, value))
        return without_callbacks(value) if hasattr(value, "eqns") or hasattr(value, "jaxpr") else value

    def strip(eqn: Any) -> Any:
        enters = eqn.primitive.name in _WITH_CALLBACKS_INSIDE
        params = {name: enter(value) for name, value in eqn.params.items()} if enters else eqn.params
        return eqn.replace(params=params, effects=_without_host_effects(eqn.effects))

    return program.replace(eqns=[strip(eqn) for eqn in program.eqns], effects=_without_host_effects(program.effects))


def _without_host_effects(effects: Any) -> Any:
    return type(effects)(one for one in effects if type(one).__name__ not in _HOST_EFFECTS)


_HOST_EFFECTS = {"DebugEffect", "OrderedDebugEffect", "IOEffect", "OrderedIOEffect"}
_WITH_CALLBACKS_INSIDE = {"jit", "pjit", "remat2", "remat", "checkpoint", "closed_call", "scan", "while", "cond"}


def replace_equations(jaxpr: Any, invars: Sequence[Any], outvars: Sequence[Any], eqns: Sequence[Any]) -> Any:
    """Return a copy of a jaxpr with other arguments, results and equations, all taken from the same jaxpr.

    Private: `debug_info._replace`, which drops the names of arguments and results from the copy, since JAX checks that
    there are as many names as arguments. If it changes: an AttributeError, or JAX's own assertion.
    """
    names = jaxpr.debug_info._replace(arg_names=None, result_paths=None)
    return jaxpr.replace(eqns=list(eqns), invars=list(invars), outvars=list(outvars), debug_info=names)


def fresh_variable(aval: Any) -> Any:
    """Make a new jaxpr variable of type `aval`.

    Undocumented: the argument of `jax.extend.core.Var`. If it changes: a TypeError.
    """
    return Var(aval)


# Texts of errors.

_UNBOUND_AXIS = re.compile(r"unbound axis name:? '?(\w+)")


def unbound_axis_name(error: NameError) -> str | None:
    """Return the mesh axis of a collective that was called outside of a `shard_map` over this axis.

    Return None for a NameError with another cause.

    Undocumented: the text of JAX's error, which has no attribute with the name: "Found an unbound axis name: data. To
    fix this, please call psum under `jax.shard_map`." or "unbound axis name: data". If it changes, there is no error:
    the user would see JAX's own error instead of the explanation. A test checks the text.
    """
    found = _UNBOUND_AXIS.search(str(error))
    return found[1] if found else None


_REFUSED_SPEC = re.compile(
    r"PartitionSpec.*(mesh context|Auto or Manual)|non-empty mesh.*PartitionSpec|can only refer to Auto axes",
    re.DOTALL,
)


def is_refused_spec(error: Exception) -> bool:
    """Return whether an error says that JAX refused a sharding: `out_sharding=P(...)`, a constraint or `reshard`.

    Undocumented: the texts of JAX's ValueErrors and RuntimeErrors. If they change, no error is raised: the user would
    see JAX's own error, which suggests `jax.set_mesh`, instead of the explanation. A test checks the texts.
    """
    return bool(_REFUSED_SPEC.search(str(error)))


# The end of a program, and its cache.


def call_before_exit(fn: Callable[[], Any]) -> None:
    """Call a function when the program ends, but while it can still start threads, which `atexit` functions can't.

    Private: `threading._register_atexit`, which `concurrent.futures` itself uses; to be replaced when Python has a
    public name for it (https://github.com/python/cpython/issues/86128). If it changes: an AttributeError.
    """
    threading._register_atexit(fn)  # type: ignore[attr-defined]  # private, so the stubs lack it


def is_ready(array: Any) -> bool:
    """Return True if an array has been computed; True for anything that is no `jax.Array`.

    Undocumented: the method. Without it, the time that a device computes while the host waits for data is input wait.
    """
    return bool(array.is_ready()) if hasattr(array, "is_ready") else True


def avoid_compilation_cache(mesh: jax.sharding.Mesh | jax.sharding.AbstractMesh) -> None:
    """Turn JAX's persistent compilation cache off, with a warning, where CPU devices of several processes compute.

    XLA stores the order of collectives for each list of instructions separately (CPU, JAX 0.10.2 and 0.12). A loaded
    program therefore no longer orders collectives in a loop or branch and those outside. Processes whose collectives
    differ in order wait for each other until XLA ends them after 40 s (seen with JAX 0.10.2). The devices of one
    process meet in every collective by itself: loaded programs with device-dependent delays never hung there.
    """
    config: Any = jax.config
    if not config.jax_compilation_cache_dir or not config.jax_enable_compilation_cache:
        return
    if not isinstance(mesh, jax.sharding.Mesh) or mesh.devices.flat[0].platform != "cpu" or jax.process_count() == 1:
        return
    config.update("jax_enable_compilation_cache", False)
    reset_cache()
    warnings.warn(
        f"the compilation cache in {config.jax_compilation_cache_dir} is not used: programs of CPU devices in "
        "several processes that are loaded from it can hang in their collectives",
        stacklevel=4,
    )


# The key-value store of JAX's coordinator. `store` is `coordinator_client()`, or an object with its methods.
#
# Private: the methods of the client, undocumented and written in C++, and the texts of its errors, all RuntimeErrors.
# A renamed method is an AttributeError. If a text changes, a function raises where it should return None.


def put_key(store: Any, key: str, value: str, *, overwrite: bool = False) -> None:
    """Store a value under a key in the key-value store of JAX's coordinator.

    Args:
      store: `coordinator_client()`.
      key: the key, such as "folder/name".
      value: the value.
      overwrite: whether to replace the value of a key that exists.

    Raises:
      RuntimeError: the key exists and `overwrite` is False, or the store can't be reached.
    """
    store.key_value_set(key, value, allow_overwrite=overwrite)


def get_key(store: Any, key: str) -> str | None:
    """Return the value of a key in the coordinator's key-value store, or None if the key does not exist."""
    try:
        return str(store.key_value_try_get(key))
    except RuntimeError as error:
        if "NOT_FOUND" not in str(error):
            raise
        return None


def wait_for_key(store: Any, key: str, seconds: float) -> str | None:
    """Wait until a key exists in the coordinator's store and return its value.

    Return None if the key does not exist after `seconds`.
    """
    try:
        return str(store.blocking_key_value_get(key, max(1, int(1000 * seconds))))
    except RuntimeError as error:
        if "DEADLINE_EXCEEDED" not in str(error):
            raise
        return None


def list_keys(store: Any, folder: str) -> dict[str, str]:
    """Return the values of all keys in a folder of the coordinator's store, by the last part of the key.

    With the keys "run/0" and "run/1" the folder "run/" gives {"0": ..., "1": ...}.
    """
    return {key.rsplit("/", 1)[1]: value for key, value in store.key_value_dir_get(folder)}


def delete_keys(store: Any, key: str) -> None:
    """Delete a key, and all keys that begin with it and a slash, from the coordinator's store."""
    store.key_value_delete(key)
