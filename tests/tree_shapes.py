"""Hand-made prefix trees, written down as the trainer stores them.

Built from the shape of a tree alone, token by token: nothing here uses the library's own reading.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from replay_lib.batch import RankBatch
from replay_lib.merged import MergedRow

Trained = Mapping[int, Sequence[int]]  # by path: its tokens whose successor is trained


@dataclass(frozen=True)
class Shape:
    """``nodes``: (tokens, parent) with ancestors first. ``ends``: (leaf, tokens of the path).

    ``trained[path]`` are places in that path whose next token is trained.
    """

    nodes: Sequence[tuple[int, int]]
    ends: Sequence[tuple[int, int]]
    trained: Trained
    total: int

    def starts(self) -> list[int]:
        return [sum(n for n, _ in self.nodes[:i]) for i in range(len(self.nodes))]

    def chain(self, node: int) -> list[int]:
        parent = self.nodes[node][1]
        return [*(self.chain(parent) if parent >= 0 else []), node]

    def paths(self) -> list[list[int]]:
        """Places in the row of each path's tokens."""
        starts, found = self.starts(), []
        for leaf, length in self.ends:
            whole = [starts[n] + i for n in self.chain(leaf) for i in range(self.nodes[n][0])]
            found.append(whole[:length])
        return found

    @property
    def real(self) -> int:
        return sum(n for n, _ in self.nodes)


#: Branches twice, at 4 and again at 8, with padding behind the last leaf.
TWICE = Shape(
    nodes=[(4, -1), (3, 0), (4, 0), (3, 2), (5, 2)],
    ends=[(1, 7), (3, 11), (4, 13)],
    trained={0: [4, 5], 1: [3, 8, 9], 2: [9, 10, 11]},
    total=32,
)
#: The first path is the beginning of the second, and the third ends inside a node.
PREFIX = Shape(
    nodes=[(3, -1), (4, 0), (6, 0)],
    ends=[(0, 3), (1, 7), (2, 6), (2, 9)],
    trained={0: [0, 1], 1: [3, 4, 5], 3: [6, 7]},
    total=16,
)
#: Only the second branch trains, the shared tokens included.
ONE_BRANCH = Shape(
    nodes=[(5, -1), (4, 0), (6, 0)],
    ends=[(1, 9), (2, 11)],
    trained={1: [2, 3, 4, 5, 8, 9]},
    total=15,
)
#: Two roots: turns that share nothing (a compacted context), and a chain three deep.
FOREST = Shape(
    nodes=[(4, -1), (2, 0), (2, 1), (3, 1), (6, -1)],
    ends=[(2, 8), (3, 9), (4, 6)],
    trained={0: [6], 1: [6, 7], 2: [1, 2, 3, 4]},
    total=24,
)
SINGLE = Shape(nodes=[(5, -1)], ends=[(0, 5)], trained={0: [1, 2, 3]}, total=8)
SHAPES = {
    "twice": TWICE,
    "prefix": PREFIX,
    "one-branch": ONE_BRANCH,
    "forest": FOREST,
    "single": SINGLE,
}


def stored_tree(shape: Shape, *, sources: bool = True) -> dict[str, Any]:
    """The fields of a PrefixMergeInfo, the last node lengthened by the padding."""
    starts = shape.starts()
    nodes = [
        {"start": start, "end": start + count, "parent": parent}
        for start, (count, parent) in zip(starts, shape.nodes, strict=True)
    ]
    nodes[-1]["end"] = shape.total
    queries, keys, kinds = [], [], []
    for number, node in enumerate(nodes):
        for above in reversed(shape.chain(number)):
            queries.append((node["start"], node["end"]))
            keys.append((nodes[above]["start"], nodes[above]["end"]))
            kinds.append(int(above == number))
    paths = shape.paths()
    tree = {
        "nodes": nodes,
        "path_to_leaf": [
            (leaf, sum(shape.nodes[n][0] for n in shape.chain(leaf)[:-1]))
            for leaf, _length in shape.ends
        ],
        "q_ranges": queries,
        "k_ranges": keys,
        "attn_type_map": kinds,
        "total_padded": shape.total,
        "max_path_len": max(len(path) for path in paths) + shape.total - shape.real,
        "turn_sample_lens": [len(path) for path in paths],
        "real_total": shape.real,
        "routing_source_path": None,
        "routing_source_read_pos": None,
    }
    if sources:
        path, read = _sources(shape, paths)
        tree |= {"routing_source_path": path, "routing_source_read_pos": read}
    return tree


def _sources(shape: Shape, paths: list[list[int]]) -> tuple[Tensor, Tensor]:
    """Of each token but the first: a path that trains it, else the first that has it."""
    owner: dict[int, tuple[int, int]] = {}
    for trains in (True, False):
        for path, places in enumerate(paths):
            for token, place in enumerate(places):
                if (token in shape.trained.get(path, ())) is trains:
                    owner.setdefault(place, (path, token))
    table = torch.tensor([owner[place] for place in range(1, shape.real)], dtype=torch.int64)
    table = table.reshape(-1, 2)
    return table[:, 0].clone(), table[:, 1].clone()


def merged_row(shape: Shape, routes_TLK: Tensor, *, sources: bool = True) -> MergedRow:
    """The row, its paths routed by ``routes_TLK [total, L, K]``, one route for every place."""
    routes = tuple(routes_TLK[path[:-1]].clone() for path in shape.paths())
    return MergedRow(path_routes=routes, tree=stored_tree(shape, sources=sources))


def merged_batch(
    shapes: Sequence[Shape],
    *,
    vocab: int,
    layers: int,
    experts: int,
    topk: int,
    width: int,
    seed: int = 0,
    dp_rank: int = 0,
) -> RankBatch:
    """Rows of these shapes with random tokens, routes and loss columns."""
    draw = torch.Generator().manual_seed(seed)
    rows = len(shapes)
    real = torch.arange(width) < torch.tensor([s.real for s in shapes])[:, None]
    ids = torch.randint(1, vocab, (rows, width), generator=draw) * real
    labels = torch.full((rows, width), -100)
    loss = torch.zeros(rows, width, dtype=torch.bool)
    merged: list[MergedRow] = []
    for row, shape in enumerate(shapes):
        for path, places in enumerate(shape.paths()):
            for token in shape.trained.get(path, ()):
                loss[row, places[token]] = True
                labels[row, places[token]] = ids[row, places[token + 1]]
        scores = torch.rand(shape.total, layers, experts, generator=draw)
        merged.append(merged_row(shape, scores.topk(topk).indices.to(torch.int16)))
    noise = torch.randn(rows, width, generator=draw) * 0.1
    return RankBatch(
        dp_rank=dp_rank,
        index=torch.arange(rows),
        input_ids=ids,
        labels=labels,
        loss_mask=loss,
        attention_mask=real,
        advantage=torch.randn(rows, width, generator=draw) * loss,
        old_logprobs=(noise - 4.8) * real,
        rollout_logprobs=(noise - 4.7) * loss,
        ref_logprobs=(noise - 4.9) * real,
        trajectory_id=torch.arange(rows),
        reward=torch.zeros(rows),
        reward_baseline=torch.zeros(rows),
        routes=(None,) * rows,
        merge_info=tuple(merged),
    )
