"""`js.moe`: routing, products, how layouts split the experts, and what is refused."""

from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxshard as js
from jaxshard.compiler.topology import topology_mesh
from jaxshard.hlo.found import summary
from jaxshard.layers.moe import experts as on_device
from jaxshard.layers.moe.exchange import form_for, use_form
from jaxshard.layers.moe.experts import Share, apply_share
from jaxshard.layers.moe.products import Way
from jaxshard.layers.moe.routing import Choice
from tests.engines.programs import tpu
from tests.layers.cases import normal
from tests.layers.moe.ragged import ragged_reference
from tests.toys import Toy, assert_equal_runs, one_device, sharded

SGD = optax.sgd(0.1)
E, C, H = 8, 8, 16


def mlp(params, rows, dot):
    hidden = jax.nn.silu(dot(rows, params["gate"])) * dot(rows, params["up"])
    return dot(hidden, params["down"])


def mlp_params(key, experts=E):
    shapes = {"gate": (experts, C, H), "up": (experts, C, H), "down": (experts, H, C)}
    keys = jax.random.split(key, len(shapes))
    return {name: jax.random.normal(k, shapes[name]) / 3 for name, k in zip(shapes, keys)}


def all_experts(x, logits, params, k, scores="softmax", normalize=True, scale=1.0, bias=0.0):
    """Every expert for every token, and of these the weighted sum."""
    score = jax.nn.softmax(logits) if scores == "softmax" else jax.nn.sigmoid(logits)
    chosen = jax.nn.one_hot(jax.lax.top_k(score + bias, k)[1], logits.shape[-1]).sum(-2)
    weights = score * chosen
    weights = scale * (weights / weights.sum(-1, keepdims=True) if normalize else weights)
    hidden = jax.nn.silu(jnp.einsum("...c,ech->...eh", x, params["gate"]))
    hidden = hidden * jnp.einsum("...c,ech->...eh", x, params["up"])
    return jnp.einsum("...e,...eh,ehc->...c", weights, hidden, params["down"])


def assert_close(found, expected, tolerance):
    """Per array, over the larger of its largest magnitude and 1e-3 of the tree's."""
    found, expected = jax.device_get((jax.tree.leaves(found), jax.tree.leaves(expected)))
    largest = max(np.abs(x).max() for x in expected)
    for a, b in zip(found, expected, strict=True):
        assert np.abs(a - b).max() <= tolerance * max(1e-3 * largest, np.abs(b).max())


@pytest.mark.parametrize(
    "how",
    [
        {"k": 2},
        pytest.param({"k": 3, "scores": "sigmoid", "scale": 2.5}, marks=pytest.mark.slow),
        *(pytest.param({"k": k, "normalize": k > 1 and k % 2 == 0}, marks=pytest.mark.slow) for k in range(1, E + 1)),
    ],
    ids=str,
)
def test_equals_all_experts_for_all_tokens(how):
    """Outputs to 1e-6, gradients to 1e-5."""
    arrays = normal(0, 2, 20, C), normal(1, 2, 20, E), mlp_params(jax.random.key(0))

    def ours(x, logits, params):
        y = js.moe(x, logits, mlp, params, **how)[0]
        return (y**2).sum(), y

    def theirs(x, logits, params):
        y = all_experts(x, logits, params, **how)
        return (y**2).sum(), y

    ((_, y), grads), ((_, expected), expected_grads) = (
        jax.jit(jax.value_and_grad(fn, (0, 1, 2), has_aux=True))(*arrays) for fn in (ours, theirs)
    )
    assert_close(y, expected, 1e-6)
    assert_close(grads, expected_grads, 1e-5)


# Layouts


def moe_model(routing="random", k=2, experts=E, **how):
    """(init_fn, loss_fn) of one layer of experts; the batch brings what makes its routing uneven."""

    def init_fn(key):
        return {"router": jax.random.normal(key, (C, experts)), "moe": mlp_params(key, experts)}

    def loss_fn(params, batch, key):
        logits = batch["x"] @ params["router"] + batch["logits"]
        y, record = js.moe(batch["x"], logits, mlp, params["moe"], k=k, hidden={"gate": 2, "up": 2, "down": 1}, **how)
        load = record.load / (k * logits.shape[-2] / experts)
        balance = (load * record.probabilities).sum(-1) / logits.shape[-2]
        metrics = {"dropped": js.Sum(record.dropped.sum()), "load": js.Sum(record.load.sum())}
        loss = js.Mean((y**2).sum(), y.size) + 0.1 * js.Mean(balance.sum(), balance.size)
        return js.Loss(loss + 0.01 * js.Mean(record.z.sum(), record.z.size * logits.shape[-2]), metrics=metrics)

    return init_fn, loss_fn


def batch_of(kind, rows=8, tokens=12, experts=E):
    logits = np.zeros((rows, tokens, experts), np.float32)
    if kind == "one":  # everything goes to the first experts: one device gets all, others get nothing
        logits[..., :2] = 50
    return {"x": normal(2, rows, tokens, C), "logits": jnp.asarray(logits)}


FSDP = js.fsdp(min_size=0)
EXPERT = js.compose(FSDP, js.expert())
TENSOR = js.tensor([("experts", "whole"), *js.RULES])
LAYOUTS = {
    "auto": ({"data": 8}, FSDP, js.auto()),
    "explicit": ({"data": 8}, FSDP, js.explicit()),
    "auto-expert": ({"data": 2, "expert": 4}, EXPERT, js.auto()),
    "auto-expert-8": ({"expert": 8}, js.compose(js.fsdp("expert", min_size=0), js.expert()), js.auto()),
    "explicit-expert": ({"data": 2, "expert": 4}, EXPERT, js.explicit()),
    "explicit-expert-2": ({"data": 4, "expert": 2}, EXPERT, js.explicit()),
    "explicit-shared": ({"data": 8}, js.compose(FSDP, js.expert("data")), js.explicit()),
    "auto-expert-tensor": ({"data": 2, "expert": 2, "tensor": 2}, js.compose(EXPERT, js.tensor()), js.auto()),
    "explicit-expert-tensor": ({"data": 2, "expert": 2, "tensor": 2}, js.compose(EXPERT, js.tensor()), js.explicit()),
    "auto-tensor": ({"data": 2, "tensor": 4}, js.compose(js.ddp(), TENSOR), js.auto()),
    "explicit-tensor": ({"data": 2, "tensor": 4}, js.compose(js.ddp(), TENSOR), js.explicit()),
}
FAST = [("explicit-expert", "even")]
CELLS = [(name, kind) for name in LAYOUTS for kind in ("even", "one")]


@pytest.mark.parametrize(
    ("name", "kind"), [cell if cell in FAST else pytest.param(*cell, marks=pytest.mark.slow) for cell in CELLS]
)
def test_a_layout_splits_it_and_one_device_is_equalled(name, kind):
    axes, strategy, engine = LAYOUTS[name]
    toy = Toy(*moe_model(), batch_of(kind))
    trace, _ = sharded(toy, strategy, js.make_mesh(**axes), engine, steps=1)
    assert_equal_runs(trace, one_device(toy, steps=1))


# Exchanges


@pytest.fixture
def ragged_with_nan(monkeypatch):
    """The program of TPUs and GPUs, with buffers full of NaN where nobody writes."""
    monkeypatch.setattr(jax.lax, "ragged_all_to_all", ragged_reference)
    monkeypatch.setattr(on_device, "_empty", lambda shape, dtype: jnp.full(shape, jnp.nan, dtype))
    with use_form("ragged"):
        yield


@pytest.mark.slow
@pytest.mark.parametrize("room", [0.2, 1.25])
@pytest.mark.parametrize("kind", ["even", "one"])
def test_the_ragged_program_equals_one_device_and_reads_nothing_unwritten(kind, room, ragged_with_nan, monkeypatch):
    monkeypatch.setattr(on_device, "ROOM", room)
    axes, strategy, engine = LAYOUTS["explicit-expert"]
    with jax.debug_nans(False):
        js.parity(*moe_model(), SGD, strategy, js.make_mesh(**axes), batch_of(kind), engine=engine).check()


def lossless(form, routings, devices=8, tokens=6, k=2, room=1.25):
    """The largest error over random routings, extreme ones among them, of experts that multiply by their number."""
    share = Share(("expert",), devices, E, 8 * -(-int(tokens * k * room) // 8), Way("cpu"), form)
    mesh = js.make_mesh(jax.devices()[:devices], expert=devices)

    def routing(key):
        """All to one expert, to the experts of one device, even, or anything between these."""
        keys = jax.random.split(key, 4)
        logits = jax.random.normal(keys[0], (tokens, E)) * jax.random.choice(keys[1], jnp.array([0.0, 1.0, 30.0]))
        favourites = jax.random.normal(keys[2], (E,)) * jax.random.choice(keys[3], jnp.array([0.0, 1.0, 100.0]))
        weights, chosen = jax.lax.top_k(jax.nn.softmax(logits + favourites), k)
        return Choice(chosen.astype(jnp.int32), weights)

    def on_one(key):
        def one(worst, key):
            own = jax.random.fold_in(key, jax.lax.axis_index("expert"))
            choice = routing(jnp.where(jax.random.bernoulli(key), own, key))  # different on each device, or the same
            x = jax.random.normal(own, (tokens, 4))
            mine = jax.lax.axis_index("expert") * (E // devices) + jnp.arange(E // devices) + 1.0
            y = apply_share(lambda p, rows, dot: rows * dot.of(p)[:, None], mine, x, choice, share)
            expected = ((choice.experts + 1) * choice.weights).sum(-1)[:, None] * x
            return jnp.maximum(worst, jnp.abs(y - expected).max()), None

        worst, _ = jax.lax.scan(one, jnp.float32(0), jax.random.split(key, routings))
        return jax.lax.pmax(worst, "expert")

    spec = jax.sharding.PartitionSpec()
    run = jax.shard_map(on_one, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False)
    return float(jax.jit(run)(jax.random.key(0)))


@pytest.mark.slow
def test_no_token_is_lost_in_1000_random_routings():
    assert lossless("equal", 1000) < 1e-5


@pytest.mark.slow
@pytest.mark.parametrize("k", [1, 2, 5, 8])
@pytest.mark.parametrize("devices", [2, 4, 8])
def test_no_token_is_lost_in_ragged_exchanges(devices, k, ragged_with_nan):
    assert lossless("ragged", 100, devices, k=k) < 1e-5
    assert lossless("ragged", 100, devices, k=k, room=0.3) < 1e-5
    assert lossless("equal", 100, devices, k=k, room=0.3) < 1e-5


def test_cpus_and_large_slices_of_v5e_exchange_equal_counts():
    def tpu(kind, chips):
        return [SimpleNamespace(platform="tpu", device_kind=kind)] * chips

    assert form_for(jax.devices()) == "equal"
    assert form_for(tpu("TPU v5 lite", 16)) == "ragged"
    assert form_for(tpu("TPU v5 lite", 32)) == "equal"
    assert form_for(tpu("TPU v5", 512)) == "ragged"
    assert form_for([SimpleNamespace(platform="gpu")] * 64) == "ragged"
    with use_form("equal"):
        assert form_for(tpu("TPU v5", 8)) == "equal"


@pytest.mark.parametrize(
    "engine", [js.explicit(), pytest.param(js.auto(), marks=pytest.mark.slow)], ids=["explicit", "auto"]
)
@pytest.mark.slow
def test_its_own_collectives(engine):
    """Over the axis of the experts: the counts, and all-to-alls, two forward and five backward.

    Over the other one the largest number of windows: no device leaves a loop before the others.
    """
    init_fn, loss_fn = moe_model()
    mesh = js.make_mesh(data=2, expert=4)
    step = js.make_step(loss_fn, SGD, js.layout(EXPERT, mesh, init_fn, SGD), engine=engine)
    found = js.collectives(step.compile(batch_of("even")), mesh)
    assert js.audit(step, batch_of("even")).ok
    assert sum(c.kind == "all-to-all" and c.axes == ("expert",) for c in found) == 7
    (counts,) = (row for row in summary(found) if row.kind == "all-gather" and "expert" in row.axes)
    assert (counts.axes, counts.bytes) == (("expert",), 4 * E * 4)
    assert [c.shapes for c in found if c.dtype == "s32" and c.axes == ("data",)] == [((),)]
    assert {row.kind for row in summary(found)} <= {"all-reduce", "all-gather", "reduce-scatter", "all-to-all"}


def test_gradients_of_many_windows_are_summed_in_f32():
    """In bf16 the sum of 512 windows of 8 rows would stay at half of what it is."""
    mesh = js.make_mesh(jax.devices()[:2], expert=2)
    share = Share(("expert",), 2, 2, 8, Way("cpu"), "equal")
    choice = Choice(jnp.zeros((2048, 1), jnp.int32), jnp.ones((2048, 1)))

    def loss(scale):
        out = apply_share(
            lambda p, rows, dot: rows * dot.of(p)[:, None], scale, jnp.ones((2048, 1), jnp.bfloat16), choice, share
        )
        return out.astype(jnp.float32).sum()

    spec = jax.sharding.PartitionSpec("expert")
    grads = jax.shard_map(jax.grad(loss), mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False)
    assert jax.jit(grads)(jnp.ones(2, jnp.bfloat16)).tolist() == [4096, 0]


# Capacity


@pytest.mark.slow
@pytest.mark.parametrize("capacity", [0.25, 1.0, 8.0])
def test_capacity_loses_what_it_counts(capacity):
    """By a loop in Python: first choices first, then in order of positions, row by row."""
    k, (x, logits) = 3, (normal(0, 2, 20, C), normal(1, 2, 20, E) * 3)
    scale = jnp.arange(1.0, E + 1)
    run = jax.jit(
        lambda x, logits: js.moe(
            x, logits, lambda p, rows, dot: rows * dot.of(p)[:, None], scale, k=k, capacity=capacity
        )
    )
    y, routing = run(x, logits)
    room = int(np.ceil(capacity * k * 20 / E))
    score = np.asarray(jax.nn.softmax(logits))
    chosen = np.argsort(-score, -1, kind="stable")[..., :k]
    for row in range(2):
        used, expected, lost = np.zeros(E, int), np.zeros((20, C)), 0
        for turn in range(k):
            for t in range(20):
                expert, weights = chosen[row, t, turn], score[row, t, chosen[row, t]]
                used[expert] += 1
                if used[expert] > room:
                    lost += 1
                else:
                    expected[t] += (expert + 1) * score[row, t, expert] / weights.sum() * np.asarray(x[row, t])
        assert int(routing.dropped[row]) == lost
        assert (np.asarray(routing.load[row]) == used).all()
        np.testing.assert_allclose(y[row], expected, rtol=1e-5, atol=1e-6)
    assert (int(routing.dropped.sum()) == 0) == (capacity == 8.0)


# Bad input


def identity(params, rows, dot):
    return rows


def test_what_does_not_fit_is_refused():
    x, logits, params = normal(0, 2, 4, C), normal(1, 2, 4, E), {"w": normal(2, E, C, C)}

    def moe(x=x, logits=logits, fn=identity, params=params, k=2, **how):
        return jax.eval_shape(lambda *arrays: js.moe(*arrays[:2], fn, arrays[2], k=k, **how), x, logits, params)

    with pytest.raises(ValueError, match=r"k=9 experts for each token of the 8 .* use k from 1 to 8"):
        moe(k=9)
    with pytest.raises(ValueError, match="k=0 experts"):
        moe(k=0)
    with pytest.raises(TypeError, match=r"k must be an int, got 2\.0"):
        moe(k=2.0)
    with pytest.raises(ValueError, match=r"capacity must be positive, got 0: 1\.0 is room for balanced routing"):
        moe(capacity=0)
    with pytest.raises(TypeError, match="'softmax', 'sigmoid', got 'tanh'"):
        moe(scores="tanh")
    with pytest.raises(ValueError, match=r"of the same tokens, got x \[2, 4, 8\] and router_logits \[2, 3, 8\]"):
        moe(logits=logits[:, :3])
    with pytest.raises(ValueError, match=r"bias must be \[8\], .* got \[3\]"):
        moe(bias=jnp.zeros(3))
    with pytest.raises(ValueError, match=r"router_logits has 8 experts, so .* must be 8\n  - w \[4, 8, 8\]"):
        moe(params={"w": params["w"][:4]})
    with pytest.raises(ValueError, match=r"width 8 for each of its 16 rows, got \[16, 4\] for \[16, 8\]"):
        moe(fn=lambda params, rows, dot: rows[:, :4])
    with pytest.raises(ValueError, match=r"8 experts, got x \[16, 8\] and w \[8, 3, 8\]; w must be \[8, 8, any\]"):
        moe(fn=lambda params, rows, dot: dot(rows, params["w"][:, :3]))
    with pytest.raises(ValueError, match=r"dot\.of\(b\) takes b \[experts, \.\.\.\] of the 8 experts here, got \[3\]"):
        moe(fn=lambda params, rows, dot: rows * dot.of(jnp.zeros(3))[:, None])


def lower_in_layout(hidden, whole_bias=False):
    """Trace a step with one layer of experts on data=2, expert=2, tensor=2."""

    def init_fn(key):
        params = {"up": jax.random.normal(key, (E, C, H)), "down": jax.random.normal(key, (E, H, C))}
        return {"moe": params | ({"b": jnp.zeros((E, C))} if whole_bias else {})}

    def fn(params, rows, dot):
        return dot(dot(rows, params["up"]), params["down"])

    def loss_fn(params, batch, key):
        y, _ = js.moe(batch["x"], batch["x"] @ jnp.ones((C, E)), fn, params["moe"], k=1, hidden=hidden)
        return js.Mean(y.sum(), y.size)

    rules = [*([("moe/b", ("experts", None))] if whole_bias else []), *js.RULES]
    strategy = js.compose(js.ddp(), js.expert(rules=rules), js.tensor(rules))
    layout = js.layout(strategy, js.make_mesh(data=2, expert=2, tensor=2), init_fn, SGD)
    js.make_step(loss_fn, SGD, layout).lower({"x": normal(0, 8, 4, C)})


@pytest.mark.slow
def test_what_a_tensor_axis_cannot_split_is_refused():
    lower_in_layout({"up": 2, "down": 1})
    with pytest.raises(ValueError, match=r"after that of the experts, from 1 on\n  - up \[8, 8, 16\]: 0"):
        lower_in_layout({"up": 0, "down": 1})
    with pytest.raises(ValueError, match=r"these arrays have none.*\n  - b \[8, 8\]"):
        lower_in_layout({"up": 2, "down": 1, "b": None}, whole_bias=True)
    with pytest.raises(ValueError, match="hidden must have the tree of params"):
        lower_in_layout({"v": 2})


@pytest.mark.parametrize("scores", [pytest.param("softmax", marks=pytest.mark.slow), "sigmoid"])
def test_a_nan_of_the_router_reaches_the_loss(scores):
    """Also where the expert that has it is not chosen, and in no other token."""
    x, logits = normal(0, 2, 6, C), normal(1, 2, 6, E)
    logits = logits.at[1, 3, jnp.argmin(logits[1, 3])].set(jnp.nan)
    y, _ = jax.jit(lambda x, logits: js.moe(x, logits, identity, jnp.zeros((E,)), k=2, scores=scores))(x, logits)
    assert np.argwhere(np.isnan(y).any(-1)).tolist() == [[1, 3]]


# A block of one's own


@pytest.mark.slow
def test_what_the_function_closes_over_has_its_gradient():
    """A scale for all experts, an integer and a random key, under experts that are split."""

    def init_fn(key):
        return mlp_model[0](key) | {"scale": jnp.ones(C)}

    mlp_model = moe_model()

    def loss_fn(params, batch, key):
        power, noise = jnp.arange(1, 3)[1], jax.random.normal(jax.random.key(1), (C,))

        def fn(moe, rows, dot):
            return mlp(moe, rows * params["scale"] ** power + noise, dot) + params["scale"]

        y, _ = js.moe(batch["x"], batch["x"] @ params["router"], fn, params["moe"], k=2)
        return js.Mean((y**2).sum(), y.size)

    for name in ("explicit-expert", "auto-expert"):
        axes, strategy, engine = LAYOUTS[name]
        js.parity(init_fn, loss_fn, SGD, strategy, js.make_mesh(**axes), batch_of("even"), engine=engine).check()


def test_flops_are_those_of_the_chosen_experts():
    from jaxshard.cost.flops import model_flops

    x, logits, params = normal(0, 2, 20, C), normal(1, 2, 20, E), mlp_params(jax.random.key(0))
    assert model_flops(lambda: js.moe(x, logits, mlp, params, k=2)[0]) == 40 * 2 * 3 * 2 * C * H


# The TPU compiler


@pytest.mark.slow
@tpu
@pytest.mark.parametrize(("topology", "collective"), [("v5e:4x4", "ragged-all-to-all("), ("v5e:4x8", " all-to-all(")])
@pytest.mark.parametrize("engine", [js.auto(), js.explicit()], ids=["auto", "explicit"])
def test_a_program_for_tpus_has_the_kernels_and_their_exchange(topology, collective, engine):
    """With gradients; no product of all experts for all tokens, which a convolution would be."""
    sizes = {"gate": (E, 128, 256), "up": (E, 128, 256), "down": (E, 256, 128)}

    def loss_fn(params, batch, key):
        y, _ = js.moe(batch["x"], batch["x"] @ params["router"], mlp, params["moe"], k=2)
        return js.Mean((y**2).sum(), y.size)

    def init_fn(key):
        return {"router": jnp.ones((128, E)), "moe": {name: jnp.ones(shape) for name, shape in sizes.items()}}

    mesh = topology_mesh(topology, data=-1, expert=4)
    step = js.make_step(loss_fn, SGD, js.layout(EXPERT, mesh, init_fn, SGD), engine=engine)
    text = step.compile({"x": jax.ShapeDtypeStruct((mesh.size, 256, 128), jnp.float32)}).as_text()
    assert text.count(collective) == 7
    assert text.count('custom_call_target="tpu_custom_call"') == 12  # 3 forward; backward 3 again, 3 of rows, 3 of w
