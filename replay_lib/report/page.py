"""Facts to one HTML page that needs nothing beside it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from replay_lib import __version__
from replay_lib.report import view
from replay_lib.report.facts import Facts
from replay_lib.report.plots import Shown, command_on, shown


def render_page(facts: Facts, plots: Sequence[Shown] | None = None) -> str:
    """The page: all text escaped, no script, nothing loaded; equal facts give equal pages.

    ``plots`` where somebody drew them already.
    """
    # here, since a node that only replays needs neither
    from jinja2 import Environment, PackageLoader, StrictUndefined
    from markupsafe import Markup

    environment = Environment(
        loader=PackageLoader("replay_lib.report"),
        autoescape=True,
        undefined=StrictUndefined,
        keep_trailing_newline=True,
    )
    style = environment.loader.get_source(environment, "style.css")[0]  # type: ignore[union-attr]
    cases, rows = view.matrix(facts)
    values: dict[str, Any] = {
        "facts": facts,
        "style": Markup(style),
        "version": __version__,
        "headline": view.headline(facts),
        "step": view.selected_step(facts),
        "keys": view.key_figures(facts),
        "places": view.places(facts),
        "baselines": view.baselines(facts),
        "plots": shown(facts) if plots is None else plots,
        "matrix_cases": cases,
        "matrix_rows": rows,
        "attempts": view.attempts(facts),
        "reasons": list(view.reasons(facts)),
        "failures": view.failures(facts),
        "methods": view.methods(facts),
        "environment": view.environment(facts),
        "replay_command": command_on(facts, "replay"),
        "analyze_command": command_on(facts, "analyze"),
    }
    functions = {
        "sign_of": view.sign_of,
        "when": view.when,
        "number": view.number,
        "fidelity": view.fidelity,
    }
    return environment.get_template("page.html").render(**values, **functions)
