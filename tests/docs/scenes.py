"""The programs of which the examples in docstrings are pieces."""

BEFORE = """
import jax, jax.numpy as jnp, numpy as np, optax
from flax import linen as nn, nnx
from jax.sharding import PartitionSpec as P
from pathlib import Path
import jaxshard as js

model = js.models.gpt(vocab=256, width=64, depth=2, heads=4, seq=16)
init_fn, loss_fn, tx, key = model.init, model.loss, optax.adamw(3e-4), jax.random.key(0)
mesh = js.make_mesh(data=8)
layout = js.layout(js.fsdp(min_size=0), mesh, init_fn, tx)
run, params = js.init(init_fn, tx, layout, 0), model.init(key)
step, eval_step = js.make_step(loss_fn, tx, layout), js.make_eval_step(model.evaluate, layout)
corpus = np.tile(np.arange(250, dtype=np.int32), 200)
batch = {"tokens": corpus[: 8 * 17].reshape(8, 17)}
tokens = corpus
batches, held_out = [batch] * 10, [batch]
source = js.data.windows(corpus, batch=8, seq=16, seed=0)
batch_shapes = jax.eval_shape(lambda: jax.tree.map(jnp.asarray, batch))


def evaluate(run):
    return js.evaluate(eval_step, run, held_out)
"""

MLP = """
class MLP(nn.Module):
    width: int

    @nn.compact
    def __call__(self, x, train=False):
        return nn.Dense(3)(nn.relu(nn.Dense(self.width)(x)))


batch = {"x": np.ones((8, 4), np.float32), "y": np.arange(8) % 3}
"""
LOSS = """
batch = {"x": np.ones((8, 4), np.float32), "y": np.arange(8) % 3}


def loss(model, batch):
    nats = js.cross_entropy(model(batch["x"]), batch["y"])
    return js.Mean(nats.sum(), nats.size)
"""
BLOCK = """
class Block(nn.Module):
    width: int

    @nn.compact
    def __call__(self, x, _=None):
        x = x + nn.Dense(self.width)(nn.relu(x))
        return (x, None) if SCANNED else x


mesh = js.make_mesh(pipe=2, data=4)
batch = {"tokens": np.ones((8, 4), np.int32), "targets": np.ones((8, 4), np.int32)}
"""
SCANNED_LOSS = """
def loss(model, batch):
    losses = optax.softmax_cross_entropy_with_integer_labels(model(batch["tokens"]), batch["targets"])
    return js.Mean(losses.sum(), losses.size)


loss.__name__
"""
MANUAL = """
mesh = js.make_mesh(data=8)
params = {"w": jnp.ones((16, 8)), "b": jnp.ones(8)}
shapes = jax.eval_shape(lambda: params)


def local_mean_loss(params, rows):
    return jnp.square(rows @ params["w"] + params["b"]).mean()


loss = local_mean_loss
"""
TENSOR = """
mesh = js.make_mesh(data=2, tensor=4)
params = {"w": jnp.ones((16, 32))}
specs = {"w": P(None, "tensor")}
tx = js.optim.tensor(js.optim.zero2(optax.adamw(3e-4), "data"), "tensor", specs)
"""
STACKED = "params = {'embed': jnp.ones((8, 4)), 'blocks': {'w': jnp.ones((3, 4, 4))}}\n"
IMAGES = """
images, labels = np.ones((8, 8, 8, 3), np.float32), np.arange(8)
init_fn = lambda key: {"kernel": jax.random.normal(key, (8 * 8 * 3, 10))}
layout = js.layout(js.fsdp(), mesh, init_fn, tx)
run = js.init(init_fn, tx, layout, 0)


def logits(params, images):
    return images.reshape(len(images), -1) @ params["kernel"]
"""
PIPELINE = """
mesh = js.make_mesh(pipe=4, data=2)
model = js.models.gpt(vocab=256, width=64, depth=8, heads=4, seq=16)
layout = js.layout(js.compose(js.fsdp(), js.pipeline(chunks=2)), mesh, model.init, tx)
"""

AVERAGED = """
tx = js.optim.averaged(optax.adamw(3e-4), 0.999)
layout = js.layout(js.fsdp(), mesh, init_fn, tx)
run, eval_step = js.init(init_fn, tx, layout, 0), js.make_eval_step(model.evaluate, layout)
"""

GENERATE = """
model = js.models.gpt(vocab=256, width=64, depth=2, heads=4, seq=128)
mesh = js.make_mesh(data=4, tensor=2)
layout = js.layout(js.compose(js.fsdp(), js.tensor()), mesh, model.init, tx)
run = js.init(model.init, tx, layout, 0)
"""

SCENES = {
    "js.Loss": MLP + "model_fn = lambda model, x: x",
    "js.Model": "module = nn.BatchNorm(use_running_average=False)\nx = np.ones((4, 3))",
    "js.Placement": "placement = jax.tree.leaves(layout.params, is_leaf=lambda x: isinstance(x, js.Placement))[0]",
    "js.audit": "layout = js.layout(js.ddp(), mesh, init_fn, tx)",
    "js.optim.clip_by_global_norm": "clipped = optax.chain(js.optim.clip_by_global_norm(1.0), optax.adamw(3e-4))\n"
    "layout = js.layout(js.fsdp(), mesh, init_fn, clipped)",
    "js.make_step": "source = iter([batch] * 3)",
    "js.pipelined": PIPELINE,
    "js.plan.compile_for": "batch = {'tokens': corpus[: 16 * 17].reshape(16, 17)}",
    "js.data.local_batches": "rows_of_this_host = iter([batch] * 4)",
    "js.generate": GENERATE,
    "js.logical": "init_fn = lambda key: {'blocks': {'attention': {'kernel': jnp.ones((2, 4, 4))}}}\n"
    "layout = js.layout(js.fsdp(), mesh, init_fn, tx)\nrun = js.init(init_fn, tx, layout, 0)",
    "js.Layout": "model = js.models.llama(vocab=256, width=64, depth=2, heads=4, kv_heads=2, hidden=128, seq=16)\n"
    "init_fn = lambda key: {'head': {'kernel': jnp.ones((4, 4))}}",
    "js.View": "x = np.ones((7, 64))",
    "js.attention": "q = jnp.ones((2, 16, 4, 8))\nk = v = jnp.ones((2, 16, 2, 8))",
    "js.attribution": IMAGES,
    "js.constrain": "h = jnp.ones((8, 4, 4))",
    "js.cross_entropy": "logits, batch = jnp.ones((2, 4, 8)), {'labels': jnp.ones((2, 4), int)}",
    "js.averaged": AVERAGED,
    "js.optim.averaged": AVERAGED,
    "js.expert": "model = js.models.make('moe-1m')",
    "js.hybrid": "model = js.models.make('gpt-1m', depth=4)",
    "js.linen": MLP,
    "js.nnx": """
class MLP(nnx.Module):
    def __init__(self, width, rngs):
        self.first, self.second = nnx.Linear(4, width, rngs=rngs), nnx.Linear(width, 3, rngs=rngs)

    def __call__(self, x):
        return self.second(nnx.relu(self.first(x)))
""",
    "js.lora": "model = js.models.llama(vocab=256, width=64, depth=2, heads=4, kv_heads=2, hidden=128, seq=16)\n"
    "pretrained = model.init(key)",
    "js.merge_lora": "tuned = js.lora(model.init, model.loss, rank=4, match=['attn_out/kernel'])\n"
    "layout = js.layout(js.fsdp(), mesh, tuned.init, tx)\nrun = js.init(tuned.init, tx, layout, 0)",
    "js.MemoryCheckpointer": "import os\nos.environ['JAXSHARD_MEMORY'] = 'memory'",
    "js.make_apply": MLP
    + "module = MLP(8)\nlayout = js.layout(js.fsdp(), mesh, lambda key: module.init(key, batch['x']), tx)\n"
    "run = js.init(lambda key: module.init(key, batch['x']), tx, layout, 0)",
    "js.positions": "x, rates = jnp.ones((2, 8, 4)), jnp.ones(4)",
    "js.row_keys": "x = jnp.ones((8, 4))",
    "js.from_module": LOSS,
    "js.to_module": LOSS,
    "js.replace_params": "averaged_weights = js.logical(run, layout).params",
    "js.run_to_bytes": "from types import SimpleNamespace\nbatches = SimpleNamespace(position=3)",
    "js.scanned": "SCANNED = True\n" + BLOCK.replace("self.width", "512") + SCANNED_LOSS,
    "js.stack": "SCANNED = False\n" + BLOCK,
    "js.moe": "k, T, E, B = 2, 4, 8, 2\nce = jnp.ones((2, 4))\nfrom types import SimpleNamespace\n"
    "routing = SimpleNamespace(load=jnp.ones((B, E)), probabilities=jnp.ones((B, E)))",
    "js.head_loss": "norm = lambda params, x: x",
    "js.local_batches": "rows_of_this_host = iter([batch] * 4)",
    "js.latest_step": "js.save('run', run, layout)",
    "js.data.load": "Path('notes.txt').write_text('some words and more ' * 500)",
    "js.optim.fsdp": MANUAL,
    "js.optim.gather_params": MANUAL,
    "js.optim.shard_params": MANUAL,
    "js.optim.state_specs": MANUAL,
    "js.optim.zero1": MANUAL,
    "js.optim.zero2": MANUAL,
    "js.optim.require_elementwise": MANUAL,
    "js.optim.tensor": TENSOR,
    "js.optim.tensor_state_specs": TENSOR,
    "js.optim.PerBlockState": STACKED,
    "js.optim.require_same_stacked": STACKED,
    "js.optim.stacking_changes": STACKED,
    "js.schedules.zero_bubble": PIPELINE,
    "js.data.tokenizer": "tokenizer_file()",
    "js.data.tokenize": "tokenizer_file('llama')\nPath('chats.jsonl').write_text(chats())",
    "js.hf.load": "hf_folder()",
    "js.hf.save": "hf_folder()",
    "js.hf.model": "hf_folder()",
    "js.plan.audit_program": "Path('step.txt').write_text(step.compile(batch).as_text())",
    "js.models.logits": "tokens = batch['tokens'][:, :-1]",
    "js.models.embed_tokens": "tokens = batch['tokens'][:, :-1]",
    "js.models.logits_of_embedded": "tokens = batch['tokens'][:, :-1]",
    "js.plan.collective_cost": "mesh = js.plan.planned_mesh('v5e:4x4', data=16)",
    "js.plan.memory_figure": "memory_figure = js.plan.memory_figure",
    "js.plan.sharding_figure": "sharding_figure = js.plan.sharding_figure",
}
"""What the example of a name takes for granted beside `BEFORE`."""

NOT_RUN = {
    "js.plan.search": "a pod of 256 devices",
    "js.row_axes": "the inside of a module",
    "js.distributed.MissingProcess": "ends the process",
    "js.cross_entropy": "the inside of a function: it returns",
    "js.models.make": "a model of 8 billion parameters",
}
"""Examples that are shown and not run, and why."""

NEEDS = {
    "js.plan.topology_mesh": "libtpu",
    "js.plan.compile_for": "libtpu",
    "js.metrics.tensorboard": "tensorboardX",
    "js.metrics.wandb": "wandb",
    "js.metrics.mlflow": "mlflow",
    "js.data.tokenizer": "tokenizers",
    "js.data.tokenize": "tokenizers",
}
"""Packages without which an example can't run."""
