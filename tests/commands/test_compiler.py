"""Loading the compiler of absent chips: what libtpu prints is left out, unless loading fails."""

import os

import pytest

from jaxshard.commands import compiler


@pytest.mark.parametrize("fails", [False, True])
def test_lines_of_the_library_are_left_out_unless_it_fails(fails, capfd, monkeypatch):
    def describe(name, *, num_slices):
        os.write(2, b"Failed to find host bounds\n")
        if fails:
            raise ValueError(f"no TPU topology {name!r}")

    monkeypatch.setattr(compiler, "has_compiler", lambda target: True)
    monkeypatch.setattr(compiler, "topology_devices", describe)
    if fails:
        with pytest.raises(ValueError, match="no TPU topology 'v5e:2x4'"):
            compiler.load_compiler("v5e:2x4")
    else:
        compiler.load_compiler("v5e:2x4")
    os.write(2, b"after\n")
    assert capfd.readouterr().err == "Failed to find host bounds\n" * fails + "after\n"
