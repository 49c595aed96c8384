"""The loss as one value: known models are recognised inside functions that call them; nothing is lost in silence."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn

import jaxshard as js
from tests.adapt.test_stacked import batch, block, init_parts, model_of

pytestmark = [pytest.mark.fast_cases(1), pytest.mark.usefixtures("compiled_quickly")]

TX = optax.sgd(0.1)
MODEL = model_of(num_blocks=3)
ENGINES = [js.explicit(), js.auto()]


def penalty(params, rows, weight=0.01):
    """A mean over rows of a number that no row changes."""
    return js.Mean(rows * weight * sum(jnp.sum(x**2) for x in jax.tree.leaves(params)), rows)


def called(params, batch, key):
    return MODEL.loss(params, batch, key)


def with_penalty_on_the_head(params, batch, key):
    return MODEL.loss(params, batch, key) + penalty(params["head"], len(batch["x"]))


def with_penalty_on_all(params, batch, key):
    return MODEL.loss(params, batch, key) + penalty(params, len(batch["x"]))


def with_a_scaled_block(params, batch, key):
    return MODEL.loss(params | {"blocks": jax.tree.map(lambda x: 0.5 * x, params["blocks"])}, batch, key)


def layout_of(init_fn=MODEL.init, tx=TX):
    return js.layout(js.fsdp(min_size=0), js.make_mesh(data=8), init_fn, tx)


def traffic(loss_fn, engine, init_fn=MODEL.init):
    layout = layout_of(init_fn)
    step = js.make_step(loss_fn, TX, layout, engine=engine)
    return js.plan.summary(js.plan.arrays_only(js.collectives(step.compile(batch()), layout.mesh)))


def parity(loss_fn, engine, init_fn=MODEL.init, **options):
    return js.parity(init_fn, loss_fn, TX, js.fsdp(min_size=0), js.make_mesh(data=8), batch(), engine=engine, **options)


@pytest.mark.slow
def test_a_model_with_a_loss_of_its_own_is_not_taken_for_its_base():
    """Within 1e-5 of one device, which runs the overridden loss."""

    class Twice(js.Stacked):
        def loss(self, params, batch, key):
            return 2 * super().loss(params, batch, key)

    model = Twice(MODEL.embed, block, MODEL.head, num_blocks=3, init=init_parts)
    report = parity(model.loss, js.explicit(), model.init)
    report.check()
    assert report.losses[1] == pytest.approx(2 * parity(MODEL.loss, js.explicit()).losses[1], rel=1e-6)


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize(
    "loss_fn",
    [called, pytest.param(jax.jit(MODEL.loss), marks=pytest.mark.slow)],
)
def test_a_function_that_calls_a_known_loss_moves_what_the_loss_itself_moves(loss_fn, engine):
    """The same collectives, counts and bytes: blocks are gathered one by one, and nothing at once."""
    assert traffic(loss_fn, engine) == traffic(MODEL.loss, engine)


@pytest.mark.slow
def test_a_penalty_gathers_only_what_it_looks_at():
    """Against the loss alone: the head once more at most; for a penalty on all, all blocks at once besides."""
    gathers = {
        fn.__name__: next(row.count for row in traffic(fn, js.explicit()) if row.kind == "all-gather")
        for fn in (called, with_penalty_on_the_head, with_penalty_on_all)
    }
    assert gathers["with_penalty_on_the_head"] <= gathers["called"] + 2
    assert gathers["with_penalty_on_all"] <= gathers["called"] + 4


@pytest.mark.slow
@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("loss_fn", [with_penalty_on_all, with_penalty_on_the_head])
def test_functions_that_call_a_known_loss_are_right(loss_fn, engine):
    """Loss within 1e-6, gradients within 1e-5 of one device."""
    parity(loss_fn, engine).check()


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*weights of all 3 blocks are gathered at once")
@pytest.mark.parametrize("engine", ENGINES)
def test_other_weights_are_right_too(engine):
    """Loss within 1e-6, gradients within 1e-5 of one device."""
    parity(with_a_scaled_block, engine).check()


@pytest.mark.parametrize("engine", ENGINES)
def test_other_weights_are_warned_of_once(engine):
    """What is lost and how to keep it."""
    step = js.make_step(with_a_scaled_block, TX, layout_of(), engine=engine)
    with pytest.warns(UserWarning, match="weights of all 3 blocks are gathered at once") as caught:
        step.lower(batch())
    told = [str(one.message) for one in caught if "gathered at once" in str(one.message)]
    assert len(told) == 1 and "other arrays than the parameters" in told[0] and "pass model.loss itself" in told[0]


def test_nothing_is_lost_where_weights_are_whole():
    layout = js.layout(js.ddp(), js.make_mesh(data=8), MODEL.init, TX)
    js.make_step(with_a_scaled_block, TX, layout, engine=js.explicit()).lower(batch())


# The layout.


def test_names_of_dimensions_survive_a_function_around_init():
    direct, around = layout_of(), layout_of(lambda key: MODEL.init(key))
    assert direct.params == around.params and direct.opt_state == around.opt_state
    jitted = jax.jit(MODEL.init)
    for _ in range(2):  # the second time the traced program is remembered
        assert layout_of(lambda key: jitted(key)).params == direct.params


# Optimizers that stacking changes.


class Dense(nn.Module):
    @nn.compact
    def __call__(self, x):
        return x + nn.Dense(5)(x)


def stack():
    return js.stack(Dense(), 4, lambda model, batch: js.Mean(model.blocks(batch["x"]).sum(), len(batch["x"])), batch())


def opaque_init(model):
    shapes = jax.eval_shape(model.init, jax.random.key(0))
    return lambda key: jax.tree.map(lambda x: jax.random.normal(key, x.shape), shapes)


@pytest.mark.parametrize("around_init", [True, False])
@pytest.mark.parametrize("around_loss", [True, False])
def test_no_function_hides_that_blocks_were_stacked(around_init, around_loss):
    """Muon updates a stack of matrices otherwise than each of them: refused by make_step, whatever is wrapped."""
    model, tx = stack(), optax.lamb(0.1)
    init_fn = (lambda key: model.init(key)) if around_init else model.init
    loss_fn = (lambda p, b, k: model.loss(p, b, k)) if around_loss else model.loss
    layout = js.layout(js.ddp(), js.make_mesh(data=8), init_fn, tx)
    with pytest.raises(ValueError, match=r"the blocks of this model were stacked.*js\.optim\.per_block"):
        js.make_step(loss_fn, tx, layout)
    js.make_step(
        loss_fn, js.optim.per_block(tx), js.layout(js.ddp(), js.make_mesh(data=8), init_fn, js.optim.per_block(tx))
    )


@pytest.mark.parametrize("engine", ENGINES[::-1])
def test_an_unknown_init_is_found_out_when_the_first_step_is_traced(engine):
    """Before anything is compiled: lowering alone raises."""
    model, tx = stack(), optax.lamb(0.1)
    layout = js.layout(js.ddp(), js.make_mesh(data=8), opaque_init(model), tx)
    step = js.make_step(lambda p, b, k: model.loss(p, b, k), tx, layout, engine=engine)
    for _ in range(2):  # and not forgotten by the second call
        with pytest.raises(ValueError, match="the blocks of this model were stacked"):
            step.lower(batch())


def test_stacked_blocks_deeper_in_the_tree_are_refused_by_name():
    model, tx = stack(), optax.lamb(0.1)
    layout = js.layout(js.ddp(), js.make_mesh(data=8), lambda key: {"net": model.init(key)}, tx)
    with pytest.raises(ValueError, match='the parameters have no "blocks" at their top'):
        js.make_step(lambda p, b, k: model.loss(p["net"], b, k), tx, layout)


# Units and pipelines.


class Net(nn.Module):
    @nn.compact
    def __call__(self, x):
        for _ in range(2):
            x = Dense()(x)
        return x


@pytest.mark.slow
def test_units_of_a_module_inside_a_function():
    """The same collectives as the adapter's own loss; without one inside, refused by name."""
    init_fn, loss_fn = js.linen(
        Net(), lambda model, batch: js.Mean(jnp.square(model(batch["x"])).sum(), len(batch["x"])), batch()
    )
    engine = js.explicit(units=[Dense], remat="nothing")
    assert traffic(lambda p, b, k: loss_fn(p, b, k), engine, init_fn) == traffic(loss_fn, engine, init_fn)
    with pytest.raises(TypeError, match="has no modules for units"):
        traffic(lambda p, b, k: js.Mean(jnp.sum(p["Dense_0"]["Dense_0"]["kernel"]), 1), engine, init_fn)


def test_a_pipeline_needs_the_loss_itself():
    layout = js.layout(js.pipeline("pipe"), js.make_mesh(jax.devices()[:1], pipe=1), MODEL.init, TX)
    with pytest.raises(TypeError, match=r"(?s)called is opaque.*a penalty, belongs into the model's head"):
        js.make_step(called, TX, layout, engine=js.pipelined(microbatches=2))


@pytest.mark.parametrize("engine", [js.explicit(reduction="ordered"), None])
def test_evaluation_inside_a_function_gathers_block_by_block(engine):
    layout = layout_of()
    run = js.init(MODEL.init, TX, layout, 0)
    expected = js.evaluate(js.make_eval_step(MODEL.evaluate, layout, engine=engine), run, [batch()])
    found = js.evaluate(js.make_eval_step(lambda m, b: MODEL.evaluate(m, b), layout, engine=engine), run, [batch()])
    assert found["loss"] == pytest.approx(expected["loss"], rel=1e-6) and np.isfinite(found["loss"])
