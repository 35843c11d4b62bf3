"""Replays on another machine: copied there over ssh, run detached, results brought back."""
