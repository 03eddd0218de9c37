"""Targets: the shipped ones, files of one's own, and what is wrong in them."""

from __future__ import annotations

import dataclasses
import json
import os
import pathlib
import re
import tempfile

from absl.testing import absltest
from absl.testing import parameterized

import jax_mgpu_ext
from jax_mgpu_ext import targets
from jax_mgpu_ext._src import errors
from jax_mgpu_ext._src import targets as targets_lib

_NAMES = (
    "h100", "h100_pcie", "h200", "gh200", "b200", "gb200", "b300", "gb300",
    "rtx_pro_6000",
)


def _file(test, text, name="gpus.toml"):
  folder = tempfile.TemporaryDirectory()
  test.addCleanup(folder.cleanup)
  path = pathlib.Path(folder.name) / name
  if isinstance(text, bytes):
    path.write_bytes(text)
  else:
    path.write_text(text, encoding="utf-8")
  return str(path)


def _table(name="h20", **values):
  """Writes a table of a target that is based on another."""
  values = {"based_on": "h100", **values}
  lines = (f"{k} = {json.dumps(v)}" for k, v in values.items())
  return "\n".join([f"[targets.{name}]", *lines])


class ShippedTest(parameterized.TestCase):

  def test_names(self):
    self.assertEqual(targets.names(), _NAMES)
    self.assertIs(jax_mgpu_ext.targets, targets)
    self.assertIn("targets", jax_mgpu_ext.__all__)

  @parameterized.parameters(*((name,) for name in _NAMES))
  def test_is_consistent(self, name):
    target = targets.get(name)
    self.assertIs(targets.get(name), target)
    self.assertIs(targets.get(target), target)
    self.assertEqual(target.name, name)
    self.assertStartsWith(target.description, "NVIDIA ")
    self.assertEqual(
        target.smem_bytes_per_sm,
        target.smem_bytes_per_block + target.smem_bytes_reserved_per_block,
    )
    self.assertEqual(target.registers_per_block, target.registers_per_sm)
    self.assertLessEqual(target.threads_per_block, target.threads_per_sm)
    self.assertEqual(target.tmem_columns, 512 if target.has_tcgen05 else 0)
    self.assertLessEqual(target.has_wgmma + target.has_tcgen05, 1)
    self.assertIn(target.cluster_size_max, (8, 16))
    self.assertBetween(target.memory_bytes_per_s, 10**12, 10**13)
    self.assertEqual(dataclasses.replace(target), target)
    self.assertEqual(
        targets_lib.from_json(json.loads(json.dumps(target.to_json()))), target
    )
    hash(target)

  @parameterized.parameters(
      ("h100", "sm_90a", True, False), ("gh200", "sm_90a", True, False),
      ("b200", "sm_100a", False, True), ("b300", "sm_103a", False, True),
      ("rtx_pro_6000", "sm_120a", False, False),
  )
  def test_arch(self, name, arch, has_wgmma, has_tcgen05):
    target = targets.get(name)
    self.assertEqual(
        (target.arch, target.has_wgmma, target.has_tcgen05),
        (arch, has_wgmma, has_tcgen05),
    )

  @parameterized.parameters(*((name,) for name in _NAMES))
  def test_xla_target_config(self, name):
    target = targets.get(name)
    text = target.xla_target_config()
    self.assertEqual(text.count("{"), text.count("}"))
    for field, value in (
        ("shared_memory_per_block_optin", target.smem_bytes_per_block),
        ("core_count", target.sm_count),
        ("threads_per_block_limit", 1024),
        ("major", target.compute_capability[0]),
        ("minor", target.compute_capability[1]),
        ("device_memory_size", target.memory_bytes),
        ("device_description_str", f'"{target.description}"'),
    ):
      self.assertRegex(text, rf"(?m)^ *{field}: {re.escape(str(value))}$")

  @parameterized.parameters(
      ("plain", '"plain"'),
      ('a "quoted" \\ name', '"a \\042quoted\\042 \\134 name"'),
      ("caf\u00e9", '"caf\\303\\251"'),
  )
  def test_text_of_a_description_is_escaped(self, description, want):
    target = dataclasses.replace(
        targets.get("h100"), description=description
    )
    last = target.xla_target_config().strip().splitlines()[-1]
    self.assertEqual(last, f"device_description_str: {want}")

  def test_source_of_each_number(self):
    path = pathlib.Path(targets_lib.__file__).with_suffix(".toml")
    for line in path.read_text(encoding="utf-8").splitlines():
      if re.match(r"\w+ = [\d\[]", line):
        self.assertIn("#", line)


class FileTest(parameterized.TestCase):

  def test_get_and_load(self):
    path = _file(self, _table(sm_count=78) + "\n" + _table("half", sm_count=66))
    self.assertEqual(list(targets.load(path)), ["h20", "half"])
    target = targets.get(f"{path}::h20")
    self.assertEqual((target.name, target.sm_count), ("h20", 78))
    self.assertEqual(
        dataclasses.replace(target, name="h100", sm_count=132),
        targets.get("h100"),
    )
    self.assertEqual(targets.load(pathlib.Path(path))["half"].sm_count, 66)

  def test_a_file_with_one(self):
    path = _file(self, _table())
    self.assertEqual(targets.get(path).name, "h20")
    self.assertEqual(targets.get(f"{path}::h20").name, "h20")

  def test_based_on_one_before_it(self):
    path = _file(self, _table("a", sm_count=7) + "\n" + _table(
        "b", based_on="a", clock_ghz=1))
    found = targets.load(path)
    self.assertEqual((found["b"].sm_count, found["b"].clock_ghz), (7, 1))

  def test_one_that_is_based_on_none(self):
    values = targets.get("b200").to_json()
    del values["name"]
    lines = "\n".join(f"{k} = {json.dumps(v)}" for k, v in values.items())
    path = _file(self, f"[targets.mine]\n{lines}")
    self.assertEqual(
        dataclasses.replace(targets.get(path), name="b200"), targets.get("b200")
    )

  def test_a_shipped_name_may_be_taken(self):
    path = _file(self, _table("h100", sm_count=7))
    self.assertEqual(targets.get(f"{path}::h100").sm_count, 7)
    self.assertEqual(targets.get("h100").sm_count, 132)

  @parameterized.parameters(
      ("", "tables"),
      ("x = 1", "got x"),
      ("targets = 1", "tables"),
      ("[targets]\nh20 = 1", "tables"),
      ("[targets]", "tables"),
      (_table() + "\n[other]\n", "got other"),
      ("[targets.h20", "cannot read targets"),
      ("[targets.h20]\nsm_count = 3", "missing: write them, or based_on"),
      (_table(based_on="h1000"), "got 'h1000'"),
      (_table(based_on=3), "got 3"),
      (_table(based_on="h20"), "stands before it"),
      (_table("a", based_on="b") + "\n" + _table("b"), "stands before it"),
      (_table(smem=3), "unknown key 'smem', expected some of description"),
      (_table('"a::b"'), "without '::'"),
      (_table('"a\\u001bb"'), "printable name"),
      (_table('" a"'), "printable name"),
      (b"\xff\xfe\x00", "cannot read targets"),
      (b"\x00" * 10, "cannot read targets"),
      ("#" * (1 << 16) + "\n" + _table(), "larger than 64 KiB"),
      ('[targets.x]\nbased_on = ["h100"]', "expected based_on to name"),
      ('[targets.x]\nbased_on = "h100"\nsm_count = ' + "9" * 400, "sm_count"),
      ('[targets.x]\nbased_on = "h100"\nclock_ghz = ' + "9" * 400, "clock_ghz"),
      ('[targets.x]\nbased_on = "h100"\nsm_count = 2147483648', "sm_count"),
      ('[targets.x]\nbased_on = "h100"\ncompute_capability = [8, 0]',
       "for which Mosaic GPU compiles"),
      ('[targets.x]\nbased_on = "h100"\ncompute_capability = [13, 0]',
       "for which Mosaic GPU compiles"),
      ("x = " + "[" * 100_000, "cannot read targets"),
  )
  def test_bad(self, text, words):
    path = _file(self, text)
    with self.assertRaisesRegex(errors.TargetError, re.escape(words)) as caught:
      targets.load(path)
    message = str(caught.exception)
    self.assertIn("gpus.toml", message)
    self.assertEndsWith(message, " [MGPU100]")
    self.assertTrue(message.isprintable())
    self.assertLess(len(message), 700)
    self.assertIsInstance(caught.exception, ValueError)

  @parameterized.parameters(
      (dict(sm_count=0), "whole number from 1 on, got sm_count = 0"),
      (dict(sm_count=1.5), "got sm_count = 1.5"),
      (dict(sm_count=True), "got sm_count = True"),
      (dict(sm_count="132"), "got sm_count = '132'"),
      (dict(sm_count=2**60), "sm_count"),
      (dict(tmem_columns=-1), "whole number from 0 on"),
      (dict(clock_ghz=0), "a positive number, got clock_ghz = 0"),
      (dict(clock_ghz="fast"), "clock_ghz = 'fast'"),
      (dict(compute_capability=[9]), "two numbers, as [9, 0]"),
      (dict(compute_capability=9.0), "two numbers"),
      (dict(compute_capability=[9, -1]), "two numbers"),
      (dict(compute_capability=[9, True]), "two numbers"),
      (dict(description=""), "a printable text"),
      (dict(description="a\x1bb"), r"'a\x1bb'"),
      (dict(description=3), "a printable text"),
      (dict(cluster_size_max=4), "at least cluster_size_portable, 8"),
  )
  def test_bad_value(self, values, words):
    path = _file(self, _table(**values))
    with self.assertRaisesRegex(errors.TargetError, re.escape(words)):
      targets.get(path)
    with self.assertRaisesRegex(errors.TargetError, re.escape(words)):
      dataclasses.replace(targets.get("h100"), **values)

  @parameterized.parameters(
      dict(sm_count=1), dict(tmem_columns=0), dict(clock_ghz=1),
      dict(clock_ghz=0.5), dict(compute_capability=[12, 1]),
      dict(smem_bytes_reserved_per_block=0), dict(description="caf\u00e9"),
      dict(cluster_size_max=8), dict(cluster_size_portable=16),
  )
  def test_good_value(self, **values):
    target = targets.get(_file(self, _table(**values)))
    [(name, value)] = values.items()
    value = tuple(value) if isinstance(value, list) else value
    self.assertEqual(getattr(target, name), value)

  def test_infinity(self):
    for value in ("inf", "nan", "-1.0"):
      path = _file(self, _table() + f"\nclock_ghz = {value}\n")
      with self.assertRaisesRegex(errors.TargetError, "positive number"):
        targets.get(path)


class NameTest(parameterized.TestCase):

  @parameterized.parameters(
      ("H100", "unknown target 'H100', expected one of h100, "),
      ("", "unknown target ''"),
      ("sm_90a", "unknown target 'sm_90a'"),
      ("h100::", "cannot read targets from 'h100'"),
      ("::h100", "cannot read targets from ''"),
      ("missing.toml", "cannot read targets from 'missing.toml'"),
      ("missing.toml::x", "No such file"),
      ("a\0b.toml", "cannot read targets"),
      ("\x1b[2J", r"x1b[2J'"),
      ("x" * 10_000, "..."),
      (None, "got NoneType: None"),
      (9.0, "got float: 9.0"),
      (b"h100", "got bytes"),
  )
  def test_bad(self, name, words):
    with self.assertRaisesRegex(errors.TargetError, re.escape(words)) as caught:
      targets.get(name)
    self.assertTrue(str(caught.exception).isprintable())
    self.assertLess(len(str(caught.exception)), 700)

  def test_folder(self):
    folder = tempfile.TemporaryDirectory(suffix=".toml")
    self.addCleanup(folder.cleanup)
    with self.assertRaisesRegex(errors.TargetError, "Is a directory"):
      targets.get(folder.name)

  def test_no_such_target_in_a_file(self):
    path = _file(self, _table("a") + "\n" + _table("b"))
    for name, words in (
        (path, f"write {path}::a"), (f"{path}::c", "got 'c'"),
        (f"{path}::", "got ''"), (f"{path}::h100", "got 'h100'"),
    ):
      with self.assertRaisesRegex(errors.TargetError, re.escape(words)):
        targets.get(name)
    self.assertEqual(targets.get(f"{path}::b").name, "b")

  def test_a_file_that_may_not_be_read(self):
    path = _file(self, _table())
    os.chmod(path, 0)
    if os.access(path, os.R_OK):
      self.skipTest("This user may read anything.")
    with self.assertRaisesRegex(errors.TargetError, "Permission denied"):
      targets.get(path)


if __name__ == "__main__":
  absltest.main()
