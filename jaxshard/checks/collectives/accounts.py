"""Accounts of arrays: under the names that a promise gives them what was promised of them, and what was found."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from jaxshard.checks.collectives.expected import Expected
from jaxshard.checks.collectives.found import Collective


@dataclass
class Account:
    """Promises that can't be told apart in a program, and the arrays that they cover.

    Attributes:
      names: the arrays in words, each once.
      forms: the promised collectives of arrays, other forms of the same arrays left out.
      covered: the arrays that were found.
    """

    names: dict[str, None] = field(default_factory=dict)
    forms: list[Expected] = field(default_factory=list)
    covered: list[Collective] = field(default_factory=list)

    def add(self, one: Expected) -> None:
        """Take in a promise."""
        self.names[one.instead_of or one.what] = None
        if counts(one):
            self.forms.append(one)

    @property
    def promised(self) -> int:
        """Bytes that are promised at most."""
        return sum(one.bytes or 0 for one in self.forms)

    @property
    def found(self) -> int:
        """Bytes that were found; collectives that run an unknown number of times are left out."""
        return sum(one.bytes or 0 for one in self.covered if one.elements > 1)


def counts(one: Expected) -> bool:
    """Return True for a promise of an array by itself: it has a size, and is no other form of one that has."""
    return one.shape is not None and bool(one.axes) and not one.instead_of and one.elements[1] > 1 and bool(one.most)


def join_accounts(accounts: Iterable[Account], joined: Iterable[Sequence[Account]]) -> list[Account]:
    """Return one account for all that share a name, or of which arrays were moved end to end."""
    accounts = [one for one in accounts if one.names]
    root = list(range(len(accounts)))

    def find(at: int) -> int:
        while root[at] != at:
            root[at] = root[root[at]]
            at = root[at]
        return at

    places = {id(one): at for at, one in enumerate(accounts)}
    by_name: dict[str, int] = {}
    for at, one in enumerate(accounts):
        for name in one.names:
            root[find(at)] = find(by_name.setdefault(name, at))
    for first, *others in joined:
        for other in others:
            root[find(places[id(other)])] = find(places[id(first)])
    whole: dict[int, Account] = {}
    for at, one in enumerate(accounts):
        account = whole.setdefault(find(at), Account())
        account.names |= one.names
        account.forms += one.forms
        account.covered += one.covered
    return list(whole.values())
