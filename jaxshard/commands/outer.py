"""`--outer average` or `--outer rate=1,momentum=0.4`: what a meeting of replicas does, read from the flag."""

from __future__ import annotations

import math

import optax

_SYNTAX = "write average, or rate=1,momentum=0.4 for SGD with Nesterov momentum, or rate= alone for SGD"


def parse_outer(text: str | None) -> optax.GradientTransformation | None:
    """Parse the value of --outer: the transform that `js.local` applies where replicas meet; None for its default.

        >>> parse_outer("rate=0.7,momentum=0.9") is not None
        True

    Raises:
      ValueError: a part that is not name=value, an unknown name, one that comes twice, or a number out of range.
    """
    if text is None:
        return None
    if text == "average":
        return optax.sgd(1.0)
    given: dict[str, float] = {}
    for part in text.split(","):
        name, _, value = (one.strip() for one in part.partition("="))
        if name not in ("rate", "momentum") or name in given:
            raise ValueError(f"--outer {text}: {part.strip()!r} is not understood or comes twice; {_SYNTAX}")
        given[name] = _number(text, value)
    if "rate" not in given or not given["rate"] > 0 or not 0 <= given.get("momentum", 0) < 1:
        raise ValueError(f"--outer {text}: the rate is a number above 0, the momentum from 0 to below 1; {_SYNTAX}")
    if not given.get("momentum"):
        return optax.sgd(given["rate"])
    return optax.sgd(given["rate"], momentum=given["momentum"], nesterov=True)


def _number(text: str, value: str) -> float:
    try:
        number = float(value)
    except ValueError:
        number = math.nan
    if not math.isfinite(number):
        raise ValueError(f"--outer {text}: {value!r} is no number; {_SYNTAX}")
    return number
