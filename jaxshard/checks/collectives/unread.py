"""Kinds of collectives that are promised and of which nothing was found in a program."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from jaxshard.checks.collectives.accounts import Account
from jaxshard.checks.collectives.found import Collective, arrays_only
from jaxshard.core.layout import human_bytes


def find_unread(accounts: Iterable[Account], found: Iterable[Collective], instead: Iterable[Collective]) -> list[str]:
    """List the kinds of collectives that are promised and of which a program has neither a byte nor a substitute.

    Either the compiler writes them in a form that the parser does not know, or they do not happen.

    Args:
      accounts: of the promised arrays, with what was found of each in any form.
      found: all collectives of the program.
      instead: arrays that belong to no account. Where such arrays move over an axis, they may do so in place of
        promised ones: a product with parts of a weight sums activations, and needs no gather.

    Returns:
      One line for each kind and axes, with the promised bytes.
    """
    promised: Counter[tuple[str, tuple[str, ...]]] = Counter()
    seen = {(one.kind, one.axes) for one in arrays_only(found)}
    moved = {axis for one in arrays_only(instead) for axis in one.axes}
    for account in accounts:
        for form in account.forms:
            promised[form.kind, form.axes] += form.bytes or 0
            if account.covered or moved & set(form.axes):
                seen.add((form.kind, form.axes))
    return [
        f"{kind} over {'+'.join(axes)}: {human_bytes(size)} promised, and neither these nor a substitute are in the "
        "program that was read"
        for (kind, axes), size in promised.items()
        if size and (kind, axes) not in seen
    ]
