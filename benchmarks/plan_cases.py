"""The cases of `plan.py`: training steps as data, drawn from a grid, and the step of a case.

The grid has every strategy, engine and remat policy, five chips, jaxshard's models and seven as users write them.
"""

from __future__ import annotations

import random
from typing import Any, NamedTuple


class Case(NamedTuple):
    """A training step.

    Attributes:
      model: a name of `js.models.SIZES`, "user/size" of `user_models.py`, or vit-l16 or resnet50 of `image_models.py`.
      topology: as `js.plan.topology_mesh` takes it, or "h100:8".
      axes: of the mesh: data (data0 and data1 too), replica, expert, context, tensor, pipe.
      strategy: of the data; the other axes add theirs.
      engine: "auto", "explicit", "explicit units" or "pipelined".
      remat: "everything", "dots" or "nothing"; of a pipeline its stash, where "nothing" is "layer"; or names of
        activations, such as "attention_out=save,block_in=offload".
      precision: "f32" or "bf16".
      rows: of the batch, for each of its shards and micro-batches.
      seq: tokens in a row; 0 for images.
      change: arguments of the model in place of the size's own.
      microbatches: of a pipeline or an accumulation.
    """

    model: str
    topology: str
    axes: dict[str, int]
    strategy: str
    engine: str
    remat: str
    precision: str
    rows: int
    seq: int
    change: dict[str, Any] = {}  # noqa: RUF012
    microbatches: int = 1

    @property
    def name(self) -> str:
        """All of it in words."""
        axes = ",".join(f"{axis}={size}" for axis, size in self.axes.items())
        change = "".join(f" {name}={value}" for name, value in self.change.items())
        turns = f" x{self.microbatches}" if self.microbatches > 1 else ""
        return (
            f"{self.model}{change} {self.topology} {axes} {self.strategy} {self.engine} {self.remat} {self.precision} "
            f"{self.rows}x{self.seq}{turns}"
        )


EVEN = {"vocab": 50304}
"""A vocabulary that tensor axes divide; GPT-2's is 50257."""

MODELS = {
    "gpt2": (1024, {"depth": (4, 12)}),
    "gpt2-medium": (1024, {"depth": (4, 24)}),
    "gpt2-large": (1024, {"depth": (4, 36)}),
    "gpt2-xl": (1024, {"depth": (4, 48)}),
    "llama2-7b": (4096, {"depth": (4, 8, 32)}),
    "llama3-8b": (8192, {"depth": (4, 8, 32)}),
    "llama3-70b": (8192, {"depth": (2, 8, 80)}),
    "mixtral-8x7b": (4096, {"depth": (2, 32)}),
    "qwen3-30b-a3b": (4096, {"depth": (2, 48)}),
    "deepseek-16b": (4096, {"depth": (4, 28)}),
    "vit-l16": (0, {"depth": (8, 24)}),
    "resnet50": (0, {}),
    **{f"{user}/{size}": (2048, {}) for user in ("linen-loop", "linen-scan", "nnx", "plain", "odd")
       for size in ("125m", "350m", "1b", "wide")},
}  # fmt: skip
"""Models with the longest row that is drawn for them, and the changes."""

TOPOLOGIES = {"v5e:4x4": 16, "v5e:16x16": 256, "v5p:4x4x8": 128, "v6e:8x8": 64, "tpu7x:4x4x4": 128, "h100:8": 8}
"""Topologies with the number of their devices."""
_HBM = {"v5e": 16e9, "v5p": 95e9, "v6e": 32e9, "tpu7x": 96e9, "h100": 80e9}
_MOE = ("mixtral", "qwen3", "deepseek")
_NAMED = ("gpt2", "llama", "vit")
"""Models whose blocks name their activations."""


def draw(seed: int | str, count: int) -> list[Case]:
    """Draw `count` different cases whose steps jaxshard does not refuse for their shape."""
    rng = random.Random(str(seed))
    found: dict[str, Case] = {}
    while len(found) < count:
        case = _draw_one(rng)
        if _makes_sense(case):
            found[case.name] = case
    return list(found.values())


def _draw_one(rng: random.Random) -> Case:
    model = rng.choice(list(MODELS))
    longest, changes = MODELS[model]
    topology = rng.choice(list(TOPOLOGIES))
    strategy = rng.choice(("ddp", "zero1", "zero2", "fsdp", "fsdp", "hsdp"))
    other = rng.choice(("", "", "", "tensor", "pipe", "context", "expert", "expert"))
    chips = TOPOLOGIES[topology]
    share = rng.choice((4, 8)) if other else 1
    axes = {"replica": 2, "data": chips // share // 2} if strategy == "hsdp" else {"data": chips // share}
    axes |= {other: share} if other else {}
    change = {name: rng.choice(values) for name, values in changes.items()}
    if model.startswith("gpt2") and other == "tensor":
        change |= EVEN
    engine = "pipelined" if other == "pipe" else rng.choice(("auto", "explicit", "explicit", "explicit units"))
    return Case(
        model, topology, axes, strategy, engine,
        remat=rng.choice(("nothing", "dots", "everything", "everything", "block_in=offload")),
        precision=rng.choice(("f32", "bf16", "bf16")),
        rows=rng.choice((1, 2, 4)) * (1 if longest else 16),
        seq=rng.choice([seq for seq in (512, 1024, 2048, 4096, 8192) if seq <= longest] or [0]),
        change=change,
        microbatches=8 if other == "pipe" else rng.choice((1, 1, 1, 2)),
    )  # fmt: skip


def _makes_sense(case: Case) -> bool:
    """Return True where the engine can run the model, the axes divide it, and its state fits."""
    user, vocab, heads, depth, parameters = _numbers_of(case)
    axes, sharded = case.axes, 1
    if case.model == "resnet50" and (case.engine != "auto" or set(axes) - {"data", "replica"}):
        return False
    if "expert" in axes and (not case.model.startswith(_MOE) or case.engine == "auto"):
        return False
    if axes.get("data") == 0 or (user and ({"pipe", "context"} & set(axes) or case.remat != "everything")):
        return False
    if "context" in axes and (not case.seq or case.engine != "explicit" or case.seq % (2 * axes["context"])):
        return False
    if "units" in case.engine and not case.model.startswith(("linen-loop", "nnx")):
        return False
    if "=" in case.remat and ("pipe" in axes or not case.model.startswith(_NAMED)):
        return False
    if "pipe" in axes and (depth % (2 * axes["pipe"]) or case.model == "resnet50"):
        return False
    if (
        heads % axes.get("tensor", 1)
        or vocab % axes.get("tensor", 1)
        or (case.model == "resnet50" and case.microbatches > 1)
    ):
        return False
    for axis in ("tensor", "pipe", "expert"):
        sharded *= axes.get(axis, 1)
    shards = axes["data"] if case.strategy != "ddp" else 1
    moments = 8 * parameters / shards
    weights = 8 * parameters / (shards if case.strategy in ("fsdp", "hsdp") else 1)
    return (moments + weights) / sharded < _HBM[case.topology.partition(":")[0]]


def _numbers_of(case: Case) -> tuple[bool, int, int, int, float]:
    """Return whether the model is a user's, its vocabulary, heads, depth, and roughly the number of its parameters."""
    import jaxshard as js

    if "/" in case.model:
        from user_models import SIZES

        s = SIZES[case.model.partition("/")[2]]
        return True, s.vocab, s.heads, s.depth, 12 * s.depth * s.width**2 + 2 * s.vocab * s.width
    if case.model == "resnet50":
        return False, 1000, 1, 1, 25e6
    if case.model == "vit-l16":
        from image_models import LARGE

        shape = LARGE | case.change
    else:
        shape = js.models.SIZES[case.model].shape | case.change
    width, hidden = shape["width"], shape.get("hidden", 4 * shape["width"])
    mlp = (3 if "hidden" in shape else 2) * width * hidden * shape.get("experts", 1)
    parameters = shape["depth"] * (3 * width**2 + mlp) + 2 * width * shape.get("vocab", 1000)
    heads = shape["heads"] if "kv_heads" not in shape else shape["kv_heads"]
    return False, shape.get("vocab", 1000), heads, shape["depth"], parameters


class Parts(NamedTuple):
    """What `js.make_step` and `js.plan.predict` take."""

    layout: Any
    loss: Any
    tx: Any
    engine: Any
    batch: Any


def make_parts(case: Case) -> Parts:
    """Build layout, loss, optimizer, engine and abstract batch of a case; nothing is allocated."""
    import image_models
    import jax
    import jax.numpy as jnp
    import optax

    import jaxshard as js
    from jaxshard.plan.search.policies import remat_of

    units: tuple[type, ...] = ()
    if "/" in case.model:
        from user_models import MODELS as USERS
        from user_models import SIZES

        user, _, size = case.model.partition("/")
        model = USERS[user](SIZES[size]._replace(seq=case.seq))
        units = model.units if "units" in case.engine else ()
    elif case.seq:
        model = js.models.make(case.model, **case.change | {"seq": case.seq})
    else:
        model = (
            image_models.resnet50()
            if case.model == "resnet50"
            else image_models.vit(**image_models.LARGE | case.change)
        )
    mesh = js.plan.planned_mesh(case.topology, **case.axes)
    tx = optax.adamw(3e-4, b2=0.95, weight_decay=0.1)
    layout = js.layout(strategy_of(case), mesh, model.init, tx)
    common = {"microbatches": case.microbatches} | ({"precision": "bf16"} if case.precision == "bf16" else {})
    if case.engine == "pipelined":
        engine = js.pipelined(stash="layer" if case.remat == "nothing" else case.remat, **common)
    else:
        make = {"auto": js.auto, "explicit": js.explicit}[case.engine.split()[0]]
        engine = make(remat=remat_of(case.remat), units=units, **common)
    rows = case.rows * case.microbatches
    for axis in layout.batch_axes:
        rows *= mesh.shape[axis]
    if "/" in case.model:
        tokens = jax.ShapeDtypeStruct((rows, case.seq), jnp.int32)
        batch = {"x": tokens, "y": tokens}
    elif case.seq:
        tokens = jax.ShapeDtypeStruct((rows, case.seq), jnp.int32)
        batch = {"tokens": tokens, "targets": tokens}
    else:
        batch = image_models.batch_of(rows)
    return Parts(layout, model.loss, tx, engine, batch)


def strategy_of(case: Case) -> Any:
    """The data strategy over all axes that share, composed with those of the other axes."""
    import jaxshard as js

    axes = case.axes
    data = tuple(axis for axis in axes if axis.startswith(("data", "expert", "context")))
    shared = data if len(data) > 1 else data[0]
    make = {"ddp": js.ddp, "zero1": js.zero1, "zero2": js.zero2, "fsdp": js.fsdp}
    parts = [js.hsdp("replica", shared) if case.strategy == "hsdp" else make[case.strategy](shared)]
    parts += [js.context("context")] if "context" in axes else []
    parts += [js.expert()] if "expert" in axes else []
    parts += [js.tensor()] if "tensor" in axes else []
    parts += [js.pipeline("pipe", chunks=2)] if "pipe" in axes else []
    return js.compose(*parts) if len(parts) > 1 else parts[0]
