"""Every number of a zoo run: model, warm-up, rollouts, optimizer. Plain data, no torch.

The numbers come from trying: with an accuracy under 0.6 after the warm-up, or with 64 rows instead
of 128, sampling noise hides nearly every cause.
"""

from __future__ import annotations

import hashlib
import json
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict

from replay_lib.errors import UsageError

#: Raised whenever the code computes another run from the same numbers: cached runs are then stale.
CODE = 1


class _Numbers(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class Shape(_Numbers):
    """The model: a GPT whose every layer holds experts."""

    layers: int = 4
    hidden: int = 64
    heads: int = 4
    groups: int = 2  # key/value heads
    channels: int = 16  # of a head
    experts: int = 8
    expert_width: int = 64
    topk: int = 2
    vocabulary: int = 32
    rotary_base: int = 10000
    epsilon: float = 1e-6  # of every RMSNorm


class Warmup(_Numbers):
    """Supervised steps before the reinforcement learning, until the task is learnt well enough.

    The learning rate stays until the mean loss of the last ``window`` steps (nats a trained token)
    is under ``decay_under``, then falls in ``decay`` steps to a tenth; the warm-up ends under
    ``end_under``. How long a seed stays on the plateau before the sums are learnt varies; where it
    ends does not: 0.0075 is an accuracy of about 0.88.
    """

    rows: int = 32
    learning_rate: float = 3e-3
    betas: tuple[float, float] = (0.9, 0.99)
    rise: int = 20  # steps in which the learning rate rises to its value
    window: int = 20
    decay_under: float = 0.1
    decay: int = 300
    end_under: float = 0.0075
    longest: int = 2500
    old_under: float = 0.3  # the much older policy and router: the first weights under this loss


class Grpo(_Numbers):
    """The reinforcement learning; the loss settings are those of the snapshot."""

    prompts: int = 16
    rollouts: int = 8  # a prompt
    longest: int = 24  # tokens of a response
    learning_rate: float = 1e-4
    betas: tuple[float, float] = (0.9, 0.95)
    clip_grad: float = 1.0
    steps: int = 50  # quiet steps before a cause is switched on
    graded: bool = False  # score: the share of right characters instead of the last sum
    stale: int = 1  # age of the rollout engine's weights, in steps
    kept: int = 8  # steps whose weights are kept: no rollout engine is further behind
    rows_at_once: int = 32  # train_micro_batch_size
    seq_length: int = 64


class Recipe(_Numbers):
    """One base run, up to its seed. ``precision`` is that of weights and activations; the
    optimizer's own weights are float32 in any case."""

    shape: Shape = Shape()
    warmup: Warmup = Warmup()
    grpo: Grpo = Grpo()
    device: Literal["cpu", "cuda"] = "cpu"
    precision: Literal["float32", "bfloat16"] = "float32"

    def key(self, seed: int, versions: dict[str, str]) -> str:
        """Names the cached base run: whatever could change a bit of it is in here."""
        parts: dict[str, Any] = {
            "code": CODE,
            "recipe": self.model_dump(mode="json"),
            "seed": seed,
            "versions": versions,
        }
        text = json.dumps(parts, sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:16]


#: 0.56 billion parameters, trained for a minute on one GPU: rewards are graded, for such a model
#: solves nothing yet, and only one older state of its weights is kept.
HALF_BILLION = Recipe(
    shape=Shape(
        layers=12, hidden=1024, heads=16, groups=4, channels=64, experts=16, expert_width=896
    ),
    warmup=Warmup(learning_rate=3e-4, longest=120),
    grpo=Grpo(learning_rate=1e-5, steps=14, graded=True, kept=1),
    device="cuda",
)

#: By the names that the command line takes.
RECIPES = {"tiny": Recipe(), "half-billion": HALF_BILLION}


def find_recipe(size: str, *, device: str | None = None, precision: str = "float32") -> Recipe:
    """The recipe ``size`` on ``device`` (None: its own); a UsageError names what is possible."""
    if size not in RECIPES:
        raise UsageError(f"zoo: found size {size!r}, expected one of {', '.join(RECIPES)}")
    chosen = {"device": device or RECIPES[size].device, "precision": precision}
    for name, allowed in (("device", ("cpu", "cuda")), ("precision", ("float32", "bfloat16"))):
        if chosen[name] not in allowed:
            raise UsageError(
                f"zoo: found {name} {chosen[name]!r}, expected one of {', '.join(allowed)}"
            )
    return Recipe.model_validate(RECIPES[size].model_dump() | chosen)
