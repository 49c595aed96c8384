"""The mesh, strategy and engine that flags make."""

import re

import jax.numpy as jnp
import pytest

import jaxshard as js
from jaxshard.checks.collectives.compiler_choices import explain_substitutes
from jaxshard.commands.flags import Sharding
from jaxshard.commands.main import main
from jaxshard.commands.parallel import make_parallel, read_outer
from jaxshard.core.layout import split_rows
from jaxshard.core.strategy_parts import Expert, part_of

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
    assert getattr(make_parallel(Sharding(mesh=mesh), remat=remat).engine, field) == expected


def test_both_names_of_bfloat16_are_one_precision():
    assert make_parallel(Sharding(), precision="bfloat16").engine == make_parallel(Sharding(), precision="bf16").engine


@pytest.mark.slow
@pytest.mark.parametrize("command", [["audit", "llama-1m"], ["train", "--model", "llama-1m", "--sample", "0"]])
def test_an_activation_that_the_model_does_not_name_is_refused_in_one_line(command, capsys):
    flags = ["--change", "depth=2", "--batch", "8", "--seq", "16", "--remat", "mlp_hiden=save"]
    assert main([*command, *flags]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("jaxshard: remat: no activation is named 'mlp_hiden'; there are 'attention_out', ")


@pytest.mark.parametrize(
    ("mesh", "strategy", "rows", "multiple"),
    [
        ("data=2,expert=4", "fsdp", ("data", "expert"), 8),
        ("expert=8", "zero2", ("data", "expert"), 8),
        ("replica=2,data=2,expert=2", "hsdp", ("replica", "data", "expert"), 8),
        ("data=2,expert=2,tensor=2", "ddp", ("data", "expert"), 4),
    ],
)
def test_an_axis_expert_splits_rows_and_experts(mesh, strategy, rows, multiple):
    how = make_parallel(Sharding(mesh=mesh, strategy=strategy))
    assert (split_rows(how.strategy, how.mesh), how.rows_multiple) == (rows, multiple)
    assert part_of(how.strategy, Expert).axis == ("expert",)


@pytest.mark.parametrize(
    ("axes", "strategy", "rows"),
    [
        ({"data": 8}, "fsdp", ("data0", "data1")),
        ({"data": 8}, "zero1", ("data0", "data1")),
        ({"replica": 2, "data": 4}, "hsdp", ("replica", "data0", "data1")),
    ],
)
def test_the_mesh_that_the_audit_advises_for_a_torus_is_accepted_as_it_is_printed(axes, strategy, rows):
    """One axis over a v5e's 2 x 4 chips, or over 2 x 2 of them, where one axis for each dimension scatters."""
    if strategy == "hsdp":  # the replicas along the third dimension of a cube
        mesh = js.plan.planned_mesh("v5p:2x2x2", **axes)
    else:
        mesh = js.plan.planned_mesh("v5e:2x4", **axes)
    remedy = explain_substitutes(mesh, ("data",))
    (flag,) = re.findall(r"--mesh (\S+)$", remedy)
    how = make_parallel(Sharding(mesh=flag, strategy=strategy))
    assert (split_rows(how.strategy, how.mesh), how.rows_multiple) == (rows, 8)
    named = re.findall(r"'(data\d)'", remedy)
    assert tuple(named) == rows[-2:]
    assert make_parallel(Sharding(mesh="data0=2,data1=2,tensor=2", strategy="fsdp")).rows_multiple == 4


@pytest.mark.parametrize(
    ("rule", "dim"),
    [((), "dim 0 over"), (("vocab=replicated",), None), (("vocab=whole", "embed=tensor"), "dim 1 over")],
)
def test_a_rule_decides_about_a_logical_axis(rule, dim):
    """An embedding [vocab, width] is sharded over tensor along vocab, unless a rule says otherwise."""
    model = js.models.gpt(vocab=64, width=32, depth=1, heads=4, seq=16)
    layout = make_parallel(Sharding(mesh="data=4,tensor=2", strategy="ddp", rule=rule)).layout(model.init)
    (row,) = (line for line in layout.explain().splitlines() if "[64, 32]" in line and line.startswith("param"))
    assert f"{dim} tensor" in row if dim else "over tensor" not in row


def test_a_pattern_of_a_rule_that_fits_nothing_is_refused():
    model = js.models.gpt(vocab=64, width=32, depth=1, heads=4, seq=16)
    how = make_parallel(Sharding(mesh="data=4,tensor=2", rule=("*/scal=replicated",)))
    with pytest.raises(ValueError, match=r"--rule: tensor: rules without effect: '\*/scal' matches no path"):
        how.layout(model.init)


def moves(text, gradients):
    tx = read_outer(text)
    state, found = tx.init(jnp.zeros(())), []
    for gradient in gradients:
        update, state = tx.update(jnp.asarray(gradient), state)
        found.append(float(update))
    return found


@pytest.mark.parametrize(
    ("text", "updates"),
    [
        ("average", [-1.0, -2.0]),
        ("rate=0.5", [-0.5, -1.0]),
        ("rate=0.5, momentum=0", [-0.5, -1.0]),
        # Of gradients 1 and 2 the sums are 1 and 2.5, and a step goes along gradient + half of the sum.
        ("rate=1,momentum=0.5", [-1.5, -3.25]),
    ],
)
def test_a_value_stands_for_gradient_descent(text, updates):
    assert moves(text, [1.0, 2.0]) == updates
