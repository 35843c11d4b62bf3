"""Small training runs that produce real spikes with a known cause. Needs no torch on import."""

from replay_lib.zoo.kinds import KINDS, Kind, find_kind
from replay_lib.zoo.make import make_spike, make_spikes
from replay_lib.zoo.recipe import Recipe

__all__ = ["KINDS", "Kind", "Recipe", "find_kind", "make_spike", "make_spikes"]
