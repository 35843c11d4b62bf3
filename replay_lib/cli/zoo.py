"""``spike-replay zoo``: spikes with a known cause, made by small training runs."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table

from replay_lib.cli.arguments import Json
from replay_lib.cli.output import key_value_table, print_json, stderr, stdout
from replay_lib.zoo import KINDS, make_spike
from replay_lib.zoo.make import CACHE
from replay_lib.zoo.recipe import RECIPES, find_recipe

zoo = typer.Typer(
    help="Make spikes with a known cause: GRPO on a tiny MoE, one fault switched on.",
    no_args_is_help=True,
    rich_markup_mode=None,
)


@zoo.command("list")
def list_kinds(json: Json = False) -> None:
    """List the kinds: what is wrong in each, and whether the gradient norm shows it."""
    if json:
        print_json({"kinds": [dataclasses.asdict(kind) for kind in KINDS.values()]})
        return
    table = Table("kind", "spikes", "what is wrong", box=None, pad_edge=False)
    for kind in KINDS.values():
        table.add_row(kind.name, "yes" if kind.spikes else "no", kind.summary)
    stdout().print(table)


@zoo.command()
def make(
    kind: Annotated[str, typer.Argument(help="A kind that zoo list shows.")],
    *,
    seed: Annotated[int, typer.Option(help="The run's seed: the same one, the same norm.")] = 1,
    out: Annotated[Path, typer.Option(metavar="DIR", help="A new directory for what is made.")],
    cache: Annotated[
        Path, typer.Option(metavar="DIR", help="Where base runs are kept between calls.")
    ] = CACHE,
    size: Annotated[
        str, typer.Option(help=f"The model and its run: {' or '.join(RECIPES)}.")
    ] = "tiny",
    device: Annotated[
        str | None, typer.Option(help="cpu or cuda. [default: what the size wants]")
    ] = None,
    precision: Annotated[
        str, typer.Option(help="Of weights and activations: float32 or bfloat16.")
    ] = "float32",
    layout: Annotated[
        str | None,
        typer.Option(
            help="Record the step on this layout, as in ep=2 or pp=2,vpp=2. [default: one rank]"
        ),
    ] = None,
    json: Json = False,
) -> None:
    """Train (minutes, once a seed), switch KIND on, and record the step and a quiet one."""
    recipe = find_recipe(size, device=device, precision=precision)
    console = stderr()

    def tell(line: str) -> None:
        console.print(line, markup=False, highlight=False, soft_wrap=True)

    report = make_spike(
        kind, seed=seed, out=out, cache=cache, recipe=recipe, layout=layout, tell=tell
    )
    if json:
        print_json(report)
        return
    shown: dict[str, Any] = {k: v for k, v in report.items() if k not in ("norms", "versions")}
    stdout().print(key_value_table(shown | {"directory": out}))
