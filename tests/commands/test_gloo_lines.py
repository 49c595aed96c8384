"""Lines of gloo are left out of what `jaxshard launch` shows, and nothing else is."""

import itertools
import re
import sys

import pytest

from jaxshard.commands.gloo_lines import GlooFilter
from jaxshard.commands.main import main


def shown(text):
    lines = map(GlooFilter(), text.encode().split(b"\n")[: -1 if text.endswith("\n") else None])
    return [line.decode() for line in lines if line is not None]


def pieces(rank, count=7):
    """What a thread of gloo writes, piece by piece."""
    end = ["Expected number of connected peer ranks is : ", str(count), "\n"]
    return ["[Gloo] Rank ", str(rank), " is connected to ", str(count), " peer ranks. ", *end]


GLOO = "".join(pieces(3))

CASES = {
    "lines of their own": (f"a\n{GLOO}{GLOO}b\n", ["a", "b"]),
    "behind a text": (f"loss {GLOO}\nb\n", ["loss ", "b"]),
    "around a text": ("[Gloo] Rank loss 3.5 at 7\n" + GLOO.removeprefix(pieces(3)[0]) + "8\n", ["loss 3.5 at 7", "8"]),
    "in front of a text without a line break": (f"{GLOO}no newline", ["no newline"]),
    "two at once": ("".join("".join(both) for both in zip(pieces(0), pieces(1))) + "7\n\nb\n", ["7", "", "b"]),
    "one after the other's start": ("[Gloo] Rank " + GLOO + GLOO.removeprefix("[Gloo] Rank ") + "3\n", ["3"]),
    "numbers together": ("[Gloo] Rank [Gloo] Rank 01 is connected to  is connected to 77 peer ranks.  peer ranks. "
                         "Expected number of connected peer ranks is : Expected number of connected peer ranks is : 7"
                         "7\n\n7\n", ["7"]),
    "other messages of gloo's": (
        "[Gloo] Rank 3 failed to connect\n[enforce fail at gloo/transport/tcp/pair.cc:547] timeout\n",
        ["[Gloo] Rank 3 failed to connect", "[enforce fail at gloo/transport/tcp/pair.cc:547] timeout"],
    ),
    "the words of a program": (
        "host a is connected to 7 peer ranks. \n\n7\nExpected number of connected peer ranks is : 3\n",
        ["host a is connected to 7 peer ranks. ", "", "7", "Expected number of connected peer ranks is : 3"],
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_what_is_left_of_lines(case):
    text, expected = CASES[case]
    assert shown(text) == expected


def test_every_interleaving_of_two_messages_and_a_line_keeps_the_line():
    """Two threads write pieces in any order; the program's line comes between any two of them."""
    first, second = pieces(0), pieces(1)
    for chosen in itertools.combinations(range(len(first) + len(second)), len(first)):
        mine, other = iter(first), iter(second)
        mixed = [next(mine if at in chosen else other) for at in range(len(first) + len(second))]
        at = sum(chosen) % (len(mixed) + 1)
        left = [line for line in shown("".join([*mixed[:at], "the loss is 2.5, word\n", *mixed[at:]])) if line]
        assert left == ["the loss is 2.5, word"], mixed


def test_launch_leaves_them_out(capfd):
    script = "import os, sys; os.write(1, sys.argv[1].encode()); os.write(2, b'[Gloo] Rank 3 is connected to\\n')"
    assert main(["launch", "-n", "2", "--", sys.executable, "-c", script, f"one\n{GLOO}two{GLOO}\nthree"]) == 0
    output = capfd.readouterr()
    for index in "01":
        own = [line[4:] for line in output.out.splitlines() if line.startswith(f"[{index}]")]
        assert own == ["one", "two", "three"]


PROGRAM = """
import jaxshard as js
js.distributed.initialize()
js.simulate_devices(4)
import jax, jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec as P
js.simulate_devices(4)  # of this process: nothing to do
mesh = js.make_mesh(data=8)
put = lambda *axes: NamedSharding(mesh, P(*axes))
x = jax.jit(lambda: jnp.arange(8.0), out_shardings=put("data"))()
print("sum", int(jax.jit(jnp.sum, out_shardings=put())(x).addressable_data(0)))
for call in (lambda: js.make_mesh(data=4), lambda: js.make_mesh(data=3), lambda: js.simulate_devices(8)):
    try:
        call()
    except (ValueError, RuntimeError) as error:
        print(error)
"""


@pytest.mark.slow
def test_simulated_devices_are_counted_for_each_process(capfd, monkeypatch):
    monkeypatch.setenv("XLA_FLAGS", "")
    assert main(["launch", "-n", "2", "--", sys.executable, "-c", PROGRAM]) == 0
    out = capfd.readouterr().out
    counts = "in 2 processes (js.simulate_devices counts the devices of each process); set one size to -1"
    expected = [
        "sum 28",
        f"make_mesh: data=4 needs 4 devices, but there are 8 {counts}, or call js.simulate_devices(2) first",
        f"make_mesh: data=3 needs 3 devices, but there are 8 {counts}",
        "simulate_devices(8): JAX already runs on 4 cpu device(s) in this process; call it at the top of the program, "
        "before anything creates an array",
    ]
    for index in "01":
        assert re.findall(rf"^\[{index}\] (.*)$", out, re.MULTILINE) == expected
