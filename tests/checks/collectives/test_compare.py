"""Compiled steps that keep the promise, and surprises with their source lines."""

from __future__ import annotations

import inspect

import jax
import jax.numpy as jnp
import optax
import pytest
from flax import linen as nn
from jax import lax

import jaxshard as js
from jaxshard.checks.collectives.compare import audit, compare
from jaxshard.checks.collectives.promise import Promise
from jaxshard.core.layout import human_bytes
from tests.engines import test_collectives as literals
from tests.engines.programs import setups
from tests.notebook_page import check_shows_text
from tests.toys import Toy, linen_toy, quick_compile

ADAM = optax.adam(1e-3)
F32 = 4


def audited(toy, strategy, mesh, engine=None, tx=ADAM, **options):
    layout = js.layout(strategy, mesh, toy.init_fn, tx, **options)
    with quick_compile():
        return audit(js.make_step(toy.loss_fn, tx, layout, engine=engine or js.explicit()), toy.batch)


# Compiled steps


def assert_exact(comparison):
    """Nothing unexpected, nothing missing, and where arrays are promised, exactly their bytes."""
    assert comparison.ok, str(comparison)
    assert not comparison.missing and not comparison.tolerated, str(comparison)
    rows = [row for row in comparison.rows() if row["promised"] is not None]
    assert rows
    assert all(row["promised"] == row["bytes"] for row in rows), str(comparison)
    assert check_shows_text(comparison).text[0] == "no surprises"


@pytest.mark.slow
@pytest.mark.parametrize("strategy", literals.EXPECTED)
def test_a_linen_mlp_keeps_the_promise_of_every_strategy(strategy):
    axes, made = setups(0)[strategy]
    assert_exact(audited(linen_toy(), made, js.make_mesh(**axes)))


@pytest.fixture(
    scope="module",
    params=[pytest.param(js.explicit(), id="explicit"), pytest.param(js.auto(), id="auto", marks=pytest.mark.slow)],
)
def fsdp(request):
    """The audit of an MLP under fsdp; under auto the CPU compiler reduces everywhere, unpadded, and slices."""
    comparison = audited(linen_toy(), js.fsdp(min_size=0), js.make_mesh(data=8), request.param)
    if request.param.compiler_chooses:
        rows = {row["kind"]: row["bytes"] for row in comparison.rows() if row["bytes"]}
        assert rows == {"all-reduce": F32 * (13 * 27 + 27 + 27 * 1001 + 1001 + 1001 * 7 + 7), "all-gather": 142_944}
    else:
        assert_exact(comparison)
    return comparison


def test_gathers_that_the_program_does_not_show_are_not_as_promised(fsdp):
    assert fsdp.ok and "could not read" not in str(fsdp)
    promised = Promise(fsdp.promised, (), fsdp.tolerated)
    blind = compare(promised, [one for one in fsdp.found if one.kind != "all-gather"])
    (line,) = blind.unread
    size = sum(one.bytes for one in fsdp.promised if one.kind == "all-gather" and one.shape and one.axes)
    assert line.startswith(f"all-gather over data: {human_bytes(size)} promised")
    assert not blind.surprises and not blind.ok
    assert blind.verdict == "could not read all-gather over data" and "could not read" in str(blind)
    assert check_shows_text(blind).text[0] == blind.verdict


@pytest.mark.slow  # `test_units_are_gathered_forward_and_backward_and_scattered_once` is fast
def test_units_are_gathered_again_where_the_backward_pass_needs_them():
    """Of two units the second one's kernel: nothing asks for the gradient of the batch, nor for an added bias."""

    class Layer(nn.Module):
        @nn.compact
        def __call__(self, x):
            return x + jnp.tanh(nn.Dense(16)(x))

    class Net(nn.Module):
        @nn.compact
        def __call__(self, x):
            for _ in range(2):
                x = Layer()(x)
            return nn.Dense(8)(x)

    batch = {"x": jax.ShapeDtypeStruct((8, 16), jnp.float32)}
    adapted = js.linen(Net(), lambda model, batch: js.Mean(jnp.sum(model(batch["x"]) ** 2), batch["x"].size), batch)
    toy = Toy(adapted.init, adapted.loss, batch)
    mesh, engine = js.make_mesh(data=8), js.explicit(units=[Layer])
    comparison = audited(toy, js.fsdp(min_size=0), mesh, engine)
    assert_exact(comparison)
    gathers = {one.what: one.most for one in comparison.promised if one.kind == "all-gather"}
    assert gathers == {
        "weight Layer_0/Dense_0/kernel": 1, "weight Layer_0/Dense_0/bias": 1,
        "weight Layer_1/Dense_0/kernel": 2, "weight Layer_1/Dense_0/bias": 1,
        "weight Dense_0/kernel": 1, "weight Dense_0/bias": 1,
    }  # fmt: skip


# Surprises


def line_of(function, needle):
    lines, first = inspect.getsourcelines(function)
    return f"{__file__}:{first + next(i for i, line in enumerate(lines) if needle in line)}"


ROWS, POSITIONS, VOCAB, WIDTH = 8, 4, 40, 16
TOKENS = {"tokens": jax.ShapeDtypeStruct((ROWS, POSITIONS), jnp.int32)}


def language_init(key):
    names = {"embedding": (VOCAB, WIDTH), "up/kernel": (WIDTH, 64), "down/kernel": (64, WIDTH)}
    shapes = {**names, "lm_head/kernel": (WIDTH, VOCAB)}
    params = {name: jax.random.normal(key, shape) / 4 for name, shape in shapes.items()}
    return {name.split("/")[0]: {"kernel": x} if "/" in name else x for name, x in params.items()}


def language_loss(seen=lambda logits: logits, up=lambda kernel: kernel, inner=lambda hidden: hidden):
    """A loss whose logits, first kernel and hidden layer go through what a test passes."""

    def loss(params, batch, key):
        x_BTC = params["embedding"][batch["tokens"]]
        hidden_BTF = inner(jnp.tanh(x_BTC @ up(params["up"]["kernel"])))
        logits_BTV = seen((hidden_BTF @ params["down"]["kernel"]) @ params["lm_head"]["kernel"])
        nats_BT = (
            jax.nn.logsumexp(logits_BTV, -1) - jnp.take_along_axis(logits_BTV, batch["tokens"][..., None], -1)[..., 0]
        )
        return js.Mean(nats_BT.sum(), nats_BT.size)

    return Toy(language_init, loss, TOKENS)


DATA_TENSOR = {"data": 4, "tensor": 2}


@pytest.mark.slow
@pytest.mark.parametrize("engine", [js.explicit(), js.auto()], ids=["explicit", "auto"])
def test_logits_that_are_gathered_are_named_with_their_line(engine):
    """Under auto the compiler gathers the output matrix instead, on the line that multiplies with it."""

    def seen(logits):
        return js.constrain(logits, ("batch", None, None))  # the whole vocabulary

    mesh = js.make_mesh(**DATA_TENSOR)
    plain = audited(language_loss(), js.compose(js.ddp(), js.tensor()), mesh, engine)
    assert plain.ok and not plain.missing, str(plain)
    comparison = audited(language_loss(seen=seen), js.compose(js.ddp(), js.tensor()), mesh, engine)
    (surprise,) = [one for one in comparison.surprises if one.found.kind == "all-gather"]
    assert surprise.found.axes == ("tensor",)
    page = check_shows_text(comparison)
    assert page.text[0].endswith("surprise") and any("must never move over tensor" in text for text in page.text)
    if engine.compiler_chooses:
        assert surprise.found.shapes == ((WIDTH, VOCAB),)
        assert surprise.why == "the weight lm_head/kernel: must never move over tensor"
        assert surprise.place == line_of(language_loss, "logits_BTV = seen(")
    else:
        assert surprise.found.bytes == F32 * (ROWS // 4) * POSITIONS * VOCAB
        assert surprise.why == "logits, all 40 of a vocabulary: must never move over tensor"
        assert "js.constrain(x, ('batch', None, 'vocab'))" in surprise.advice
        # JAX 0.12 names what is moved after the line that made it.
        assert surprise.place in (line_of(seen, "# the whole vocabulary"), line_of(language_loss, "logits_BTV = seen("))


def test_the_automatic_engines_gather_of_activations_over_data_is_named():
    def inner(hidden):
        rows = hidden.reshape(ROWS, -1)
        return hidden + (rows @ rows.T).mean()  # every row with every other

    comparison = audited(language_loss(inner=inner), js.ddp(), js.make_mesh(data=8), js.auto())
    assert {one.found.axes for one in comparison.surprises} == {("data",)}
    assert line_of(inner, "# every row with every other") in {one.place for one in comparison.surprises}
    assert {one.found.kind for one in comparison.surprises} & {"all-gather", "all-to-all", "collective-permute"}
    assert all(one.cause and one.advice for one in comparison.surprises)
    assert any("js.constrain(x, ('batch', None" in one.advice for one in comparison.surprises)


def test_the_users_own_collective_under_the_explicit_engine_is_named():
    def inner(hidden):
        return hidden + lax.all_gather(lax.stop_gradient(hidden), "data").mean()  # of all devices

    comparison = audited(language_loss(inner=inner), js.fsdp(min_size=0), js.make_mesh(data=8))
    (surprise,) = comparison.surprises
    assert surprise.found.kind == "all-gather"
    assert surprise.place == line_of(inner, "# of all devices")
    assert not comparison.missing


@pytest.mark.slow
def test_a_cpu_that_widens_bf16_is_named_and_not_counted():
    engine = js.explicit(compute_dtype=jnp.bfloat16)
    comparison = audited(linen_toy(), js.fsdp(min_size=0), js.make_mesh(data=8), engine)
    assert comparison.ok, str(comparison)
    (line,) = comparison.substitutes
    assert line.startswith("all-gather in f32 in place of all-gather in bf16 over data, ")
    gathers = sum(row["bytes"] for row in comparison.rows() if row["kind"] == "all-gather")
    assert comparison.widened_bytes == gathers // 2
    text = comparison.short()  # one note says so of all collectives
    assert "a CPU's compiler sends bf16 as f32" in text and text.count("f32") == 1
    assert comparison.verdict == "no surprises"
