"""config.json of a model: its family, and its entries as the arguments of a function of `js.models`, and back.

Every entry is either understood, or known to make no difference to what the model computes, or refused by name.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from jaxshard.checkpoint.strict_json import decode_object, read_plain_file
from jaxshard.core.tree import raise_all
from jaxshard.hf.entries import NEUTRAL, Reader
from jaxshard.hf.families import FAMILIES, Family
from jaxshard.hf.folder import CONFIG
from jaxshard.models.decoder import Decoder
from jaxshard.models.parts import check_window
from jaxshard.models.rope import as_scaling


class Config(NamedTuple):
    """A config.json that was understood.

    Attributes:
      family: the family.
      arguments: the arguments of `family.make`.
      entries: the whole file.
      folder: where it was read; None for a model that was made otherwise.
    """

    family: Family
    arguments: dict[str, Any]
    entries: dict[str, Any]
    folder: Path | None = None


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
    return Config(family, read_arguments(family, entries, path, ignore), entries, folder)


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
    left_out = set(ignore)
    reader = Reader({name: x for name, x in entries.items() if name not in left_out}, family.defaults)
    made = {ours: reader.take(theirs) for ours, theirs in family.sizes.items()} | dict(family.fixed)
    if "kv_heads" in made and made["kv_heads"] is None:
        made["kv_heads"] = made["heads"]
    for name, value in family.only.items():
        reader.require(name, value)
    for group in family.groups:
        made |= group.read(reader, made)
    for name in family.unread:
        reader.take(name, None)
    reader.refuse_rest()
    raise_all(reader.problems, ValueError, f"{path}: a {family.architecture} that is not supported")
    return made


def make_config(model: Decoder, dtype: str) -> Config:
    """Return the configuration of a model: the one that it was read from, or one of the first family that fits.

    Args:
      model: a model of `js.models` or `js.hf.model`.
      dtype: of its parameters.

    Raises:
      ValueError: it is of no family; names the arguments that no family has.
    """
    if model.make is None:
        raise ValueError("js.hf: the model was not built by a function of js.models")
    made_from: Config | None = getattr(model, "config", None)
    if made_from is not None:
        entries = dict(made_from.entries)
        if model.arguments != made_from.arguments:
            kept = {name: x for name, x in entries.items() if name in NEUTRAL}
            entries = kept | write_entries(made_from.family, model.arguments)
        entries.pop("torch_dtype", None)
        return Config(made_from.family, model.arguments, entries | {"dtype": dtype}, made_from.folder)
    misfits: dict[str, list[str]] = {}
    for family in FAMILIES.values():
        if family.make is model.make:
            entries = write_entries(family, model.arguments) | {"dtype": dtype}
            differences = _differences(family, entries, model.arguments)
            if not differences:
                return Config(family, model.arguments, entries)
            misfits[family.architecture] = differences
    raise_all(
        (f"{name}: {', '.join(differences)}" for name, differences in misfits.items()),
        ValueError,
        "js.hf: the model is not of a family that transformers knows, because of these arguments",
    )
    raise ValueError(f"js.hf: no family of transformers is known for js.models.{model.make.__name__}")


def write_entries(family: Family, arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Return config.json of a family for the arguments of its function."""
    entries = {"architectures": [family.architecture], "model_type": family.model_type, "use_cache": True}
    entries |= family.only
    entries |= {theirs.split("|")[0]: arguments[ours] for ours, theirs in family.sizes.items()}
    if entries.get("head_dim", 0) is None:
        entries["head_dim"] = arguments["width"] // arguments["heads"]
    for group in family.groups:
        entries |= group.write(arguments)
    return entries


_TRAINING = ("balance", "z", "dropout")
"""Arguments that make no difference to the logits, and that no configuration has."""


def _differences(family: Family, entries: Mapping[str, Any], arguments: Mapping[str, Any]) -> list[str]:
    """Return the arguments that a configuration does not give back."""
    back = family.make(**read_arguments(family, entries, CONFIG)).arguments

    def same(name: str) -> Any:
        return [_plain(name, given[name], given) for given in (back, arguments)]

    return [f"{name}={arguments[name]!r}" for name in arguments if name not in _TRAINING and len({*same(name)}) > 1]


def _plain(name: str, value: Any, arguments: Mapping[str, Any]) -> Any:
    """Return an argument in the form that all ways of saying the same have in common, as text."""
    if name == "head_dim":
        value = value or arguments["width"] // arguments["heads"]
    if name == "rope_scaling":
        scaling = as_scaling(value)
        value = scaling and (type(scaling).__name__, *(x and float(x) for x in scaling))
    if name == "query_scale":
        value = value or arguments["head_dim"]
    if name == "window_rope_base":
        value = value or arguments["rope_base"]
    if name == "window":
        value = check_window("js.hf", value, arguments["depth"])
    return repr(float(value)) if isinstance(value, int | float) else repr(value)
