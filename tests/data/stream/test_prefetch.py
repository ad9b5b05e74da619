"""The prefetch thread: same items, bounded, ended cleanly, errors raised where they belong."""

import threading
import time

import pytest

from data.stream.prefetch import Prefetch


def threads():
    return [thread for thread in threading.enumerate() if thread.name == "data-prefetch"]


@pytest.mark.parametrize("depth", [0, 1, 4])
def test_items_are_the_same_at_any_depth(depth):
    assert list(Prefetch(lambda key: key * key, range(20), depth)) == [i * i for i in range(20)]
    assert not threads()


def test_at_most_depth_items_wait_ahead():
    made = []
    with Prefetch(made.append, range(100), depth=3) as items:
        next(items)
        time.sleep(0.1)
        assert len(made) <= 1 + 3 + 1  # one used, three waiting, one in the thread's hands
    assert not threads()


@pytest.mark.parametrize("depth", [0, 2])
def test_an_error_is_raised_at_the_item_that_failed(depth):
    def make(key):
        if key == 3:
            raise ValueError("item three")
        return key

    items = Prefetch(make, range(10), depth)
    assert [next(items) for _ in range(3)] == [0, 1, 2]
    with pytest.raises(ValueError, match="item three"):
        next(items)
    assert not threads()


def test_leaving_early_ends_the_thread_even_when_it_waits_for_room():
    def leave_in_the_middle():
        with Prefetch(lambda key: key, range(10**9), depth=2) as items:
            assert len(threads()) == 1
            assert next(items) == 0
            time.sleep(0.1)  # by now the queue is full and the thread waits
            raise KeyError(items)

    with pytest.raises(KeyError) as caught:
        leave_in_the_middle()
    assert not threads()
    (items,) = caught.value.args
    with pytest.raises(StopIteration):
        next(items)
    items.close()


def test_an_error_inside_the_keys_reaches_the_consumer():
    def keys():
        yield 1
        raise RuntimeError("no more keys")

    items = Prefetch(lambda key: key, keys(), depth=2)
    assert next(items) == 1
    with pytest.raises(RuntimeError, match="no more keys"):
        next(items)
