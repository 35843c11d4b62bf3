"""The one list of the doctor's codes: severity, meaning, what to do; docs/doctor.md shows it."""

from __future__ import annotations

import enum
from dataclasses import dataclass


class Severity(enum.StrEnum):
    """Worst first."""

    ERROR = "error"
    WARNING = "warning"
    NOTE = "note"


@dataclass(frozen=True)
class Code:
    """What one code means and what to do about it."""

    severity: Severity
    meaning: str
    then: str


_E, _W, _N = Severity.ERROR, Severity.WARNING, Severity.NOTE
_COPY = "Copy the file again from where it was written."
_AGAIN = "Wait until all ranks have finished writing, or copy the snapshot again."

CODES: dict[str, Code] = {
    # files
    "file-incomplete": Code(_E, "a file is missing or cut short", _AGAIN),
    "file-broken": Code(_E, "a file's bytes or values cannot be what a trainer wrote", _COPY),
    "pickle-unsafe": Code(
        _E,
        "a pickle asks for a global that is not on the allow-list; nothing of it was run",
        "Do not load the file with other tools; find out who wrote it.",
    ),
    "rank-file-extra": Code(
        _W,
        "a file of a rank that the recorded layout does not have",
        "Check whether two runs were written into one directory.",
    ),
    "rank-copies-differ": Code(
        _E,
        "ranks of one data-parallel group (tensor, context, pipeline) hold different batches",
        "One of the two files is another step's or another rank's: copy both again.",
    ),
    "metadata-legacy": Code(
        _N,
        "the trainer's metadata stands in metadata.json, over Megatron's own",
        "It is read; give Megatron its own file back before Megatron itself loads the directory.",
    ),
    "imported": Code(
        _N,
        "the snapshot was made from another trainer's debug dump and cannot be replayed",
        "Look at it with show and analyze; to replay a step, record it with SpikeRecorder.",
    ),
    "case-unsealed": Code(
        _E,
        "a file of a sealed case is not the one that was sealed, is missing, or is not listed",
        "Restore the file; if the change is meant, seal the case anew.",
    ),
    # norms
    "norm-missing": Code(
        _W,
        "no recorded gradient norm: a replay has nothing to reproduce (reference_missing)",
        "Nothing can be proven on it; take a snapshot that records a norm.",
    ),
    "norm-not-finite": Code(
        _W,
        "the recorded norm is NaN, infinite or negative: no replay can be compared with it",
        "Look for not finite values below; take a snapshot of the step before.",
    ),
    "median-undefined": Code(
        _W,
        "the median norm is missing, zero or not finite: no ratio exists (ratio_undefined)",
        "Look at the run's history of norms; a NaN in it can spoil later medians.",
    ),
    "ratio-differs": Code(
        _W,
        "the recorded ratio is not the recorded norm over the recorded median",
        "Trust norm and median; find out who edited the metadata.",
    ),
    "norm-below-detector": Code(
        _N,
        "the recorded norm is no spike by the run's own ratio",
        "It may be a forced snapshot or a quiet control.",
    ),
    # batch
    "batch-broken": Code(
        _E,
        "a column, a mask or a routing payload has the wrong dtype, shape, count or range",
        "The trainer cannot have read it like this: copy the file again.",
    ),
    "column-absent": Code(
        _E,
        "a column that the loss reads is not in the batch",
        "Check the trainer's options that write it.",
    ),
    "value-not-finite": Code(
        _E,
        "NaN or infinity at a loss token",
        "The replay gives the verdict non_finite; look at what wrote this token.",
    ),
    "masked-value-not-finite": Code(
        _E,
        "NaN or infinity outside the loss mask; the trainer's loss multiplies by the mask, and "
        "NaN times zero is NaN",
        "See loss-not-finite for whether it reaches the loss; mend it where the column is made.",
    ),
    "loss-not-finite": Code(
        _E,
        "the trainer's loss of a micro-batch is not finite on the stored log-probabilities",
        "The replay gives the verdict non_finite; mend the values or the setting named here.",
    ),
    "loss-of-nothing": Code(
        _W,
        "a micro-batch has no loss token: the loss and its denominator are zero, but token-max "
        "and token-min of nothing are infinite and the reported loss is NaN",
        "Take another loss_agg_type, or split micro-batches so that each has a loss token.",
    ),
    "rank-without-loss": Code(
        _W,
        "a data-parallel rank has no loss token at all: it adds nothing to gradient or denominator",
        "Look at the filter that masked it.",
    ),
    "row-without-loss": Code(
        _N,
        "rows that are no padding have no loss token; they change neither loss nor denominator",
        "Look at the filter that masked them.",
    ),
    "row-empty": Code(_E, "a row without any token", "The trainer writes none: copy it again."),
    "rows-padding": Code(
        _N,
        "padding rows; they go through the model and add nothing to the loss",
        "See padding-moves-balance for where they matter.",
    ),
    "rows-repeated": Code(
        _W,
        "the same row of the training window on two data-parallel ranks",
        "One rank's file may be a copy of another's: compare them with the source.",
    ),
    "token-outside": Code(
        _E,
        "a token id or label that is no row of the embedding",
        "The batch belongs to another model.",
    ),
    "mask-outside": Code(
        _E,
        "a loss token whose next token is not there",
        "Masks, labels and tokens are shifted against each other.",
    ),
    "labels-differ": Code(
        _E,
        "a loss token whose label is not the next token",
        "Columns are shifted against each other, or of another batch.",
    ),
    "advantage-zero": Code(
        _W,
        "every advantage of the step is zero: no policy gradient, and no ratio of norms",
        "Look at the rewards: all members of each group may have scored the same.",
    ),
    "logprob-positive": Code(
        _W,
        "a log-probability above zero",
        "The column holds something else, or was scaled by a temperature.",
    ),
    "logprob-absent": Code(
        _W,
        "rollout log-probabilities are exactly zero at loss tokens that are far from certain",
        "The rollout engine gave none there: the ratio is wrong by the token's probability.",
    ),
    "logratio-large": Code(
        _W,
        "trainer and rollout engine are far apart on one token",
        "Look at the routes and the text around this token; the loss clamps at 20 nats.",
    ),
    "sequence-weight-explodes": Code(
        _W,
        "the log-ratios of a row add up to a weight that explodes with its length",
        "A weight of whole sequences must be a mean over tokens, or be bounded.",
    ),
    "tree-inconsistent": Code(
        _E,
        "a merged row's prefix tree contradicts itself, its row or its routes",
        "It cannot be replayed: copy the file again, or look at what merged the row.",
    ),
    # routes
    "route-missing": Code(
        _E,
        "rows without routes beside rows with them, in a run that replayed routes",
        "The trainer refuses such a batch; replay it with disable-routing-replay.",
    ),
    "route-count": Code(
        _E,
        "a row of n tokens has neither n - 1 nor n routes",
        "A rollout engine that cut or shifted the routes cannot be replayed.",
    ),
    "route-unused": Code(
        _N,
        "rows of n tokens have n routes: the last one is not used",
        "Nothing to do.",
    ),
    "route-layers": Code(
        _E,
        "routes of another number of layers than the model, or its MoE layers, has",
        "The routes are of another model.",
    ),
    "route-topk": Code(
        _E,
        "routes of another top-k than the model's",
        "The routes are of another model.",
    ),
    "route-duplicate-expert": Code(
        _E,
        "one expert twice for a token",
        "No router chooses so: the routes are filled with a constant or were overwritten.",
    ),
    "route-expert-outside": Code(
        _E,
        "an expert id below 0 or not below the number of experts",
        "The routes are of another model, or ids wrapped in a narrow integer.",
    ),
    "route-dtype-narrow": Code(
        _E,
        "routes are stored in integers that cannot hold every expert id; large ids have wrapped",
        "Have the rollout engine send int16 or wider.",
    ),
    "route-constant": Code(
        _W,
        "a run of real tokens where every layer has the same experts",
        "A filler stands where routes are missing (a later turn, a cached prefix).",
    ),
    "route-switch": Code(
        _W,
        "the run was to replay routes and has none (it routes itself then), or has routes and did "
        "not replay them",
        "Check enable_routing_replay against the files.",
    ),
    # settings and model
    "settings-refused": Code(
        _E,
        "loss settings are out of range or contradict each other",
        "Correct the setting in the trainer.",
    ),
    "setting-unread": Code(
        _E,
        "a setting that is switched on and that nothing here reads: its effect is not replayed",
        "Take a newer version of this package, or switch it off in the run.",
    ),
    "setting-unknown": Code(
        _N,
        "a setting of another version of the trainer, switched off",
        "Nothing to do.",
    ),
    "config-differs": Code(
        _E,
        "worker settings and the model section state different things",
        "The replay takes what the finding says; correct the other file, or the snapshot's source.",
    ),
    "model-field-unknown": Code(
        _W,
        "a field of the model section that is switched on and that nothing here knows",
        "Look up what it does; if it changes the step, replay with a backend that knows it.",
    ),
    "model-field-assumed": Code(
        _W,
        "a field of the model section that shapes the step is not there; Megatron-Core's default "
        "is replayed",
        "Check it against the run, and state it in run_config.yaml.",
    ),
    "model-value": Code(
        _E,
        "a field of the model section has a value that it cannot have",
        "Correct it in run_config.yaml, or copy that again.",
    ),
    "run-unsupported": Code(
        _E,
        "the run used what the engine does not model: fp8, fp16, an fp32 output layer in a "
        "bfloat16 model, a critic",
        "Replay it with a backend that does.",
    ),
    "model-unsupported": Code(
        _E,
        "the model has something that the engine does not model, or would replay otherwise",
        "Replay it with a backend that does.",
    ),
    "padding-moves-balance": Code(
        _W,
        "padding goes through routers that balance or cap experts, so it moves the gradient of "
        "real tokens",
        "Replay keeps the padding as the trainer had it; compare steps of equal padding only.",
    ),
    "capacity-drops": Code(
        _W,
        "a finite expert capacity drops choices of the saved routes; padding takes places too",
        "Compare steps of equal padding only, or look at the run without capacity.",
    ),
    "packed-length-uneven": Code(
        _W,
        "a packed length that is no multiple of 2 x context-parallel size: gradients may differ "
        "from run to run",
        "Pad each row to that multiple, as the trainer does.",
    ),
    "not-deterministic": Code(
        _N,
        "the run did not ask for deterministic kernels: its norm has a spread of its own",
        "Allow for it in the case's tolerance.",
    ),
    # weights
    "weights-refused": Code(_E, "the checkpoint cannot be read", "Copy the checkpoint again."),
    "weights-missing": Code(
        _E,
        "parameters that the model section asks for are not in the checkpoint",
        "Check run_config.yaml against the run, or the snapshot against its source.",
    ),
    "weights-unknown": Code(
        _E,
        "the checkpoint holds parameters that the model section does not have",
        "Check run_config.yaml against the run, or the snapshot against its source.",
    ),
    "weights-shape": Code(
        _E,
        "a parameter has another shape or kind of number than the model section gives it",
        "Check run_config.yaml against the run, or the snapshot against its source.",
    ),
    "weights-not-finite": Code(
        _E,
        "a parameter holds NaN or infinity",
        "The model was broken before this step: look at earlier checkpoints.",
    ),
    "weights-not-compared": Code(
        _N,
        "names and shapes of parameters were not compared: the model section has a kind of layer "
        "that is not known here",
        "The engine compares them when it loads.",
    ),
}
