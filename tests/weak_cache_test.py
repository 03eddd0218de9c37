"""The cache of live objects: by identity, and keeping none of them alive."""

from __future__ import annotations

import gc
import threading

from absl.testing import absltest

from jax_mgpu_ext._src import weak_cache


class _Thing:

  def __eq__(self, other):
    return True

  __hash__ = None


class IdentityCacheTest(absltest.TestCase):

  def test_by_identity(self):
    cache = weak_cache.IdentityCache()
    first, second = _Thing(), _Thing()
    cache.put(first, "first")
    self.assertEqual(cache.get(first), "first")
    self.assertIsNone(cache.get(second))
    cache.put(second, "second")
    cache.put(first, "other")
    self.assertEqual((cache.get(first), cache.get(second)), ("other", "second"))
    self.assertLen(cache, 2)
    cache.clear()
    self.assertLen(cache, 0)
    self.assertIsNone(cache.get(first))

  def test_keeps_nothing_alive(self):
    cache = weak_cache.IdentityCache()
    kept = _Thing()
    cache.put(kept, 1)
    for i in range(100):
      cache.put(_Thing(), i)
    gc.collect()
    self.assertLen(cache, 1)
    del kept
    gc.collect()
    self.assertLen(cache, 0)

  def test_an_entry_that_was_replaced_outlives_the_first(self):
    cache = weak_cache.IdentityCache()
    thing = _Thing()
    cache.put(thing, 1)
    cache.put(thing, 2)
    gc.collect()
    self.assertEqual(cache.get(thing), 2)

  def test_another_object_at_the_same_place(self):
    cache = weak_cache.IdentityCache()
    thing, other = _Thing(), _Thing()
    cache.put(other, "other")
    cache.known[id(thing)] = cache.known[id(other)]
    self.assertIsNone(cache.get(thing))

  def test_what_has_no_room_for_weak_references(self):
    cache = weak_cache.IdentityCache()
    with self.assertRaises(TypeError):
      cache.put((1, 2), 3)
    self.assertIsNone(cache.get((1, 2)))
    self.assertLen(cache, 0)

  def test_threads(self):
    cache = weak_cache.IdentityCache()
    things = [_Thing() for _ in range(50)]
    wrong = []

    def work():
      for _ in range(200):
        for i, thing in enumerate(things):
          if cache.get(thing) not in (None, i):
            wrong.append(i)
          cache.put(thing, i)
          cache.put(_Thing(), -1)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
      thread.start()
    for thread in threads:
      thread.join()
    self.assertEqual(wrong, [])
    gc.collect()
    self.assertLen(cache, len(things))


if __name__ == "__main__":
  absltest.main()
