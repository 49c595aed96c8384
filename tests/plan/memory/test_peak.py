"""The peak of training steps: its roles, and recorded peaks of compiled programs."""

import json

import jax
import jax.numpy as jnp
import optax
import pytest

import jaxshard as js
from jaxshard.plan.memory.peak import moment_str, role_of, step_graph, step_peak, traced_step
from tests.benchmarks.scripts import BENCHMARKS, script

plan = script("plan")
KNOWN = json.loads((BENCHMARKS / "plan_peaks.json").read_text())


def test_roles_of_a_step():
    model, tx, mesh = js.models.make("gpt-1m", seq=32), optax.adamw(1e-3), js.plan.planned_mesh("v5e:2x4", data=8)
    layout, engine = js.layout(js.fsdp(), mesh, model.init, tx), js.explicit(precision="bf16")
    batch = {"tokens": jax.ShapeDtypeStruct((512, 33), jnp.int32)}
    program = js.make_step(model.loss, tx, layout, engine=engine).trace(batch)
    region = step_graph(traced_step(program.jaxpr, layout, engine, batch), dict(mesh.shape), tpu=True)
    peak = step_peak(region, dict(mesh.shape), tpu=True, vocab=frozenset({256}))
    roles = {}
    for one in peak.moment.live:
        roles[role_of(one, peak)] = roles.get(role_of(one, peak), 0) + one.bytes
    # The inputs of 4 blocks: bf16[4, 64 rows, 32 positions, 144], in tiles of 256 lanes.
    assert roles["kept activations"] >= 4 * 64 * 32 * 256 * 2
    assert sum(roles.values()) == peak.moment.total
    assert moment_str(peak.moment).startswith(("forward pass", "backward pass"))


@pytest.mark.filterwarnings("ignore:attention", "ignore:tensor")
@pytest.mark.parametrize(
    "number", [0, pytest.param(1, marks=pytest.mark.slow), pytest.param(6, marks=pytest.mark.slow)]
)
def test_recorded_peaks_are_within_the_band(plan, number):
    row = KNOWN[number] | plan.estimate(plan.Case(**KNOWN[number]["case"]))
    assert abs(plan.error_of(row)) <= 0.25


@pytest.mark.slow(sampled=False)
@pytest.mark.filterwarnings("ignore:attention", "ignore:tensor")
def test_all_recorded_peaks_are_within_the_figures_of_the_page(plan):
    rows = [entry | plan.estimate(plan.Case(**entry["case"])) for entry in KNOWN]
    found = plan.summarize(rows)
    assert found["median"] <= 0.08 and found["p90"] <= 0.25 and not found["wrongly_fits"]
