"""Replay recorded gradient spikes and judge mitigations. Public names live in the rooms below."""

__version__ = "0.1.0"
