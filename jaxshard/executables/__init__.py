"""Compiled programs as files: compiled on one machine, loaded and run on another without compiling.

    file.py      writes and reads a file, and refuses a file of another program, other devices or other versions
    trust.py     refuses a file that somebody else could have written, because loading it runs code

Imports `core/`.
"""
