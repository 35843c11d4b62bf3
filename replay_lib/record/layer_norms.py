"""Norms of parameters added up to norms of layers and of their parts: what a page can show.

A model has thousands of parameters; a layer has a handful of parts. Parts are ``attention``,
``router``, ``experts``, ``shared experts``, ``mlp`` (a dense one) and ``norms`` of a layer, and
``embedding``, ``final norm`` and ``output layer`` outside the layers.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping

_LAYER = re.compile(r"(?:^|\.)layers\.(\d+)\.(.+)$")
#: The first text that a parameter's name holds decides: norms lie inside what they belong to.
_PARTS = (
    ("norm", "norms"),
    ("router", "router"),
    ("shared_experts", "shared experts"),
    ("experts", "experts"),
    ("attention", "attention"),
    ("mlp", "mlp"),
)
_OUTSIDE = (
    ("embedding", "embedding"),
    ("final_layernorm", "final norm"),
    ("output_layer", "output layer"),
)
OTHER = "other"


def group_of(name: str) -> str:
    """``layers.<i>.<part>`` or ``<part>`` of a parameter by Megatron's name, wrapped or not."""
    inside = _LAYER.search(name)
    if inside is None:
        return next((part for text, part in _OUTSIDE if text in name), OTHER)
    part = next((part for text, part in _PARTS if text in inside[2]), OTHER)
    return f"layers.{int(inside[1])}.{part}"


def layer_norms(param_norms: Mapping[str, float]) -> dict[str, float]:
    """L2 norm of each group of :func:`group_of`, in the order of first appearance.

    ``param_norms`` are L2 norms of parameters by name. A group with a norm that is not finite is
    not finite.
    """
    return _joined((group_of(name), norm) for name, norm in param_norms.items())


def by_layer(groups: Mapping[str, float]) -> dict[str, float]:
    """Norms of whole layers (``layer <i>``, in order) between what lies before and after them."""
    inside = {f"layer {_number(g)}": _number(g) for g in groups if g.startswith("layers.")}
    told = _joined(
        (f"layer {_number(g)}" if g.startswith("layers.") else g, n) for g, n in groups.items()
    )
    order = ["embedding", *sorted(inside, key=inside.__getitem__)]
    return {
        name: told[name] for name in [*order, *(n for n in told if n not in order)] if name in told
    }


def by_part(groups: Mapping[str, float]) -> dict[str, float]:
    """Norms of each part over all layers."""
    return _joined((group.rpartition(".")[2], norm) for group, norm in groups.items())


def _number(group: str) -> int:
    return int(group.split(".")[1])


def _joined(pairs: Iterable[tuple[str, float]]) -> dict[str, float]:
    """Roots of summed squares; ``hypot`` neither overflows nor loses what is not finite."""
    found: dict[str, float] = {}
    for name, norm in pairs:
        found[name] = math.hypot(found.get(name, 0.0), norm)
    return found
