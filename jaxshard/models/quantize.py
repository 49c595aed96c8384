"""Products of ready-made models in 8 bits, by the rules of qwix: the argument `quant` of `js.models.gpt`, `llama`, ...

Both operands of a product of activations with a weight are rounded to 8 bits, with one scale for each row of the
activations and one for each output channel of the weight:

    y[r, n]  =  s[r] * t[n] * sum over k of  x8[r, k] * w8[k, n],      s[r] = max over k of |x[r, k]| / 127 for int8

The scale of a row reads this row alone, and the scale of a channel all of a gathered weight, so that scales are the
same on every mesh. Gradients pass the rounding unchanged, and their products are computed in the dtype of computation.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from flax import linen as nn

from jaxshard.adapt.qwix_compat import make_provider
from jaxshard.core.tree import BLOCKS, path_str
from jaxshard.core.types import PyTree
from jaxshard.layers.moe.eight_bits import Rounding

_Module = TypeVar("_Module", bound=nn.Module)

Quant = str | Sequence[Any] | None
"""The products of a model that are computed in 8 bits: "int8" or "fp8", or rules of qwix; None for none."""

FORMATS = {"int8": jnp.int8, "fp8": jnp.float8_e4m3fn}
"""{name of a format: dtype of the rounded numbers}."""

_METHODS = {
    # qwix divides the largest magnitude by 127.5, so that the largest number of a channel is a tie: the last bit of the
    # scale decides whether it becomes -127 or -128. Divided by 127 it is 127 with every scale.
    "int8": f"absmax,{127.5 / 127}",
    "fp8": "absmax",
}

_UNSUITED_TO_EXPERTS = (
    "bwd_qtype",
    "tile_size",
    "act_static_scale",
    "disable_channelwise_axes",
    "additional_qt_config",
)


def quant_rules(quant: str, *, module_path: str = ".*") -> list[Any]:
    """Make the rules of qwix for products of activations with weights in 8 bits, forward, on any mesh.

    Gradients are computed in the dtype of computation, from the operands before rounding.

    Args:
      quant: "int8", or "fp8" for float8_e4m3fn.
      module_path: a regular expression of the paths of the modules whose products are rounded, such as ".*/Dense_.*".

    Returns:
      A list of one `qwix.QtRule`, for `qwix.QtProvider`.

    Raises:
      ImportError: qwix is not installed.
      ValueError: another `quant`.

    Example:
        module = qwix.quantize_model(module, qwix.QtProvider(js.models.quant_rules("int8")))
        model = js.linen(module, loss_fn, batch)
    """
    if quant not in FORMATS:
        raise ValueError(f"quant must be {' or '.join(map(repr, FORMATS))}, or a list of qwix.QtRule, got {quant!r}")
    if find_spec("qwix") is None:
        raise ImportError(f'quant={quant!r} needs qwix, which is not installed: pip install "qwix>=0.1.8"')
    import qwix

    dtype, method = FORMATS[quant], _METHODS[quant]
    rule = qwix.QtRule(
        module_path=module_path,
        weight_qtype=dtype,
        act_qtype=dtype,
        weight_calibration_method=method,
        act_calibration_method=method,
    )
    return [rule]


def quantize(module: _Module, quant: Quant) -> _Module:
    """Return a module whose products follow the rules; the module itself if `quant` is None.

    Paths begin below the module, such as "q_proj". The rules of "int8" and "fp8" match every module below it, but not
    its own products, such as attention's products of queries with keys.
    """
    if quant is None:
        return module
    rules = _rules_of(quant)
    import qwix

    quantized: _Module = qwix.quantize_model(module, make_provider(rules))
    return quantized


def expert_rounding(quant: Quant, path: str) -> Rounding | None:
    """Return how the first rule that matches rounds the operands of an expert's product; None if none does.

    Args:
      quant: the argument of the model.
      path: the path of the expert's matrix, such as "experts/gate_proj".
    """
    rule = _find_rule(quant, path, "ragged_dot")
    return None if rule is None else _rounding_of(rule, path)


def rounded_weights(init: Callable[[jax.Array], PyTree], quant: Quant) -> dict[str, tuple[str, tuple[int, ...]]]:
    """Find the weights of the blocks that are rounded: {path of the stacked parameter: (8-bit dtype, contracted dims)}.

    Args:
      init: `init(key) -> {"block": ...}`, which calls the block's modules.
      quant: the argument of the model.

    Raises:
      ValueError: a rule rounds a weight otherwise than `quant_rules`.
    """
    if quant is None:
        return {}
    rules_of_layers: dict[str, tuple[Any, int]] = {}

    def record(next_fun: Any, args: Any, kwargs: Any, context: nn.module.InterceptorContext) -> Any:
        layer, rule = context.module, None
        if context.method_name == "__call__" and isinstance(layer, (nn.Dense, nn.DenseGeneral)):
            rule = _find_rule(quant, "/".join(layer.path), "dot_general")
        if rule is not None:
            axis = layer.axis if isinstance(layer, nn.DenseGeneral) else -1
            rules_of_layers[layer.path[-1]] = rule, len(axis) if isinstance(axis, tuple) else 1
        return next_fun(*args, **kwargs)

    # JAX remembers the traces of `init`, which is jitted, and would not call the modules again.
    with jax.disable_jit(), nn.intercept_methods(record):
        block = jax.eval_shape(lambda key: init(key)["block"], jax.random.key(0))
    found = {}
    for path, _ in jax.tree_util.tree_leaves_with_path(block):
        name = path_str(path)
        *_, owner, last = ("", *name.split("/"))
        stacked = f"{BLOCKS}/{name}"
        if last == "kernel" and owner in rules_of_layers:
            rule, count = rules_of_layers[owner]
            found[stacked] = _gathered_dtype(rule, stacked), tuple(range(1, 1 + count))
        elif owner == "experts" and (rule := _find_rule(quant, name, "ragged_dot")) is not None:
            found[stacked] = _gathered_dtype(rule, stacked), (2,)
    return found


def _find_rule(quant: Quant, path: str, op_name: str) -> Any:
    """Return the first rule for this operation of the module at `path`, as qwix does; None if no weight is rounded."""
    for rule in () if quant is None else _rules_of(quant):
        if re.fullmatch(rule.module_path, path) and (not rule.op_names or op_name in rule.op_names):
            return None if rule.weight_qtype is None else rule
    return None


def _gathered_dtype(rule: Any, path: str) -> str:
    """Return the dtype in which a rounded weight can be gathered; refuse a rule that rounds it otherwise than ours."""
    qtype = rule.weight_qtype
    dtype = qtype if isinstance(qtype, str) else jnp.dtype(qtype).name
    methods = {jnp.dtype(FORMATS[name]).name: method for name, method in _METHODS.items()}
    method = rule.weight_calibration_method
    names = ("tile_size", "disable_channelwise_axes", "additional_qt_config")
    others = [f"{name}={value!r}" for name in names if (value := getattr(rule, name, None))]
    if methods.get(dtype) != method or others:
        got = ", ".join([f"weight_qtype={dtype}", f"weight_calibration_method={method!r}", *others])
        ours = " or ".join(f"{dtype} by {method!r}" for dtype, method in methods.items())
        raise ValueError(
            f"gather_dtype='quant': the rule for {path} has {got}; weights are rounded before they are gathered only "
            f"to {ours}, with one scale for each output channel: make the rule by js.models.quant_rules, or leave "
            "gather_dtype out"
        )
    return dtype


def _rounding_of(rule: Any, path: str) -> Rounding:
    unsuited = [name for name in _UNSUITED_TO_EXPERTS if getattr(rule, name, None)]
    if rule.act_qtype != rule.weight_qtype or unsuited:
        raise ValueError(
            f"quant: the rule for {path} has {unsuited or f'act_qtype {rule.act_qtype}'}; products of experts round "
            f"both operands alike, here to {jnp.dtype(rule.weight_qtype).name}, and forward alone: leave the experts "
            "out by module_path or op_names, or set act_qtype=weight_qtype and nothing else"
        )
    methods = rule.act_calibration_method or "absmax", rule.weight_calibration_method
    return Rounding(jnp.dtype(rule.weight_qtype).name, *methods)


def _rules_of(quant: str | Sequence[Any]) -> Sequence[Any]:
    return quant_rules(quant, module_path=".+") if isinstance(quant, str) else quant
