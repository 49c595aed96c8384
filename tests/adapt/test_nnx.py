"""`js.nnx`: an NNX module on 8 devices equals what its author writes for one, variables and random streams included."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn
from flax import nnx

import jaxshard as js
from tests.toys import (
    CLASSES,
    FEATURES,
    ROWS,
    Toy,
    assert_equal_runs,
    classes,
    cross_entropy,
    one_device,
    one_device_key,
    sharded,
    start_of,
    tree_error,
)

pytestmark = pytest.mark.usefixtures("compiled_quickly")

TX = optax.sgd(0.1)


def mesh():
    return js.make_mesh(data=8)


class MLP(nnx.Module):
    """BatchNorm and dropout in a layer of a list, a count of calls; 13 -> 27 -> 7."""

    def __init__(self, rngs: nnx.Rngs, rate: float = 0.0):
        self.layers = nnx.List([nnx.Linear(FEATURES, 27, use_bias=False, rngs=rngs)])
        self.norms = nnx.List([nnx.BatchNorm(27, rngs=rngs)])
        self.drops = nnx.List([nnx.Dropout(rate, rngs=rngs)])
        self.calls = nnx.Cache(jnp.zeros((), jnp.int32))
        self.last = nnx.Linear(27, CLASSES, rngs=rngs)

    def __call__(self, x):
        self.calls[...] += 1
        for layer, norm, drop in zip(self.layers, self.norms, self.drops):
            x = drop(jnp.tanh(norm(layer(x))))
        return self.last(x)


def loss_of(module, batch):
    return cross_entropy(module(batch["x"]), batch)


def adapted(make=MLP, loss=loss_of) -> Toy:
    return Toy(*js.nnx(make, loss), classes())


def plain() -> Toy:
    """What an NNX user writes for one device without dropout: a module that is changed in place."""
    graph, _, start = nnx.split(MLP(nnx.Rngs(0)), nnx.Param, ...)

    def loss_fn(model, batch, key):
        module = nnx.merge(graph, nnx.State(model.params), merged(model.state, start), copy=True)
        loss = loss_of(module, batch)
        variables = nnx.state(module, (nnx.BatchStat, nnx.Cache))
        return js.Loss(loss, state=nnx.to_pure_dict(variables))

    def merged(pure, state):
        state = jax.tree.map(lambda x: x, state)
        nnx.replace_by_pure_dict(state, pure)
        return state

    def init_fn(key):
        module = MLP(nnx.Rngs(key))
        params, state = nnx.state(module, nnx.Param), nnx.state(module, (nnx.BatchStat, nnx.Cache))
        return js.Model(nnx.to_pure_dict(params), nnx.to_pure_dict(state))

    return Toy(init_fn, loss_fn, classes())


@pytest.mark.slow
def test_batch_norm_under_auto_equals_one_device():
    """Losses within 1e-6, gradients and batch statistics within 1e-5; the count of calls is exact."""
    toy, reference = adapted(), plain()
    jax.tree.map(np.testing.assert_array_equal, start_of(toy.init_fn), start_of(reference.init_fn))
    trace, layout = sharded(toy, js.fsdp(min_size=0), mesh(), js.auto(), steps=3)
    assert_equal_runs(trace, one_device(reference, steps=3))
    assert trace.state["calls"] == 3
    paths = [p.leaf.path for p in layout.placed() if p.role == "param"]
    assert paths[:3] == ["last/bias", "last/kernel", "layers/0/kernel"]


class Noise(nnx.Module):
    """Two dropouts on ones, and which entries of which row each kept."""

    def __init__(self, rngs):
        self.drops = nnx.List([nnx.Dropout(0.5, rngs=rngs) for _ in range(2)])
        self.out = nnx.Linear(40, 3, rngs=rngs)

    def __call__(self, rows):
        kept = [drop(jnp.ones((rows, 40))) for drop in self.drops]
        return self.out(kept[0]), jnp.concatenate(kept, 1) > 0


def noise_toy() -> Toy:
    def loss(module, batch):
        y, kept = module(len(batch["row"]))
        kept = js.Sum(batch["row"].T @ kept.astype(jnp.float32))
        return js.Loss(js.Mean(jnp.square(y - 1).sum(), y.size), metrics={"kept": kept})

    return Toy(*js.nnx(Noise, loss), {"row": np.eye(16, dtype=np.float32)})


def test_dropout_under_auto_is_that_of_one_device_bit_for_bit():
    """Stream i draws as `nnx.Dropout` does from the step's key folded with i, in every step and layer another mask."""
    toy = noise_toy()
    trace, _ = sharded(toy, js.fsdp(min_size=0), mesh(), js.auto(), steps=2)
    for step in range(2):
        key = jax.random.fold_in(one_device_key(), step)
        masks = []
        for i in range(2):
            draw = jax.random.fold_in(jax.random.fold_in(key, i), 0)
            masks.append(jax.random.bernoulli(draw, 0.5, (16, 40)))
        np.testing.assert_array_equal(trace.metrics[step]["kept"], np.concatenate(masks, 1))
    kept = np.concatenate([m["kept"].reshape(-1, 40) for m in trace.metrics])
    assert len(np.unique(kept, axis=0)) == 2 * 2 * 16


def test_a_loss_may_be_told_and_a_module_may_have_no_state():
    told = []

    def loss(module, batch, *, train):
        told.append(train)
        return jnp.square(module(batch)).sum()

    init_fn, loss_fn = js.nnx(lambda rngs: nnx.Linear(3, 2, rngs=rngs), loss)
    params, x = init_fn(jax.random.key(0)), jnp.ones((4, 3))
    assert set(params) == {"kernel", "bias"}
    value = loss_fn(params, x, jax.random.key(1))
    assert (
        float(value)
        == float(loss_fn.model.evaluate(params, x)["loss"].value)
        == pytest.approx(float(jnp.square(x @ params["kernel"]).sum()), rel=1e-6)
    )
    assert told == [True, False]


class Tied(nnx.Module):
    """A weight shared by two layers, a sown value, random numbers of an own stream, and data that is no variable."""

    def __init__(self, rngs):
        self.first, self.second = nnx.Linear(5, 5, rngs=rngs), nnx.Linear(5, 5, rngs=rngs)
        self.second.kernel = self.first.kernel
        self.shift = nnx.data(jnp.arange(5.0))
        self.rngs = rngs.fork()

    def __call__(self, x):
        self.seen = nnx.Intermediate(x)
        return self.second(self.first(x)) + self.shift + self.rngs.noise.normal(x.shape)


@pytest.mark.slow
def test_shared_weights_sown_values_and_own_streams():
    toy = Toy(
        *js.nnx(Tied, lambda m, batch: js.Mean(jnp.square(m(batch)).sum(), batch.size)), np.eye(16, 5, dtype="f4")
    )
    model = start_of(toy.init_fn)
    assert set(model.params["second"]) == {"bias"} and set(model.state) == {"shift"}
    toy = toy._replace(rate=1e-2)
    trace, _ = sharded(toy, js.fsdp(min_size=0), mesh(), js.auto(), steps=2)
    reference = one_device(toy, steps=2)
    assert_equal_runs(trace, reference)
    np.testing.assert_array_equal(trace.state["shift"], np.arange(5.0))
    with pytest.raises(ValueError, match=r"js.nnx: evaluation has no random key, but the module draws numbers"):
        toy.loss_fn.model.evaluate(model, toy.batch)


def test_names_in_metadata_split_a_model_over_tensor():
    class Named(nnx.Module):
        def __init__(self, rngs):
            def init(*names):
                return nnx.with_partitioning(nnx.initializers.lecun_normal(), names)

            self.first = nnx.Linear(FEATURES, 32, use_bias=False, rngs=rngs, kernel_init=init("embed", "mlp"))
            self.second = nnx.Linear(32, CLASSES, rngs=rngs, kernel_init=init("mlp", None))
            self.scale = nnx.Param(jnp.ones(32), out_sharding=("mlp",))

        def __call__(self, x):
            return self.second(jnp.tanh(self.first(x)) * self.scale[...])

    toy = adapted(Named)
    names = toy.init_fn.model.dim_names(start_of(toy.init_fn))
    assert names == {
        "first": {"kernel": ("embed", "mlp")},
        "second": {"kernel": ("mlp", None), "bias": (None,)},
        "scale": ("mlp",),
    }
    strategy = js.compose(js.fsdp(min_size=0), js.tensor())
    layout = js.layout(strategy, js.make_mesh(data=4, tensor=2), toy.init_fn, TX)
    assert layout.params["scale"].use == jax.sharding.PartitionSpec("tensor")


# Transforms of Flax, which write back into every variable what went through them.


class Cell(nnx.Module):
    def __init__(self, rngs):
        self.dense = nnx.Linear(FEATURES, FEATURES, rngs=rngs)

    def __call__(self, x):
        return x + jnp.tanh(self.dense(x))


class CheckpointedCell(Cell):
    __call__ = nnx.remat(Cell.__call__)


class JittedCell(Cell):
    __call__ = nnx.jit(Cell.__call__)


def call(cell, x):
    return cell(x)


TRANSFORMED = {
    "remat": nnx.remat(call),
    "remat, dots": nnx.remat(call, policy=jax.checkpoint_policies.dots_saveable),
    "jit": nnx.jit(call),
    "remat of jit": nnx.remat(nnx.jit(call)),
    "jit of remat": nnx.jit(nnx.remat(call)),
    "vmap": nnx.vmap(nnx.jit(call), in_axes=(None, 0)),
    "cond": lambda cell, x: nnx.cond(x.sum() < jnp.inf, nnx.remat(call), lambda _, x: x, cell, x),
    "fori_loop": lambda cell, x: nnx.fori_loop(0, 1, lambda _, carry: (carry[0], carry[0](carry[1])), (cell, x))[1],
    "while_loop": lambda cell, x: nnx.while_loop(lambda c: c[2] < 1, lambda c: (c[0], c[1], c[2] + 1), (cell, x, 0))[0](
        x
    ),
    "a method with nnx.remat": CheckpointedCell,
    "a method with nnx.jit": JittedCell,
}


@pytest.mark.slow
def test_transforms_that_hand_parameters_through_change_nothing():
    """All in one program: losses within 1e-6 and gradients within 1e-5 of the plain call."""

    def make(transform):
        kind, run = (transform, call) if isinstance(transform, type) else (Cell, transform)
        return js.nnx(lambda rngs: kind(rngs), lambda cell, x: jnp.square(run(cell, x)).sum())

    batch = classes()["x"]
    params = start_of(make(call).init)
    models = {name: make(transform) for name, transform in {"": call, **TRANSFORMED}.items()}

    @jax.jit
    def run(params):
        return {
            name: jax.value_and_grad(lambda p, model=model: model.loss(p, batch, jax.random.key(0)))(params)
            for name, model in models.items()
        }

    results = run(params)
    for name in TRANSFORMED:
        assert tree_error(results[name][0], results[""][0]) <= 1e-6, name
        assert tree_error(results[name][1], results[""][1]) <= 1e-5, name
    assert tree_error(models["remat"].apply(params, batch), models["jit"].apply(params, batch)) <= 1e-6


@pytest.mark.slow
@pytest.mark.parametrize("engine", [js.auto, js.explicit])
def test_layers_stacked_by_vmap_and_run_by_a_scan_with_remat(engine):
    """Losses within 1e-6, gradients within 1e-5 of one device."""

    class Deep(nnx.Module):
        def __init__(self, rngs):
            self.cells = nnx.split_rngs(splits=3)(nnx.vmap(lambda rngs: Cell(rngs)))(rngs)
            self.last = nnx.Linear(FEATURES, CLASSES, rngs=rngs)

        def __call__(self, x):
            run = nnx.scan(nnx.remat(call), in_axes=(0, nnx.Carry), out_axes=nnx.Carry)
            return self.last(run(self.cells, x))

    toy = adapted(Deep)
    trace, _ = sharded(toy, js.fsdp(min_size=0), mesh(), engine(), steps=2)
    assert_equal_runs(trace, one_device(toy, steps=2))


# Bad input.


def test_wrong_types():
    with pytest.raises(TypeError, match=r"make_module must be a function of nnx.Rngs .*, got Linear"):
        js.nnx(nnx.Linear(2, 3, rngs=nnx.Rngs(0)), loss_of)
    with pytest.raises(TypeError, match=r"must return a flax.nnx Module, got Dense; a Linen module is for js.linen"):
        js.nnx(lambda rngs: nn.Dense(3), loss_of).init(jax.random.key(0))
    with pytest.raises(TypeError, match=r"js.nnx: loss must be a function loss\(model, batch\), got NoneType"):
        js.nnx(MLP, None)


def test_a_module_without_parameters():
    with pytest.raises(ValueError, match=r"js.nnx: the module has no parameters"):
        js.layout(js.ddp(), mesh(), js.nnx(lambda rngs: nnx.Dropout(0.5, rngs=rngs), loss_of).init, TX)


class Lazy(nnx.Module):
    def __init__(self, rngs, change):
        self.change, self.scale = change, nnx.Param(jnp.ones(FEATURES))

    def __call__(self, x):
        if self.change:
            self.scale[...] = 2 * self.scale[...]
        else:
            self.late = nnx.Param(jnp.ones(FEATURES))
        return x * self.scale[...]


@pytest.mark.parametrize(("change", "what"), [(True, "scale: set"), (False, "late: was never initialised")])
def test_parameters_that_a_call_makes_or_changes(change, what):
    toy = adapted(lambda rngs: Lazy(rngs, change), lambda m, batch: m(batch["x"]).sum())
    with pytest.raises(ValueError, match=rf"(?s)js.nnx: the loss made or changed parameters.*{what}"):
        toy.loss_fn(start_of(toy.init_fn), toy.batch, jax.random.key(0))


def change_in_jit(m, batch):
    @nnx.jit
    def shrink(module):
        nnx.update(module, jax.tree.map(lambda x: 0.9 * x, nnx.state(module, nnx.Param)))

    shrink(m)
    return m(batch["x"]).sum()


def change_in_a_branch(m, batch):
    nnx.cond(batch["x"].sum() > 0, lambda m: m.dense.kernel.set_value(2 * m.dense.kernel[...]), lambda m: None, m)
    return m(batch["x"]).sum()


@pytest.mark.parametrize(
    ("loss", "path"),
    [
        (change_in_jit, "dense/bias: set\n  - dense/kernel"),
        (change_in_a_branch, "dense/kernel"),
    ],
)
def test_parameters_that_a_transform_changes(loss, path):
    toy = adapted(Cell, loss)
    with pytest.raises(ValueError, match=rf"js.nnx: the loss made or .*\n  - {path}: set(\n--|$)"):
        jax.eval_shape(toy.loss_fn, start_of(toy.init_fn), toy.batch, jax.random.key(0))


def test_raw_arrays():
    class Raw(nnx.Module):
        def __init__(self, rngs):
            self.inner = nnx.Linear(FEATURES, 2, rngs=rngs)
            self.table = jnp.ones(3)

    with pytest.raises(TypeError, match=r"(?s)neither trained nor kept; make each an nnx.Param.*- table"):
        js.layout(js.ddp(), mesh(), js.nnx(Raw, loss_of).init, TX)


def test_state_of_another_shape_than_before():
    class Grows(nnx.Module):
        def __init__(self, rngs):
            self.scale, self.seen = nnx.Param(jnp.ones(FEATURES)), nnx.Cache(jnp.zeros(()))

        def __call__(self, x):
            self.seen.set_value(jnp.ones(ROWS))
            return x * self.scale[...]

    toy = adapted(Grows, lambda m, batch: js.Mean(m(batch["x"]).sum(), 1.0))
    with pytest.raises(ValueError, match=r"(?s)another state than the model has.*seen: expected float32\[\], got"):
        sharded(toy, js.ddp(), mesh(), js.auto(), steps=1)
