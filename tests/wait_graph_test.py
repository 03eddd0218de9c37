"""Verdicts on pictures of threads and barriers, without JAX."""

from __future__ import annotations

import ast
import pathlib
import random

from absl.testing import absltest
from absl.testing import parameterized

from jax_mgpu_ext._src.deadlock import wait_graph
from jax_mgpu_ext._src.deadlock.wait_graph import Barrier
from jax_mgpu_ext._src.deadlock.wait_graph import Picture
from jax_mgpu_ext._src.deadlock.wait_graph import Thread


def key(warpgroup, block=0):
  return (0, block, warpgroup, -1)


def barrier(number, name, **arguments):
  """A barrier; `arrived` and `usual` are warpgroups of block 0, or keys."""
  arguments = dict(
      array=name.partition("[")[0], kind=wait_graph.BARRIER, device=0, block=0,
      phase=0, need=1, arrived={}, usual={}, scope=frozenset({0}),
  ) | arguments
  for part in ("arrived", "usual"):
    arguments[part] = {
        (k if isinstance(k, tuple) else key(k)): n
        for k, n in dict(arguments[part]).items()
    }
  arguments.setdefault("have", sum(arguments["arrived"].values()))
  return Barrier(key=(number,), name=name, **arguments)


def picture(states, barriers):
  """States: key -> number of the barrier, "finished" or "running"."""
  threads = []
  for thread, state in states.items():
    thread = thread if isinstance(thread, tuple) else key(thread)
    if isinstance(state, int):
      threads.append(Thread(key=thread, state="blocked", barrier=(state,)))
    else:
      threads.append(Thread(key=thread, state=state))
  return Picture(
      threads=tuple(threads), barriers={b.key: b for b in barriers}
  )


def verdict(states, *barriers):
  found = wait_graph.judge(picture(states, barriers))
  if found is None:
    return None
  return found.code, tuple(w.thread[2] for w in found.waits), tuple(
      w.barrier.name for w in found.waits
  )


class JudgeTest(parameterized.TestCase):

  @parameterized.named_parameters(
      ("runs", {0: 0, 1: "running"}, [barrier(0, "a")]),
      ("all_done", {0: "finished", 1: "finished"}, [barrier(0, "a")]),
      ("nobody", {}, []),
  )
  def test_no_verdict(self, states, barriers):
    self.assertIsNone(verdict(states, *barriers))

  @parameterized.named_parameters(
      ("nobody_arrived", {0: 0, 1: "finished"}, [barrier(0, "a")],
       ("DL002", (0,), ("a",))),
      ("alone", {0: 0}, [barrier(0, "a")], ("DL002", (0,), ("a",))),
      ("left", {0: 0, 1: "finished"},
       [barrier(0, "a", phase=2, usual={1: 1})], ("DL002", (0,), ("a",))),
      ("one_of_two_left", {0: 0, 1: "finished", 2: "finished"},
       [barrier(0, "a", phase=2, need=2, arrived={1: 1}, usual={1: 1, 2: 1})],
       ("DL002", (0,), ("a",))),
      ("too_high", {0: 0, 1: 0},
       [barrier(0, "a", need=3, arrived={0: 1, 1: 1})],
       ("DL003", (0,), ("a",))),
      ("too_high_of_one", {0: 0, 1: "finished"},
       [barrier(0, "a", need=2, arrived={1: 1})], ("DL003", (0,), ("a",))),
      ("each_other", {0: 0, 1: 1}, [barrier(0, "a"), barrier(1, "b")],
       ("DL001", (0, 1), ("a", "b"))),
      ("round", {0: 0, 1: 1, 2: 2},
       [barrier(0, "a", phase=1, usual={1: 1}),
        barrier(1, "b", phase=1, usual={2: 1}),
        barrier(2, "c", phase=1, usual={0: 1})],
       ("DL001", (0, 1, 2), ("a", "b", "c"))),
      ("all_for_one", {0: 0, 1: 0}, [barrier(0, "a", need=2)],
       ("DL001", (0, 1), ("a", "a"))),
      # A known cycle comes before what is only starved.
      ("cycle_and_starved", {0: 0, 1: 1, 2: 2, 3: "finished"},
       [barrier(0, "a", phase=1, usual={1: 1}),
        barrier(1, "b", phase=1, usual={0: 1}),
        barrier(2, "c", phase=1, usual={3: 1})],
       ("DL001", (0, 1), ("a", "b"))),
      # What is starved comes before a cycle that is only supposed.
      ("starved_and_supposed", {0: 0, 1: 1, 2: 2, 3: "finished"},
       [barrier(0, "a"), barrier(1, "b"), barrier(2, "c", phase=1, usual={3: 1})],
       ("DL002", (2,), ("c",))),
      ("sibling", {0: 0, 1: "finished"},
       [barrier(0, "r[1]"), barrier(1, "r[0]", phase=1, usual={1: 1})],
       ("DL002", (0,), ("r[1]",))),
      ("own_copy", {0: 0, 1: "finished"},
       [barrier(0, "full", phase=1, usual={0: 1})], ("DL002", (0,), ("full",))),
      ("named", {0: 0, 1: "finished"},
       [barrier(0, "n", kind=wait_graph.NAMED_BARRIER, need=2, arrived={0: 1})],
       ("DL006", (0,), ("n",))),
      ("block", {0: 0, key(0, 1): "finished"},
       [barrier(0, "c", kind=wait_graph.CLUSTER_BARRIER, need=2, arrived={0: 1},
                scope=frozenset({0, 1}))],
       ("DL006", (0,), ("c",))),
      ("count_of_cluster", {0: 0, key(0, 1): 1},
       [barrier(n, "c", kind=wait_graph.CLUSTER_BARRIER, need=3, block=n,
                arrived={0: 1, key(0, 1): 1}, scope=frozenset({0, 1}))
        for n in (0, 1)],
       ("DL003", (0,), ("c",))),
      ("mixed", {0: 0, 1: 1},
       [barrier(0, "c", kind=wait_graph.CLUSTER_BARRIER), barrier(1, "l")],
       ("DL005", (0, 1), ("c", "l"))),
  )
  def test_verdict(self, states, barriers, want):
    self.assertEqual(verdict(states, *barriers), want)

  def test_order_does_not_matter(self):
    states = {0: 0, 1: 1, 2: 2, 3: "finished", 4: 1}
    barriers = [
        barrier(0, "a", phase=1, usual={1: 1}), barrier(1, "b"),
        barrier(2, "c", phase=1, usual={3: 1}),
    ]
    want = verdict(states, *barriers)
    generator = random.Random(0)
    for _ in range(20):
      shuffled = list(states.items())
      generator.shuffle(shuffled)
      generator.shuffle(barriers)
      self.assertEqual(verdict(dict(shuffled), *barriers), want)

  def test_every_stuck_picture_has_a_verdict(self):
    generator = random.Random(1)
    for _ in range(3000):
      count = generator.randint(1, 5)
      number = generator.randint(1, 4)
      barriers = [
          barrier(
              n, f"b[{n}]", phase=generator.randint(0, 2), need=3,
              arrived={t: 1 for t in range(count) if generator.random() < 0.2},
              usual={t: 1 for t in range(count) if generator.random() < 0.4},
              kind=generator.choice([
                  wait_graph.BARRIER, wait_graph.CLUSTER_BARRIER,
                  wait_graph.NAMED_BARRIER,
              ]),
          )
          for n in range(number)
      ]
      states = {
          t: generator.choice(["finished", *range(number)]) for t in range(count)
      }
      found = wait_graph.judge(picture(states, barriers))
      if any(isinstance(state, int) for state in states.values()):
        self.assertIsNotNone(found)
        self.assertNotEmpty(found.waits)
        for wait in found.waits:
          self.assertEqual(wait.barrier.key[0], states[wait.thread[2]])
      else:
        self.assertIsNone(found)

  def test_imports_no_jax(self):
    source = pathlib.Path(wait_graph.__file__).read_text(encoding="utf-8")
    names = {
        alias.name
        for node in ast.walk(ast.parse(source))
        if isinstance(node, (ast.Import, ast.ImportFrom))
        for alias in node.names
    } | {
        node.module
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.ImportFrom)
    }
    self.assertEqual([n for n in names if n.startswith(("jax", "numpy"))], [])


if __name__ == "__main__":
  absltest.main()
