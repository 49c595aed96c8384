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
from jaxshard.hf.entries import Reader
from jaxshard.hf.families import FAMILIES, Family
from jaxshard.hf.folder import CONFIG


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
