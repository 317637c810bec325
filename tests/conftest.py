"""Shared fixtures and the gates that state what is missing when a test cannot run here."""

from __future__ import annotations
