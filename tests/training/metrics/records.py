"""Records for the tests of writers."""

import math

from jaxshard.training.records import Record

RECORDS = [
    Record(1, {"loss": 5.371376037597656, "grad_norm": 1.5}, 0.5, {"tokens_per_second": 4096.0}),
    Record(2, {"loss": math.nan, "grad_norm": math.inf}, 0.25, {"tokens_per_second": 8192.0}, {"loss": 2.5}),
]


def record(step: int) -> Record:
    return Record(step, {"loss": 1.0 / step}, 0.5, {"rows_per_second": 2.0})
