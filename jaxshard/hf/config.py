"""config.json of a model: its family, and its entries as the arguments of a function of `js.models`.

Every entry is either understood, or known to make no difference to what the model computes, or refused by name.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from jaxshard.checkpoint.strict_json import decode_object, read_plain_file
from jaxshard.core.tree import raise_all
from jaxshard.hf.families import FAMILIES, Family
from jaxshard.hf.folder import CONFIG
from jaxshard.models.rope import LinearScaling, RopeScaling, Scaling, YarnScaling

_MISSING = object()
_NEUTRAL = frozenset(
    """
    _attn_implementation _attn_implementation_autoset _name_or_path architectures begin_suppress_tokens bos_token_id
    cache_implementation chunk_size_feed_forward decoder_start_token_id dtype eos_token_id finetuning_task id2label
    initializer_range is_decoder label2id max_length max_window_layers model_type num_return_sequences
    output_attentions output_hidden_states output_router_logits pad_token_id prefix pretraining_tp problem_type
    return_dict sep_token_id task_specific_params temperature tokenizer_class top_k top_p torch_dtype torchscript
    transformers_version typical_p unsloth_fixed unsloth_version use_cache repetition_penalty length_penalty
    diversity_penalty num_beams num_beam_groups encoder_no_repeat_ngram_size no_repeat_ngram_size early_stopping
    do_sample min_length
    """.split()  # noqa: SIM905
)
"""Entries that make no difference to the logits, or only to how other programs generate."""


class Config(NamedTuple):
    """A config.json that was understood.

    Attributes:
      family: the family.
      arguments: the arguments of `family.make`.
      entries: the whole file.
    """

    family: Family
    arguments: dict[str, Any]
    entries: dict[str, Any]


def read_config(folder: Path, ignore: Iterable[str] = ()) -> Config:
    """Read config.json.

    Args:
      folder: the folder.
      ignore: entries that are left out, as if they were not there.

    Raises:
      ValueError: it is damaged; the architecture is unknown; entries that are not supported, missing or of another
        type, all of them by name.
    """
    path = folder / CONFIG
    try:
        entries = decode_object(read_plain_file(path).lstrip())
    except (OSError, ValueError) as error:
        raise ValueError(f"{path}: {error}") from error
    family = find_family(entries, path)
    return Config(family, read_arguments(family, entries, path, ignore), entries)


def find_family(entries: Mapping[str, Any], path: Path | str) -> Family:
    """Return the family of a configuration; ValueError for one that is not known, which names the nearest ones."""
    names = entries.get("architectures") or []
    found = [family for family in FAMILIES.values() if family.architecture in names]
    if not names:
        found = [family for family in FAMILIES.values() if family.model_type == entries.get("model_type")]
    if len(found) == 1:
        return found[0]
    got = ", ".join(map(str, names)) or f"model_type {entries.get('model_type')!r}"
    near = difflib.get_close_matches(got, FAMILIES, 3, 0.5)
    hint = f"the nearest known ones are {', '.join(near)}" if near else f"known are {', '.join(FAMILIES)}"
    raise ValueError(f"{path}: the architecture {got} is not known; {hint}")


def read_arguments(
    family: Family, entries: Mapping[str, Any], path: Path | str, ignore: Iterable[str] = ()
) -> dict[str, Any]:
    """Return the arguments of `family.make`; ValueError with every entry that is not supported."""
    reader = Reader(family, {name: x for name, x in entries.items() if name not in set(ignore)})
    made = {ours: reader.take(theirs) for ours, theirs in family.sizes.items()}
    if made.get("kv_heads", 0) is None:
        made["kv_heads"] = made["heads"]
    for name, value in family.only.items():
        if (got := reader.take(name, value)) != value:
            reader.problems.append(f"{name}: {got!r}, and only {value!r} is supported")
    if "rope_theta" in family.defaults:
        made |= read_rope(reader, made["seq"])
    reader.refuse_rest()
    raise_all(reader.problems, ValueError, f"{path}: a {family.architecture} that is not supported")
    return made


class Reader:
    """The entries of a configuration, and what is wrong with them.

    Attributes:
      problems: a line for each.
    """

    def __init__(self, family: Family, entries: Mapping[str, Any]) -> None:
        self.family, self._left = family, dict(entries)
        self.problems: list[str] = []

    def take(self, name: str, default: Any = _MISSING) -> Any:
        """Return an entry, or if it is absent its default; without one it is a problem."""
        default = self.family.defaults.get(name, default)
        if name not in self._left and default is _MISSING:
            self.problems.append(f"{name}: missing")
        return self._left.pop(name, default)

    def refuse_rest(self) -> None:
        """Note every entry that was not taken and may make a difference."""
        for name, value in self._left.items():
            if name not in _NEUTRAL and value not in (None, False, "", [], {}) and value != 0:
                self.problems.append(
                    f"{name}: {_short(value)}, which is not supported; if it makes no difference to what "
                    f"the model computes, pass ignore=[{name!r}]"
                )


def read_rope(reader: Reader, seq: Any) -> dict[str, Any]:
    """Return the arguments `rope_base` and `rope_scaling`, of transformers 5's entry or of the two older ones."""
    base, scaling, new = (
        reader.take("rope_theta"),
        reader.take("rope_scaling", None),
        reader.take("rope_parameters", None),
    )
    if reader.take("partial_rotary_factor", 1.0) != 1:
        reader.problems.append("partial_rotary_factor: only 1 is supported")
    entries = dict(new or scaling or {})
    return {
        "rope_base": entries.pop("rope_theta", base),
        "rope_scaling": _read_scaling(reader, entries, seq, "rope_parameters" if new else "rope_scaling"),
    }


def _read_scaling(reader: Reader, entries: dict[str, Any], seq: Any, where: str) -> Scaling | None:
    kind = entries.pop("rope_type", entries.pop("type", "default"))
    entries.pop("type", None)
    if entries.pop("partial_rotary_factor", 1.0) != 1:
        reader.problems.append(f"{where}: partial_rotary_factor: only 1 is supported")
    made: Scaling | None = None
    try:
        if kind == "linear":
            made = LinearScaling(entries.pop("factor"))
        elif kind == "llama3":
            factor, low, high = (entries.pop(name) for name in ("factor", "low_freq_factor", "high_freq_factor"))
            made = RopeScaling(factor, low, high, entries.pop("original_max_position_embeddings", seq))
        elif kind == "yarn":
            made = _read_yarn(entries, seq)
        elif kind != "default":
            reader.problems.append(f"{where}: the type {kind!r}; known are default, linear, llama3 and yarn")
            return None
    except KeyError as error:
        reader.problems.append(f"{where}: {error.args[0]}: missing for the type {kind!r}")
    reader.problems += [
        f"{where}: {name}: {_short(value)}, which is not supported"
        for name, value in entries.items()
        if value is not None
    ]
    return made


def _read_yarn(entries: dict[str, Any], seq: Any) -> YarnScaling:
    original = entries.pop("original_max_position_embeddings", None) or seq
    factor = entries.pop("factor")
    if entries.get("truncate") is True:
        del entries["truncate"]
    return YarnScaling(
        factor,
        entries.pop("beta_slow", None) or 1,
        entries.pop("beta_fast", None) or 32,
        original,
        entries.pop("attention_factor", None),
    )


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
