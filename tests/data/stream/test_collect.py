"""The collector: one line per step from any layout; ranks that disagree stop together."""

import re
import threading

import numpy as np
import pytest
from ranks import PATIENCE
from small_corpora import random_documents, stream_of, write_corpus

from base.errors import UserError
from data.stream.collect import LedgerCollector
from data.stream.ledger import Ledger, read_ledger
from recipes.schema import Skip


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    root = tmp_path_factory.mktemp("corpora")
    for seed, name in enumerate(("prose", "other")):
        write_corpus(root / name, random_documents(150, 3, 50, seed=seed))
    return root


def collect(streams, data_ranks, data_size, folder, steps=range(1, 8), micro_batch=1, prefetch=0):
    """Run one collector per rank in threads; the gather is a barrier. Returns the errors."""
    ranks = len(streams)
    shelf, barrier, errors = [None] * ranks, threading.Barrier(ranks), [None] * ranks

    def work(rank):
        def gather(own):
            shelf[rank] = own
            barrier.wait(timeout=30 * PATIENCE)
            everyone = np.stack(shelf)
            barrier.wait(timeout=30 * PATIENCE)
            return everyone

        ledger = Ledger(folder) if rank == 0 else None
        collector = LedgerCollector(
            ledger, gather, 3, data_ranks, streams[rank].skips.fingerprint()
        )
        place = data_ranks[rank], data_size, micro_batch
        try:
            with streams[rank].prefetch(steps[0], steps[-1], *place) as batches:
                for data in batches:
                    collector.add(data)
            collector.flush()
        except UserError as error:
            errors[rank] = str(error)

    threads = [threading.Thread(target=work, args=(rank,)) for rank in range(ranks)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=60 * PATIENCE)
    return errors


def test_ledgers_are_equal_for_any_number_of_data_and_tensor_ranks_and_any_prefetch(root, tmp_path):
    skip = Skip(advance=[(2, 4)], no_update=[(5, 6)])
    ledgers = []
    for number, (data_size, copies, prefetch) in enumerate(
        [(1, 1, 0), (2, 1, 4), (4, 1, 0), (8, 1, 4), (2, 2, 0), (1, 2, 4)]
    ):
        ranks = [d for d in range(data_size) for _ in range(copies)]
        streams = [
            stream_of(root, {"prose": 1}, skip=skip, prefetch=prefetch, attend="within")
            for _ in ranks
        ]
        folder = tmp_path / str(number)
        assert collect(streams, ranks, data_size, folder) == [None] * len(ranks)
        ledgers.append(list(read_ledger(folder)))
    assert all(ledger == ledgers[0] for ledger in ledgers)
    assert [line["data_step"] for line in ledgers[0]] == [0, 1, 4, 5, 6, 7, 8]
    assert [line.get("update", True) for line in ledgers[0]] == [True] * 3 + [False] + [True] * 3
    assert len({line["skips"] for line in ledgers[0]}) == 1


def test_a_change_of_data_ranks_in_mid_run_keeps_the_ledger(root, tmp_path):
    sizes = [(1, range(1, 4)), (4, range(4, 9)), (2, range(9, 13))]
    for size, steps in sizes:
        streams = [stream_of(root, {"prose": 1, "other": 2}) for _ in range(size)]
        collect(streams, list(range(size)), size, tmp_path / "changed", steps)
    whole = [stream_of(root, {"prose": 1, "other": 2})]
    collect(whole, [0], 1, tmp_path / "whole", range(1, 13))
    assert list(read_ledger(tmp_path / "changed")) == list(read_ledger(tmp_path / "whole"))


@pytest.mark.parametrize(
    ("others", "data_ranks", "message"),
    [
        # Data ranks with another seed see other documents: their numbers of targets differ.
        (dict(seed=7), [0, 1], r"step \d+: rank 1 and rank 0 disagree on what this step is"),
        (dict(skip=Skip(advance=[(0, 1)])), [0, 1], "disagree on what this step is"),
        # Tensor ranks share a data coordinate: even with equal counts the samples must be equal.
        (dict(seed=7, attend="across"), [0, 0], "rank 1 and rank 0 disagree on the samples of"),
    ],
)
def test_ranks_that_disagree_all_stop_and_say_who(root, tmp_path, others, data_ranks, message):
    mine = dict(attend=others.get("attend", "within"))
    streams = [stream_of(root, {"prose": 1}, **mine), stream_of(root, {"prose": 1}, **others)]
    data_size = len(set(data_ranks))
    errors = collect(streams, data_ranks, data_size, tmp_path)

    assert all(error and re.search(message, error) for error in errors), errors
    assert errors[0] == errors[1]
    assert not list(read_ledger(tmp_path))
