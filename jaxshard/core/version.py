"""The version of this package, known without what an installer writes beside it."""

__version__ = "0.1.0"
