"""Convert config.json of a Hugging Face model to the arguments of a function of `js.models`, and back.

Every entry of config.json is either converted, or known not to change the model's logits, or refused by name.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from jaxshard.core.tree import raise_all
from jaxshard.hf.entries import NEUTRAL, Reader, shorten
from jaxshard.hf.families import FAMILIES, Family
from jaxshard.hf.folder import CONFIG
from jaxshard.hf.text_part import WITH_IMAGES, take_text_part
from jaxshard.models.decoder import Decoder
from jaxshard.models.parts import check_window, largest_size
from jaxshard.models.rope import as_scaling
from jaxshard.storage.paths import AnyPath
from jaxshard.storage.strict_json import decode_object, read_plain_file

_COUNTS = frozenset(("vocab", "width", "depth", "heads", "kv_heads", "head_dim", "hidden", "seq", "experts", "k"))
"""Arguments of `js.models` that are whole numbers above 0."""


class Config(NamedTuple):
    """A config.json, converted to the arguments of a function of `js.models`.

    Attributes:
      family: the family of models, such as Llama.
      arguments: the arguments of `family.make`, the function of `js.models` that builds the model.
      entries: all entries of the file.
      folder: the folder of the file; None for a model that was not read from a folder.
      reads_images: True if this is the language model inside of a model that also reads images.
    """

    family: Family
    arguments: dict[str, Any]
    entries: dict[str, Any]
    folder: AnyPath | None = None
    reads_images: bool = False


def read_config(folder: AnyPath, ignore: Iterable[str] = ()) -> Config:
    """Read config.json, and convert its entries to arguments.

    Args:
      folder: the folder with config.json.
      ignore: the names of entries to treat as absent.

    Raises:
      ValueError: the file is damaged, the architecture is unknown, or entries are unsupported or missing; the message
        names all such entries.
    """
    path = folder / CONFIG
    try:
        entries = decode_object(read_plain_file(path).lstrip())
    except (OSError, ValueError) as error:
        raise ValueError(f"{path}: {error}") from error
    try:
        text_part = take_text_part(entries)
        entries = entries if text_part is None else text_part
        family = find_family(entries, path)
        arguments = read_arguments(family, entries, path, ignore)
    except (AttributeError, OverflowError, TypeError) as error:
        raise ValueError(f"{path}: an entry has a value of another type than it should: {error}") from error
    return Config(family, arguments, entries, folder, reads_images=text_part is not None)


def find_family(entries: Mapping[str, Any], path: AnyPath | str) -> Family:
    """Return the family of models that the entries of config.json name.

    Raises:
      ValueError: the architecture is unknown; the message names the most similar known architectures.
    """
    names = entries.get("architectures") or []
    found = [family for family in FAMILIES.values() if family.architecture in names]
    if not names:
        found = [family for family in FAMILIES.values() if family.model_type == entries.get("model_type")]
    if len(found) == 1:
        return found[0]
    known = [*FAMILIES, *WITH_IMAGES]
    got = ", ".join(map(str, names)) or f"model_type {entries.get('model_type')!r}"
    near = difflib.get_close_matches(got, known, 3, 0.5)
    hint = f"the nearest known ones are {', '.join(near)}" if near else f"known are {', '.join(known)}"
    raise ValueError(f"{path}: the architecture {got} is not known; {hint}")


def read_arguments(
    family: Family, entries: Mapping[str, Any], path: AnyPath | str, ignore: Iterable[str] = ()
) -> dict[str, Any]:
    """Convert the entries of config.json to the arguments of `family.make`.

    Args:
      family: the family of models.
      entries: the entries.
      path: the path of config.json, for error messages.
      ignore: the names of entries to treat as absent.

    Raises:
      ValueError: entries are unsupported or missing; the message names all of them.
    """
    left_out = set(ignore)
    reader = Reader({name: x for name, x in entries.items() if name not in left_out}, family.defaults)
    made = {ours: reader.take(theirs) for ours, theirs in family.sizes.items()} | dict(family.fixed)
    sizes = {ours: theirs for ours, theirs in family.sizes.items() if ours in _COUNTS and made[ours] is not None}
    for ours, theirs in sizes.items():  # before the groups, which list the blocks
        if type(size := made[ours]) is not int or not 1 <= size <= largest_size(ours):
            must = f"must be a whole number from 1 to {largest_size(ours)}"
            raise ValueError(f"{path}: {theirs.replace('|', ' or ')}: {shorten(size)}, {must}")
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
    """Make the config.json of a model in the format of Hugging Face.

    If the model was built from a config.json, its family and entries are used as far as they still fit the model's
    arguments. Otherwise the first model family (Llama, Qwen, ...) that can represent the model is used.

    Args:
      model: a model of `js.models` or `js.hf.model`.
      dtype: the dtype of the model's parameters.

    Raises:
      ValueError: no family fits; the message lists, for each family, the arguments that it can't represent.
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
    """Convert the arguments of `family.make` to the entries of config.json."""
    entries = {"architectures": [family.architecture], "model_type": family.model_type, "use_cache": True}
    entries |= family.only
    entries |= {theirs.split("|")[0]: arguments[ours] for ours, theirs in family.sizes.items()}
    if entries.get("head_dim", 0) is None:
        entries["head_dim"] = arguments["width"] // arguments["heads"]
    for group in family.groups:
        entries |= group.write(arguments)
    return entries


_TRAINING = ("balance", "z", "dropout", "quant")
"""Arguments of `js.models` about training, which config.json has no entries for: weights keep their meaning."""


def _differences(family: Family, entries: Mapping[str, Any], arguments: Mapping[str, Any]) -> list[str]:
    """List the arguments that a family's config.json can't represent, as "name=value".

    `entries` are made from `arguments`. They are converted back to arguments, and compared with `arguments`.
    """
    back = family.make(**read_arguments(family, entries, CONFIG)).arguments

    def same(name: str) -> Any:
        return [_plain(name, given[name], given) for given in (back, arguments)]

    return [f"{name}={arguments[name]!r}" for name in arguments if name not in _TRAINING and len({*same(name)}) > 1]


def _plain(name: str, value: Any, arguments: Mapping[str, Any]) -> Any:
    """Convert the value of an argument to text, so that equivalent values (such as None and its default) are equal."""
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
