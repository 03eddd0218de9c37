"""Hangs of interpreted kernels as errors, with a report of who waits for what."""

from jax_mgpu_ext._src.deadlock.report import Report as Report
from jax_mgpu_ext._src.deadlock.running import last_report as last_report
from jax_mgpu_ext._src.deadlock.running import run as run
from jax_mgpu_ext._src.deadlock.running import trace as trace
from jax_mgpu_ext._src.errors import DeadlockError as DeadlockError
