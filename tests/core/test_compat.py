"""Names that JAX may change without an error: each of them is still what jaxshard takes it for.

A test fails by the name that changed. What would fail loudly (an import, an attribute) is not tested here: every other
test does that.
"""

from __future__ import annotations

import gc
import sys
import warnings
from concurrent.futures import ThreadPoolExecutor

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax
from jax.extend.core import Primitive, jaxprs_in_params
from jax.sharding import NamedSharding, PartitionSpec

import jaxshard as js
from jaxshard.adapt.positionwise import primitives as positionwise
from jaxshard.adapt.positionwise import rules
from jaxshard.adapt.remat import make_save_policy
from jaxshard.checks.collectives import weight_uses
from jaxshard.core import compat, primitives
from jaxshard.core.jaxpr import CALLS, open_jaxpr
from jaxshard.core.keys import key_impl_of
from jaxshard.engines import wide_sums
from jaxshard.proofs import dims
from jaxshard.proofs.walk import CONTROL_FLOW

MESH = js.make_mesh(jax.devices()[:1], data=1)
X = np.ones((4, 2), np.float32)


def manual(fn, *, check_vma=False):
    whole = PartitionSpec()
    return jax.shard_map(fn, mesh=MESH, in_specs=whole, out_specs=whole, check_vma=check_vma)


# Primitives that no checkpoint policy saves, for they turn what is stored into a weight. Renamed, the gathered weights
# of all blocks would be saved by remat="everything", and memory would grow silently.

MOVES = {
    "all_gather": manual(lambda x: lax.all_gather(x, "data", tiled=True)),
    "shard_map": manual(lambda x: x),
    "sharding_constraint": lambda x: lax.with_sharding_constraint(x, NamedSharding(MESH, PartitionSpec())),
    "slice": lambda x: lax.slice(x, (0, 0), (2, 2)),
    "reshape": lambda x: jnp.reshape(x, (8,)),
    "transpose": lambda x: x.T,
    "convert_element_type": lambda x: x.astype(jnp.bfloat16),
    "pad": lambda x: jnp.pad(x, ((0, 1), (0, 0))),
}


def primitives_of(jaxpr):
    for equation in open_jaxpr(jaxpr)[0].eqns:
        yield equation.primitive
        for inner in jaxprs_in_params(equation.params):
            yield from primitives_of(inner)


@pytest.mark.parametrize("name", MOVES)
def test_moves_of_weights_are_the_primitives_that_are_never_saved(name):
    found = {primitive.name: primitive for primitive in primitives_of(jax.make_jaxpr(MOVES[name])(X))}
    assert name in found, f"JAX makes {set(found)} of what was called {name!r}: adapt/stacked.py has to know it"
    assert not make_save_policy("everything")(found[name]), f"{name!r} would be saved between forward and backward"


def test_a_product_is_saved():
    (dot,) = primitives_of(jax.make_jaxpr(lambda x: lax.dot(x, x))(np.ones((2, 2), np.float32)))
    assert dot.name == "dot_general" and make_save_policy("everything")(dot)


def test_marks_of_weights_are_called_what_a_gather_is():
    """Else a checkpoint policy would save them, and the second gather of the backward pass would not be counted."""
    (gather,) = [one for one in primitives_of(jax.make_jaxpr(MOVES["all_gather"])(X)) if one.name != "shard_map"]
    assert weight_uses._mark.name == gather.name


# A pass of the CPU compiler, disabled so that a second gather is not merged with the first (`Engine.compiler_options`).
# Renamed, the compiler would accept the option and merge them: units would keep their gathered weights.


def count_barriers(compiler_options):
    """The barriers in the compiled text of a program that has one."""
    lowered = jax.jit(lambda x: jnp.sin(x) @ jnp.sin(lax.optimization_barrier(x))).lower(np.ones((4, 4), np.float32))
    return lowered.compile(compiler_options).as_text().count(" opt-barrier(")


def test_disabling_the_compiler_pass_keeps_barriers():
    (option,) = js.explicit(units=[object]).compiler_options(MESH).items()
    assert option == ("xla_disable_hlo_passes", "cse_barrier_expander")
    kept, dropped = count_barriers(dict([option])), count_barriers(None)
    assert kept == 1, f"{option[1]!r} is no longer the pass that drops barriers on CPU: the option has no effect"
    assert dropped == 0, "barriers stay without the option too: it can be deleted in Engine.compiler_options"


# Primitives in the tables of the optimizer's proof and of core/jaxpr.py. An unknown elementwise primitive is refused
# with its name; an unknown call is not looked into.

OTHER_VERSIONS = {
    "before 0.10": {"checkpoint", "core_call", "custom_vjp_call_jaxpr", "pjit", "remat"},
    "before 0.10, as lax functions": {"copy_p", "expand_dims", "infeed", "pcast"},
    "up to 0.11": {"closed_call"},
    "from 0.11": {"log2", "one_minus_square"},
}
TABLES = {
    "CALLS": set(CALLS),
    "SAME": primitives.SAME,
    "RESHAPES": primitives.RESHAPES,
    "ARITHMETIC": set(primitives.ARITHMETIC),
    "ELEMENTWISE": set(primitives.ELEMENTWISE),
    "GENERATORS": set(primitives.GENERATORS),
    "CONTROL_FLOW": set(CONTROL_FLOW) | {"shard_map"},
    "dependence": {"psum", "psum_invariant", "rng_uniform", "infeed", "reduce_sum"}
    | {"add", "sub", "add_any", "mul", "div", "neg", "real", "convert_element_type", "select_n"},
    "positionwise": positionwise.KEPT
    | positionwise.EACH_ELEMENT
    | positionwise.REDUCTIONS
    | set(dims.SCANNED)
    | positionwise.SHARDED_SUMS
    | positionwise.WITHOUT_RESULT
    | set(rules._RULES)
    | {"sort", "top_k", "reduce_sum", "reduce_max", "integer_pow", "sqrt", "rsqrt", "square", "custom_vjp_call"},
    "dims": set(dims._MOVES),
    "wide_sums": wide_sums._LINEAR | wide_sums._SUMS | {"scan", "cond"},
}


@pytest.fixture(scope="module")
def known():
    return {x.name for x in gc.get_objects() if isinstance(x, Primitive)} - {weight_uses._mark.name}


@pytest.mark.parametrize("table", TABLES)
def test_every_primitive_in_a_table_exists(table, known):
    gone = TABLES[table] - known - set().union(*OTHER_VERSIONS.values())
    assert not gone, f"JAX {jax.__version__} has no primitives called {sorted(gone)}"


@jax.custom_jvp
def own_jvp(x):
    return x * 2


own_jvp.defjvp(lambda primals, tangents: (own_jvp(*primals), tangents[0] * 2))


@jax.custom_vjp
def own_vjp(x):
    return x * 2


own_vjp.defvjp(lambda x: (x * 2, None), lambda _, dy: (dy * 2,))


@pytest.mark.parametrize(
    "call", [jax.jit(jnp.sin), jax.checkpoint(jnp.sin), own_jvp, own_vjp], ids=["jit", "checkpoint", "jvp", "vjp"]
)
def test_calls_are_in_the_table_with_their_program(call):
    (equation,) = open_jaxpr(jax.make_jaxpr(call)(X))[0].eqns
    assert equation.primitive.name in CALLS
    assert open_jaxpr(equation.params[CALLS[equation.primitive.name]])[0].eqns


def test_the_inputs_of_a_scan_are_counted():
    def fn(offset, x, xs):
        return lax.scan(lambda carry, x: ((carry[0] + x * offset, carry[1] * 2), x), (x, x), xs)

    (scan,) = [e for e in open_jaxpr(jax.make_jaxpr(fn)(1.0, 2.0, X[:, 0]))[0].eqns if e.primitive.name == "scan"]
    assert compat.scan_counts(scan.params) == (1, 2)


def test_a_shard_map_says_which_axes_it_adds_as_newly_manual_axes():
    mesh = js.make_mesh(jax.devices()[:1], data=1, tensor=1)
    whole = PartitionSpec()

    def outer(x):
        return jax.shard_map(jnp.sin, in_specs=whole, out_specs=whole, axis_names={"tensor"}, check_vma=False)(x)

    nested = jax.shard_map(outer, mesh=mesh, in_specs=whole, out_specs=whole, axis_names={"data"}, check_vma=False)
    (first,) = open_jaxpr(jax.make_jaxpr(nested)(X))[0].eqns
    (second,) = open_jaxpr(first.params["jaxpr"])[0].eqns
    assert [compat.newly_manual_axes(one.params) for one in (first, second)] == [{"data"}, {"tensor"}]


def test_rhs_spec_names_the_kernels_output_features_first():
    numbers = ("NHWC", "HWIO", "NHWC")  # the output features O are dimension 3, the input features I dimension 2
    image, kernel = np.ones((1, 5, 6, 4), np.float32), np.ones((2, 3, 4, 7), np.float32)
    conv = jax.make_jaxpr(lambda x, w: lax.conv_general_dilated(x, w, (1, 1), "SAME", dimension_numbers=numbers))
    (equation,) = open_jaxpr(conv(image, kernel))[0].eqns
    assert compat.contracted_kernel_dims(equation.params) == (2, 0, 1)


@pytest.mark.parametrize("draw", [jax.random.bits, jax.random.normal, lambda key: jax.random.gamma(key, 2.0)])
def test_random_numbers_are_seen_in_a_program(draw):
    """Else a transform that draws them would pass for one that does not, and each block would draw the same."""
    for key in (jax.random.key(0), jax.random.PRNGKey(0)):
        program = jax.make_jaxpr(draw)(key)
        assert primitives.draws_random_bits(program)
        assert draw is not jax.random.bits or "random_bits" in str(program)  # as checks/causes.py looks for it


# Types inside of shard_map.


def test_what_varies_over_axes_is_told_by_the_type():
    found = []

    def look(x):
        found.append(compat.varying_axes(lax.axis_index("data")))
        found.append(compat.varying_axes(x))
        return x

    jax.make_jaxpr(manual(look, check_vma=True))(X)
    jax.make_jaxpr(manual(look, check_vma=False))(X)
    assert found == [{"data"}, set(), set(), set()]


# Texts of errors.


@pytest.mark.parametrize(
    "fn",
    [lambda x: lax.psum(x, "other"), lambda x: lax.axis_index("other"), lambda x: lax.all_gather(x, "other")],
    ids=["psum", "axis_index", "all_gather"],
)
def test_an_axis_that_nobody_bound_is_found_in_the_error(fn):
    with pytest.raises(NameError) as caught:
        jax.make_jaxpr(fn)(X)
    assert compat.unbound_axis_name(caught.value) == "other"


@pytest.mark.parametrize(
    "place",
    [
        lambda x: jnp.einsum("ab->ba", x, out_sharding=PartitionSpec("data", None)),
        lambda x: lax.with_sharding_constraint(x, PartitionSpec("data", None)),
        lambda x: jax.sharding.reshard(x, PartitionSpec("data", None)),
    ],
    ids=["einsum", "constraint", "reshard"],
)
def test_a_sharding_that_jax_refuses_is_found_in_the_error(place):
    """Outside of any mesh, and over a manual axis."""
    x, mesh = jnp.ones((8, 8)), js.make_mesh(data=8)
    whole = PartitionSpec()
    manual = jax.shard_map(place, mesh=mesh, in_specs=whole, out_specs=whole, check_vma=False)
    for fn in (place, manual):
        with pytest.raises((ValueError, RuntimeError)) as caught:
            jax.make_jaxpr(fn)(x)
        assert compat.is_refused_spec(caught.value), caught.value
    assert not compat.is_refused_spec(ValueError("PartitionSpec('data',) has more entries than the array dimensions"))


# Newer versions.


@pytest.fixture
def version(monkeypatch):
    compat._warn_once.cache_clear()

    def set_version(text):
        monkeypatch.setattr(jax, "__version__", text)
        monkeypatch.setattr(jax, "__version_info__", tuple(map(int, text.split("."))))

    yield set_version
    compat._warn_once.cache_clear()


def make_layout():
    return js.layout(js.ddp(), MESH, lambda key: {"w": jnp.ones(2)}, optax.sgd(0.1))


def test_a_jax_newer_than_tested_is_warned_of_once(version):
    newer = f"{compat.NEWEST_TESTED[0]}.{compat.NEWEST_TESTED[1] + 1}"
    version(f"{newer}.0")
    message = rf"JAX {newer}\.0 is newer than 0\.12, the newest that jaxshard is tested with"
    with pytest.warns(UserWarning, match=message) as caught:
        make_layout()
        make_layout()
    assert len(caught) == 1 and caught[0].filename == __file__


@pytest.mark.parametrize("text", ["0.10.2", "0.12.0", "0.12.7"])
def test_a_tested_jax_gives_no_warning(version, text):
    version(text)
    with warnings.catch_warnings(action="error"):
        make_layout()
    assert compat.untested_version() is None


# Plugins.


def test_a_plugin_that_can_not_start_is_reported_in_one_line(monkeypatch, tmp_path, caplog):
    """The words of JAX's report are matched; JAX itself looks for plugins here, and finds one that raises."""
    (tmp_path / "plugin_that_fails.py").write_text("def initialize(): raise RuntimeError('no driver\\nat all')\n")
    (tmp_path / "fails-1.dist-info").mkdir()
    (tmp_path / "fails-1.dist-info" / "METADATA").write_text("Metadata-Version: 2.1\nName: fails\nVersion: 1\n")
    entry = "[jax_plugins]\nfails = plugin_that_fails\n"
    (tmp_path / "fails-1.dist-info" / "entry_points.txt").write_text(entry)
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    monkeypatch.setattr(compat.xla_bridge, "jax_plugins", None)
    compat.shorten_plugin_errors()
    compat.xla_bridge.discover_pjrt_plugins()
    [record] = caplog.records
    assert record.getMessage() == "JAX goes on without its plugin plugin_that_fails, which can't start: no driver"
    assert record.exc_info is None


# Random keys.


@pytest.mark.parametrize("impl", ["threefry2x32", "rbg"])
def test_the_implementation_of_a_dtype_of_keys_makes_such_keys(impl):
    key = jax.random.key(3, impl=impl)
    again = jax.random.wrap_key_data(jax.random.key_data(key), impl=key_impl_of(key.dtype))
    assert again.dtype == key.dtype and (again == key).all()


def test_what_a_compiler_is_given_is_taken_in_two_threads_and_compilation_goes_on():
    """The function that is replaced meanwhile is put back, whichever thread comes first."""
    lowered = [jax.jit(lambda x, n=n: x * n).lower(1.0) for n in range(8)]
    with ThreadPoolExecutor(4) as pool:
        taken = list(pool.map(compat.compiler_input, lowered))
    assert len({one.program for one in taken}) == 8 and all(one.devices == (0,) for one in taken)
    assert compat.compiler_input(lowered[0]) == taken[0]
    with ThreadPoolExecutor(4) as pool:
        assert [float(x) for x in pool.map(lambda one: one.compile()(1.0), lowered)] == [0, 1, 2, 3, 4, 5, 6, 7]
