"""How several processes share the devices that a command asks for."""

from types import SimpleNamespace

import jax
import pytest

from jaxshard.commands import devices
from jaxshard.commands.devices import choose_devices, describe


@pytest.fixture
def processes(monkeypatch):
    """So many processes with so many devices each, of a platform; returns what JAX was told of CPU devices."""

    def made(count, each, platform):
        told = {}
        found = [
            SimpleNamespace(process_index=process, id=process * 100 + number, platform=platform, device_kind="chip")
            for process in range(count)
            for number in range(each)
        ]
        monkeypatch.setattr(devices, "process_count_and_id", lambda: (count, 0))
        monkeypatch.setattr(devices, "backend_is_initialized", lambda: False)
        monkeypatch.setattr(devices, "_is_simulated", lambda: False)
        monkeypatch.setattr(devices, "default_devices", lambda: found)
        monkeypatch.setattr(jax.config, "update", told.__setitem__)
        return told

    return made


def test_the_eight_are_divided(processes):
    told = processes(4, 2, "cpu")
    chosen = choose_devices(None)
    assert len(chosen) == 8 and told == {"jax_num_cpu_devices": 2}
    assert describe(chosen) == "8 simulated CPU devices in 4 processes"


def test_without_accelerators_there_are_as_many_as_the_mesh_needs(processes):
    told = processes(1, 16, "cpu")
    assert len(choose_devices(None, 16)) == 16 and told == {"jax_num_cpu_devices": 16}
    processes(1, 16, "tpu")
    assert len(choose_devices(None, 8)) == 16  # accelerators are never left out silently: the mesh refuses them


def test_a_count_is_divided(processes):
    told = processes(3, 4, "cpu")
    assert [device.id for device in choose_devices(6)] == [0, 1, 100, 101, 200, 201]
    assert told == {"jax_num_cpu_devices": 2}


def test_each_accelerator_counts(processes):
    processes(3, 4, "tpu")
    assert len(choose_devices(None)) == 12
    assert describe(choose_devices(3)) == "3 x chip in 3 processes"
    with pytest.raises(ValueError, match="--devices 15: there are 12 tpu"):
        choose_devices(15)


@pytest.mark.parametrize(("count", "message"), [(None, "8 simulated CPU devices"), (8, "--devices 8")])
def test_what_does_not_divide_names_both_numbers(processes, count, message):
    processes(3, 2, "cpu")
    with pytest.raises(ValueError, match=f"{message} can't be divided over 3 processes; .* a multiple of 3"):
        choose_devices(count)
