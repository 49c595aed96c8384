"""Pipeline schedules as tables: named schedules, your own, their costs, and pictures.

`table` has the table and its rules, `schedule` the public class, and `named` the known schedules. `runs` determines
when embedding and head run. `stats`, `chart`, `page`, `plot` and `file` show a schedule. `buffers` and `packing`
convert it to the form that `engines/pipeline` executes. Imports `core/` only.
"""

from jaxshard.schedules.named import NAMES as NAMES
from jaxshard.schedules.named import ONE_CHUNK as ONE_CHUNK
from jaxshard.schedules.named import full_name as full_name
from jaxshard.schedules.named import gpipe as gpipe
from jaxshard.schedules.named import interleaved as interleaved
from jaxshard.schedules.named import named as named
from jaxshard.schedules.named import one_f_one_b as one_f_one_b
from jaxshard.schedules.named import zero_bubble as zero_bubble
from jaxshard.schedules.plot import plot_schedule as plot_schedule
from jaxshard.schedules.plot import schedule_figure as schedule_figure
from jaxshard.schedules.runs import Run as Run
from jaxshard.schedules.runs import embed_grad_runs as embed_grad_runs
from jaxshard.schedules.runs import embed_runs as embed_runs
from jaxshard.schedules.runs import head_runs as head_runs
from jaxshard.schedules.schedule import Schedule as Schedule
from jaxshard.schedules.stats import Costs as Costs
from jaxshard.schedules.stats import Stats as Stats
from jaxshard.schedules.table import Kind as Kind
from jaxshard.schedules.table import Op as Op
