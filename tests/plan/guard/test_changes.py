"""Silent faults are named with their line and bytes, and refactorings without effect are not reported."""

import importlib.util
import re

import jax
import pytest

import jaxshard as js
from jaxshard.compiler.topology import topology_devices
from tests.plan.guard import faults, refactorings

QUICK = ("a reduce-scatter that became an all-reduce", "a step that compiles twice")
FAULTS = [
    pytest.param(
        fault,
        id=name,
        marks=[pytest.mark.slow] * (name not in QUICK) + [pytest.mark.tpu] * (fault.topology is not None),
    )
    for name, fault in faults.ALL.items()
]


@pytest.fixture
def file(tmp_path):
    return tmp_path / "step.guard.json"


def call(made, file, **options):
    step, arguments, *later = made
    return js.guard(step, arguments, file, later=later, **options)


@pytest.mark.parametrize("fault", FAULTS)
def test_a_published_fault_is_named_with_its_line_and_bytes(fault, file):
    devices = topology_devices(fault.topology) if fault.topology else jax.devices()
    call(fault.good(devices), file, topology=fault.topology, record=True)
    assert call(fault.good(devices), file, topology=fault.topology).ok
    with pytest.raises(js.GuardChanged) as error:
        call(fault.bad(devices), file, topology=fault.topology)
    sentence = re.escape(fault.sentence).replace(r"\.\.\.", r"[\d,.]*")
    found = re.search(rf"^- {sentence}(.*)\n    \w", str(error.value), re.MULTILINE)
    assert found, str(error.value)
    if "over" in fault.sentence.split(":")[0] and "opt" not in fault.sentence and "params" not in fault.sentence:
        assert re.search(r": (near )?\S*guard/(faults|programs)\.py:\d+$", found[1])


def make(text, name, folder, devices):
    """Run the text of a program as a module of its own, in a file, since compiled programs name their lines."""
    path = folder / f"{name}.py"
    path.write_text(text)
    spec = importlib.util.spec_from_file_location(name, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.make(devices)


@pytest.fixture(scope="module")
def recorded(tmp_path_factory):
    folder = tmp_path_factory.mktemp("plain")
    call(make(refactorings.SOURCE, "plain_step", folder, jax.devices()), folder / "step.guard.json", record=True)
    return folder / "step.guard.json"


@pytest.mark.fast_cases(1)
@pytest.mark.parametrize("name", list(refactorings.EDITS))
def test_a_refactoring_without_effect_is_not_reported(name, recorded, tmp_path):
    made = make(refactorings.edited(refactorings.EDITS[name]), "other_file", tmp_path, jax.devices())
    found = call(made, recorded)
    assert found.changes == found.notes == ()
