"""Files of this package, told apart from the user's and from other libraries'."""

import os
import subprocess
import sys
from pathlib import Path

import jax
import pytest

import jaxshard
from jaxshard.core import our_code
from jaxshard.core.our_code import is_jaxshard_file, package_folder


def test_a_package_is_found_by_its_name():
    folder = package_folder("jaxshard.engines")
    assert folder.is_absolute() and (folder / "auto.py").is_file()
    assert folder.parent == package_folder("jaxshard")


@pytest.mark.parametrize("name", ["jaxshard.nowhere", "jaxshard.core.our_code"])
def test_what_is_no_package_is_an_error_with_its_name(name):
    with pytest.raises(ModuleNotFoundError, match=rf"no package '{name}'"):
        package_folder(name)


def test_only_files_below_the_package_are_its_own():
    assert is_jaxshard_file(our_code.__file__)
    assert is_jaxshard_file(jaxshard.__file__)
    assert not is_jaxshard_file(__file__)
    assert not is_jaxshard_file(jax.__file__)
    assert not is_jaxshard_file("/home/user/jaxshard/train.py")


def test_a_package_behind_a_symbolic_link_knows_its_own_files(tmp_path):
    (tmp_path / "link").symlink_to(Path(__file__).parents[2], target_is_directory=True)
    program = (
        "from jaxshard.core import our_code; print(our_code.__file__, our_code.is_jaxshard_file(our_code.__file__))"
    )
    environment = os.environ | {"PYTHONPATH": str(tmp_path / "link")}
    command = [sys.executable, "-c", program]
    result = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=True)
    assert result.stdout.split() == [str(tmp_path / "link/jaxshard/core/our_code.py"), "True"]
