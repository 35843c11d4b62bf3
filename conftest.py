"""Options of the whole repository; a checkout that is not installed gets the plugin from here."""

from __future__ import annotations

from importlib.metadata import entry_points

_INSTALLED = any(point.name == "spike_replay" for point in entry_points(group="pytest11"))

pytest_plugins = ["pytester", *([] if _INSTALLED else ["replay_lib.pytest_plugin"])]
