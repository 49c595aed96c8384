"""The best plans of a search before the compiler: which are asked, which stay, and a compiler that fails."""

from types import SimpleNamespace

from jaxshard.plan.prediction import Prediction
from jaxshard.plan.search.candidates import Candidate
from jaxshard.plan.search.judged import judged
from jaxshard.plan.search.policies import Policy
from jaxshard.plan.search.ranking import Plan
from jaxshard.plan.time.step_time import StepTime


def plan(seconds, data=8, policy="nothing"):
    time = StepTime((seconds, seconds), host=(0.0, 0.0))
    prediction = Prediction(
        mesh={"data": data}, chip=None, judged_by="estimate", live_bytes=1, allocated_bytes=None, argument_bytes=0,
        time=time,
    )  # fmt: skip
    return Plan(Candidate((("data", data),), "fsdp", policy=Policy(policy)), prediction)


def test_the_compiler_is_asked_until_enough_fit_and_may_fail():
    plans = [plan(1, 8), plan(2, 16), plan(3, 32), plan(4, 8, "dots"), plan(5, 64), plan(6, 128)]
    asked = []

    def judge(one):
        asked.append(one.seconds[0])
        if one.seconds[0] == 2:
            raise RuntimeError("INTERNAL: a fault of the compiler")
        return SimpleNamespace(fits=one.seconds[0] != 3)

    found = judged(plans, 2, judge, lambda one: (one.fits is not True, one.seconds), lambda words: None)
    # The second fails, the third does not fit, the fourth is the first with another policy.
    assert sorted(asked) == [1, 2, 3, 5]
    assert [(one.seconds[0], one.compiled is not None) for one in found] == [(1, True), (5, True), (6, False)]
