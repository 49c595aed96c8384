"""Rules of `js.tensor`: the names of a parameter's dimensions, and the names that a tensor axis splits.

A list has two kinds of pairs, and the first pair that fits decides. The fate of a dimension is "split", "whole" (not
split), or "split or whole" (split if the devices divide it):

    ("mlp", "split")                         a name and its fate, for dimensions of that name in all parameters
    ("up_proj/kernel", ("embed", "mlp"))     a pattern and names, for parameters whose path ends with the pattern
    ("*/scale", "whole")                     a pattern, for parameters that are not split

Names are found first, fates second: "layer_0/up_proj/kernel" [512, 2048] is ("embed", "mlp"), "embed" is whole
and "mlp" split, so the matrix is split along dimension 1. A name without "/" and "*" in front of a fate is a name of
dimensions, anything else is a pattern.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Callable, Container, Iterable, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import cached_property
from typing import Any, Literal

from jaxshard.core.tree import BLOCKS, BY_LAYER, CONTRACTED, LAYERS, SPATIAL, Leaf, raise_all

Fate = Literal["split", "split or whole", "whole"]
Names = tuple[str | None, ...]
NamesOf = Callable[[Leaf], Names | None]
Rule = tuple[str, Fate | Names | NamesOf]

_FATES = ("split", "split or whole", "whole")

_POSITIONS = ("sequence", "length", "positions")

BY_MODEL = "named by the model"
"""The value of `Leaf.named_by` if the model's own annotation named the dimensions."""

BY_KERNEL = "as its kernel"
"""The value of `Leaf.named_by` for a bias, which has the names of the last dimensions of its kernel."""


EXPERTS = ("expert", "experts")
"""The names of a dimension of experts, which `js.expert` splits.

Without `js.expert` a tensor axis splits "experts", the name that patterns give in models whose experts are one einsum.
"expert", the name in models' own annotations, is not split by it: then the hidden dimension of every expert is split.
"""


def kernel_names(leaf: Leaf) -> Names | None:
    """Name the dimensions of a kernel (a matrix, DenseGeneral, einsum or convolution) that no other rule names.

    The tensor axis splits the dimension named "features", and not the dimensions named "embed". A kernel is
    row-parallel if it has more inputs than outputs, or contracts several dimensions into one. Then "features" is a
    contracted dimension. Any other kernel is column-parallel, and "features" is an output dimension. An up-projection
    and the down-projection after it then need one all-reduce together (Shoeybi et al. 2019, "Megatron-LM", section 3).

    If several dimensions could be "features", the first of them with more than three elements is named so. This splits
    the attention heads, and not the dimension that stacks query, key and value.
    """
    first = _count_stacked_dims(leaf)
    shape, names = leaf.shape[first:], leaf.names[first:]
    told = [dim for dim, name in enumerate(names) if name == CONTRACTED]
    inputs = told or _guess_contracted(leaf.path, shape)
    if inputs is None:
        spatial = (SPATIAL,) * (len(shape) - 2)
        narrows = shape[-1] < shape[-2]
        return None if len(spatial) > 3 else (*spatial, *(("features", "embed") if narrows else ("embed", "features")))
    outputs = [dim for dim in range(len(shape)) if dim not in inputs and names[dim] not in (LAYERS, SPATIAL)]
    size_in, size_out = (math.prod(shape[dim] for dim in dims) for dims in (inputs, outputs))
    rows = (-len(inputs), size_out) < (-len(outputs), size_in)
    chosen, other = (inputs, outputs) if rows else (outputs, inputs)
    split = next((dim for dim in chosen if shape[dim] > 3), chosen[0])
    named = dict.fromkeys(other, "embed") | {split: "features"}
    return tuple(name if name in (LAYERS, SPATIAL) else named.get(dim) for dim, name in enumerate(names))


def _guess_contracted(path: str, shape: tuple[int, ...]) -> list[int] | None:
    """Guess from a kernel's shape which dimensions it contracts; None if it looks like a convolution.

    [512, 8, 64] is taken for a DenseGeneral that makes 8 heads of 64, because 512 = 8 * 64, and [8, 64, 512] for one
    that joins the heads. [3, 3, 64, 512] is taken for a convolution.
    """
    rank = len(shape)
    if rank == 2:
        return [0]
    if "conv" not in path.lower():
        if shape[-3] > 3 and shape[-1] == shape[-3] * shape[-2]:
            return [rank - 3, rank - 2]
        for dim in (0, rank - 3):
            if shape[-2] > 3 and shape[dim] == shape[-2] * shape[-1]:
                return [dim]
    return None


def gating_names(leaf: Leaf) -> Names | None:
    """Name the dimensions of Gemma's kernel with two gated projections, [2, embed, mlp] or [2, mlp, embed].

    The larger dimension is "mlp". An additional leading dimension is "experts".
    """
    *front, _, first, last = leaf.shape[_count_stacked_dims(leaf) :]
    if len(front) > 1:
        return None
    return (*("experts" for _ in front), None, *(("mlp", "embed") if first > last else ("embed", "mlp")))


def gate_names(leaf: Leaf) -> Names | None:
    """Name the dimensions of a matrix called "gate": (embed, mlp) for an MLP's gate.

    Return None if it has fewer outputs than inputs, for then it is a router.
    """
    return ("embed", "mlp") if leaf.shape[-1] >= leaf.shape[-2] else None


_EINSUM_KERNELS: tuple[tuple[str, Names], ...] = (
    ("q_einsum", ("heads", "embed", "head_dim")),
    ("k_einsum", ("kv_heads", "embed", "head_dim")),
    ("kv_einsum", (None, "kv_heads", "embed", "head_dim")),
    ("qkv_einsum", (None, "heads", "embed", "head_dim")),
    ("attn_vec_einsum", ("heads", "head_dim", "embed")),
)
"""Gemma's attention kernels: parameter "w" of its own Einsum, "kernel" of NNX's."""


_UP, _DOWN = ("wi", "wi_0", "wi_1", "w1", "w3", "up", "gate"), ("wo", "w2", "down")
"""The names of an MLP's matrices that are parameters themselves, not kernels of a layer."""

_ROUTERS = ("router", "gating", "gate_router")
"""The modules, or parameters, that choose experts."""

_Q, _KV = ("query", "q", "q_proj", "wq"), ("key", "value", "k", "v", "k_proj", "v_proj", "wk", "wv")
_FUSED = ("qkv", "qkv_proj", "c_attn", "in_proj", "Wqkv")
_OUT = ("out", "o", "o_proj", "wo", "out_proj", "attn_out", "attn_out_proj", "attn/c_proj")
"""The layers of attention: projections to queries, keys and values, the three in one, and back from the heads."""

_OF_EXPERTS = ("*moe*", "*Moe*", "*MoE*", "*expert*", "*Expert*")
"""Modules whose parameters have a dimension of experts: "moe", "MoeBlock_0", "experts", "routed_experts/inner"."""


RULES: tuple[Rule, ...] = (
    # Fates of names, as Flax, T5X, MaxText and their descendants use them.
    *((name, "split") for name in ("vocab", "heads", "q_heads", "qkv", "joined_kv", "mlp", "experts")),
    ("kv_heads", "split or whole"),
    ("features", "split or whole"),
    *((name, "whole") for name in ("batch", *_POSITIONS, "embed", "head_dim", "kv", "norm", "expert")),
    *((name, "whole") for name in ("stack", *BY_LAYER)),
    # From here on patterns. The first decides that fits and has as many names as the parameter has dimensions, so
    # "query/kernel" stands here twice: for [embed, heads, head_dim] and for [embed, heads * head_dim].
    #
    # Attention: a dimension per head (DenseGeneral, MultiHeadAttention; not for the kernels of `find_headless`), then
    # flat projections, then fused ones.
    *((f"{q}/kernel", ("embed", "heads", "head_dim")) for q in _Q),
    *((f"{k}/kernel", ("embed", "kv_heads", "head_dim")) for k in _KV),
    *((f"{o}/kernel", ("heads", "head_dim", "embed")) for o in _OUT),
    *((f"{q}/kernel", ("embed", "heads")) for q in _Q),
    *((f"{k}/kernel", ("embed", "kv_heads")) for k in _KV),
    *((f"{o}/kernel", ("heads", "embed")) for o in _OUT if o not in ("out", "wo")),
    *((f"{f}/kernel", ("embed", "qkv")) for f in _FUSED),
    # MLPs, plain and gated.
    *((f"{up}/kernel", ("embed", "mlp")) for up in ("up", "gate", "up_proj", "gate_proj", "fc1", "c_fc", "mlp_in")),
    *((f"{up}/kernel", ("embed", "mlp")) for up in ("wi", "wi_0", "wi_1", "w1", "w3", "gate_up_proj")),
    *((f"{down}/kernel", ("mlp", "embed")) for down in ("down", "down_proj", "fc2", "wo", "w2", "mlp_out")),
    ("mlp/c_proj/kernel", ("mlp", "embed")),
    # Gemma's einsums.
    *((f"{name}/{weight}", names) for name, names in _EINSUM_KERNELS for weight in ("w", "kernel")),
    *((f"gating_einsum{weight}", gating_names) for weight in ("", "/w", "/kernel")),
    *((f"mlp/linear{weight}", ("mlp", "embed")) for weight in ("", "/w")),
    *((f"moe/linear{weight}", ("experts", "mlp", "embed")) for weight in ("", "/w")),
    ("router_logits/w", ("embed", None)),
    # Experts stacked in front, in a module that is named so or has a router: each device holds some experts.
    *((f"{module}/{up}", ("experts", "embed", "mlp")) for module in _OF_EXPERTS for up in _UP),
    *((f"{module}/{down}", ("experts", "mlp", "embed")) for module in _OF_EXPERTS for down in _DOWN),
    # The same names elsewhere are matrices of an MLP, whose first dimension may stack layers.
    *((up, ("embed", "mlp")) for up in _UP if up != "gate"),
    ("gate", gate_names),
    *((down, ("mlp", "embed")) for down in _DOWN),
    *((f"{router}/kernel", ("embed", None)) for router in _ROUTERS),
    # Norms, replicated however many layers are stacked.
    *((f"*{norm}", "whole") for norm in ("/scale", "ln_*/bias", "norm/bias", "LayerNorm_*/bias", "BatchNorm_*/bias")),
    # Tables: of tokens and of positions.
    *((f"*{table}*", "whole") for table in ("pos_embed", "position", "wpe", "posemb")),
    *((table, ("vocab", "embed")) for table in ("embedding", "input_embedding")),
    *((f"{head}/kernel", ("embed", "vocab")) for head in ("lm_head", "logits", "unembed", "logits_dense")),
    # Recurrent cells: Flax joins the kernels of the gates along their outputs, so these are replicated.
    *((f"{gate}/kernel", ("features", "embed")) for gate in ("[ih][ifgorzn]", "dense_[ih]")),
    # All other kernels: matrices, and convolutions over one to three dimensions.
    ("kernel", kernel_names),
)
"""The built-in rules; your own go in front: `js.tensor([("fuse/kernel", ("embed", "mlp")), *js.RULES])`.

Example:
    strategy = js.tensor([("fuse/kernel", ("embed", "mlp")), *js.RULES])
"""


class _Default(tuple[Rule, ...]):
    """The built-in rules as the default of a parameter, which `help` shows by their name."""

    def __repr__(self) -> str:
        return "js.RULES"


DEFAULT: tuple[Rule, ...] = _Default(RULES)
"""`RULES` for signatures; printing `RULES` itself shows the rules."""


@dataclass(frozen=True)
class Rules:
    """The rules of one `js.tensor`, in order.

    Attributes:
      rules: pairs such as ("mlp", "split") and ("up_proj/kernel", ("embed", "mlp")); see the top of this file. Anything
        else raises TypeError.
    """

    rules: tuple[Rule, ...]

    def __post_init__(self) -> None:
        raise_all(
            (f"{rule!r}" for rule in self.rules if not _is_rule(rule)),
            TypeError,
            "tensor: every rule must be a pair (name, fate) with a fate of 'split', 'split or whole' or 'whole', or "
            "(pattern, names) with a name or None for every dimension of the parameters whose path ends so, or "
            "(pattern, 'whole')",
        )

    def fate(self, name: str | None) -> Fate | None:
        """Return whether dimensions of this name are split: "split", "whole" (not split) or "split or whole".

        "split or whole" means split if the devices divide the dimension. Return None if no rule knows the name.
        """
        if name is None:
            return "whole"
        return next((fate for key, fate in self.rules if key == name and isinstance(fate, str)), None)

    def keeps_whole(self, names: Names) -> bool:
        """Return True if arrays with these names are replicated on purpose, so that no warning is needed.

        This is so if the user wrote a rule for one of the names, or if one of them means positions ("length").
        """
        own = {key for key, value in self.rules if isinstance(value, str) and (key, value) not in RULES}
        return any(name in own or name in _POSITIONS for name in names)

    def resolve(self, leaves: Sequence[Leaf], axes: Container[str] = ()) -> list[Leaf]:
        """Give the dimensions of parameters their names.

        Names come from the first of the user's own patterns that fits, or else from the model, or else from the
        built-in patterns. A bias has the names of the last dimensions of the kernel in the same module.

        The model's names count if one of them is to be split, or if there is one for each dimension. If not, the
        built-in patterns are tried as well: Flax's attention, for example, hands an annotation of two names on to
        kernels of three dimensions.

        Args:
          leaves: parameters, with the names that the model gives to their first dimensions.
          axes: names that need no rule, since they are mesh axes.

        Returns:
          The leaves with a name, or None, for every dimension, and the rule that named them.

        Raises:
          ValueError: a name that no rule knows; every one is listed, with the names that are near.
        """
        experts, headless = find_routed(leaves), find_headless(leaves)
        named = {
            leaf.path: self.name_dims(leaf, axes, routed=leaf.path in experts, headless=leaf.path in headless)
            for leaf in leaves
        }
        for leaf in named.values():
            # Patterns name only kernels: a column-parallel kernel [embed, mlp] has its bias [mlp] split, a
            # row-parallel kernel [mlp, embed] its bias [embed] replicated.
            kernel = named.get(leaf.path.removesuffix("bias") + "kernel")
            if leaf.path.endswith("bias") and not leaf.named_by and kernel is not None and kernel.named_by:
                names = _bias_names(leaf.shape, kernel)
                if names is not None:
                    named[leaf.path] = leaf._replace(names=names, named_by=BY_KERNEL)
        self._check_known(named.values(), axes)
        return [named[leaf.path] for leaf in leaves]

    def find_unused(self, leaves: Sequence[Leaf]) -> list[str]:
        """List the user's own patterns that named no parameter, each with the reason.

        A pattern such as "fuse/kernel" names the dimensions of the parameters whose path ends with it.
        """
        reasons = []
        for key, value in self._own_patterns:
            named = [leaf.names for leaf in leaves if leaf.named_by == key]
            if not named or not (callable(value) or any(_names_by(value, leaf) in named for leaf in leaves)):
                fitting = next((leaf for leaf in leaves if _fits(key, leaf)), None)
                count = len(value) if isinstance(value, tuple) else 0
                reasons.append(
                    f"{key!r} matches no path"
                    if fitting is None
                    else f"{key!r} has {count} names, {fitting.path} {list(fitting.shape)} other dimensions"
                    if count
                    else f"{key!r} comes after another rule for {fitting.path}"
                )
        return reasons

    @cached_property
    def _own_patterns(self) -> list[tuple[str, Any]]:
        """The user's patterns; one that repeats a built-in pattern in front of it counts."""
        rules = [rule for rule in self.rules if _is_pattern(*rule)]
        return [rule for at, rule in enumerate(rules) if rule not in RULES or rule in rules[at + 1 :]]

    def name_dims(self, leaf: Leaf, axes: Container[str] = (), *, routed: bool = False, headless: bool = False) -> Leaf:
        """Name the dimensions of one parameter, without checking that rules know the names; see `resolve`.

        Args:
          leaf: the parameter, with the names that the model gives to its first dimensions.
          axes: names that need no rule, since they are mesh axes.
          routed: True if the parameter stacks experts (`find_routed`). Then patterns that ask for a module called
            "experts" fit too.
          headless: True if no dimension of the parameter is a head (`find_headless`). Then built-in patterns that name
            one don't fit.
        """
        module, _, name = leaf.path.rpartition("/")
        inside = leaf._replace(path=f"{module}/experts/{name}") if routed else leaf
        own, given = self._own_patterns, pad_names(leaf)
        patterns = [rule for rule in self.rules if _is_pattern(*rule)]
        # The model's own names rank before built-in patterns, which only see paths, and after the user's own patterns.
        if any(name not in (None, *BY_LAYER) for name in leaf.names):
            splits = any(name in axes or self.fate(name) != "whole" for name in leaf.names)
            if splits or len(leaf.names) == len(leaf.shape):
                patterns, given = own, given._replace(named_by=BY_MODEL)
        for key, value in patterns:
            names = _names_by(value, given) if _fits(key, given) or _fits(key, inside) else None
            wrong = names is not None and (_contradicts(names, given) or (headless and "head_dim" in names))
            if names is not None and (not wrong or (key, value) in own):
                return given._replace(names=names, named_by=key)
        return given

    def _check_known(self, leaves: Iterable[Leaf], axes: Container[str]) -> None:
        known = [key for key, value in self.rules if isinstance(value, str)]
        problems = []
        for leaf in leaves:
            for name in leaf.names:
                if name is not None and name not in axes and self.fate(name) is None:
                    near = difflib.get_close_matches(name, known, n=3)
                    hint = f"; did you mean {' or '.join(map(repr, near))}?" if near else ""
                    problems.append(f"{leaf.path} {list(leaf.shape)}: {name!r}{hint}")
        raise_all(
            problems,
            ValueError,
            "tensor: no rule knows these names of dimensions; add a rule such as ('name', 'split') or "
            "('name', 'whole')",
        )


def find_routed(leaves: Sequence[Leaf]) -> set[str]:
    """Return the paths of the parameters that stack experts, found by a router in the same module.

    A parameter [..., experts, in, out] is recognised by its third last dimension, which is as large as the number of
    the router's outputs.
    """
    outputs = {}
    for leaf in leaves:
        words = leaf.path.split("/")
        for at, word in enumerate(words):
            if word in _ROUTERS and leaf.shape and words[-1] != "bias":
                outputs["/".join(words[:at])] = leaf.shape[-1]
    return {
        leaf.path
        for leaf in leaves
        if len(leaf.shape) > 2 and outputs.get(leaf.path.rpartition("/")[0]) == leaf.shape[-3]
    }


def find_headless(leaves: Sequence[Leaf]) -> set[str]:
    """Return the paths of kernels that are called like projections of attention, but have no dimension of heads.

    Such are convolutions, and matrices of stacked layers. The layer's code tells, if it is known. Else the shapes do:

    - [embed, heads, head_dim] has no head that is larger than "embed". A convolution [3, 64, 64] has.
    - [heads, head_dim, embed] has as many inputs as outputs, or comes with a kernel of the same module that makes such
      heads. The convolution "out" [4, 64, 3] of a U-Net does neither.
    """
    modules: dict[str, list[Leaf]] = {}
    for leaf in leaves:
        module, _, layer = leaf.path.removesuffix("/kernel").rpartition("/")
        if leaf.path.endswith("/kernel") and layer in (*_Q, *_KV, *_FUSED):
            modules.setdefault(module, []).append(leaf)

    def has_heads(leaf: Leaf) -> bool:
        told, inwards = pad_names(leaf).names[-3:], any(_fits(f"{layer}/kernel", leaf) for layer in (*_Q, *_KV))
        if CONTRACTED in told:
            return told == ((CONTRACTED, None, None) if inwards else (CONTRACTED, CONTRACTED, None))
        if inwards:
            return leaf.shape[-3] >= leaf.shape[-1]
        joined = [len(leaf.shape) - 3, len(leaf.shape) - 2]
        beside = modules.get(leaf.path.removesuffix("/kernel").rpartition("/")[0], [])
        return _guess_contracted(leaf.path, leaf.shape) == joined or any(_makes_heads(one, leaf) for one in beside)

    named = [leaf for leaf in leaves if any(_fits(f"{layer}/kernel", leaf) for layer in (*_Q, *_KV, *_OUT))]
    return {leaf.path for leaf in named if len(leaf.shape) > 2 and not has_heads(leaf)}


def _makes_heads(leaf: Leaf, out: Leaf) -> bool:
    """Return whether a kernel [embed, heads, head_dim] or [embed, heads * head_dim] makes the heads that `out` joins.

    Keys and values may have fewer heads, which divide the heads of `out`.
    """
    *_, heads, head_dim, _ = out.shape
    *_, rows, columns = leaf.shape
    per_head = len(leaf.shape) > 2 and columns == head_dim and heads % rows == 0
    return heads > 1 and (per_head or columns % (heads * head_dim) == 0)


def _contradicts(names: Names, leaf: Leaf) -> bool:
    """Return whether names differ from what the layer's code tells about the dimensions of a kernel.

    A layer's own dimension stacks no layers, and the window of a convolution has no other name.
    """
    return any(
        (told == SPATIAL and name not in (None, SPATIAL)) or (told == CONTRACTED and name == LAYERS)
        for told, name in zip(leaf.names, names, strict=True)
    )


def pad_names(leaf: Leaf) -> Leaf:
    """Return the leaf with as many names as dimensions, by None for every dimension after the last name."""
    return leaf._replace(names=(*leaf.names, *(None,) * (len(leaf.shape) - len(leaf.names))))


def _is_rule(rule: object) -> bool:
    if not isinstance(rule, tuple) or len(rule) != 2 or not isinstance(rule[0], str):
        return False
    key, value = rule
    if isinstance(value, str):
        return value == "whole" or (value in _FATES and not _is_pattern(key, value))
    return callable(value) or (
        isinstance(value, tuple) and all(name is None or isinstance(name, str) for name in value)
    )


def _is_pattern(key: str, value: object) -> bool:
    return not isinstance(value, str) or "/" in key or "*" in key


def _fits(key: str, leaf: Leaf) -> bool:
    return ends_with(leaf.path, key)


def ends_with(path: str, pattern: str) -> bool:
    """Return True if the last words of a path fit a pattern, "mlp/*/kernel" for example.

    The first word of the pattern must fit a word of the path in full: "proj/kernel" does not fit "up_proj/kernel".
    """
    return fnmatchcase("/" + path, "*/" + pattern.removeprefix("*/"))


def _names_by(value: Fate | Names | NamesOf, leaf: Leaf) -> Names | None:
    """Return the names that the right side of a rule gives to the dimensions of a parameter.

    Return None if it has another number of names than the parameter has dimensions. The parameter may have one more
    dimension in front, which stacks layers as `nn.scan` and `nn.vmap` do.

    Args:
      value: the right side of a rule: a tuple of names, a function from the parameter to names, or "whole".
      leaf: the parameter.
    """
    front = leaf.names[: _count_stacked_dims(leaf)]
    rank = len(leaf.shape) - len(front)
    if isinstance(value, str):
        return (*front, *(None,) * rank)
    names = (value(leaf) if rank >= 2 else None) if callable(value) else value
    if names is None or len(names) == rank:
        return None if names is None else front + names
    return (*front, LAYERS, *names) if len(names) == rank - 1 and rank > 2 else None


def _bias_names(shape: tuple[int, ...], kernel: Leaf) -> Names | None:
    """Return the names of a bias: those of its kernel's last dimensions. If their sizes differ, return None.

    Both may have a first dimension that stacks layers.

    Args:
      shape: the shape of the bias.
      kernel: the kernel in the same module, with its names.
    """
    for front in (0, 1):
        tail = len(shape) - front
        if tail > 0 and shape == kernel.shape[:front] + kernel.shape[len(kernel.shape) - tail :]:
            return kernel.names[:front] + kernel.names[len(kernel.names) - tail :]
    return None


def _count_stacked_dims(leaf: Leaf) -> int:
    """Return the number of leading dimensions that stack blocks: 0 or 1."""
    return int(bool(leaf.names) and leaf.names[0] == BLOCKS)
