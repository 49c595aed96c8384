"""The command line: every command is a file with a function `run`, which `main` finds.

    words ── parse.py ──> flags.py: a dataclass for each command ──> the command's run(flags)
                          parallel.py, engine.py, optimizer.py, program.py: its values as those of js
                          terminal.py, result.py: what is printed, and the JSON object

Up to run nothing imports JAX. Imports `core/`, `adapt/`, `cost/`, `schedules/`, `distributed/`, `optim/`, `data/`,
`models/`, `engines/`, `training/`, `checkpoint/`, `checks/`, `generation/`, `plan/` and `hf/`; only `__main__` imports
it.
"""
