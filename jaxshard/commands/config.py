"""Read flags from a TOML file (`--config`), by the same names, and write them (`--save-config`)."""

from __future__ import annotations

import dataclasses
import tomllib
from collections.abc import Collection, Iterable
from typing import Any

import tomli_w

from jaxshard.commands.errors import UsageError, usage_errors
from jaxshard.commands.flags import Flags
from jaxshard.core.near_words import did_you_mean
from jaxshard.storage.paths import AnyPath, write_file

_OF_TRAINER = {
    "learning_rate": "lr",
    "per_device_train_batch_size": "batch, which counts the rows of all devices",
    "gradient_accumulation_steps": "microbatches",
    "eval_steps": "eval-every",
    "max_steps": "steps",
    "num_train_epochs": "steps",
    "warmup_steps": "warmup",
    "warmup_ratio": "warmup, in steps",
    "lr_scheduler_type": "decay",
    "weight_decay": "optimizer, as adamw,weight_decay=0.01",
    "optim": "optimizer",
    "max_grad_norm": "clip",
    "bf16": "precision, as bf16",
    "gradient_checkpointing": "remat, which is nothing for hf: models unless it is given",
    "output_dir": "checkpoint",
    "save_steps": "checkpoint-every",
    "save_total_limit": "keep",
    "resume_from_checkpoint": "resume",
    "report_to": "wandb, tensorboard or mlflow",
    "max_length": "seq",
    "lora_r": "lora, as rank=8",
    "lora_alpha": "lora, as rank=8,alpha=16",
}
"""Arguments of the trainers of Hugging Face, with the flags that do the same, and what is different about them."""


def read_config(file: AnyPath, names: Collection[str], command: str) -> dict[str, Any]:
    """Read the flags in a TOML file.

    Args:
      file: the file; `sync-every = 8` and `sync_every = 8` are the flag --sync-every.
      names: the names of the flags that the command has.
      command: the name of the command, for error messages.

    Raises:
      UsageError: the file can't be read, is not TOML, or has names that are not flags of the command (the message
        has all of them), or one flag twice.
    """
    with usage_errors():
        try:
            entries = tomllib.loads(file.read_bytes().decode())
        except ValueError as error:
            raise ValueError(f"--config {file}: this is no TOML: {error}") from error
    if unknown := [name for name in entries if name.replace("-", "_") not in names]:
        flags = [one.replace("_", "-") for one in names]
        listed = [name + (f" ({near})" if (near := suggest_flag(name, flags)) else "") for name in unknown]
        raise UsageError(f"--config {file}: {command} has no flag {', '.join(listed)}")
    found: dict[str, Any] = {}
    for name, value in entries.items():
        field = name.replace("-", "_")
        if isinstance(value, dict):
            raise UsageError(f"--config {file}: {name} is a table; write {name} = VALUE")
        if field in found:
            raise UsageError(f"--config {file}: {name} is given twice, with - and with _; leave one out")
        found[field] = value
    return found


def suggest_flag(name: str, flags: Iterable[str]) -> str:
    """Return "did you mean lr?" for the flag that is meant by a name; "" if none is.

    Args:
      name: the unknown name, such as "learning_rate" or "--learning-rate".
      flags: the flags of the command, all with dashes in front if the name has them.
    """
    flags, word = list(flags), name.lstrip("-")
    ours = name.removesuffix(word) + _OF_TRAINER.get(word.replace("-", "_"), "")
    return f"did you mean {ours}?" if ours.partition(",")[0] in flags else did_you_mean(name, flags)


def write_config(file: AnyPath, flags: Flags) -> None:
    """Write the flags that differ from their defaults as a TOML file that `read_config` reads."""
    differing = [one for one in dataclasses.fields(flags) if getattr(flags, one.name) != one.default]
    entries = {
        one.name.replace("_", "-"): _plain(getattr(flags, one.name))
        for one in differing
        if one.name not in ("config", "save_config")
    }
    write_file(file, tomli_w.dumps(entries).encode())


def _plain(value: Any) -> Any:
    """Convert a flag's value to a type that TOML has: a tuple becomes a list, a path becomes text."""
    if isinstance(value, tuple):
        return list(map(_plain, value))
    return value if isinstance(value, bool | int | float) else str(value)
