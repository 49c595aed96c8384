"""Chips against their names, and utilization against a quotient made by hand."""

import pytest

from jaxshard.cost.hardware import KINDS, chip, mfu


@pytest.mark.parametrize(
    ("kind", "peak"),
    [("TPU v4", 275e12), ("TPU v5 lite", 197e12), ("TPU v5", 459e12), ("TPU v6 lite", 918e12), ("TPU7x", 2307e12 / 2),
     ("TPU v3", 123e12 / 2), ("NVIDIA A100-SXM4-80GB", 312e12), ("NVIDIA H200", 989e12), ("NVIDIA B200", 2250e12),
     ("AMD Instinct MI300X", 1307.4e12), ("AMD Instinct MI325X", 1307.4e12)],
)  # fmt: skip
def test_chips(kind, peak):
    assert chip(kind).peak_flops == peak


@pytest.mark.parametrize(("name", "kind"), [*KINDS.items(), ("H100", KINDS["h100"])])
def test_a_short_name_is_that_of_a_kind(name, kind):
    assert chip(name) is not None and chip(name) == chip(kind)
    assert mfu(1e12, name, 1) == mfu(1e12, kind, 1)


def test_f32_products_on_gpus_with_and_without_tf32():
    """A100's data sheet has 156 TFLOPs of TF32 and 19.5 of f32; on MI300X, XLA computes in f32: 163.4 TFLOPs."""
    for kind, default, exact in (("a100", 156e12, 19.5e12), ("mi300x", 163.4e12, 163.4e12)):
        assert (chip(kind).rate("float32"), chip(kind).rate("float32", passes=6)) == (default, exact)


def test_an_mi300x_has_binary_gigabytes_and_twice_the_rate_in_8_bits():
    """Its driver tells 196288 MiB; the data sheet 2614.9 TFLOPs and TOPS, and seven links of 128 GB/s both ways."""
    found = chip("AMD Instinct MI300X")
    assert found.hbm_bytes == pytest.approx(196288 * 2**20, rel=5e-3)
    assert found.rate("float8_e4m3fnuz") == found.rate("int8") == pytest.approx(2614.9e12, rel=1e-4)
    assert found.network.bandwidth == 7 * 128e9 / 2 and found.network.island == 8


def test_half_a_chip():
    assert chip("TPU v4", num_cores=1).peak_flops == 275e12 / 2
    assert chip("TPU v4", num_cores=1).hbm_bytes == 16 * 2**30
    assert chip("TPU v5p", num_cores=2) == chip("TPU v5p")


def test_a_program_may_use_what_jax_takes_of_a_gpu(monkeypatch):
    """0.75 of 85.0 GB: `memory_stats()["bytes_limit"]` was 63763906560 on an H100, without preallocation, too."""
    assert chip("h100").usable_bytes == pytest.approx(63763906560, rel=1e-3)
    monkeypatch.setenv("XLA_CLIENT_MEM_FRACTION", "0.9")
    assert chip("h100").usable_bytes == pytest.approx(0.9 * chip("h100").hbm_bytes)
    monkeypatch.setenv("XLA_PYTHON_CLIENT_ALLOCATOR", "platform")
    assert chip("h100").usable_bytes == chip("h100").hbm_bytes
    assert chip("v5e").usable_bytes == int(15.75 * 2**30)


def test_a_fraction_that_jax_would_refuse_is_refused(monkeypatch):
    monkeypatch.setenv("XLA_PYTHON_CLIENT_MEM_FRACTION", "90")
    with pytest.raises(ValueError, match="MEM_FRACTION=90 is no fraction of a GPU"):
        chip("h100")


@pytest.mark.parametrize("kind", ["cpu", "NVIDIA H100", "TPU v99", ""])
def test_an_unknown_chip_is_not_guessed(kind):
    assert chip(kind) is None
    assert mfu(1e12, kind, 8) is None


def test_mfu():
    assert mfu(197e12, "TPU v5e", 2) == 0.5
