"""The benchmark of compiler options: its tables, and what its record says of the options that engines set."""

from jaxshard.cost.hardware import KINDS
from jaxshard.engines.compiler_options import OVERLAP
from tests.benchmarks.scripts import script

benchmark = script("compiler_options")


def row(setting, **figures):
    about = {"chip": "v6e", "model": "llama3-8b", "setting": setting, "compiler": "libtpu 1"}
    sizes = dict.fromkeys(("temporaries", "live", "allocated", "waits", "gathers waited for", "moved"), 2 * 10**9)
    return about | sizes | {"program": setting, "operations": 3} | figures


def test_a_table_shows_changes_refusals_and_settings_without_effect(benchmark):
    rows = [
        row("none", cycles=200 * 10**6),
        row("SC gathers", waits=0, live=2_100_000_000, cycles=210 * 10**6),
        row("native bf16", program="none"),
        {"chip": "v6e", "model": "llama3-8b", "setting": "fused sums", "compiler": "libtpu 1", "refused": "no such"},
    ]
    lines = benchmark.tables(rows).splitlines()
    assert lines[0] == "llama3-8b, v6e:4x4, data=16, rows of 8192, libtpu 1:"
    assert "| 2.100 (+5.0 %) |" in lines[5] and "| 0.000 (-100.0 %) |" in lines[5] and "210.0 M (+5.0 %)" in lines[5]
    assert "the same program" in lines[6] and "refused: no such" in lines[7]


def test_options_are_set_where_less_is_waited_for_and_memory_does_not_rise(benchmark):
    """By the record: gathers on SparseCores, which the engine sets on v6e, for at most 3 % of allocated memory."""
    rows = benchmark.read(benchmark.RESULTS)
    saved = []
    for (chip, model, compiler, setting), one in rows.items():
        options = benchmark.settings_of(chip)[setting]
        if setting != benchmark.NONE and options.items() <= OVERLAP.get(KINDS[chip], {}).items():
            base = rows[chip, model, compiler, benchmark.NONE]
            assert one["allocated"] <= 1.03 * base["allocated"], (chip, model, setting)
            saved.append(base["waits"] - one["waits"])
    assert min(saved) >= 0 and max(saved) > 0
