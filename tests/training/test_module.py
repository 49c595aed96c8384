"""`js.to_module` and `js.from_module`: a trained model in its own form equals that of plain Flax and optax."""

from __future__ import annotations

import json
import pickle
from dataclasses import replace
from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn
from flax import nnx
from flax.core import freeze

import jaxshard as js
from tests.distributed.launched import printed_together
from tests.toys import CLASSES, FEATURES, classes, cross_entropy, gpt_toy, normal, one_device_key, tree_error

pytestmark = pytest.mark.usefixtures("compiled_quickly")

TX, BATCH = optax.sgd(0.1), classes()
WIDTH, BLOCKS = 16, 3


def same(tree, expected):
    jax.tree.map(np.testing.assert_array_equal, tree, expected)


def made(model, strategy=None, mesh=None, tx=TX, **options):
    """A layout of odd sizes, which pads, and a run of it."""
    mesh = js.make_mesh(data=8) if mesh is None else mesh
    layout = js.layout(js.fsdp(min_size=0) if strategy is None else strategy, mesh, model.init, tx)
    return layout, js.init(model.init, tx, layout, 0, **options)


def drawn(model):
    """Parameters of a model without the program that draws them, which takes longest to compile."""
    shapes = jax.eval_shape(model.init, jax.random.key(0))
    return jax.tree.map(lambda x: np.random.default_rng(x.size).normal(size=x.shape).astype(x.dtype), shapes)


def trained(layout, run, model, steps=2, engine=None):
    step = js.make_step(model.loss, TX, layout, engine=engine)
    for _ in range(steps):
        run, _ = step(run, BATCH)
    return run, step


class Net(nnx.Module):
    """BatchNorm and dropout in a list."""

    def __init__(self, rngs):
        self.layers = nnx.List([nnx.Linear(FEATURES, 27, rngs=rngs), nnx.BatchNorm(27, rngs=rngs)])
        self.drop = nnx.Dropout(0.5, rngs=rngs)
        self.last = nnx.Linear(27, CLASSES, rngs=rngs)

    def __call__(self, x):
        for layer in self.layers:
            x = layer(x)
        return self.last(self.drop(jnp.tanh(x)))


def loss(module, batch):
    return cross_entropy(module(batch["x"]), batch)


def plain_net(steps=2):
    """Net trained by Flax and optax alone, with the dropout keys of js.nnx."""
    module = Net(nnx.Rngs(jax.random.key(0)))
    optimizer = nnx.Optimizer(module, TX, wrt=nnx.Param)

    @nnx.jit
    def step(module, optimizer, key):
        nnx.update(module, jax.tree.map(lambda _: key, nnx.state(module, nnx.RngKey)))
        nnx.update(module, jax.tree.map(jnp.zeros_like, nnx.state(module, nnx.RngCount)))
        optimizer.update(module, nnx.grad(lambda module: loss(module, BATCH).value)(module))

    for number in range(steps):
        step(module, optimizer, jax.random.fold_in(jax.random.fold_in(one_device_key(), number), 0))
    module.eval()
    return module


@cache
def net():
    """Net trained on 8 devices: (model, layout, run), whose arrays no step takes."""
    model = js.nnx(Net, loss)
    layout, run = made(model)
    run, step = trained(layout, run, model)
    module, kept = js.to_module(run, layout), js.clone(run)
    step(run, BATCH)  # takes the arrays of `run`, and none of the module's
    return model, layout, kept, module


def test_an_nnx_module_equals_that_of_plain_flax():
    """Outputs and batch statistics within 1e-5."""
    module, expected = net()[-1], plain_net()
    assert isinstance(module, Net)
    params, theirs = (nnx.to_pure_dict(nnx.state(one, nnx.Param)) for one in (module, expected))
    assert tree_error(params, theirs) < 1e-5
    assert tree_error(module.layers[1].mean[...], expected.layers[1].mean[...]) < 1e-5
    assert tree_error(module(BATCH["x"]), expected(BATCH["x"])) < 1e-5
    assert len(module(BATCH["x"]).devices()) == 1


def test_an_nnx_module_goes_on_in_plain_flax_and_comes_back_bit_for_bit():
    model, layout, run, _ = net()
    unpickled = pickle.loads(pickle.dumps(layout))  # which does not know its model
    module = js.to_module(run, unpickled, model.init)
    back = js.from_module(module, unpickled, model)
    again = js.init(model.init, TX, layout, 1, init_from=back)
    same((again.params, again.state), (run.params, run.state))
    module.train()
    mean = module.layers[1].mean[...]
    first, second = module(BATCH["x"]), module(BATCH["x"])
    assert not np.array_equal(first, second), "dropout draws from streams that go on"
    assert not np.array_equal(mean, module.layers[1].mean[...])


class Linen(nn.Module):
    @nn.compact
    def __call__(self, x, train=False):
        kernel = nn.with_partitioning(nn.initializers.lecun_normal(), ("embed", "mlp"))
        x = nn.BatchNorm(use_running_average=not train)(nn.Dense(28, kernel_init=kernel)(x))
        return nn.Dense(CLASSES)(jnp.tanh(x))


def linen_loss(model, batch, train):
    return cross_entropy(model(batch["x"], train=train), batch)


def plain_linen(steps=2):
    """The variables after steps of Flax and optax alone."""
    variables = nn.unbox(Linen().init(jax.random.key(0), BATCH["x"], train=True))

    @jax.jit
    def step(variables):
        def objective(params):
            now = variables | {"params": params}
            logits, new = Linen().apply(now, BATCH["x"], train=True, mutable=["batch_stats"])
            return cross_entropy(logits, BATCH).value, new

        grads, new = jax.grad(objective, has_aux=True)(variables["params"])
        return {"params": jax.tree.map(lambda x, g: x - 0.1 * g, variables["params"], grads), **new}

    for _ in range(steps):
        variables = step(variables)
    return variables


@pytest.mark.slow
def test_variables_of_linen_equal_those_of_plain_flax_and_come_back():
    """Parameters and batch statistics within 1e-5 after two steps."""
    model = js.linen(Linen(), linen_loss, BATCH)
    strategy = js.compose(js.fsdp("data", min_size=0), js.tensor())
    layout, run = made(model, strategy, js.make_mesh(data=4, tensor=2))
    run, _ = trained(layout, run, model)
    variables, expected = js.to_module(run, layout), plain_linen()
    assert tree_error(variables, expected) < 1e-5
    assert Linen().apply(variables, BATCH["x"]).shape == (16, CLASSES)
    again = js.init(model.init, TX, layout, 1, init_from=js.from_module(variables, layout))
    same((again.params, again.state), (run.params, run.state))
    boxed = Linen().init(jax.random.key(0), BATCH["x"])
    assert isinstance(boxed["params"]["Dense_0"]["kernel"], nn.Partitioned)
    back = js.from_module(freeze(boxed | {"intermediates": {"seen": jnp.ones(3)}}), layout)
    same((back.params, back.state), (nn.unbox(boxed)["params"], {"batch_stats": boxed["batch_stats"]}))


class Block(nn.Module):
    @nn.compact
    def __call__(self, x):
        return x + nn.Dense(WIDTH)(jnp.tanh(x))


class NnxBlock(nnx.Module):
    def __init__(self, rngs):
        self.inner = nnx.Linear(WIDTH, WIDTH, rngs=rngs)

    def __call__(self, x):
        return x + self.inner(jnp.tanh(x))


def stacked_loss(model, batch):
    return cross_entropy(model.head(model.blocks(model.embed(batch["x"]))), batch)


def stacked(kind):
    if kind == "linen":
        return js.stack(Block(), BLOCKS, stacked_loss, BATCH, embed=nn.Dense(WIDTH), head=nn.Dense(CLASSES))
    embed, head = (lambda rngs, sizes=sizes: nnx.Linear(*sizes, rngs=rngs) for sizes in ((FEATURES, WIDTH), (WIDTH, 7)))
    return js.stack(NnxBlock, BLOCKS, stacked_loss, embed=embed, head=head)


def run_parts(kind, module, x):
    """The model from its parts, as its user would run them."""
    if kind == "nnx":
        x = module["embed"](x)
        for block in module["blocks"]:
            x = block(x)
        return module["head"](x)
    x = nn.Dense(WIDTH).apply(module["embed"], x)
    for variables in module["blocks"]:
        x = Block().apply(variables, x)
    return nn.Dense(CLASSES).apply(module["head"], x)


PIPELINE = js.compose(js.fsdp("data", min_size=0), js.pipeline(chunks=1))


@cache
def piped(kind):
    """(model, layout, run) of three blocks in two stages."""
    model = stacked(kind)
    return model, *made(model, PIPELINE, js.make_mesh(pipe=2, data=4), init_from=drawn(model))


@pytest.mark.fast_cases(1)
@pytest.mark.parametrize("kind", ["linen", "nnx"])
def test_modules_of_js_stack_come_out_one_by_one_from_a_padded_pipeline(kind):
    model, layout, run = piped(kind)
    assert jax.tree.leaves(layout.params["blocks"])[0].view.padded[0] == BLOCKS + 1
    module, start = js.to_module(run, layout), drawn(model)
    assert len(module["blocks"]) == BLOCKS
    for number, block in enumerate(module["blocks"]):
        own = block["params"] if kind == "linen" else nnx.to_pure_dict(nnx.state(block, nnx.Param))
        same(own, jax.tree.map(lambda x, number=number: x[number], start["blocks"]))
    assert run_parts(kind, module, BATCH["x"]).shape == (len(BATCH["x"]), CLASSES)
    again = js.init(model.init, TX, layout, 1, init_from=js.from_module(module, layout))
    same(again.params, run.params)


@pytest.mark.slow
def test_a_pipeline_that_trained_equals_one_device():
    """The loss of the single blocks after two steps, within 1e-5."""
    model, pipe = stacked("nnx"), js.make_mesh(pipe=2, data=4)
    layout, run = made(model, PIPELINE, pipe)
    run, _ = trained(layout, run, model, engine=js.pipelined(microbatches=2))
    params = jax.jit(model.init)(jax.random.key(0))
    for _ in range(2):
        grads = jax.grad(lambda params: model.loss(params, BATCH, None).value)(params)
        params = jax.tree.map(lambda x, g: x - 0.1 * g, params, grads)
    logits = run_parts("nnx", js.to_module(run, layout), BATCH["x"])
    expected = model.loss(params, BATCH, None).value
    np.testing.assert_allclose(cross_entropy(logits, BATCH).value, expected, rtol=1e-5)


class Scan(nn.Module):
    @nn.compact
    def __call__(self, x):
        blocks = nn.scan(ScanBlock, variable_axes={"params": 0}, split_rngs={"params": True}, length=BLOCKS)
        return nn.Dense(CLASSES)(blocks()(nn.Dense(WIDTH)(x), None)[0])


class ScanBlock(nn.Module):
    @nn.compact
    def __call__(self, x, _):
        return x + nn.Dense(WIDTH)(jnp.tanh(x)), None


@pytest.mark.slow
def test_a_scanned_module_has_its_own_variables_again():
    model = js.scanned(Scan(), lambda model, batch: cross_entropy(model(batch["x"]), batch), BATCH)
    layout, run = made(model)
    variables = js.to_module(run, layout)
    expected = jax.eval_shape(lambda: Scan().init(jax.random.key(0), BATCH["x"]))
    assert jax.tree.map(jnp.shape, variables) == jax.tree.map(jnp.shape, expected)
    again = js.init(model.init, TX, layout, 1, init_from=js.from_module(variables, layout))
    same(again.params, run.params)


@pytest.mark.slow
def test_factors_of_lora_are_merged_and_the_merged_module_is_a_base_again():
    base = js.nnx(Net, loss)
    tuned = js.lora(base.init, base.loss, rank=2, match=["last/kernel"], base="int8")
    start = jax.jit(tuned.init)(jax.random.key(0))
    factors = start.params["last"]["kernel"]
    start.params["last"]["kernel"] = replace(factors, b=normal(1, *factors.b.shape))
    layout, run = made(tuned, init_from=start)
    module, merged = js.to_module(run, layout), js.merge_lora(js.logical(run, layout).params)
    assert isinstance(module, Net)
    assert tree_error(module.last.kernel[...], merged["last"]["kernel"]) < 1e-6
    same(js.to_module(run, layout, base).last.kernel[...], js.to_module(run, layout, tuned).last.kernel[...])
    again = js.init(tuned.init, TX, layout, 1, init_from=js.from_module(module, layout))
    assert again.params["last"]["kernel"].base.dtype == jnp.int8


def test_a_model_of_blocks_is_the_tree_of_its_init_on_one_device_under_any_active_mesh():
    def init(key):
        return {"embed": {"kernel": jnp.ones((FEATURES, WIDTH))}, "block": {"kernel": jnp.ones((WIDTH, WIDTH))}}

    model = js.Stacked(*[lambda *args: None] * 3, BLOCKS, init)
    mesh = js.make_mesh(data=2, tensor=2, pipe=2)
    strategy = js.compose(
        js.fsdp("data", min_size=0), js.tensor([("kernel", (None, "mlp")), *js.RULES]), js.pipeline(chunks=1)
    )
    layout, run = made(model, strategy, mesh, init_from=drawn(model))
    with jax.set_mesh(mesh):
        tree = js.to_module(run, layout)
    same(tree, drawn(model))
    assert {device for x in jax.tree.leaves(tree) for device in x.devices()} == {jax.devices()[0]}
    with jax.default_device(jax.devices()[3]):
        assert jax.tree.leaves(js.to_module(run, layout))[0].devices() == {jax.devices()[3]}


STRATEGIES = {
    "ddp": (js.ddp(), {"data": 8}, TX),
    "zero1": (js.zero1(), {"data": 8}, TX),
    "hsdp": (js.hsdp(min_size=0), {"replica": 2, "data": 4}, TX),
    "owners": (js.fsdp(min_size=0), {"data": 8}, optax.contrib.muon(0.1)),
    "local": (js.compose(js.fsdp("data", min_size=0), js.local("replica", every=2)), {"replica": 2, "data": 4}, TX),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", STRATEGIES)
def test_every_strategy_gives_the_parameters_of_js_logical(name):
    strategy, axes, tx = STRATEGIES[name]
    toy = gpt_toy()
    layout = js.layout(strategy, js.make_mesh(**axes), toy.init_fn, tx)
    run = js.init(toy.init_fn, tx, layout, 0)
    same(js.to_module(run, layout), jax.device_get(js.logical(run, layout).params))


def test_a_plain_function_gives_what_it_returned_with_keys_in_its_state():
    def init_fn(key):
        return js.Model(
            {"w": jax.random.normal(key, (13, 3))}, {"key": jax.random.key(7), "half": jnp.ones(3, "bfloat16")}
        )

    layout = js.layout(js.fsdp(min_size=0), js.make_mesh(data=8), init_fn, TX)
    run = js.init(init_fn, TX, layout, 0)
    model = js.to_module(run, layout)
    same(model.params, init_fn(jax.random.key(0)).params)
    assert model.state["half"].dtype == jnp.bfloat16
    same(jax.random.key_data(model.state["key"]), jax.random.key_data(jax.random.key(7)))
    assert js.from_module(model, layout) is model


def test_wrong_pairs_are_refused_with_path_and_shapes():
    model, layout, run, module = net()
    other = js.nnx(lambda rngs: nnx.Linear(4, 3, rngs=rngs), loss)
    with pytest.raises(ValueError, match=r"not made from this model(.|\n)*kernel: unexpected, float32\[4, 3\]"):
        js.to_module(run, layout, other)
    with pytest.raises(TypeError, match=r"js\.nnx(.|\n)*got function"):
        js.to_module(run, layout, loss)
    replicated = js.layout(js.ddp(), js.make_mesh(data=8), model.init, TX)
    with pytest.raises(ValueError, match=r"params/last/bias: expected float32\[7\], got float32\[8\]"):
        js.to_module(run, replicated)
    given = js.clone(run)
    js.make_step(model.loss, TX, layout)(given, BATCH)
    with pytest.raises(ValueError, match="donated"):
        js.to_module(given, layout)
    with pytest.raises(TypeError, match=r"expected an nnx\.Module, got dict"):
        js.from_module({"params": {}}, layout)
    module = nnx.clone(module)
    module.last = nnx.Linear(27, 5, rngs=nnx.Rngs(0))
    with pytest.raises(ValueError, match=r"last/kernel: expected float32\[27, 7\], got float32\[27, 5\]"):
        js.init(model.init, TX, layout, 0, init_from=js.from_module(module, layout))


def test_other_forms_than_the_model_has_are_refused():
    linen = made(js.linen(Linen(), linen_loss, BATCH))[0]
    with pytest.raises(TypeError, match=r"expected Linen variables .* got a dict of \['BatchNorm_0', 'Dense_0'"):
        js.from_module(linen.shapes.params, linen)
    model, layout, run = piped("linen")
    module = js.to_module(run, layout)
    with pytest.raises(TypeError, match=r"js\.stack, so expected a dict"):
        js.from_module(module["blocks"], layout)
    with pytest.raises(ValueError, match=r"blocks/Dense_0/bias: expected float32\[3, 16\], got float32\[2, 16\]"):
        js.init(model.init, TX, layout, 0, init_from=js.from_module(module | {"blocks": module["blocks"][:2]}, layout))
    module["blocks"][1] = {"params": {"Dense_0": {"kernel": jnp.ones((16, 4)), "bias": jnp.ones(16)}}}
    with pytest.raises(ValueError, match=r"block 1 (.|\n)*Dense_0/kernel: expected float32\[16, 16\], got .*\[16, 4\]"):
        js.from_module(module, layout)


PROGRAM = """
    import json, sys
    import jax
    address, index, count = sys.argv[1:]
    jax.config.update("jax_num_cpu_devices", 8 // int(count))
    jax.distributed.initialize(address, int(count), int(index))
    import jaxshard as js
    from tests.training.test_module import BATCH, TX, Net, loss, made, trained

    model = js.nnx(Net, loss)
    layout, run = made(model)
    run, _ = trained(layout, run, model)
    module = js.to_module(run, layout)
    again = js.init(model.init, TX, layout, 0, init_from=js.from_module(module, layout))
    print(json.dumps(float(module(BATCH["x"]).sum())))
"""


@pytest.mark.slow
def test_each_of_two_processes_has_the_module():
    """The sum of all outputs, within 1e-4 of that of one process."""
    outputs = printed_together(PROGRAM, count=2)
    sums = [json.loads(out.splitlines()[-1]) for out in outputs]
    assert sums == pytest.approx([float(net()[-1](BATCH["x"]).sum())] * 2, rel=1e-4)
