"""What flags make of the engine."""

import pytest

from jaxshard.commands.flags import ShardingFlags
from jaxshard.commands.main import main
from jaxshard.commands.parallel import make_parallel

NAMES = {"attention_out": "save", "block_in": "offload"}


@pytest.mark.parametrize(
    ("mesh", "remat", "field", "expected"),
    [
        (None, "attention_out=save, block_in=offload", "remat", NAMES),
        (None, "dots", "remat", "dots"),
        (None, None, "remat", None),
        ("data=4,pipe=2", "attention_out=save,qkv=remat", "stash", {"attention_out": "save", "qkv": "remat"}),
        ("data=4,pipe=2", "nothing", "stash", "layer"),
        ("data=4,pipe=2", None, "stash", "layer"),
    ],
)
def test_what_the_forward_pass_keeps(mesh, remat, field, expected):
    assert getattr(make_parallel(ShardingFlags(mesh=mesh), remat=remat).engine, field) == expected


@pytest.mark.slow
@pytest.mark.parametrize("command", [["audit", "llama-1m"], ["train", "--model", "llama-1m", "--sample", "0"]])
def test_an_activation_that_the_model_does_not_name_is_refused_in_one_line(command, capsys):
    flags = ["--change", "depth=2", "--batch", "8", "--seq", "16", "--remat", "mlp_hiden=save"]
    assert main([*command, *flags]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("jaxshard: remat: no activation is named 'mlp_hiden'; there are 'attention_out', ")
