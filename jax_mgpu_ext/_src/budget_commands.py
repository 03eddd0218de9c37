"""The commands `mgpu-ext budget` and `mgpu-ext targets`."""

from __future__ import annotations

import json
from typing import Annotated

import typer

from jax_mgpu_ext._src import command_options
from jax_mgpu_ext._src import errors
from jax_mgpu_ext._src import streams
from jax_mgpu_ext._src.errors import UsageError



def _sizes(text: str) -> tuple[int, ...]:
  """Parses the value of an option that is a cluster, as `2,1`."""
  parts = text.split(",")
  if len(parts) > 3 or not all(map(command_options.is_count, parts)):
    raise typer.BadParameter(
        f"expected one to three sizes from 1 on, as 2,1, got {text!r}"
    )
  return tuple(map(int, parts))


def budget(
    selector: Annotated[
        str,
        typer.Argument(
            metavar="MODULE:OBJECT|FILE.py:OBJECT|FILE.py::CASE",
            help="A tree of specs, a function that returns one, or a case, whose"
            " kernel is looked at.",
            show_default=False,
        ),
    ],
    target: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME", help="The GPU, h100 by default; may be repeated."
        ),
    ] = None,
    cluster: Annotated[
        str | None,
        typer.Option(
            parser=_sizes, metavar="N[,N[,N]]", help="Sizes of the cluster."
        ),
    ] = None,
    num_threads: Annotated[
        int | None,
        typer.Option(
            parser=command_options.count,
            metavar="N",
            help="Warpgroups a block, 1 by default.",
        ),
    ] = None,
    as_json: command_options.Json = False,
) -> None:
  """Tell what specs take of a GPU, item by item, and whether it fits."""
  from jax_mgpu_ext._src import budget as budget_lib
  from jax_mgpu_ext._src import budget_kernel
  from jax_mgpu_ext._src import budget_objects
  from jax_mgpu_ext._src import budget_report
  from jax_mgpu_ext._src import targets as targets_lib

  try:
    chosen = targets_lib.distinct(target or ("h100",)).values()
    with streams.nothing_else_on_stdout():
      if "::" in selector:
        if cluster or num_threads:
          raise UsageError(
              "--cluster and --num-threads are for trees of specs: the kernel of"
              " a case has its own"
          )
        calls = budget_objects.kernels(selector)
        found = [
            budget_kernel.budget_kernel(call, each)
            for each in chosen
            for call in calls
        ]
      else:
        specs = budget_objects.load(selector)
        found = [
            budget_lib.budget(
                specs, each, cluster=cluster or (), num_threads=num_threads
            )
            for each in chosen
        ]
  except (errors.SpecError, errors.TargetError) as e:
    raise UsageError(str(e)) from e
  if as_json:
    print(json.dumps(budget_report.budgets_json(found), indent=2))
  else:
    for index, each in enumerate(found):
      if index:
        print()
      budget_report.print_budget(each, console=streams.console())
  if not all(each.fits for each in found):
    raise typer.Exit(1)


def targets(as_json: command_options.Json = False) -> None:
  """List the GPUs that kernels can be budgeted and compiled for."""
  from jax_mgpu_ext._src import budget_report
  from jax_mgpu_ext._src import targets as targets_lib

  found = [targets_lib.get(name) for name in targets_lib.names()]
  if as_json:
    print(json.dumps([each.to_json() for each in found], indent=2))
  else:
    budget_report.print_targets(found, console=streams.console())


def add_to(app: typer.Typer) -> None:
  """Adds the commands to a command line."""
  app.command()(budget)
  app.command()(targets)
