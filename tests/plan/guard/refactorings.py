"""Edits of `plain_step.py` that change nothing that matters, each by the text that it replaces."""

from __future__ import annotations

from pathlib import Path

SOURCE = Path(__file__).with_name("plain_step.py").read_text()
Edit = tuple[tuple[str, str], ...]

_BODY = SOURCE[SOURCE.index("def train_step") : SOURCE.index("def make")]
_LIST = SOURCE[SOURCE.index("    blocks = [") : SOURCE.index('    return {"embed"')]
_ARGS = "train_step(params, opt_state, batch)"
_HEAD, _STEP = 'batch["labels"])\n    return nats.mean()', "jax.jit(train_step, donate_argnums=(0, 1))"
_CALL = f"step = {_STEP}\n    return step, (params, opt_state, batch)"
_STATE = """
class State{bases}:
    params: object
    opt_state: object


def train_step(state, batch):
    loss, grads = jax.value_and_grad(loss_fn)(state.params, batch)
    updates, opt_state = tx.update(grads, state.opt_state, state.params)
    return State(optax.apply_updates(state.params, updates), opt_state), loss


"""
_OF_STATE = "step = jax.jit(train_step, donate_argnums=0)\n    return step, (State(params, opt_state), batch)"
_DATACLASS = "import dataclasses\n\nimport jax\nimport jax.numpy"
_REGISTERED = "@jax.tree_util.register_dataclass\n@dataclasses.dataclass" + _STATE.format(bases="")
_CROSS_ENTROPY = 'nats = optax.softmax_cross_entropy_with_integer_labels(logits, batch["labels"])'

EDITS: dict[str, Edit] = {
    "a named tuple": (
        ("import jax\nimport jax.numpy", "from typing import NamedTuple\n\nimport jax\nimport jax.numpy"),
        (_BODY, _STATE.format(bases="(NamedTuple)")),
        (_CALL, _OF_STATE),
    ),
    "lines above": (("import jax\n", "\n\n# A comment\n\n\nimport jax\n"),),
    "other argument names": (
        ("def train_step(params, opt_state, batch)", "def train_step(p, s, b)"),
        (
            _BODY[_BODY.index("    loss,") :],
            _BODY[_BODY.index("    loss,") :].replace("params", "p").replace("opt_state", "s").replace("batch", "b"),
        ),
    ),
    "another order of arguments": (
        ("train_step(params, opt_state, batch)", "train_step(batch, params, opt_state)"),
        ("donate_argnums=(0, 1)", "donate_argnums=(1, 2)"),
        ("(params, opt_state, batch)\n", "(batch, params, opt_state)\n"),
    ),
    "a dataclass": (("import jax\nimport jax.numpy", _DATACLASS), (_BODY, _REGISTERED), (_CALL, _OF_STATE)),
    "another name of the step": (("train_step", "update_weights"),),
    "another name of the loss": (("loss_fn", "objective"),),
    "another name of a helper": (("normalize", "rms_norm"),),
    "another name of the block": (("block(", "feed_forward("),),
    "the batch by another name": (
        ("train_step(params, opt_state, batch)", "train_step(params, opt_state, example)"),
        ("(loss_fn)(params, batch)", "(loss_fn)(params, example)"),
    ),
    "other keys of parameters": (('"embed"', '"wte"'), ('"head"', '"unembed"'), ('"up"', '"wi"'), ('"down"', '"wo"')),
    "another key of the list": (('"blocks"', '"layers"'),),
    "keys in another order": (
        ('{"embed": embed, "head": head, "blocks": blocks}', '{"blocks": blocks, "head": head, "embed": embed}'),
    ),
    "a tuple of blocks": (('"blocks": blocks}', '"blocks": tuple(blocks)}'),),
    "a dict of blocks": (
        ('"blocks": blocks}', '"blocks": {f"block_{i}": b for i, b in enumerate(blocks)}}'),
        ('in params["blocks"]:', 'in params["blocks"].values():'),
    ),
    "a batch that is a tuple": (
        ('batch["tokens"]', "batch[0]"),
        ('batch["labels"]', "batch[1]"),
        ('{"tokens": tokens, "labels": tokens}', "(tokens, tokens)"),
    ),
    "batch keys by other names": (('"tokens"', '"inputs"'), ('"labels"', '"targets"')),
    "another seed": (("jax.random.key(0)", "jax.random.key(17)"),),
    "another initial scale": (("0.02 *", "0.01 *"),),
    "another learning rate": (("1e-3", "3e-4"),),
    "another weight decay": (("weight_decay=0.01", "weight_decay=0.1"),),
    "another epsilon": (("1e-6", "1e-5"),),
    "docstrings": (("def block(x, w):\n", 'def block(x, w):\n    """Apply one block."""\n'),),
    "annotations": (("def normalize(x):", "def normalize(x: jax.Array) -> jax.Array:"),),
    "helpers below": (
        (SOURCE[SOURCE.index("def normalize") : SOURCE.index("def block")], ""),
        ("\n\ndef make(", "\n\n" + SOURCE[SOURCE.index("def normalize") : SOURCE.index("def block")] + "def make("),
    ),
    "jit of a block": (("def block(x, w):", "@jax.jit\ndef block(x, w):"),),
    "jit of the loss": (("def loss_fn(", "@jax.jit\ndef loss_fn("),),
    "inlined jit": (("def normalize(", "@jax.jit(inline=True)\ndef normalize("),),
    "a named scope": (
        ("        x = block(x, w)", '        with jax.named_scope("block"):\n            x = block(x, w)'),
    ),
    "a named call": (("x = block(x, w)", "x = jax.named_call(block, name='layer')(x, w)"),),
    "jnp.square": (("x * x", "jnp.square(x)"),),
    "a power": (("x * x,", "x**2,"),),
    "jnp.dot": (('hidden @ w["down"]', 'jnp.dot(hidden, w["down"])'),),
    "jnp.einsum": (('hidden @ w["down"]', 'jnp.einsum("bth,hd->btd", hidden, w["down"])'),),
    "lax.dot_general": (('hidden @ w["down"]', 'lax.dot_general(hidden, w["down"], (((2,), (0,)), ((), ())))'),),
    "silu by hand": (("jax.nn.silu(", "(lambda h: h * jax.nn.sigmoid(h))("),),
    "a division by a root": (("x * lax.rsqrt(", "x / jnp.sqrt("),),
    "a mean by hand": (("nats.mean()", "nats.sum() / nats.size"),),
    "jnp.mean": (("nats.mean()", "jnp.mean(nats)"),),
    "a sum in another order": (('x + hidden @ w["down"]', 'hidden @ w["down"] + x'),),
    "statements in another order": (
        (
            "    embed = normal(0, VOCAB, WIDTH)\n    head = normal(1, WIDTH, VOCAB)\n",
            "    head = normal(1, WIDTH, VOCAB)\n    embed = normal(0, VOCAB, WIDTH)\n",
        ),
    ),
    "a constant array": (("+ 1e-6", "+ jnp.float32(1e-6)"),),
    "a cast to the same type": (("x = block(x, w)", "x = block(x, w).astype(jnp.float32)"),),
    "a reshape to the same shape": (("x = block(x, w)", "x = block(x, w).reshape(x.shape)"),),
    "a check of shapes": (("    hidden = jax", "    assert x.shape[-1] == WIDTH\n    hidden = jax"),),
    "argnums": (("value_and_grad(loss_fn)", "value_and_grad(loss_fn, argnums=0)"),),
    "an auxiliary result": (
        (_HEAD, 'batch["labels"])\n    return nats.mean(), {}'),
        ("loss, grads = jax.value_and_grad(loss_fn)", "(loss, _), grads = jax.value_and_grad(loss_fn, has_aux=True)"),
    ),
    "results in another order": (("return params, opt_state, loss", "return loss, params, opt_state"),),
    "results by name": (
        ("return params, opt_state, loss", 'return {"loss": loss, "new_params": params, "optimizer": opt_state}'),
    ),
    "donation by name": (("donate_argnums=(0, 1)", 'donate_argnames=("params", "opt_state")'),),
    "a lambda": ((_STEP, "jax.jit(lambda *args: train_step(*args), donate_argnums=(0, 1))"),),
    "a partial function": ((_STEP, "jax.jit(jax.tree_util.Partial(train_step), donate_argnums=(0, 1))"),),
    "a method": (
        (
            _STEP,
            'jax.jit(type("Trainer", (), {"step": lambda self, *args: train_step(*args)})().step, '
            "donate_argnums=(0, 1))",
        ),
    ),
    "an argument that nothing reads": (
        (_ARGS, _ARGS[:-1] + ", epoch)"),
        ("state, batch)\n", "state, batch, jax.ShapeDtypeStruct((), jnp.int32))\n"),
    ),
    "a static argument": (
        (_ARGS, _ARGS[:-1] + ", training=True)"),
        ("donate_argnums=(0, 1)", 'donate_argnums=(0, 1), static_argnames="training"'),
    ),
    "shardings given to jit": (
        (
            _STEP,
            "jax.jit(train_step, donate_argnums=(0, 1), in_shardings="
            "jax.tree.map(lambda x: x.sharding, (params, opt_state, batch)))",
        ),
    ),
    "a longer spec": (('params = place(params, P("data"))', 'params = place(params, P(("data",), None))'),),
    "a mesh of jax.make_mesh": (
        (
            'Mesh(np.array(devices), ("data",))',
            'jax.make_mesh((8,), ("data",), (jax.sharding.AxisType.Auto,), devices=devices)',
        ),
    ),
    "devices in another order": (("np.array(devices)", "np.array(devices[::-1])"),),
    "a constraint that holds anyway": (
        (
            "grads = jax.value_and_grad(loss_fn)(params, batch)\n",
            "grads = jax.value_and_grad(loss_fn)(params, batch)\n"
            "    grads = jax.tree.map(lax.with_sharding_constraint, grads, STORED)\n",
        ),
        (
            "    step = jax.jit",
            "    global STORED\n    STORED = jax.tree.map(lambda x: x.sharding, params)\n    step = jax.jit",
        ),
    ),
    "adamw in parts": (
        (
            "optax.adamw(1e-3, weight_decay=0.01)",
            "optax.chain(optax.scale_by_adam(), optax.add_decayed_weights(0.01), optax.scale_by_learning_rate(1e-3))",
        ),
    ),
    "a cross-entropy by hand": (
        (
            _CROSS_ENTROPY,
            "logits = jax.nn.log_softmax(logits)\n    nats = -jnp.take_along_axis("
            'logits, batch["labels"][..., None], axis=-1)[..., 0]',
        ),
    ),
    "updates by hand": (("optax.apply_updates(params, updates)", "jax.tree.map(lambda p, u: p + u, params, updates)"),),
    "an older name of a function": (("jax.tree.map(", "jax.tree_util.tree_map("),),
}


def edited(edit: Edit) -> str:
    """Return the text of `plain_step.py` after an edit, whose texts have to be there."""
    text = SOURCE
    for old, new in edit:
        assert old in text, old
        text = text.replace(old, new)
    return text
