"""Step times that others published, against the predictions: tolerance 15 % of the median."""

import statistics

import pytest

from tests.benchmarks.scripts import script

step_times = script("step_times")


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:attention")
def test_published_step_times_are_predicted(step_times):
    found = [step_times.predict(case) for case in step_times.PREDICTED]
    assert len(found) >= 6
    assert statistics.median(abs(one.error) for one in found) <= 0.15
    for one in found:
        # Where one is further off, the part is named, and why.
        assert abs(one.error) <= 0.15 or (step_times.explain(one) and one.case.off), one.case.name


@pytest.mark.slow
def test_the_calibrated_number_is_that_of_two_figures(step_times):
    found = step_times.calibrate([step_times.predict(case) for case in step_times.CALIBRATION])
    assert found == pytest.approx(sum(step_times.TRAFFIC) / 2, abs=0.05)
