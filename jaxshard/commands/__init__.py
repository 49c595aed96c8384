"""The command line: every command is a file with a function `run`, which `main` finds.

    words ── parse.py ──> flags.py: a dataclass for each command ──> the command's run(flags)
                          parallel.py, engine.py, optimizer.py, named_model.py, program.py: values of js
                          terminal.py, result.py: print facts and tables, write the JSON object

Before `run` nothing imports JAX. Imports `core/`, `adapt/`, `compiler/`, `cost/`, `hlo/`, `schedules/`,
`distributed/`, `storage/`, `optim/`, `data/`, `models/`, `engines/`, `training/`, `checkpoint/`, `checks/`,
`generation/`, `plan/`, `profile/` and `hf/`; only `__main__` imports it, and IPython its notebook.py, by
`%load_ext jaxshard.commands.notebook`.
"""
