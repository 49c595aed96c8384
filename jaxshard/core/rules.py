"""Rules: the names of a parameter's dimensions, and which of those names a tensor axis splits.

There are two kinds of pairs, in one list, of which the first that fits decides:

    ("mlp", "split")                         a name and its fate, for the dimensions of that name in all parameters
    ("up_proj/kernel", ("embed", "mlp"))     a pattern and names, for the parameters whose path ends with it
    ("*/scale", "whole")                     a pattern, for parameters that stay whole

Naming comes first, fates second: "layer_0/up_proj/kernel" [512, 2048] is ("embed", "mlp"), "embed" is whole and "mlp"
split, so the matrix is split along dimension 1. A name without "/" and "*" in front of a fate is a name of dimensions,
anything else is a pattern.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any, Literal

from jaxshard.core.tree import BLOCKS, Leaf, raise_all

Fate = Literal["split", "split or whole", "whole"]
Names = tuple[str | None, ...]
NamesOf = Callable[[Leaf], Names | None]
Rule = tuple[str, Fate | Names | NamesOf]

_FATES = ("split", "split or whole", "whole")


def kernel_names(leaf: Leaf) -> Names | None:
    """Name the dimensions of a matrix or convolution that no other rule knows.

    One that narrows is row-parallel, any other column-parallel. A layer that widens and the one that narrows again then
    make a pair with one all-reduce (Shoeybi et al. 2019, "Megatron-LM", section 3).
    """
    spatial, (inputs, outputs) = ("spatial",) * (len(leaf.shape) - _count_stacked_dims(leaf) - 2), leaf.shape[-2:]
    if len(spatial) > 3:
        return None
    return (*spatial, "features", "embed") if outputs < inputs else (*spatial, "embed", "features")


RULES: tuple[Rule, ...] = (
    # Fates of names, as Flax, T5X, MaxText and their descendants use them.
    *((name, "split") for name in ("vocab", "heads", "q_heads", "qkv", "joined_kv", "mlp", "expert", "experts")),
    ("kv_heads", "split or whole"),
    ("features", "split or whole"),
    *((name, "whole") for name in ("batch", "sequence", "length", "positions", "embed", "head_dim", "kv", "norm")),
    *((name, "whole") for name in ("layers", BLOCKS, "stack", "spatial")),
    # From here on patterns. The first decides that fits and has as many names as the parameter has dimensions, so
    # "query/kernel" stands here twice: for [embed, heads, head_dim] and for [embed, heads * head_dim].
    #
    # Attention: a dimension per head (DenseGeneral, MultiHeadAttention), then flat projections, then fused ones.
    *((f"{q}/kernel", ("embed", "heads", "head_dim")) for q in ("query", "q", "q_proj", "wq")),
    *((f"{k}/kernel", ("embed", "kv_heads", "head_dim")) for k in ("key", "value", "k", "v", "k_proj", "v_proj")),
    *((f"{k}/kernel", ("embed", "kv_heads", "head_dim")) for k in ("wk", "wv")),
    *((f"{o}/kernel", ("heads", "head_dim", "embed")) for o in ("out", "o", "o_proj", "wo", "out_proj")),
    *((f"{q}/kernel", ("embed", "heads")) for q in ("query", "q", "q_proj", "wq")),
    *((f"{k}/kernel", ("embed", "kv_heads")) for k in ("key", "value", "k", "v", "k_proj", "v_proj", "wk", "wv")),
    *((f"{o}/kernel", ("heads", "embed")) for o in ("o", "o_proj", "out_proj", "attn_out", "attn/c_proj")),
    *((f"{f}/kernel", ("embed", "qkv")) for f in ("qkv", "qkv_proj", "c_attn", "in_proj", "Wqkv")),
    # MLPs, plain and gated.
    *((f"{up}/kernel", ("embed", "mlp")) for up in ("up", "gate", "up_proj", "gate_proj", "fc1", "c_fc", "mlp_in")),
    *((f"{up}/kernel", ("embed", "mlp")) for up in ("wi", "wi_0", "wi_1", "w1", "w3", "gate_up_proj")),
    *((f"{down}/kernel", ("mlp", "embed")) for down in ("down", "down_proj", "fc2", "wo", "w2", "mlp_out")),
    ("mlp/c_proj/kernel", ("mlp", "embed")),
    # Experts stacked in front: each device holds some of them whole.
    *((f"*{name}", ("experts", "embed", "mlp")) for name in ("/wi", "/wi_0", "/wi_1", "/w1", "/w3", "/up", "/gate")),
    *((f"*{name}", ("experts", "mlp", "embed")) for name in ("/wo", "/w2", "/down")),
    *((f"{router}/kernel", ("embed", None)) for router in ("router", "gating", "gate_router")),
    # Norms, which stay whole however many layers are stacked.
    *((f"*{norm}", "whole") for norm in ("/scale", "ln_*/bias", "norm/bias", "LayerNorm_*/bias", "BatchNorm_*/bias")),
    # Tables: of tokens and of positions.
    *((f"*{table}*", "whole") for table in ("pos_embed", "position", "wpe", "posemb")),
    ("embedding", ("vocab", "embed")),
    *((f"{head}/kernel", ("embed", "vocab")) for head in ("lm_head", "logits", "unembed", "logits_dense")),
    # Recurrent cells: Flax joins the kernels of the gates along their outputs, so these stay whole.
    *((f"{gate}/kernel", ("features", "embed")) for gate in ("[ih][ifgorzn]", "dense_[ih]")),
    # Whatever else is called a kernel: matrices, and convolutions over one to three dimensions.
    ("kernel", kernel_names),
)
"""The built-in rules; your own go in front: `js.tensor([("fuse/kernel", ("embed", "mlp")), *js.RULES])`."""


@dataclass(frozen=True)
class Rules:
    """The rules of one `js.tensor`, in order.

    Attributes:
      rules: the pairs. Anything that is not such a pair raises TypeError.
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
        """Return what happens to the dimensions of this name; None for a name that no rule knows."""
        if name is None:
            return "whole"
        return next((fate for key, fate in self.rules if key == name and isinstance(fate, str)), None)

    def resolve(self, leaves: Sequence[Leaf]) -> list[Leaf]:
        """Give the dimensions of parameters their names.

        They come from the first of the user's own patterns that fits, else from the model, else from the built-in
        patterns. A bias has the names of the last dimensions of the kernel beside it.

        Raises:
          ValueError: a name that no rule knows; every one is listed, with the names that are near.
        """
        named = {leaf.path: self._name_dims(leaf) for leaf in leaves}
        for leaf in named.values():
            # Patterns speak of kernels only: a column-parallel kernel [embed, mlp] has its bias [mlp] split, a
            # row-parallel one [mlp, embed] its bias [embed] whole.
            kernel = named.get(leaf.path.removesuffix("bias") + "kernel")
            if leaf.path.endswith("bias") and not leaf.named_by and kernel is not None and kernel.named_by:
                names = _bias_names(leaf.shape, kernel)
                if names is not None:
                    named[leaf.path] = leaf._replace(names=names, named_by="as its kernel")
        self._check_known(named.values())
        return [named[leaf.path] for leaf in leaves]

    def find_unused(self, leaves: Sequence[Leaf]) -> list[str]:
        """List the user's own patterns that name no parameter, each with the reason."""
        reasons = []
        for key, value in self._own_patterns():
            if not any(leaf.named_by == key and leaf.names == _names_by(value, leaf) for leaf in leaves):
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

    def _own_patterns(self) -> list[tuple[str, Any]]:
        """List the patterns that are not built in."""
        return [(key, value) for key, value in self.rules if _is_pattern(key, value) and (key, value) not in RULES]

    def _name_dims(self, leaf: Leaf) -> Leaf:
        own = self._own_patterns()
        # A model that names its dimensions knows better than built-in patterns, which look at paths; the user's own
        # patterns know better still. "blocks" is not the model's word: the library gives it to what is stacked.
        if any(name not in (None, BLOCKS) for name in leaf.names):
            patterns, given = own, leaf._replace(named_by="named by the model")
        else:
            patterns, given = [rule for rule in self.rules if _is_pattern(*rule)], leaf
        for key, value in patterns:
            names = _names_by(value, leaf) if _fits(key, leaf) else None
            if names is not None:
                return leaf._replace(names=names, named_by=key)
        return given

    def _check_known(self, leaves: Iterable[Leaf]) -> None:
        known = [key for key, value in self.rules if isinstance(value, str)]
        problems = []
        for leaf in leaves:
            for name in leaf.names:
                if name is not None and self.fate(name) is None:
                    near = difflib.get_close_matches(name, known, n=3)
                    hint = f"; did you mean {' or '.join(map(repr, near))}?" if near else ""
                    problems.append(f"{leaf.path} {list(leaf.shape)}: {name!r}{hint}")
        raise_all(
            problems,
            ValueError,
            "tensor: no rule knows these names of dimensions; add a rule such as ('name', 'split') or "
            "('name', 'whole')",
        )


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
    """Tell whether the path of a parameter ends with the pattern, from the start of a word."""
    return fnmatchcase("/" + leaf.path, "*/" + key.removeprefix("*/"))


def _names_by(value: Fate | Names | NamesOf, leaf: Leaf) -> Names | None:
    """Return the names that a pattern gives to the dimensions of a parameter; None if their number is another.

    A leading dimension more than there are names is that of layers, which `nn.scan` and `nn.vmap` stack.
    """
    front = leaf.names[: _count_stacked_dims(leaf)]
    rank = len(leaf.shape) - len(front)
    if isinstance(value, str):
        return (*front, *(None,) * rank)
    names = (value(leaf) if rank >= 2 else None) if callable(value) else value
    if names is None or len(names) == rank:
        return None if names is None else front + names
    return (*front, "layers", *names) if len(names) == rank - 1 and rank > 2 else None


def _bias_names(shape: tuple[int, ...], kernel: Leaf) -> Names | None:
    """Return the names of the last dimensions of a kernel, for a bias of their sizes; a first one may stack layers."""
    for front in (0, 1):
        tail = len(shape) - front
        if tail > 0 and shape == kernel.shape[:front] + kernel.shape[len(kernel.shape) - tail :]:
            return kernel.names[:front] + kernel.names[len(kernel.names) - tail :]
    return None


def _count_stacked_dims(leaf: Leaf) -> int:
    """Return the number of leading dimensions that stack blocks: 0 or 1."""
    return int(bool(leaf.names) and leaf.names[0] == BLOCKS)
