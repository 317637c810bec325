"""Planned and measured bytes side by side, and what is written against what drives endure."""
