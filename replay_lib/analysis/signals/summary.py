"""The result of ``analyze``: all that is told about a snapshot, as strict JSON.

A report is rendered from this alone, after the snapshot is gone. Every number is finite; None is
"not known" or "of nothing", and ``absent`` says why. Values that were not finite are counted in
``nonfinite`` and enter no other figure. Log-probabilities and log-ratios are in nats; tokens are
loss tokens (``loss_mask`` and ``attention_mask``) unless a field says otherwise; a token position
is label-aligned: at ``t`` stands what belongs to token ``t + 1``. Padding rows (``index`` < 0) are
counted and otherwise left out. Meaning and formula of each figure: docs/analyze.md.
"""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from replay_lib.analysis.signals.figures import Distribution, Finite, Histogram, Ratio
from replay_lib.analysis.signals.session_summary import SessionSignals

SCHEMA = 1
GRAD_INFO_IS = "post-clip, rank-local, partly unreduced: to look at, never a reference"


class Norms(Finite):
    """The recorded gradient norm (L2, before clipping) and the detector that was running.

    ``history`` is empty: snapshots hold the median of the earlier norms, not the norms themselves.
    ``threshold`` is ``spike_ratio * median``, ``target`` the norm at which a replay passes.
    """

    step: int
    grad_norm_preclip: float | None
    median: float | None
    ratio: float | None
    spike_ratio: float
    threshold: float | None
    target_ratio: float
    target: float | None
    is_spike: bool
    warmup_steps: int
    history_window: int
    history: tuple[tuple[int, float], ...] = ()


class RankAdvantages(Finite):
    """Sums of one data-parallel rank, or of all (``dp_rank`` None).

    ``negative`` is a magnitude. ``near_zero`` counts tokens with ``|advantage| <= eps``.
    """

    dp_rank: int | None
    tokens: int
    positive: float
    negative: float
    positive_tokens: int
    negative_tokens: int
    near_zero: int

    @property
    def near_zero_share(self) -> float | None:
        """Of the tokens."""
        return self.near_zero / self.tokens if self.tokens else None


class Advantages(Finite):
    """``balance``: positive over negative sum. ``largest_row_share`` is of |advantage|."""

    eps: float
    total: RankAdvantages
    ranks: tuple[RankAdvantages, ...]
    balance: float | None
    largest_row_share: float | None
    values: Distribution


class Column(Finite):
    """A column on loss tokens; ``elsewhere`` counts values off them that are not finite."""

    name: str
    values: Distribution
    elsewhere: int = 0


class Lengths(Finite):
    """Tokens a row. ``spans`` are runs of loss tokens of a row: assistant turns, whatever
    ``turn_index`` says; ``turns`` the different turn indexes of a row (None: no such column)."""

    rows: int
    padding_rows: int
    rows_without_loss: int
    tokens: Distribution
    loss_tokens: Distribution
    prompt_tokens: Distribution
    histogram: Histogram
    spans: Distribution
    turns: Distribution | None
    turn_tokens: dict[str, int] = Field(default_factory=dict)  # loss tokens by turn index


class Groups(Finite):
    """Rows with one prompt (all tokens up to the first that trains), over all ranks.

    ``zero_variance``: groups of two trajectories or more, all of one reward; ``judged`` are the
    groups of two or more whose rewards are known.
    """

    groups: int
    judged: int
    zero_variance: int
    sizes: Distribution
    largest: int


class Rewards(Finite):
    """Of rows that are no padding; None where the trainer did not write the column."""

    reward: Distribution | None
    baseline: Distribution | None
    difference: Distribution | None  # reward - baseline
    groups: Groups


class Trajectories(Finite):
    """``rows_a_trajectory`` is over trajectories; ``unknown`` rows have id -1, no padding."""

    trajectories: int | None
    unknown: int
    rows_a_trajectory: Distribution | None
    most: tuple[tuple[int, int], ...] = ()  # (trajectory id, rows), most rows first


class LayerLoad(Finite):
    """How often each expert was chosen in one layer of the saved routes, real tokens alone.

    ``imbalance`` is the largest load over the mean one, ``entropy`` that of the loads over log E.
    """

    layer: int
    load: tuple[int, ...]
    unused: int
    imbalance: float | None
    entropy: float | None
    repeated: int  # tokens that name one expert twice


class Routing(Finite):
    """Saved routes. ``payloads`` are counted in the files, a data-parallel rank each.

    ``layers`` and ``topk`` are the payload's; ``experts`` the model's, or one more than the largest
    id where no file states it. ``share_without`` is of rows that are no padding.
    """

    payloads: tuple[int, ...]
    payloads_recorded_rank0: int | None
    replayed: bool  # enable_routing_replay
    loss_tokens_only: bool
    rows_with: int
    rows_without: int
    share_without: float | None
    tokens: int
    dtype: str | None
    layers: int | None
    topk: int | None
    experts: int | None
    per_layer: tuple[LayerLoad, ...]
    outside: int = 0  # ids below 0 or not below ``experts``; counted nowhere else


class Parameter(Finite):
    """Figures of one parameter as the trainer wrote them; None: not finite or not written."""

    name: str
    grad_norm: float | None
    grad_max: float | None
    param_norm: float | None


class RankParameters(Finite):
    """The largest parameters of one GLOBAL rank by ``grad_norm``, and each layer's L2 of them."""

    rank: int
    parameters: int
    nonfinite: int
    top: tuple[Parameter, ...]
    layers: dict[str, float]


class GradInfo(Finite):
    """Per-parameter figures. ``layers`` is each layer's largest L2 among ranks: no norm of a step,
    since ranks hold shards and copies that cannot be told apart here."""

    caution: str = GRAD_INFO_IS
    ranks: tuple[RankParameters, ...]
    layers: dict[str, float]


class Outlier(Finite):
    """One token that stands out. ``position`` is label-aligned, ``token_id`` the label's.

    ``value`` is what it was chosen by (``kind``: a ratio's name, its log-ratio; or ``advantage``).
    ``text`` is the decoded token where a tokenizer was given, ``context`` a few tokens before it.
    """

    kind: str
    dp_rank: int
    row: int
    position: int
    index: int
    trajectory_id: int | None
    token_id: int
    text: str | None = None
    context: str | None = None
    value: float
    advantage: float | None
    logprobs: dict[str, float | None]


class RowPlace(Finite):
    """A row that is to blame for a sign, with the figure that says so."""

    dp_rank: int
    row: int
    index: int
    trajectory_id: int | None
    value: float


class Sign(Finite):
    """One sign of trouble. ``present`` None: it could not be looked for (``found`` says why).

    Present is ``figure > bound`` (``figure < bound`` where ``direction`` is below). ``quiet`` is
    the same figure of the case's quiet control. ``rows`` are the first of ``rows_total``.
    """

    name: str
    present: bool | None
    figure: float | None
    unit: str
    bound: float
    direction: Literal["above", "below"] = "above"
    reason: str
    found: str
    rows: tuple[RowPlace, ...] = ()
    rows_total: int = 0
    quiet: float | None = None


class NonFinite(Finite):
    """Values of one column that are NaN or infinite, with the first of them."""

    column: str
    on_loss_tokens: int
    elsewhere: int
    dp_rank: int
    row: int
    position: int | None  # None: a column with one value a row


class Signals(Finite):
    """All of it. ``signs`` come in the order in which a person should read them."""

    schema_version: Literal[1] = Field(default=1, alias="schema")
    snapshot: str
    case: str | None
    dp: int
    rows: int
    tokens: int  # real ones, padding rows left out
    loss_tokens: int
    dtypes: dict[str, str]
    norms: Norms
    signs: tuple[Sign, ...]
    advantages: Advantages
    ratios: tuple[Ratio, ...]
    columns: tuple[Column, ...]
    lengths: Lengths
    rewards: Rewards
    trajectories: Trajectories
    routing: Routing
    grad_info: GradInfo | None
    outliers: tuple[Outlier, ...]
    nonfinite: tuple[NonFinite, ...]
    session: SessionSignals | None = None
    absent: dict[str, str] = Field(default_factory=dict)  # what is not told: why
    notes: tuple[str, ...] = ()
    seconds: float = 0.0

    model_config = Finite.model_config | {"populate_by_name": True}

    def sign(self, name: str) -> Sign:
        """The sign ``name``; a KeyError where there is none."""
        return {s.name: s for s in self.signs}[name]
