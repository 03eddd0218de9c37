"""The command `mgpu-ext`: one function per command, and how it ends.

Status 0: all is well. 1: a kernel case failed, or a hook was refused under
`JAX_MGPU_EXT=strict`. 2: something was asked for that cannot be done; one line
on stderr says what. 130, or another 128 + n: ended by signal n. 141: whoever
read the output went away.

JAX is imported only by the commands that need it.
"""

from __future__ import annotations

from collections.abc import Iterator
import contextlib
import errno
import json
import os
import signal
import sys
import threading
from typing import Annotated, Any

import typer

import jax_mgpu_ext
from jax_mgpu_ext._src import budget_commands
from jax_mgpu_ext._src import command_options
from jax_mgpu_ext._src import compile_commands
from jax_mgpu_ext._src import config
from jax_mgpu_ext._src import errors
from jax_mgpu_ext._src import hooks as hooks_lib
from jax_mgpu_ext._src import streams

PROGRAM = "mgpu-ext"

_CANNOT_WRITE = (
    *(errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO),
    errno.EBADF,  # Opened for reading only.
)
# Processes, file descriptors, memory.
_NO_MORE = (errno.EAGAIN, errno.EMFILE, errno.ENFILE, errno.ENOMEM)

# Typer's own kind of complaint about a command line; it exports only some of
# its subclasses.
_ParseError = next(
    c for c in typer.BadParameter.__mro__ if c.__name__ == "ClickException"
)

app = typer.Typer(
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


class _Terminated(BaseException):
  """A signal asks the process to end; whatever it started ends on the way."""


def main(args: list[str] | None = None) -> int:
  """Runs the command line.

  Args:
    args: The arguments, by default those of the process.

  Returns:
    The exit status.
  """
  streams.mend()
  try:
    with _raising_on_signals():
      return _run(sys.argv[1:] if args is None else args)
  except _Terminated as e:
    [number] = e.args
    streams.complain(f"{PROGRAM}: ended by {signal.Signals(number).name}")
    return 128 + number


@contextlib.contextmanager
def _raising_on_signals() -> Iterator[None]:
  """Raises `_Terminated` on signals that would end the process at once."""
  numbers = []
  if threading.current_thread() is threading.main_thread():
    # Not where somebody has decided otherwise, as nohup has about SIGHUP.
    numbers = [
        number
        for number in (signal.SIGTERM, signal.SIGHUP)
        if signal.getsignal(number) is signal.SIG_DFL
    ]

  def back_to_default():
    for number in numbers:
      signal.signal(number, signal.SIG_DFL)

  def handler(number, unused_frame):
    back_to_default()  # Who asks a second time does not want to wait.
    raise _Terminated(number)

  for number in numbers:
    signal.signal(number, handler)
  try:
    yield
  finally:
    back_to_default()


def _run(args: list[str]) -> int:
  """Runs one command, and returns the exit status."""
  try:
    try:
      config.settings(hooks_lib.SLUGS)  # Whatever the command: say it first.
      config.cache_dir()
      # Not `app()`, which would end the process in its own ways.
      command = typer.main.get_command(app)
      with command.make_context(PROGRAM, list(args)) as context:
        command.invoke(context)
      status = 0
    except typer.Exit as e:
      status = e.exit_code
    sys.stdout.flush()
  except BrokenPipeError:
    status = streams.give_up_output()
  except (errors.UsageError, errors.ConfigError) as e:
    status = _complain(str(e))
  except errors.HookRefusedError as e:
    status = _complain(str(e), status=1)
  except _ParseError as e:
    context = getattr(e, "ctx", None)
    path = context.command_path if context else PROGRAM
    status = _complain(f"{e.format_message().rstrip('.')} (see {path} --help)")
  except KeyboardInterrupt:
    streams.complain(f"{PROGRAM}: interrupted")
    status = 130
  except OSError as e:
    if e.errno in _CANNOT_WRITE:
      status = _complain(f"cannot write the output: {e.strerror}")
      streams.give_up_output()
    elif e.errno in _NO_MORE:
      status = _complain(f"the system does not let us: {e.strerror}")
    else:
      raise
  return status


def _complain(text: str, status: int = 2) -> int:
  streams.complain(f"{PROGRAM}: error: {text}")
  return status


def _print_json(document: Any) -> None:
  print(json.dumps(document, indent=2))


def _print_version(wanted: bool) -> None:
  if wanted:
    print(f"{PROGRAM} {jax_mgpu_ext.__version__}")
    raise typer.Exit()


@app.callback(invoke_without_command=True)
def _main(
    context: typer.Context,
    version: Annotated[
        bool,
        typer.Option(
            "--version",
            callback=_print_version,
            is_eager=True,
            help="Print the version and exit.",
        ),
    ] = False,
) -> None:
  """Checks Pallas Mosaic GPU kernels on a machine with no GPU."""
  del version
  if context.invoked_subcommand is None:
    print(context.get_help())


@app.command()
def check(
    selectors: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="FILE.py[::CASE]|MODULE",
            help="What to check; the shipped kernels by default.",
            show_default=False,
        ),
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
    stage: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME", help="Only this stage; may be repeated."
        ),
    ] = None,
    target: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME", help="Only this target; may be repeated."
        ),
    ] = None,
    out: Annotated[
        str | None,
        typer.Option(
            metavar="FOLDER", help="Write whole reports of hangs and races there."
        ),
    ] = None,
    trace: Annotated[
        str | None,
        typer.Option(
            metavar="FILE",
            help="Write a timeline of the interpreted kernel, for"
            " ui.perfetto.dev; a picture if it ends in .png.",
        ),
    ] = None,
    as_json: command_options.Json = False,
) -> None:
  """Send kernel cases through every stage that this machine can do."""
  from jax_mgpu_ext._src import check as check_lib
  from jax_mgpu_ext._src import report

  with contextlib.ExitStack() as stack:
    results = check_lib.run(
        selectors or (),
        jobs=jobs,
        timeout_s=timeout_s,
        stages=stage,
        targets=target,
        options=check_lib.Options(
            out=os.path.abspath(out) if out else "",
            trace=os.path.abspath(trace) if trace else "",
        ),
        on_progress=command_options.progress(stack, as_json, "checking"),
    )
  if as_json:
    _print_json(report.check_json(results))
  else:
    report.print_check(results, console=streams.console())
  if not all(result.ok for result in results):
    raise typer.Exit(1)


@app.command()
def explain(
    text: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="CODE|TEXT",
            help="A code as MGPU012, or a piece of a message.",
            show_default=False,
        ),
    ] = None,
    list_all: Annotated[
        bool, typer.Option("--list", help="List all codes.")
    ] = False,
    as_json: command_options.Json = False,
) -> None:
  """Tell what an error means and how to mend it."""
  query = " ".join(text or ()).strip()
  if list_all == bool(query):
    raise errors.UsageError(
        "expected a code, a piece of a message, or --list, got"
        f" {'both' if query else 'none'}; see {PROGRAM} explain --help"
    )
  from jax_mgpu_ext._src import catalog
  from jax_mgpu_ext._src import report

  if list_all:
    found = [(entry, 1.0) for entry in catalog.entries()]
  else:
    found = _look_up(query)
  if as_json:
    _print_json({
        "query": query,
        "entries": [{**e.to_json(), "score": score} for e, score in found],
    })
  elif list_all:
    report.print_entries([entry for entry, _ in found], console=streams.console())
  else:
    (entry, _), *others = found
    report.print_entry(
        entry, others=[other for other, _ in others], console=streams.console()
    )


def _look_up(query: str):
  """Returns the catalog entries for a query, best first, and their scores."""
  from jax_mgpu_ext._src import catalog

  try:
    return [(catalog.get(query), 1.0)]
  except KeyError:
    pass
  if found := catalog.find(query):
    return found
  raise errors.UsageError(
      f"expected a code or a piece of a message, got {query[:80]!r}, which"
      f" resembles none; {PROGRAM} explain --list shows all"
  )


@app.command()
def hooks(as_json: command_options.Json = False) -> None:
  """Tell which changes to JAX are in force, and why others are not."""
  from jax_mgpu_ext._src import doctor as doctor_lib
  from jax_mgpu_ext._src import report

  with streams.nothing_else_on_stdout():
    states, error = doctor_lib.hook_states()
  if as_json:
    _print_json(doctor_lib.hooks_json(states, error))
  else:
    report.print_hooks(states, error, console=streams.console())
  _exit_for_hooks(states)


@app.command()
def doctor(
    gpu_timeout_s: Annotated[
        float | None,
        typer.Option(
            parser=command_options.seconds,
            metavar="SECONDS",
            help="Time limit for finding GPUs, 60 by default.",
        ),
    ] = None,
    as_json: command_options.Json = False,
) -> None:
  """Tell what is installed, what is found, and what should be mended."""
  from jax_mgpu_ext._src import doctor as doctor_lib
  from jax_mgpu_ext._src import report

  with streams.nothing_else_on_stdout():
    facts = doctor_lib.collect(gpu_timeout_s or 60.0)
  if as_json:
    _print_json(facts.to_json())
  else:
    report.print_doctor(facts, console=streams.console())
  _exit_for_hooks(facts.hooks)


@app.command(
    # The options are those of the tool; it has a help of its own.
    context_settings={
        "allow_extra_args": True,
        "ignore_unknown_options": True,
        "help_option_names": [],
    },
)
def patches(context: typer.Context) -> None:
  """Check, apply, copy and carry over the git patches for JAX."""
  from jax_mgpu_ext._src import patchset

  raise typer.Exit(patchset.main(context.args or ["--help"]))


budget_commands.add_to(app)
compile_commands.add_to(app)


def _exit_for_hooks(states) -> None:
  from jax_mgpu_ext._src import doctor as doctor_lib

  if doctor_lib.is_strict() and any(
      status.state in ("refused", "failed") for status in states
  ):
    raise typer.Exit(1)
