"""Writes the fingerprints of what the hooks replace into `releases.py`.

Run it once in the environment of every supported release:

  python tools/fingerprints.py            # shows what is new
  python tools/fingerprints.py --write    # writes it
  python tools/fingerprints.py --check    # exit status 1 if anything is new
"""

from __future__ import annotations

import os
import pathlib
import sys

# The fingerprints are those of JAX without our hooks.
os.environ["JAX_MGPU_EXT"] = "off"

from absl import app
from absl import flags
import jax
from jax.experimental import pallas as _  # pylint: disable=unused-import
from jax.experimental.pallas import mosaic_gpu as _  # pylint: disable=unused-import
from jax._src.pallas.mosaic_gpu.interpret import jaxpr_interpret as _  # pylint: disable=unused-import

from jax_mgpu_ext._src import hooks
from jax_mgpu_ext._src import releases
from jax_mgpu_ext._src.hooks import guard

_WRITE = flags.DEFINE_bool("write", False, "Write the table.")
_CHECK = flags.DEFINE_bool("check", False, "Fail if the table lacks anything.")

_BEGIN = "# BEGIN FINGERPRINTS\n"
_END = "# END FINGERPRINTS\n"


def collect(version: str) -> dict[str, dict[str, tuple[str, ...]]]:
  """Returns the table with the fingerprints of the running JAX merged in."""
  table = {t: dict(prints) for t, prints in releases.FINGERPRINTS.items()}
  for slug in hooks.SLUGS:
    for target in hooks.load(slug).targets:
      prints = table.setdefault(str(target), {})
      for found in list(prints):
        prints[found] = tuple(r for r in prints[found] if r != version)
      found = guard.fingerprint(target.current())
      prints[found] = tuple(
          sorted((*prints.get(found, ()), version), key=releases.key)
      )
  return {
      target: {f: rs for f, rs in prints.items() if rs}
      for target, prints in sorted(table.items())
  }


def render(table: dict[str, dict[str, tuple[str, ...]]]) -> str:
  """Returns the table as Python source."""
  lines = ["FINGERPRINTS: dict[str, dict[str, tuple[str, ...]]] = {\n"]
  for target, prints in table.items():
    lines.append(f'    "{target}": {{\n')
    for found, versions in sorted(
        prints.items(), key=lambda item: releases.key(item[1][0])
    ):
      names = ", ".join(f'"{v}"' for v in versions)
      comma = "," if len(versions) == 1 else ""
      lines.append(f'        "{found}": ({names}{comma}),\n')
    lines.append("    },\n")
  return "".join([*lines, "}\n"])


def main(argv) -> int:
  if len(argv) > 1:
    raise app.UsageError(f"expected no arguments, got {argv[1:]}")
  version = releases.canonical(jax.__version__)
  table = collect(version)
  if table == releases.FINGERPRINTS:
    print(f"fingerprints of JAX {version} are up to date")
    return 0
  if not _WRITE.value:
    print(f"fingerprints of JAX {version} differ from releases.py:")
    for target, prints in table.items():
      for found in prints:
        if found not in releases.FINGERPRINTS.get(target, {}):
          print(f"  {target} is {found}")
    return 1 if _CHECK.value else 0
  path = pathlib.Path(releases.__file__)
  text = path.read_text(encoding="utf-8")
  head, rest = text.split(_BEGIN)
  path.write_text(
      head + _BEGIN + render(table) + _END + rest.split(_END)[1],
      encoding="utf-8",
  )
  print(f"wrote the fingerprints of JAX {version}")
  return 0


if __name__ == "__main__":
  app.run(lambda argv: sys.exit(main(argv)))
