"""The command line: `main` finds the command, every command is a file.

Imports every room; only `__main__` imports it. A command's file is imported when the command is used.
"""
