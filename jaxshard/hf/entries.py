"""Read the entries of config.json, collect problems, and convert groups of entries that depend on each other.

A `Group` converts entries to arguments of a function of `js.models`, and arguments back to entries.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from jaxshard.models.rope import LinearScaling, RopeScaling, Scaling, YarnScaling

_MISSING = object()
_SLIDING, _FULL = "sliding_attention", "full_attention"
NEUTRAL = frozenset(
    """
    _attn_implementation _attn_implementation_autoset _name_or_path architectures begin_suppress_tokens bos_token_id
    cache_implementation chunk_size_feed_forward decoder_start_token_id diversity_penalty do_sample dtype early_stopping
    encoder_no_repeat_ngram_size eos_token_id finetuning_task id2label initializer_range label2id length_penalty
    max_length min_length model_type no_repeat_ngram_size num_beam_groups num_beams num_return_sequences
    output_attentions output_hidden_states output_router_logits pad_token_id prefix pretraining_tp problem_type
    repetition_penalty return_dict router_aux_loss_coef sep_token_id task_specific_params temperature tokenizer_class
    top_k top_p torch_dtype torchscript transformers_version typical_p unsloth_fixed unsloth_version use_cache
    """.split()  # noqa: SIM905
)
"""Entries that do not change the logits: they are for initialization, or for text generation by other programs."""


class Reader:
    """The entries of config.json while they are read: remembers which were not read yet, and collects problems.

    Args:
      entries: the entries of config.json.
      defaults: the values of entries that may be absent.

    Attributes:
      problems: a line for each entry that is missing or not supported.
    """

    def __init__(self, entries: Mapping[str, Any], defaults: Mapping[str, Any]) -> None:
        self._left, self._defaults = dict(entries), defaults
        self.problems: list[str] = []

    def take(self, name: str, default: Any = _MISSING) -> Any:
        """Return the value of an entry, and mark the entry as read.

        Args:
          name: the name of the entry, or two alternative names as "a|b".
          default: the value if the entry is absent and `defaults` has no value for it. If there is no default either, a
            problem is added, and the result is None.
        """
        found = next((one for one in name.split("|") if one in self._left), None)
        if found is not None:
            return self._left.pop(found)
        default = self._defaults.get(name, default)
        if default is _MISSING:
            self.problems.append(f"{name.replace('|', ' or ')}: missing")
            return None
        return default

    def require(self, name: str, value: Any) -> None:
        """Read an entry that must have this value or be absent; otherwise add a problem."""
        if (got := self.take(name, value)) != value and (got or value):
            self.problems.append(f"{name}: {shorten(got)}, and only {value!r} is supported")

    def refuse_rest(self) -> None:
        """Add a problem for every entry that was not read, except those that can't change the logits."""
        for name, value in self._left.items():
            if name not in NEUTRAL and value not in (None, False, "", [], {}):
                self.problems.append(
                    f"{name}: {shorten(value)}, which is not supported; if it makes no difference to what the model "
                    f"computes, pass ignore=[{name!r}]"
                )


class Group(NamedTuple):
    """Two functions that convert several entries of config.json together, because they depend on each other.

    Attributes:
      read: `read(reader, arguments)` reads the entries and returns {name: value} of further arguments of the function
        of `js.models`; `arguments` are those that are known already.
      write: `write(arguments)` returns the entries, {name: value}.
    """

    read: Callable[[Reader, Mapping[str, Any]], dict[str, Any]]
    write: Callable[[Mapping[str, Any]], dict[str, Any]]


def shorten(value: Any) -> str:
    """Return a value as text of at most 60 characters."""
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."


# Rotary positions, in one entry of transformers 5, or in two older ones


def _read_rope(reader: Reader, arguments: Mapping[str, Any]) -> dict[str, Any]:
    base, old, new = reader.take("rope_theta"), reader.take("rope_scaling", None), reader.take("rope_parameters", None)
    reader.require("partial_rotary_factor", 1.0)
    entries = dict(new or old or {})
    base = entries.pop("rope_theta", base)
    where = "rope_parameters" if new else "rope_scaling"
    return {"rope_base": base, "rope_scaling": _read_scaling(reader, entries, arguments["seq"], where)}


def _write_rope(arguments: Mapping[str, Any]) -> dict[str, Any]:
    scaling = arguments["rope_scaling"]
    return {"rope_theta": arguments["rope_base"], "rope_scaling": _write_scaling(scaling)}


ROPE = Group(_read_rope, _write_rope)
"""Rotary positions that are the same in all blocks. Written as `rope_scaling`, which every transformers reads."""


def _read_two_ropes(reader: Reader, arguments: Mapping[str, Any]) -> dict[str, Any]:
    base, local = reader.take("rope_theta"), reader.take("rope_local_base_freq", 10_000.0)
    old, new = reader.take("rope_scaling", None), reader.take("rope_parameters", None) or {}
    full = dict(new.get(_FULL, {}) if _FULL in new or _SLIDING in new else new) or dict(old or {})
    near = dict(new.get(_SLIDING) or {})
    made = {"rope_base": full.pop("rope_theta", base), "window_rope_base": near.pop("rope_theta", local)}
    if _read_scaling(reader, near, arguments["seq"], f"rope_parameters.{_SLIDING}") is not None:
        reader.problems.append(f"rope_parameters.{_SLIDING}: a scaling, which is not supported")
    return made | {"rope_scaling": _read_scaling(reader, full, arguments["seq"], "rope_parameters")}


def _write_two_ropes(arguments: Mapping[str, Any]) -> dict[str, Any]:
    base = arguments["window_rope_base"]
    local = arguments["rope_base"] if base is None else base
    return _write_rope(arguments) | {"rope_local_base_freq": local}


TWO_ROPES = Group(_read_two_ropes, _write_two_ropes)
"""Rotary positions that differ between blocks with full attention and blocks with a window."""


def _read_scaling(reader: Reader, entries: dict[str, Any], seq: Any, where: str) -> Scaling | None:
    kinds = entries.pop("rope_type", None), entries.pop("type", None)
    kind = kinds[0] or kinds[1] or "default"
    made: Scaling | None = None
    if entries.pop("partial_rotary_factor", 1.0) != 1:
        reader.problems.append(f"{where}: partial_rotary_factor: only 1 is supported")
    original = entries.pop("original_max_position_embeddings", None) or seq
    try:
        if kind == "linear":
            made = LinearScaling(entries.pop("factor"))
        elif kind == "llama3":
            factor, low, high = (entries.pop(name) for name in ("factor", "low_freq_factor", "high_freq_factor"))
            made = RopeScaling(factor, low, high, original)
        elif kind == "yarn":
            low, high = entries.pop("beta_slow", None) or 1, entries.pop("beta_fast", None) or 32
            made = YarnScaling(entries.pop("factor"), low, high, original, entries.pop("attention_factor", None))
            if entries.get("truncate") is True:
                del entries["truncate"]
        elif kind == "default":
            entries.pop("factor", None)
        else:
            reader.problems.append(f"{where}: the type {kind!r}; known are default, linear, llama3 and yarn")
            return None
    except KeyError as error:
        reader.problems.append(f"{where}: {error.args[0]}: missing for the type {kind!r}")
    unknown = {name: value for name, value in entries.items() if value is not None}
    reader.problems += [f"{where}: {name}: {shorten(x)}, which is not supported" for name, x in unknown.items()]
    return made


def _write_scaling(scaling: Any) -> dict[str, Any] | None:
    if isinstance(scaling, LinearScaling):
        return {"rope_type": "linear", "factor": float(scaling.factor)}
    if isinstance(scaling, int | float):
        scaling = RopeScaling(scaling)
    if isinstance(scaling, RopeScaling):
        names = ("factor", "low_freq_factor", "high_freq_factor")
        rest = {name: float(x) for name, x in zip(names, scaling)}
        return {"rope_type": "llama3", **rest, "original_max_position_embeddings": scaling.original}
    if isinstance(scaling, YarnScaling):
        rest = {"beta_slow": float(scaling.low), "beta_fast": float(scaling.high)}
        if scaling.attention is not None:
            rest["attention_factor"] = float(scaling.attention)
        return {
            "rope_type": "yarn",
            "factor": float(scaling.factor),
            "original_max_position_embeddings": scaling.original,
            **rest,
        }
    return None


# Windows


def _of_layers(reader: Reader, window: Any, types: Any, depth: Any) -> Any:
    """Convert the entry `layer_types` to a list with the attention window of each block; None means full attention.

    Args:
      reader: receives a problem if `types` is not valid; the result is then None.
      window: the window of the blocks with "sliding_attention".
      types: the value of `layer_types`, the attention type of each block.
      depth: the number of blocks.
    """
    if not isinstance(types, list) or set(types) - {_SLIDING, _FULL} or len(types) != depth:
        reader.problems.append(f"layer_types: {shorten(types)}, must be {depth} of {_SLIDING!r} and {_FULL!r}")
        return None
    return [window if kind == _SLIDING else None for kind in types]


def _read_window(reader: Reader, arguments: Mapping[str, Any]) -> dict[str, Any]:
    return {"window": reader.take("sliding_window", None)}


def _write_window(arguments: Mapping[str, Any]) -> dict[str, Any]:
    return {"sliding_window": arguments["window"]}


WINDOW = Group(_read_window, _write_window)
"""One window for all blocks, or none."""


def _read_switched_window(reader: Reader, arguments: Mapping[str, Any]) -> dict[str, Any]:
    window = reader.take("sliding_window", None)
    reader.take("max_window_layers", None)
    return {"window": window if reader.take("use_sliding_window", False) else None}


def _write_switched_window(arguments: Mapping[str, Any]) -> dict[str, Any]:
    return _write_window(arguments) | {"use_sliding_window": arguments["window"] is not None}


SWITCHED_WINDOW = Group(_read_switched_window, _write_switched_window)
"""One window for all blocks, if `use_sliding_window` is true."""


def _read_last_windows(reader: Reader, arguments: Mapping[str, Any]) -> dict[str, Any]:
    depth, first = arguments["depth"], reader.take("max_window_layers", 28)
    types = reader.take("layer_types", None)
    window = _read_switched_window(reader, arguments)["window"]
    if window is None or depth is None:
        return {"window": None}
    types = types or [_SLIDING if i >= first else _FULL for i in range(depth)]
    return {"window": _of_layers(reader, window, types, depth)}


def _write_windows(arguments: Mapping[str, Any]) -> dict[str, Any]:
    window, depth = arguments["window"], arguments["depth"]
    each = [window] * depth if window is None or isinstance(window, int) else list(window)
    sizes = {x for x in each if x is not None}
    size = max(sizes) if sizes else None
    return {"sliding_window": size, "layer_types": [_FULL if x is None else _SLIDING for x in each]}


def _write_last_windows(arguments: Mapping[str, Any]) -> dict[str, Any]:
    entries = _write_windows(arguments)
    types = entries["layer_types"]
    first = types.index(_SLIDING) if _SLIDING in types else len(types)
    return entries | {"use_sliding_window": entries["sliding_window"] is not None, "max_window_layers": first}


LAST_WINDOWS = Group(_read_last_windows, _write_last_windows)
"""A window for some blocks, by default from block `max_window_layers` on, if `use_sliding_window` is true."""


def windows_in_turn(every: int) -> Group:
    """Make the `Group` for families in which every n-th block has full attention and the other blocks a window.

    Args:
      every: n, if config.json has no entry for it.
    """

    def read(reader: Reader, arguments: Mapping[str, Any]) -> dict[str, Any]:
        reader.take("_sliding_window_pattern", None)
        depth, window = arguments["depth"], reader.take("sliding_window")
        period = reader.take("sliding_window_pattern", None) or every
        types = reader.take("layer_types", None)
        if window is None or not isinstance(depth, int):
            return {"window": None}
        types = types or [_SLIDING if (i + 1) % period else _FULL for i in range(depth)]
        return {"window": _of_layers(reader, window, types, depth)}

    return Group(read, _write_windows)


# The MLP of GPT-2


def _read_expansion(reader: Reader, arguments: Mapping[str, Any]) -> dict[str, Any]:
    for name in ("attn_pdrop", "embd_pdrop", "resid_pdrop", "n_ctx", "gradient_checkpointing"):
        reader.take(name, None)
    for name in ("activation", "first_dropout", "proj_to_labels", "type", "use_proj"):
        reader.take(f"summary_{name}", None)
    inner, width = reader.take("n_inner", None), arguments["width"]
    if inner is not None and isinstance(width, int) and inner % width:
        reader.problems.append(f"n_inner: {inner}, and only a multiple of n_embd {width} is supported")
    return {"expansion": inner // width if inner is not None and isinstance(width, int) else 4}


def _write_expansion(arguments: Mapping[str, Any]) -> dict[str, Any]:
    dropout = arguments.get("dropout", 0.0)
    entries = {"n_inner": arguments["expansion"] * arguments["width"]}
    return entries | {f"{name}_pdrop": dropout if name != "attn" else 0.0 for name in ("attn", "embd", "resid")}


EXPANSION = Group(_read_expansion, _write_expansion)
"""The MLP's width in GPT-2. Entries for dropout, and for heads other than the language model's, are ignored."""
