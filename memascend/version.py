"""The version as text, so that a build can read it without the package's dependencies."""

__version__ = "0.1.0"
