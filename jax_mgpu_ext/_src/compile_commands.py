"""The commands `mgpu-ext compile` and `mgpu-ext sweep`."""

from __future__ import annotations

import contextlib
import json
import os
import pathlib
from typing import Annotated

import typer

from jax_mgpu_ext._src import check_options
from jax_mgpu_ext._src import command_options
from jax_mgpu_ext._src import errors
from jax_mgpu_ext._src import streams
from jax_mgpu_ext._src.errors import UsageError

_NoCache = Annotated[
    bool,
    typer.Option("--no-cache", help="Compile anew, and keep nothing on disk."),
]
_EXECUTORS = ("threads", "processes", "dask")


def _emitted(text: str) -> tuple[str, ...]:
  """Parses the value of an option that names what is to be written."""
  names = tuple(filter(None, (part.strip() for part in text.split(","))))
  unknown = [name for name in names if name not in check_options.EMITTED]
  if unknown or not names:
    raise typer.BadParameter(
        f"expected some of {','.join(check_options.EMITTED)}, got"
        f" {(unknown or [text])[0]!r}"
    )
  return names


def compile_(
    selectors: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="FILE.py[::CASE]|MODULE",
            help="What to compile; the shipped kernels by default.",
            show_default=False,
        ),
    ] = None,
    target: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME",
            help="What to compile for; may be repeated. What a case is for, by"
            " default.",
        ),
    ] = None,
    emit: Annotated[
        str | None,
        typer.Option(
            parser=_emitted,
            metavar="KIND[,KIND]",
            help="Write files: ptx, sass, mlir, resources, xla.",
        ),
    ] = None,
    out: Annotated[
        str | None,
        typer.Option(metavar="DIR", help="Where to write them."),
    ] = None,
    jobs: command_options.Jobs = None,
    timeout_s: Annotated[
        float | None,
        typer.Option(
            parser=command_options.seconds,
            metavar="SECONDS",
            help="Time limit of a case.",
        ),
    ] = None,
    no_cache: _NoCache = False,
    as_json: command_options.Json = False,
) -> None:
  """Compile kernel cases for GPUs that need not be there."""
  from jax_mgpu_ext._src import check as check_lib
  from jax_mgpu_ext._src import compile_report

  if bool(emit) != bool(out):
    raise UsageError(
        "--emit and --out go together: write --emit ptx,sass --out DIR"
    )
  if out:
    out = os.path.abspath(out)
    try:
      os.makedirs(out, exist_ok=True)
    except OSError as e:
      raise UsageError(f"cannot write to {out!r}: {e.strerror}") from e
  with contextlib.ExitStack() as stack:
    results = check_lib.run(
        selectors or (),
        jobs=jobs,
        timeout_s=timeout_s,
        stages=["compile"],
        targets=target,
        declared_only=False,
        options=check_options.Options(
            cache=not no_cache, emit=emit or (), out=out or ""
        ),
        on_progress=command_options.progress(stack, as_json, "compiling"),
    )
  missing = {
      stage.message
      for result in results
      for stage in result.stages
      if stage.state == "skipped"
  }
  if len(missing) == 1 and all(r.stages[0].state == "skipped" for r in results):
    raise UsageError(missing.pop())  # As without the extra.
  if as_json:
    print(json.dumps(compile_report.compiled_json(results), indent=2))
  else:
    compile_report.print_compiled(results, console=streams.console())
  if not all(result.ok for result in results):
    raise typer.Exit(1)


def sweep(
    configs: Annotated[
        str,
        typer.Argument(
            metavar="MODULE:OBJECT|FILE.py:OBJECT",
            help="A mapping of names to configurations, or a function that"
            " returns one. A configuration is a pair (function, arguments), or a"
            " function that returns one.",
            show_default=False,
        ),
    ],
    target: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME",
            help="What to compile for, h100 by default; may be repeated.",
        ),
    ] = None,
    out: Annotated[
        str | None,
        typer.Option(
            metavar="FILE.csv|FILE.parquet", help="Write the table there, too."
        ),
    ] = None,
    executor: Annotated[
        str,
        typer.Option(
            metavar="NAME",
            help="threads, processes, or dask for a Dask cluster.",
        ),
    ] = "threads",
    dask: Annotated[
        str | None,
        typer.Option(
            metavar="ADDRESS",
            help="The Dask scheduler; a cluster on this machine by default.",
        ),
    ] = None,
    jobs: command_options.Jobs = None,
    timeout_s: Annotated[
        float | None,
        typer.Option(
            parser=command_options.seconds,
            metavar="SECONDS",
            help="Time limit of the compiler, 120 by default.",
        ),
    ] = None,
    no_cache: _NoCache = False,
    as_json: command_options.Json = False,
) -> None:
  """Compile many configurations of a kernel, and list what fits best first."""
  from jax_mgpu_ext._src import compile_report
  from jax_mgpu_ext._src import sweep_executors
  from jax_mgpu_ext._src.aot import sweep as sweep_lib

  if executor not in _EXECUTORS:
    raise UsageError(
        f"expected --executor to be one of {', '.join(_EXECUTORS)}, got"
        f" {executor!r}"
    )
  if dask and executor != "dask":
    raise UsageError("--dask is for --executor dask")
  if out:
    compile_report.check_table_path(out)
    out = os.path.abspath(out)  # Wherever the configurations may take us.
  # Here, and in the processes that are started, nothing runs on a GPU.
  os.environ.setdefault("JAX_PLATFORMS", "cpu")
  with contextlib.ExitStack() as stack:
    try:
      with streams.nothing_else_on_stdout():
        rows = sweep_lib.sweep(
            configs,
            targets=target or ("h100",),
            executor=stack.enter_context(
                sweep_executors.executor(executor, jobs, dask)
            ),
            jobs=jobs,
            cache=not no_cache,
            timeout_s=timeout_s or 120.0,
            on_progress=command_options.progress(stack, as_json, "compiling"),
        )
    except (errors.TargetError, errors.AotUnavailableError, TypeError) as e:
      raise UsageError(str(e)) from e
  if out:
    compile_report.write_table(rows, pathlib.Path(out))
  if as_json:
    print(json.dumps({"rows": [row.to_json() for row in rows]}, indent=2))
  else:
    compile_report.print_sweep(rows, console=streams.console())
  if not any(row.state in ("fits", "spills") for row in rows):
    raise typer.Exit(1)


def add_to(app: typer.Typer) -> None:
  """Adds the commands to a command line."""
  app.command("compile")(compile_)
  app.command()(sweep)
