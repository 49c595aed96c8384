"""The result of a training run as plain values: what goes into the JSON object and the tables."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import jax
import numpy as np

from jaxshard.core.layout import Layout
from jaxshard.data.corpus import Corpus
from jaxshard.models.decoder import Decoder, sample
from jaxshard.training.evaluate import make_apply
from jaxshard.training.metrics import finite
from jaxshard.training.records import Record
from jaxshard.training.state import TrainState

_PROMPT, _TEMPERATURE = 32, 0.8


def predicted_bytes(layout: Layout, batch: Any) -> dict[str, int]:
    """Bytes per device by role, and "arguments": all of them but the gradients, what a step is given."""
    roles: dict[str, int] = {str(role): count for role, count in layout.bytes_per_device().items()}
    roles["batch"] = sum(
        layout.batch_placement(x).bytes_per_device(layout.mesh, x.dtype) for x in jax.tree.leaves(batch)
    )
    total = layout.argument_bytes(batch)
    return roles | {"step_and_key": total - sum(roles.values()) + roles["grad"], "arguments": total}


def compiled_bytes(compiled: jax.stages.Compiled) -> dict[str, int]:
    """Bytes per device of a compiled step: its arguments and its temporaries, gradients included."""
    memory: Any = compiled.memory_analysis()
    return {"arguments": memory.argument_size_in_bytes, "temporaries": memory.temp_size_in_bytes}


def numbers(records: Sequence[Record]) -> dict[str, Any]:
    """What the records of this start come to; None for a number that is not finite or not known."""
    seconds = sum(record.seconds for record in records)

    def mean(name: str) -> float | None:
        known = [record.speed[name] * record.seconds / seconds for record in records if name in record.speed]
        return sum(known) if known else None

    latest = {record.step: record for record in records}.values()  # of a step that was taken again, the last time
    evaluations = [{"step": record.step, **record.evaluation} for record in latest if record.evaluation is not None]
    return {
        "losses": [finite(record.metrics["loss"]) for record in latest],
        "bad_steps": [record.step for record in latest if record.metrics["bad"]],
        "loss_eval": finite(evaluations[-1]["loss"]) if evaluations else None,
        "evaluations": [{name: finite(value) for name, value in one.items()} for one in evaluations],
        "tokens_per_second": mean("tokens_per_second"),
        "flops_per_second": mean("flops_per_second"),
        "mfu": mean("mfu"),
        "train_seconds": seconds,
    }


def corpus_facts(corpus: Corpus) -> dict[str, Any]:
    """Which data it was: `sha256` is over all tokens, `unit` is what a token is."""
    return {
        "name": corpus.name,
        "sha256": corpus.digest,
        "vocab": corpus.vocab,
        "unit": "byte" if _is_text(corpus) else "token",
        "train_tokens": len(corpus.train),
        "held_out_tokens": len(corpus.held_out),
    }


def sampled(
    network: Decoder, run: TrainState, layout: Layout, corpus: Corpus, *, length: int, seed: int
) -> dict[str, str] | None:
    """A prompt, the first held-out tokens, and `length` tokens that the model puts after it; None for a length of 0."""
    if length == 0:
        return None
    prompt = np.asarray(corpus.held_out[:_PROMPT], np.int32)
    draw = make_apply(partial(sample, network, length=length, temperature=_TEMPERATURE), layout)
    tokens = np.asarray(draw(run, prompt[None], jax.random.key(seed)))[0]
    return {"prompt": _text(prompt, corpus), "text": _text(tokens[len(prompt) :], corpus)}


def write_json(file: Path | None, result: dict[str, Any]) -> None:
    """One JSON object into the file, or to standard output for "-"."""
    text = json.dumps(result, indent=2, allow_nan=False) + "\n"
    if str(file) == "-":
        sys.stdout.write(text)
    elif file is not None:
        file.write_text(text)


def _is_text(corpus: Corpus) -> bool:
    return corpus.train.dtype == np.uint8 and corpus.vocab == 256


def _text(tokens: np.ndarray, corpus: Corpus) -> str:
    """Bytes as text without control characters, other tokens as numbers."""
    if not _is_text(corpus):
        return " ".join(map(str, tokens))
    text = bytes(tokens.astype(np.uint8)).decode(errors="replace")
    return "".join(char if char.isprintable() or char in "\n\t" else "\N{REPLACEMENT CHARACTER}" for char in text)
