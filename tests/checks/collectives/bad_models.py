"""Losses, strategies and optimizers whose steps move more than was promised, each by one mistake that users make.

Widths are small, so that a step compiles in a second.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import jaxshard as js

ROWS, POSITIONS, VOCAB, WIDTH, HIDDEN, BLOCKS = 16, 8, 96, 32, 128, 4
DATA = {"data": 8}
DATA_TENSOR = {"data": 4, "tensor": 2}
ADAM = optax.adam(1e-2)


class Bad(NamedTuple):
    """The arguments of `js.parity`; the mesh as its axes."""

    init_fn: Callable[..., Any]
    loss_fn: Callable[..., Any]
    strategy: js.Strategy
    axes: dict[str, int]
    engine: Any
    tx: Any = ADAM
    rows: int = ROWS
    positions: int = POSITIONS

    def arguments(self, *, values: bool = True) -> dict[str, Any]:
        shape = (self.rows, self.positions)
        tokens = np.random.default_rng(0).integers(0, VOCAB, shape, dtype=np.int32)
        batch = {"tokens": tokens if values else jax.ShapeDtypeStruct(shape, np.int32)}
        rest = self._asdict()
        mesh = js.make_mesh(**rest.pop("axes"))
        del rest["rows"], rest["positions"]
        return rest | {"mesh": mesh, "batch": batch}


SHAPES = {
    "embedding": (VOCAB, WIDTH),
    "up/kernel": (WIDTH, HIDDEN),
    "down/kernel": (HIDDEN, WIDTH),
    "lm_head/kernel": (WIDTH, VOCAB),
}


def make_init(**shapes):
    """An init_fn of the shapes of SHAPES and others, by path with two underscores for a slash."""
    all_shapes = SHAPES | {name.replace("__", "/"): shape for name, shape in shapes.items()}

    def init(key):
        params: dict[str, Any] = {}
        for number, (path, shape) in enumerate(all_shapes.items()):
            *folders, name = path.split("/")
            place = params
            for folder in folders:
                place = place.setdefault(folder, {})
            place[name] = jax.random.normal(jax.random.fold_in(key, number), shape) * shape[-2] ** -0.5
        return params

    return init


def cross_entropy(logits, tokens):
    nats = js.cross_entropy(logits, tokens)
    return js.Mean(nats.sum(), nats.size)


def block(params, x):
    return x + jnp.tanh(x @ params["up"]["kernel"]) @ params["down"]["kernel"]


def plain_loss(params, batch, key):
    x = block(params, params["embedding"][batch["tokens"]])
    return cross_entropy(x @ params["lm_head"]["kernel"], batch["tokens"])


TENSOR = js.compose(js.ddp(), js.tensor())


def with_rules(*rules):
    return js.compose(js.ddp(), js.tensor([*rules, *js.RULES]))


def gathered_logits():
    """The logits of the whole vocabulary on every device."""

    def loss(params, batch, key):
        x = block(params, params["embedding"][batch["tokens"]])
        logits = js.constrain(x @ params["lm_head"]["kernel"], ("batch", None, None))  # gathered_logits
        return cross_entropy(logits, batch["tokens"])

    return Bad(make_init(), loss, TENSOR, DATA_TENSOR, js.explicit())


def replicated_moments():
    """An optimizer that makes its gradients, hence its moments, whole on every device."""

    def update(grads, state, params=None):
        whole = NamedSharding(js.make_mesh(**DATA), P())
        grads = jax.tree.map(lambda x: lax.with_sharding_constraint(x, whole), grads)  # replicated_moments
        return ADAM.update(grads, state, params)

    tx = optax.GradientTransformation(ADAM.init, update)
    return Bad(make_init(), plain_loss, js.fsdp(min_size=0), DATA, js.explicit(), tx=tx)


def split_head():
    """Three heads of twelve: the two devices of the tensor axis split 36 features, and the middle head with them."""

    def loss(params, batch, key):
        x = params["embedding"][batch["tokens"]]
        q, k, v = ((x @ params[name]["kernel"]).reshape(*x.shape[:2], 3, 12) for name in ("q_proj", "k_proj", "v_proj"))
        scores = jax.nn.softmax(jnp.einsum("bthd,bshd->bhts", q, k) / 3, -1)
        seen = jnp.einsum("bhts,bshd->bthd", scores, v).reshape(*x.shape[:2], 36)
        x = block(params, x + seen @ params["o_proj"]["kernel"])
        return cross_entropy(x @ params["lm_head"]["kernel"], batch["tokens"])

    heads = {f"{name}_proj__kernel": (WIDTH, 36) for name in "qkv"}
    return Bad(make_init(**heads, o_proj__kernel=(36, WIDTH)), loss, TENSOR, DATA_TENSOR, js.explicit())


def missing_constraint():
    """Every row twice: the compiler loses that rows are split, and splits the features of activations instead."""

    def loss(params, batch, key):
        tokens = jnp.tile(batch["tokens"], (2, 1))
        x = block(params, params["embedding"][tokens])
        return cross_entropy(x @ params["lm_head"]["kernel"], tokens)

    return Bad(make_init(), loss, js.fsdp(min_size=0), DATA, js.auto())


def moved_rows():
    """The compiler sends the gradients of what is looked up to where parts of the table's features are."""
    strategy = js.compose(js.fsdp(min_size=0), js.tensor())
    return Bad(make_init(), plain_loss, strategy, DATA_TENSOR, js.auto())


def sorted_rows():
    """The mean of a sorted batch, for which the rows of all devices are needed."""

    def loss(params, batch, key):
        x = block(params, params["embedding"][batch["tokens"]])
        nats = js.cross_entropy(x @ params["lm_head"]["kernel"], batch["tokens"])
        ordered = jnp.sort(nats, axis=0)  # sorted_rows
        return js.Mean(ordered.sum(), nats.size)

    return Bad(make_init(), loss, js.ddp(), DATA, js.auto(), rows=32, positions=16)


def wrong_dims():
    """Rules that split the dimensions of both matrices the wrong way round."""
    strategy = with_rules(("up/kernel", ("mlp", "embed")), ("down/kernel", ("embed", "mlp")))
    return Bad(make_init(), plain_loss, strategy, DATA_TENSOR, js.explicit())


def split_embedding():
    """A table whose features are split, so that what is looked up has to be gathered."""
    strategy = with_rules(("embedding", ("embed", "features")))
    return Bad(make_init(), plain_loss, strategy, DATA_TENSOR, js.explicit())


def transposed_weights():
    """Matrices that are stored transposed, under names that say the contrary of what the rules think."""

    def loss(params, batch, key):
        x = params["embedding"][batch["tokens"]]
        x = x + jnp.tanh(x @ params["up"]["kernel"].T) @ params["down"]["kernel"].T
        return cross_entropy(x @ params["lm_head"]["kernel"], batch["tokens"])

    init = make_init(up__kernel=(HIDDEN, WIDTH), down__kernel=(WIDTH, HIDDEN))
    return Bad(init, loss, TENSOR, DATA_TENSOR, js.explicit())


def rows_over_tensor():
    """Rows over both axes, one of which splits the weights too."""

    def loss(params, batch, key):
        x = block(params, params["embedding"][batch["tokens"]])
        logits = x @ params["lm_head"]["kernel"]
        chosen = jnp.take_along_axis(logits, batch["tokens"][..., None], -1)[..., 0]
        return js.Mean((jax.nn.logsumexp(logits, -1) - chosen).sum(), chosen.size)

    strategy = js.compose(js.batch("data", "tensor"), js.tensor())
    return Bad(make_init(), loss, strategy, DATA_TENSOR, js.auto())


def whole_activation():
    """A constraint that makes the activations of all rows whole on every device."""

    def loss(params, batch, key):
        x = params["embedding"][batch["tokens"]]
        x = lax.with_sharding_constraint(x, NamedSharding(js.make_mesh(**DATA), P()))  # whole_activation
        return cross_entropy(block(params, x) @ params["lm_head"]["kernel"], batch["tokens"])

    return Bad(make_init(), loss, js.fsdp(min_size=0), DATA, js.auto())


def whole_weight():
    """A constraint that makes a weight whole on every device."""

    def loss(params, batch, key):
        x = params["embedding"][batch["tokens"]]
        mesh = js.make_mesh(**DATA_TENSOR)
        up = lax.with_sharding_constraint(params["up"]["kernel"], NamedSharding(mesh, P()))  # whole_weight
        x = x + jnp.tanh(x @ up) @ params["down"]["kernel"]
        return cross_entropy(x @ params["lm_head"]["kernel"], batch["tokens"])

    return Bad(make_init(), loss, TENSOR, DATA_TENSOR, js.auto())


def stacked_init(key):
    params = make_init(blocks__up__kernel=(BLOCKS, WIDTH, HIDDEN), blocks__down__kernel=(BLOCKS, HIDDEN, WIDTH))(key)
    return {name: params[name] for name in ("embedding", "blocks", "lm_head")}


def scan_loss(params, batch, key):
    x = params["embedding"][batch["tokens"]]
    x, _ = lax.scan(lambda x, weights: (block(weights, x), None), x, params["blocks"])
    return cross_entropy(x @ params["lm_head"]["kernel"], batch["tokens"])


def scan_over_split_blocks():
    """A scan over blocks that are split along the dimension that it goes over: all are gathered."""
    rules = ("blocks/up/kernel", ("mlp", None, None)), ("blocks/down/kernel", ("mlp", None, None))
    return Bad(stacked_init, scan_loss, with_rules(*rules), DATA_TENSOR, js.explicit())


def sums_in_a_scan():
    """A scan in whose turns the compiler sums gradients over devices."""
    return Bad(stacked_init, scan_loss, js.fsdp(min_size=0), DATA, js.auto())


def loop_over_rows():
    """A loop over rows that are spread over devices: all devices compute all of them."""

    def loss(params, batch, key):
        x = params["embedding"][batch["tokens"]]
        x = lax.map(lambda row: block(params, row), x)
        return cross_entropy(x @ params["lm_head"]["kernel"], batch["tokens"])

    return Bad(make_init(), loss, js.fsdp(min_size=0), DATA, js.auto())


def two_views():
    """Two views of every row, one batch behind the other: half of the rows move to other devices."""

    def loss(params, batch, key):
        x = params["embedding"][batch["tokens"]]
        y = block(params, jnp.concatenate([x, x[:, ::-1]], 0)) @ params["lm_head"]["kernel"]
        one, two = jnp.split(y, 2, 0)
        return cross_entropy(one, batch["tokens"]) + cross_entropy(two, batch["tokens"])

    return Bad(make_init(), loss, js.fsdp(min_size=0), DATA, js.auto())


def every_row_with_every_other():
    """Needs all rows on every device: no edit keeps the result."""

    def loss(params, batch, key):
        x = block(params, params["embedding"][batch["tokens"]]).mean(1)
        return js.Mean(jax.nn.logsumexp(x @ x.T, -1).sum(), len(x))

    return Bad(make_init(), loss, js.ddp(), DATA, js.auto())
