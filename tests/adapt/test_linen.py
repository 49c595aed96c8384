"""`js.linen`: a Linen module on 8 devices equals what its author writes for one, collections and keys included."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn
from flax import nnx

import jaxshard as js
from tests.toys import FEATURES, ROWS, Toy, assert_equal_runs, classes, cross_entropy, one_device, sharded, start_of

pytestmark = pytest.mark.usefixtures("compiled_quickly")

TX = optax.sgd(0.1)
ENGINES = {"auto": js.auto, "explicit": js.explicit}


def mesh():
    return js.make_mesh(data=8)


class MLP(nn.Module):
    """BatchNorm between two dense layers, 13 -> 27 -> 7; a bias before it would have a gradient of zero."""

    rate: float = 0.0

    @nn.compact
    def __call__(self, x, train=True):
        x = nn.BatchNorm(use_running_average=not train)(nn.Dense(27, use_bias=False)(x))
        x = nn.Dropout(self.rate, deterministic=not train)(jnp.tanh(x))
        return nn.Dense(7)(x)


def loss_of(model, batch, train):
    return cross_entropy(model(batch["x"], train=train), batch)


def shapes(batch):
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), batch)


def plain(module) -> Toy:
    """What a Flax user writes for one device."""

    def init_fn(key):
        variables = module.init(key, jnp.zeros((ROWS, FEATURES)))
        return js.Model(variables.pop("params"), variables)

    def loss_fn(model, batch, key):
        variables = {"params": model.params, **model.state}
        logits, state = module.apply(variables, batch["x"], rngs={"dropout": key}, mutable=list(model.state))
        return js.Loss(cross_entropy(logits, batch), state=state)

    return Toy(init_fn, loss_fn, classes())


def adapted(module, loss=loss_of) -> Toy:
    return Toy(*js.linen(module, loss, shapes(classes())), classes())


@pytest.mark.slow
def test_batch_norm_and_dropout_under_auto_equal_one_device():
    """Losses within 1e-6, gradients and batch statistics within 1e-5."""
    toy, alone = adapted(MLP(0.3)), plain(MLP(0.3))
    jax.tree.map(np.testing.assert_array_equal, start_of(toy.init_fn), start_of(alone.init_fn))
    trace, _ = sharded(toy, js.fsdp(min_size=0), mesh(), js.auto(), steps=3)
    reference = one_device(alone, steps=3)
    assert_equal_runs(trace, reference)
    assert np.abs(reference.state["batch_stats"]["BatchNorm_0"]["mean"]).max() > 1e-3


class Noise(nn.Module):
    """A stock dropout on ones, which entries of which row were kept, and a weight."""

    @nn.compact
    def __call__(self, x):
        kept = nn.Dropout(0.5, deterministic=False)(jnp.ones((len(x), 40)))
        return nn.Dense(3)(kept), kept > 0


def test_state_goes_from_one_call_to_the_next_and_keys_differ():
    def loss(model, batch):
        first, second = model(batch["x"])[1], model(batch["x"])[1]
        return js.Loss(
            model(batch["x"])[0].sum(), metrics={"same": js.Sum((first == second).all().astype(jnp.float32))}
        )

    class Counted(nn.Module):
        @nn.compact
        def __call__(self, x):
            count = self.variable("seen", "calls", jnp.zeros, (), jnp.int32)
            if not self.is_initializing():
                count.value += 1
            return Noise()(x)

    init_fn, loss_fn = js.linen(Counted(), loss, {"x": np.ones((4, 3), np.float32)})
    result = loss_fn(init_fn(jax.random.key(0)), {"x": jnp.ones((4, 3))}, jax.random.key(1))
    assert result.state == {"seen": {"calls": 3}} and result.metrics["same"].value == 0


class Coder(nn.Module):
    """Two methods, each with its own parameters."""

    def setup(self):
        self.down, self.up = nn.Dense(3), nn.Dense(5)

    def encode(self, x):
        return self.down(x)

    def decode(self, z):
        self.sow("losses", "norm", jnp.square(z).sum())
        self.sow("intermediates", "z", z)
        return self.up(z)


def test_methods_are_initialised_by_the_loss_that_calls_them():
    def loss(model, batch):
        y, sown = model(model(batch, method="encode"), method=Coder.decode, mutable=["losses"])
        (norm,) = sown["losses"]["norm"]
        return jnp.square(y - batch).sum() + 0.1 * norm

    pair = js.linen(Coder(), loss, jax.ShapeDtypeStruct((2, 5), jnp.float32))
    params = pair.init(jax.random.key(0))
    both = Coder().init(jax.random.key(0), jnp.zeros((2, 5)), method=lambda m, x: m.decode(m.encode(x)))
    jax.tree.map(np.testing.assert_array_equal, params, both["params"])  # what is sown is no state
    x = jax.random.normal(jax.random.key(1), (2, 5))
    z = pair.apply(params, x, method="encode")
    expected = jnp.square(pair.apply(params, z, method="decode") - x).sum() + 0.1 * jnp.square(z).sum()
    assert float(pair.loss(params, x, jax.random.key(2))) == pytest.approx(float(expected), rel=1e-6)


@pytest.mark.slow
def test_evaluation_is_told_and_leaves_the_state():
    toy = adapted(MLP(0.5))
    model = start_of(toy.init_fn)
    pair = toy.loss_fn.model
    variables = {"params": model.params, **model.state}
    logits = jax.jit(lambda v, x: MLP(0.5).apply(v, x, train=False))(variables, toy.batch["x"])
    expected = float(cross_entropy(logits, toy.batch).value)
    layout = js.layout(js.fsdp(min_size=0), mesh(), pair.init, TX)
    run = js.init(pair.init, TX, layout, 0, init_from=model)
    found = js.make_eval_step(pair.evaluate, layout)(run, toy.batch)
    assert float(found["loss"].value) == pytest.approx(expected, rel=1e-6)
    predicted = js.make_apply(lambda m, x: pair.apply(m, x, train=False), layout)(run, toy.batch["x"])
    assert predicted.shape == (ROWS, 7)


@pytest.mark.parametrize("module", [nn.Dense(7), nn.Sequential([nn.Dense(7)]), MLP(0.5)])
def test_a_call_of_the_flax_module_on_what_init_returned_is_explained(module):
    """Parameters at the top, in a submodule, and a js.Model with a state: Flax raises another error for each."""
    kwargs = {"train": False} if isinstance(module, MLP) else {}
    x = np.ones((ROWS, 5), np.float32)
    model = js.linen(module, lambda model, batch: jnp.square(model(batch, **kwargs)).sum(), x)
    layout = js.layout(js.fsdp(), mesh(), model.init, TX)
    run = js.init(model.init, TX, layout, 0)
    explained = r"the function calls the Flax module itself.*: call apply of .* js.linen returned, model.apply\(v, x\)"
    with pytest.raises(TypeError, match=f"(?s){explained}"):
        js.make_apply(lambda v, x: module.apply(v, x, **kwargs), layout)(run, x)
    eval_step = js.make_eval_step(lambda v, x: {"y": js.Sum(module.apply(v, x, **kwargs).sum())}, layout)
    with pytest.raises(TypeError, match="calls the Flax module itself"):
        eval_step(run, x)


def test_names_in_boxes_split_a_model_over_tensor():
    class Named(nn.Module):
        @nn.compact
        def __call__(self, x):
            def names(*names):
                return nn.with_logical_partitioning(nn.initializers.lecun_normal(), names)

            x = jnp.tanh(nn.Dense(32, use_bias=False, kernel_init=names("embed", "mlp"), name="first")(x))
            return nn.Dense(7, kernel_init=names("mlp", None), name="second")(x)

    def loss(model, batch):
        return cross_entropy(model(batch["x"]), batch)

    pair = adapted(Named(), loss).init_fn.model
    assert pair.dim_names(jax.eval_shape(pair.init, jax.random.key(0))) == {
        "first": {"kernel": ("embed", "mlp")},
        "second": {"kernel": ("mlp", None), "bias": (None,)},
    }
    strategy = js.compose(js.fsdp(min_size=0), js.tensor())
    layout = js.layout(strategy, js.make_mesh(data=4, tensor=2), pair.init, TX)
    assert layout.params["first"]["kernel"].use == jax.sharding.PartitionSpec(None, "tensor")


# Bad input.


def test_wrong_types():
    with pytest.raises(TypeError, match=r"must be an instance of a flax.linen Module.*got the class MLP"):
        js.linen(MLP, loss_of, classes())
    with pytest.raises(TypeError, match=r"got Linear; an NNX module is for js.nnx"):
        js.linen(nnx.Linear(2, 3, rngs=nnx.Rngs(0)), loss_of, classes())
    with pytest.raises(TypeError, match="loss must be a function loss\\(model, batch\\), got int"):
        js.linen(MLP(), 3, classes())
    with pytest.raises(TypeError, match=r"named train or key, got one_too_many\(model, batch, z_rng\): missing"):

        def one_too_many(model, batch, z_rng): ...

        js.linen(MLP(), one_too_many, classes())
    with pytest.raises(TypeError, match="mutable must be names of collections"):
        adapted(MLP(), lambda model, batch: model(batch["x"], mutable=True)).init_fn(jax.random.key(0))


def test_a_module_that_the_loss_never_calls():
    init_fn, _ = js.linen(MLP(), lambda model, batch: jnp.square(batch["x"]).sum(), classes())
    with pytest.raises(ValueError, match=r"js.linen: MLP has no parameters: nothing that the loss called"):
        js.layout(js.ddp(), mesh(), init_fn, TX)


def test_a_module_that_only_evaluation_calls():
    pair = js.linen(Coder(), lambda model, batch: model(batch, method="encode").sum(), np.ones((2, 5), np.float32))
    params = pair.init(jax.random.key(0))
    with pytest.raises(ValueError, match=r"(?s)a module was never initialised:.*/up.*must call, in training too"):
        pair.apply(params, jnp.ones((2, 3)), method="decode")


def test_evaluation_without_train_asks_for_a_key():
    batch = {"row": np.eye(4, dtype=np.float32)}
    model = js.linen(Noise(), lambda model, batch: js.Mean(model(batch["row"])[0].sum(), 1.0), batch)
    with pytest.raises(ValueError, match=r"evaluation has no random key:.*give the loss a parameter `train`"):
        jax.eval_shape(model.evaluate, jax.eval_shape(model.init, jax.random.key(0)), batch)


def test_a_loss_with_a_state_of_its_own():
    def loss(model, batch):
        return js.Loss(cross_entropy(model(batch["x"]), batch), state={"mine": 1})

    model = adapted(MLP(), loss).loss_fn.model
    shapes = jax.eval_shape(model.init, jax.random.key(0))
    with pytest.raises(ValueError, match="the adapter carries the module's state itself; leave state out"):
        jax.eval_shape(model.loss, shapes, classes(), jax.random.key(0))


def test_names_that_are_no_names():
    class Odd(nn.Module):
        @nn.compact
        def __call__(self, x):
            return nn.Dense(2, kernel_init=nn.with_partitioning(nn.initializers.ones, (("x", "y"), None)))(x)

    init_fn, _ = js.linen(Odd(), lambda model, batch: model(batch).sum(), np.ones((2, 3), np.float32))
    with pytest.raises(ValueError, match=r"(?s)one name or None, but not.*Dense_0/kernel \[3, 2\]: \(\('x', 'y'\)"):
        js.layout(js.ddp(), mesh(), init_fn, TX)
