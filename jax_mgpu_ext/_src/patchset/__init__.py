"""The series of patches against JAX: one function for each thing to do with it.

Each takes its folders as arguments, returns data, and raises `PatchError` for
bad input, having changed nothing. See `docs/patch-policy.md`.
"""

from __future__ import annotations

from jax_mgpu_ext._src.patchset.applying import Applied as Applied
from jax_mgpu_ext._src.patchset.applying import apply as apply
from jax_mgpu_ext._src.patchset.checking import check as check
from jax_mgpu_ext._src.patchset.checking import CheckReport as CheckReport
from jax_mgpu_ext._src.patchset.checking import PatchStatus as PatchStatus
from jax_mgpu_ext._src.patchset.checking import status as status
from jax_mgpu_ext._src.patchset.command import main as main
from jax_mgpu_ext._src.patchset.exporting import export as export
from jax_mgpu_ext._src.patchset.exporting import Exported as Exported
from jax_mgpu_ext._src.patchset.overlaying import Overlay as Overlay
from jax_mgpu_ext._src.patchset.overlaying import overlay as overlay
from jax_mgpu_ext._src.patchset.problems import PatchError as PatchError
from jax_mgpu_ext._src.patchset.problems import Problem as Problem
from jax_mgpu_ext._src.patchset.rebasing import Conflict as Conflict
from jax_mgpu_ext._src.patchset.rebasing import rebase as rebase
from jax_mgpu_ext._src.patchset.rebasing import Rebased as Rebased
