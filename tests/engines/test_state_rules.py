"""The model's state counts once per step, whatever the number of devices and micro-batches.

The tolerance of all comparisons with one device is 1e-5, relative to the largest element.
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn
from flax import nnx

import jaxshard as js
from tests.toys import normal

pytestmark = pytest.mark.fast_cases(3)

ENGINES = [js.explicit(), js.explicit(microbatches=2), js.auto(microbatches=2), js.auto()]
SHARED = [ENGINES[0], *(pytest.param(engine, marks=pytest.mark.slow) for engine in ENGINES[1:3])]
"""Engines under which the loss sees some of the rows at a time; what they refuse is found by one function."""

FEW = [ENGINES[1], *(pytest.param(engine, marks=pytest.mark.slow) for engine in (ENGINES[0], *ENGINES[2:]))]

TX = optax.sgd(0.1)
RNG = np.random.default_rng(0)
BATCHES = [
    {"x": RNG.normal(size=(16, 8)).astype(np.float32), "code": RNG.integers(0, 4, 16).astype(np.int32)}
    for _ in range(3)
]


def describe(engine):
    return f"{engine.name}-{engine.microbatches}"


def train_all(init_fn, loss_fn, engine, batches=BATCHES):
    """Return the runs after a step on each batch, in model order."""
    layout = js.layout(js.fsdp("data", min_size=0), js.make_mesh(data=8), init_fn, TX)
    run, step = js.init(init_fn, TX, layout, key=0), js.make_step(loss_fn, TX, layout, engine=engine)
    runs = []
    for batch in batches:
        run, _ = step(run, batch)
        runs.append(js.clone(run))
    return [js.logical(run, layout) for run in runs]


def train(*args, **options):
    """Return the last of these runs."""
    return train_all(*args, **options)[-1]


def trace(init_fn, loss_fn, engine):
    layout = js.layout(js.fsdp("data", min_size=0), js.make_mesh(data=8), init_fn, TX)
    js.make_step(loss_fn, TX, layout, engine=engine).lower(BATCHES[0])


def train_alone(init_fn, loss, batches=BATCHES):
    """The loop on one device, of `loss(params, state, batch) -> (loss, new state)`."""

    @jax.jit
    def step(params, state, batch):
        (_, state), grads = jax.value_and_grad(loss, has_aux=True)(params, state, batch)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), state

    params, state = init_fn(jax.random.key(0))
    for batch in batches:
        params, state = step(params, state, batch)
    return params, state


def assert_close(ours, theirs):
    for a, b in zip(jax.tree.leaves(ours), jax.tree.leaves(theirs), strict=True):
        assert np.abs(np.asarray(a, np.float64) - b).max() <= 1e-5 * max(np.abs(b).max(), 1e-3)


# A state with one of everything.


def init_fn(key):
    w = 0.3 * normal(0, 8, 6)
    state = {
        "teacher": 1.0 * w,  # proven equal
        "steps": jnp.zeros((), jnp.int32),  # a counter
        "average": jnp.zeros(6),  # a mean over rows
        "seen": jnp.zeros((), jnp.int32),
        "codes": jnp.zeros(4),
        "peak": jnp.zeros(()),
        "share": jnp.zeros(()),
        "key": jax.random.key(7),
        "constant": jnp.arange(3),  # handed on
    }
    return js.Model({"w": w}, state)


def errors_of(params, state, x):
    target = jax.lax.stop_gradient(jnp.roll(jnp.tanh(x @ state["teacher"]), 1, -1))
    return ((jnp.tanh(x @ params["w"]) - target) ** 2).sum(-1)


def common(params, state):
    return state | {
        "teacher": jax.lax.stop_gradient(0.9 * state["teacher"] + 0.1 * params["w"]),
        "steps": state["steps"] + 1,
        "key": jax.random.split(state["key"])[0],
    }


def loss_alone(params, state, batch):
    x = batch["x"]
    new = common(params, state) | {
        "average": 0.5 * state["average"] + 0.5 * (x @ params["w"]).mean(0),
        "seen": state["seen"] + len(x),
        "codes": state["codes"] + jax.nn.one_hot(batch["code"], 4).sum(0),
        "peak": jnp.maximum(state["peak"], x.max()),
        "share": (x * (x > 1)).sum() / (x > 1).sum(),
    }
    return errors_of(params, state, x).mean(), new


def loss_fn(model, batch, key):
    (params, state), x = model, batch["x"]
    new = common(params, state) | {
        "average": 0.5 * state["average"] + 0.5 * (x @ params["w"]).mean(0),
        "seen": js.Sum(len(x)),
        "codes": js.Sum(jax.nn.one_hot(batch["code"], 4).sum(0)),
        "peak": js.Max(x.max()),
        "share": js.Mean((x * (x > 1)).sum(), (x > 1).sum()),
    }
    errors = errors_of(params, state, x)
    return js.Loss(js.Mean(errors.sum(), errors.size), state=new)


@pytest.mark.fast_cases(2)
@pytest.mark.parametrize("engine", ENGINES[1:] + ENGINES[:1], ids=describe)
def test_every_kind_of_state_equals_one_device(engine):
    params, state = train_alone(init_fn, loss_alone)
    run = train(init_fn, loss_fn, engine)
    keys = [jax.random.key_data(one.pop("key")) for one in (run.state, state)]
    assert_close((run.params, run.state, keys[0]), (params, state, keys[1]))
    assert {name: x.dtype for name, x in run.state.items()} == {name: x.dtype for name, x in state.items()}


def test_only_what_may_differ_is_reduced():
    assert rules_of(init_fn, loss_fn, js.explicit()) == {
        "average": "mean",
        "codes/value": "sum",
        "constant": "kept",
        "key": "once",
        "peak/value": "max",
        "seen/value": "sum",
        "share/0/0": "sum",
        "share/1/0": "sum",
        "steps": "once",
        "teacher": "once",
    }


# Contributions that the loss's own update makes a state of: codes of a VQ-VAE (van den Oord et al. 2017, appendix A.1).


def codes_init(key):
    return js.Model({"w": normal(0, 8, 2)}, {"book": jnp.eye(4, 2), "counts": jnp.ones(4)})


def codes_of(params, book, x):
    z = x @ params["w"]
    nearest = ((z[:, None] - book) ** 2).sum(-1).argmin(-1)
    chosen = jax.nn.one_hot(nearest, 4)
    return ((z - jax.lax.stop_gradient(chosen @ book)) ** 2).sum(-1), chosen.sum(0), jax.lax.stop_gradient(chosen.T @ z)


def update_codes(old, new):
    counts = 0.9 * old["counts"] + 0.1 * new["counts"]
    return {
        "book": (0.9 * old["book"] * old["counts"][:, None] + 0.1 * new["sums"]) / counts[:, None],
        "counts": counts,
    }


def codes_loss(model, batch, key):
    errors, counts, sums = codes_of(model.params, model.state["book"], batch["x"])
    state = {"counts": js.Sum(counts), "sums": js.Sum(sums)}
    return js.Loss(js.Mean(errors.sum(), errors.size), state=state, update=update_codes)


@pytest.mark.parametrize("engine", FEW, ids=describe)
def test_an_update_runs_once_on_combined_contributions(engine):
    def alone(params, state, batch):
        errors, counts, sums = codes_of(params, state["book"], batch["x"])
        return errors.mean(), update_codes(state, {"counts": counts, "sums": sums})

    run = train(codes_init, codes_loss, engine)
    assert_close((run.params, run.state), train_alone(codes_init, alone))


def test_an_update_that_reads_values_of_the_loss_is_refused():
    def leaking(model, batch, key):
        errors, counts, _ = codes_of(model.params, model.state["book"], batch["x"])

        def update(old, new):
            return old | {"counts": old["counts"] + counts}

        return js.Loss(js.Mean(errors.sum(), errors.size), state={"counts": js.Sum(counts)}, update=update)

    for engine in (js.auto(), js.explicit(microbatches=2)):
        with pytest.raises(ValueError, match=r"the update of js.Loss reads values of the loss .*\(counts\)"):
            trace(codes_init, leaking, engine)


def test_an_update_that_returns_another_tree_is_refused():
    def odd(model, batch, key):
        return js.Loss(codes_loss(model, batch, key).value, state={}, update=lambda old, new: {"book": old["book"][0]})

    for engine in (js.auto(), js.explicit()):
        with pytest.raises(
            ValueError, match=r"(?s)update of js.Loss returned another state.*counts: missing.*book: exp"
        ):
            trace(codes_init, odd, engine)


# A teacher that the loss reads, placed as the parameters are (BYOL, DINO).


def teacher_init(key):
    params = {"big": 0.3 * normal(0, 8, 6), "bias": jnp.zeros(6)}
    return js.Model(params, {"teacher": js.Average(params, 0.9), "steps": jnp.zeros((), jnp.int32)})


def teacher_errors(params, teacher, x):
    def predict(p):
        return jnp.tanh(x @ p["big"] + p["bias"])

    return ((predict(params) - jax.lax.stop_gradient(jnp.roll(predict(teacher), 1, -1))) ** 2).sum(-1)


def teacher_loss(model, batch, key):
    errors = teacher_errors(model.params, model.state["teacher"].params, batch["x"])
    return js.Loss(js.Mean(errors.sum(), errors.size), state=model.state | {"steps": model.state["steps"] + 1})


@pytest.mark.parametrize("engine", FEW, ids=describe)
def test_an_average_follows_the_parameters_on_its_shards(engine):
    @jax.jit
    def step(params, teacher, x):
        grads = jax.grad(lambda p: teacher_errors(p, teacher, x).mean())(params)
        params = jax.tree.map(lambda p, g: p - 0.1 * g, params, grads)
        return params, jax.tree.map(lambda t, p: 0.9 * t + 0.1 * p, teacher, params)

    teacher = params = teacher_init(jax.random.key(0)).params
    for batch in BATCHES:
        params, teacher = step(params, teacher, batch["x"])
    run = train(teacher_init, teacher_loss, engine)
    assert_close((run.params, run.state["teacher"].params), (params, teacher))
    assert int(run.state["steps"]) == 3


def test_an_average_is_stored_as_its_parameter_and_gathered_only_to_be_read():
    layout = js.layout(js.fsdp("data", min_size=0), js.make_mesh(data=8), teacher_init, TX)
    assert layout.state["teacher"].params == layout.params
    step = js.make_step(teacher_loss, TX, layout, engine=js.explicit())
    unread = js.make_step(
        lambda m, b, k: js.Mean((b["x"] @ m.params["big"]).sum(), len(b["x"])), TX, layout, engine=js.explicit()
    )
    gathers = [
        [
            shape
            for c in js.collectives(one.compile(BATCHES[0]), layout.mesh)
            if c.kind == "all-gather"
            for shape in c.shapes
        ]
        for one in (step, unread)
    ]
    assert [sorted(shapes).count((8, 6)) for shapes in gathers] == [2, 1], gathers


@pytest.mark.parametrize(
    "state, match",
    [
        (lambda p: js.Average({"other": p["big"]}, 0.9), "no parameter has the path\n  - other"),
        (lambda p: js.Average({"big": p["big"].T}, 0.9), r"big: the average is \[6, 8\], the parameter \[8, 6\]"),
        (lambda p: js.Average(p, 1.5), "decay must lie between 0 and 1, got 1.5"),
    ],
)
def test_an_average_of_what_is_no_parameter_is_refused(state, match):
    def init(key):
        params = teacher_init(key).params
        return js.Model(params, {"teacher": state(params)})

    with pytest.raises(ValueError, match=match):
        js.layout(js.fsdp("data"), js.make_mesh(data=8), init, TX)


@pytest.mark.parametrize("change", [lambda s: jax.tree.map(lambda x: 2 * x, s), lambda s: {"steps": s["steps"]}])
def test_an_average_that_the_loss_changes_is_refused(change):
    def loss(model, batch, key):
        return js.Loss(teacher_loss(model, batch, key).value, state=change(model.state))

    for engine in (js.auto(), js.explicit()):
        with pytest.raises(ValueError, match=r"the step itself updates a js.Average"):
            trace(teacher_init, loss, engine)


def test_a_decay_may_be_a_schedule():
    decay = optax.linear_schedule(0.0, 1.0, 2)  # 0, 0.5, 1, ...

    def init(key):
        params = teacher_init(key).params
        return js.Model(params, {"teacher": js.Average(params, decay)})

    def loss(model, batch, key):
        errors = teacher_errors(model.params, model.state["teacher"].params, batch["x"])
        return js.Mean(errors.sum(), errors.size)

    runs = train_all(init, loss, js.explicit())
    first, second, _ = (run.params["big"] for run in runs)
    for run, teacher in zip(runs, (first, (first + second) / 2, (first + second) / 2)):
        assert_close(run.state["teacher"].params["big"], np.asarray(teacher))


# Modules of Flax.


class Normed(nn.Module):
    @nn.compact
    def __call__(self, x):
        count = self.variable("stats", "count", lambda: jnp.zeros((), jnp.int32))
        peak = self.variable("stats", "peak", lambda: jnp.zeros(()))
        steps = self.variable("stats", "steps", lambda: jnp.zeros((), jnp.int32))
        if not self.is_initializing():
            count.value, peak.value, steps.value = count.value + len(x), jnp.abs(x).max(), steps.value + 1
        return nn.Dense(4)(nn.BatchNorm(use_running_average=False, momentum=0.9)(x))


class Counting(nnx.Module):
    def __init__(self, rngs):
        self.dense, self.norm = nnx.Linear(8, 4, rngs=rngs), nnx.BatchNorm(8, momentum=0.9, rngs=rngs)
        self.stats = nnx.Dict(count=nnx.Variable(jnp.zeros((), jnp.int32)), peak=nnx.Variable(jnp.zeros(())))
        self.steps = nnx.Variable(jnp.zeros((), jnp.int32))

    def __call__(self, x):
        self.stats["count"][...] += len(x)
        self.stats["peak"][...] = jnp.abs(x).max()
        self.steps[...] += 1
        return self.dense(self.norm(x))


def module_loss(model, batch):
    errors = (model(batch["x"]) ** 2).sum(-1)
    return js.Mean(errors.sum(), errors.size)


DECLARED = {"stats/count": "sum", "stats/peak": "max"}


def find(tree, name):
    (found,) = (
        np.asarray(x) for path, x in jax.tree_util.tree_leaves_with_path(tree) if name in jax.tree_util.keystr(path)
    )
    return found


@pytest.mark.parametrize("engine", FEW, ids=describe)
@pytest.mark.parametrize(
    "make",
    [lambda **k: js.linen(Normed(), module_loss, BATCHES[0], **k), lambda **k: js.nnx(Counting, module_loss, **k)],
)
def test_modules_declare_their_state_by_path(make, engine):
    model = make(state=DECLARED)
    run = train(model.init, model.loss, engine)
    assert (find(run.state, "count"), find(run.state, "steps")) == (48, 3)
    assert find(run.state, "peak") == pytest.approx(np.abs(BATCHES[-1]["x"]).max(), rel=1e-6)
    # Momentum counts once per step, whatever the number of parts: the mean over equal parts of rows is that of all.
    mean = np.zeros(8)
    for batch in BATCHES:
        mean = 0.9 * mean + 0.1 * batch["x"].mean(0)
    assert_close(find(run.state, "mean"), mean)


def test_undeclared_counts_of_modules_are_refused_by_path():
    for model in (js.linen(Normed(), module_loss, BATCHES[0]), js.nnx(Counting, module_loss)):
        with pytest.raises(
            TypeError, match=r"(?s)js.linen\(..., state=.*stats/count int32\[\]: depends on the number of rows"
        ):
            trace(model.init, model.loss, js.explicit())


def test_a_declaration_that_names_nothing_is_refused():
    with pytest.raises(TypeError, match='with "sum" or "max"'):
        js.nnx(Counting, module_loss, state={"stats/count": "mean"})
    model = js.linen(Normed(), module_loss, BATCHES[0], state={"stats/cuont": "sum"})
    with pytest.raises(ValueError, match=r"(?s)names no array of the module's state.*stats/count.*\n  - stats/cuont"):
        trace(model.init, model.loss, js.auto())


# What has no rule.


def counting_loss(new, wrap=lambda fn: fn):
    def loss(model, batch, key):
        errors = ((batch["x"] @ model.params["w"]) ** 2).sum(-1)
        return js.Loss(js.Mean(errors.sum(), errors.size), state={"n": new(model.state["n"], errors, batch, key)})

    return wrap(loss)


def counting_init(dtype):
    return lambda key: js.Model({"w": normal(0, 8, 6)}, {"n": jnp.zeros((), dtype)})


BY_ROWS = {
    "size": lambda n, errors, batch, key: n + errors.size,
    "shape of the batch": lambda n, errors, batch, key: n + batch["x"].shape[0],
    "sum of ones": lambda n, errors, batch, key: n + jnp.ones_like(errors).sum(),
    "array of NumPy": lambda n, errors, batch, key: n + np.arange(len(errors)).sum().astype(np.float32),
    "loop": lambda n, errors, batch, key: jax.lax.fori_loop(0, len(errors), lambda i, n: n + 1, n),
    "scan": lambda n, errors, batch, key: jax.lax.scan(lambda n, _: (n + 1, None), n, None, len(errors))[0],
    "condition": lambda n, errors, batch, key: jax.lax.cond(
        n > 0, lambda: n + len(errors), lambda: n + 1.0 * len(errors)
    ),
}


@pytest.mark.parametrize("engine", SHARED, ids=describe)
@pytest.mark.parametrize("name", BY_ROWS)
def test_a_float_that_depends_on_how_many_rows_there_are_is_refused(name, engine):
    with pytest.raises(TypeError, match=r"n float32\[\]: depends on the number of rows at hand"):
        trace(counting_init(jnp.float32), counting_loss(BY_ROWS[name]), engine)


INTEGERS = {
    "sum of a mask": lambda n, errors, batch, key: n + (errors > 1).sum(),
    "largest code": lambda n, errors, batch, key: jnp.maximum(n, batch["code"].max()),
    "drawn": lambda n, errors, batch, key: jax.random.randint(key, (), 0, 9),
}


@pytest.mark.parametrize("engine", SHARED, ids=describe)
@pytest.mark.parametrize("name", INTEGERS)
def test_an_integer_that_is_not_proven_equal_is_refused(name, engine):
    with pytest.raises(TypeError, match=r"n int32\[\]: is no floating array"):
        trace(counting_init(jnp.int32), counting_loss(INTEGERS[name]), engine)


RIGHT = {
    "counter": lambda n, errors, batch, key: n + 1,
    "of the old one": lambda n, errors, batch, key: jnp.where(n > 3, 0, n + 1),
    "loop": lambda n, errors, batch, key: jax.lax.fori_loop(0, 3, lambda i, n: n + 1, n),
    "printed": lambda n, errors, batch, key: (jax.debug.print("{}", errors), n + 1)[1],
    "in a condition": lambda n, errors, batch, key: jax.lax.cond(n > 0, lambda: n, lambda: n + 1),
}


@pytest.mark.parametrize("wrap", [lambda fn: fn, jax.jit, jax.checkpoint], ids=["plain", "jit", "checkpoint"])
@pytest.mark.parametrize("name", RIGHT)
def test_what_is_proven_equal_is_taken_once(name, wrap):
    loss = counting_loss(RIGHT[name], wrap)
    for engine in (js.explicit(), js.auto(microbatches=2)):
        assert rules_of(counting_init(jnp.int32), loss, engine) == {"n": "once"}


def test_a_loss_that_is_written_for_one_number_of_rows_has_rules():
    """Libraries that check shapes raise errors of classes of their own."""

    def new(n, errors, batch, key):
        if len(errors) != 2:
            raise RuntimeError("this is written for two rows")
        return n + 1

    trace(counting_init(jnp.int32), counting_loss(new), js.explicit())


def test_sums_that_the_loss_takes_over_devices_are_equal_there():
    def total(n, errors, batch, key):
        return n + jax.lax.psum((errors > 1).sum(), js.row_axes())

    assert rules_of(counting_init(jnp.int32), counting_loss(total), js.explicit()) == {"n": "once"}


def test_a_loss_that_sees_all_rows_needs_no_rules():
    layout = js.layout(js.ddp("data"), js.make_mesh(jax.devices()[:1], data=1), counting_init(jnp.int32), TX)
    for new in (BY_ROWS["size"], INTEGERS["sum of a mask"]):
        step = js.make_step(counting_loss(new), TX, layout, engine=js.explicit())
        run, _ = step(js.init(counting_init(jnp.int32), TX, layout, key=0), BATCHES[0])
        assert run.state["n"] > 0


def rules_of(init_fn, loss_fn, engine):
    layout = js.layout(js.fsdp("data", min_size=0), js.make_mesh(data=8), init_fn, TX)
    step = js.make_step(loss_fn, TX, layout, engine=engine)
    rules = engine.state_rules(step.objective, layout, BATCHES[0])
    return dict(zip(rules.paths, rules.rules, strict=True))


# Side effects


@pytest.mark.parametrize("engine, times", [(js.explicit(microbatches=2), 16), (js.auto(microbatches=2), 2)])
def test_callbacks_of_the_loss_run_once_per_device_and_micro_batch(engine, times):
    seen = []

    def loss(params, batch, key):
        errors = (batch["x"] @ params["w"] ** 2).sum(-1)

        def head(errors):
            jax.debug.callback(lambda: seen.append(1))
            return errors.sum(), 1.0 * errors.size

        def body(total, row):
            jax.debug.callback(lambda: None)
            return total + row, None

        jax.lax.scan(body, 0.0, errors)
        return js.Mean(*jax.lax.cond(params["w"][0, 0] > -9, head, lambda e: (0.0, 1.0), errors))

    train(lambda key: {"w": normal(0, 8, 6)}, loss, engine, batches=BATCHES[:1])
    jax.effects_barrier()
    assert len(seen) == times
