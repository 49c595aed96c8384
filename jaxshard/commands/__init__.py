"""The command line: `main` finds the command, every command is a file.

A command's file is imported when the command is used. Imports `core/`, `adapt/`, `cost/`, `schedules/`,
`distributed/`, `data/`, `models/`, `engines/`, `training/`, `checkpoint/`, `checks/`, `generation/`, `plan/` and
`hf/`; only `__main__` imports it.
"""
