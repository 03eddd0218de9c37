"""The executors that `mgpu-ext sweep` can be told by name."""

from __future__ import annotations

from collections.abc import Iterator
import concurrent.futures
import contextlib
import multiprocessing

from jax_mgpu_ext._src import installed
from jax_mgpu_ext._src import programs
from jax_mgpu_ext._src.errors import UsageError


@contextlib.contextmanager
def executor(
    name: str, jobs: int | None, address: str | None
) -> Iterator[concurrent.futures.Executor | None]:
  """Lends an executor.

  Args:
    name: `threads`, `processes` or `dask`.
    jobs: How many tasks at a time; None: one for each core.
    address: Of the Dask scheduler; None: a cluster of processes on this machine.

  Yields:
    The executor; None for the threads that `sweep` has of its own.

  Raises:
    UsageError: There is no such cluster, or Dask is not installed.
  """
  jobs = jobs or programs.num_cores()
  if name == "threads":
    yield None
  elif name == "processes":
    # Not forked: JAX has threads.
    context = multiprocessing.get_context("spawn")
    with concurrent.futures.ProcessPoolExecutor(
        jobs, context, initializer=programs.die_with_parent
    ) as pool:
      try:
        yield pool
      except BaseException:
        pool.shutdown(wait=False, cancel_futures=True)
        # They would first finish what they are at, and it is not wanted.
        for process in multiprocessing.active_children():
          process.terminate()
        raise
  else:
    with _dask_client(jobs, address) as client:
      yield client.get_executor()


@contextlib.contextmanager
def _dask_client(jobs: int, address: str | None) -> Iterator:
  try:
    import distributed  # pylint: disable=g-import-not-at-top
  except ImportError as e:
    raise UsageError(
        "Dask is not installed: pip install"
        f" '{installed.DISTRIBUTION}[dask]'"
    ) from e
  with contextlib.ExitStack() as stack:
    try:
      if address is None:
        cluster = stack.enter_context(
            distributed.LocalCluster(
                n_workers=jobs,
                threads_per_worker=1,
                dashboard_address=None,
            )
        )
        address = cluster.scheduler_address
      client = distributed.Client(address, timeout="10s")
    except (OSError, ValueError) as e:
      raise UsageError(
          f"cannot reach the Dask scheduler {address!r}: {e}"
      ) from e
    yield stack.enter_context(client)
