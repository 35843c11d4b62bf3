"""What a session says about merged rows: how they were packed, and what that does to the norm."""

from __future__ import annotations

from replay_lib.engine.step import Loaded
from replay_lib.engine.trees import routes_apart, several_paths


def rows_notes(loaded: Loaded, dtype: str) -> tuple[str, ...]:
    """Notes on the rows of ``loaded`` that are prefix trees; none where no row is one."""
    if not loaded.unmerged:
        return ()
    count = sum(several_paths(rank.trees) for rank in loaded.ranks)
    how = "one row a path" if loaded.rows == "unmerged" else "as trees, as the trainer packs them"
    notes = [
        f"{count} rows are prefix trees of several paths (merge_info), replayed {how}. Their "
        "recorded norm is a reference only where the run took it on these merged rows with these "
        "old log-probabilities; a snapshot that was put together otherwise is not reproduced, and "
        "then merged against unmerged is what can be compared."
    ]
    if dtype == "float32":
        notes.append(
            "The trainer's kernel for merged rows works in bfloat16 whatever the model's dtype and "
            "this replay in float32: a float32 run's norm comes out to parts in a thousand only."
        )
    apart = sum(routes_apart(rank.trees) for rank in loaded.ranks)
    if apart:
        notes.append(
            f"{apart} tokens of paths have other routes than the merged rows give them: there "
            "merged and unmerged replays differ by more than rounding."
        )
    return tuple(notes)
