"""Describe a training run by plain values, for the JSON object and the tables at the end."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import jax
import numpy as np

from jaxshard.commands.stops import Stops
from jaxshard.commands.training_data import TrainingData
from jaxshard.core.layout import Layout
from jaxshard.core.low_rank import has_low_rank
from jaxshard.core.types import PyTree
from jaxshard.engines.engine import Engine
from jaxshard.generation.generate import generate
from jaxshard.hlo.found import collectives, summary
from jaxshard.models.decoder import Decoder
from jaxshard.models.moe import RoutedDecoder
from jaxshard.training.evaluate import make_eval_step
from jaxshard.training.metrics import finite
from jaxshard.training.progress import Progress
from jaxshard.training.records import Record, mean_speed
from jaxshard.training.state import TrainState

_PROMPT_LENGTH = 32
_TEMPERATURE = 0.8

DEAD = 0.01
"""An expert with a load under this share of the mean is dead."""


def predicted_bytes(layout: Layout, batch: PyTree) -> dict[str, int]:
    """Predict the bytes per device of a step's arrays from its layout and the shapes of a global batch.

    Returns:
      Bytes by role ("param", "grad", "opt", ...), of the "batch", of the "step_and_key" (step number and random key),
      and of all "arguments" of the step, which is the sum without gradients.
    """
    roles: dict[str, int] = {str(role): count for role, count in layout.bytes_per_device().items()}
    stored = sum(roles.values()) - roles["grad"]
    total, without_batch = layout.argument_bytes(batch), layout.argument_bytes(())
    return roles | {"batch": total - without_batch, "step_and_key": without_batch - stored, "arguments": total}


def describe_step(compiled: jax.stages.Compiled, layout: Layout, batch: PyTree) -> dict[str, Any]:
    """Describe a compiled step: {"bytes_per_device": {"predicted", "compiled"}, "collectives"}.

    The compiler's bytes are those of "arguments" and "temporaries"; gradients are among the temporaries.
    """
    memory: Any = compiled.memory_analysis()
    sizes = {"arguments": memory.argument_size_in_bytes, "temporaries": memory.temp_size_in_bytes}
    return {
        "bytes_per_device": {"predicted": predicted_bytes(layout, batch), "compiled": sizes},
        "collectives": [row.as_dict() for row in summary(collectives(compiled, layout.mesh))],
    }


def summarize(records: Collection[Record]) -> dict[str, Any]:
    """Summarize the records of a training, one for each step: losses, evaluations and mean speeds.

    A number that is infinite, NaN or unknown becomes None, since JSON can't represent it.
    """
    latest = {record.step: record for record in records}.values()  # a step taken again after a rollback counts once
    evaluations = [{"step": record.step, **record.evaluation} for record in latest if record.evaluation is not None]
    return {
        "losses": [finite(record.metrics["loss"]) for record in latest],
        "bad_steps": [record.step for record in latest if record.metrics["bad"]],
        "loss_eval": finite(evaluations[-1]["loss"]) if evaluations else None,
        "evaluations": [{name: finite(value) for name, value in one.items()} for one in evaluations],
        **{name: mean_speed(records, name) for name in ("tokens_per_second", "flops_per_second", "mfu")},
        "train_seconds": sum(record.seconds for record in records),
    }


def describe_goodput(last: Progress | None) -> dict[str, Any] | None:
    """Describe the wall time of a training from the last `Progress` of `fit`; None in all processes but the first."""
    if last is None or last.goodput is None:
        return None
    return {"share": last.goodput.share, "seconds": last.goodput.seconds}


def count_experts(
    network: Decoder,
    run: TrainState,
    layout: Layout,
    engine: Engine,
    batches: Sequence[PyTree],
    dropped: float | None,
) -> dict[str, Any] | None:
    """Count how often each expert is chosen in held-out batches.

    Returns:
      A dictionary: "load" has for each block the list of its experts' loads, divided by their mean; "dead" names the
      experts that are hardly chosen; "drop_rate" is the argument `dropped`. None for a model without experts or with
      low-rank factors.
    """
    if not isinstance(network, RoutedDecoder) or not batches or has_low_rank(layout.shapes.params):
        return None
    step = make_eval_step(network.routing.evaluate, layout, engine=engine)
    counts = np.asarray(sum(np.asarray(step(run, batch)["load"].value, np.float64) for batch in batches))
    load = counts / np.mean(counts, -1, keepdims=True)
    dead = [f"block {block} expert {expert}" for block, expert in np.argwhere(load < DEAD)]
    return {"load": np.round(load, 4).tolist(), "dead": dead, "drop_rate": dropped}


def draw_sample(
    network: Decoder, run: TrainState, layout: Layout, data: TrainingData, *, length: int, stops: Stops, seed: int
) -> dict[str, Any] | None:
    """Let the model continue the first held-out tokens, until it draws a stop token.

    If the text reaches the model's sequence length, generation goes on with the second half of the row as the prompt.

    Returns:
      {"prompt", "text", "temperature"}: the prompt, the text of at most `length` new tokens without the stop token, and
      the temperature at which they were drawn; None for a length of 0.
    """
    if length == 0:
        return None
    kept = (network.seq + 1) // 2
    prompt = data.prompt(min(_PROMPT_LENGTH, kept))
    tokens, key, wanted = prompt.tolist(), jax.random.key(seed), len(prompt) + length
    while len(tokens) < wanted and stops.cut(tokens, len(prompt)) == tokens:
        seen = tokens[-kept:]
        new = min(length, network.seq + 1 - len(seen))
        key = jax.random.fold_in(key, len(tokens))
        (drawn,) = generate(
            network, run.params, layout, [seen], length=new, temperature=_TEMPERATURE, stop=stops.tokens, key=key
        )
        tokens += drawn[len(seen) :]
    text = np.asarray(stops.cut(tokens[:wanted], len(prompt))[len(prompt) :], np.int32)
    return {"prompt": data.decode(prompt), "text": data.decode(text), "temperature": _TEMPERATURE}
