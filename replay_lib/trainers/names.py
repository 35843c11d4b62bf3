"""How a trainer is named: ``grpo``, ``axrl`` or ``module:factory``. No torch."""

from __future__ import annotations

from replay_lib.errors import UsageError

GRPO = "grpo"
AXRL = "axrl"


def check_name(text: str) -> str:
    """``text`` if a trainer can be named so; UsageError else. Nothing is imported."""
    if text in (GRPO, AXRL) or _is_factory(text):
        return text
    raise UsageError(
        f"trainer {text!r}: expected {GRPO} (the built-in loss), {AXRL} (the installed trainer's "
        "own) or module:factory"
    )


def _is_factory(text: str) -> bool:
    module, colon, factory = text.partition(":")
    parts = [*module.split("."), factory]
    return bool(colon) and all(part.isidentifier() for part in parts)
