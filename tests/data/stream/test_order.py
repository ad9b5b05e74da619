"""The order function: golden vectors, bijection, inverse, epochs, and that it looks random."""

import numpy as np
import pytest

from data.stream.order import Order, forward, inverse, order_seed, round_keys

GOLDEN = [  # version 1; these numbers never change
    (1000, 1, [725, 394, 87, 944, 443, 137]),
    (244140625, 42, [81896506, 72369955, 92306917, 239111051, 193660916, 164073588]),
    (1000000007, 7, [585878353, 768031006, 850899711, 613286900, 593817730, 99033698]),
]


@pytest.mark.parametrize(("n", "seed", "images"), GOLDEN)
def test_order_version_1_gives_its_golden_images(n, seed, images):
    assert forward(np.arange(6), n, seed).tolist() == images


def test_seed_of_an_epoch_is_the_hash_of_its_text():
    assert order_seed(1234, "prose", 0) == 17714384647849679590


def test_an_independent_scalar_version_gives_the_same_images():
    """Plain Python integers, written from the definition: any overflow trick of numpy would
    show.
    """

    def image(x, n, seed):
        mask64, bits = 2**64 - 1, max(2, (n - 1).bit_length() + (n - 1).bit_length() % 2)
        half = bits // 2
        keys, state = [], seed
        for _ in range(6):
            state = (state + 0x9E3779B97F4A7C15) & mask64
            z = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & mask64
            z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & mask64
            keys.append(z ^ (z >> 31))
        while True:
            left, right = x >> half, x & ((1 << half) - 1)
            for key in keys:
                z = ((right ^ key) * 0xBF58476D1CE4E5B9) & mask64
                z = ((z ^ (z >> 32)) * 0x94D049BB133111EB) & mask64
                left, right = right, left ^ (z >> (64 - half))
            x = (left << half) | right
            if x < n:
                return x

    for n in (1, 2, 3, 5, 17, 1000, 2**16, 2**16 + 1, 2**33 + 5):
        for seed in (0, 1, 2**64 - 1):
            index = np.unique(np.linspace(0, n - 1, 20).astype(np.int64))
            assert forward(index, n, seed).tolist() == [image(int(i), n, seed) for i in index]


@pytest.mark.filterwarnings("error")
def test_order_is_a_bijection_with_its_inverse_for_every_small_size():
    for n in range(1, 301):
        images = forward(np.arange(n), n, seed=n * 7919)
        assert np.array_equal(np.sort(images), np.arange(n))
        assert np.array_equal(inverse(images, n, seed=n * 7919), np.arange(n))


@pytest.mark.filterwarnings("error")
def test_inverse_holds_for_huge_sizes():
    rng = np.random.default_rng(0)
    for n in (2**31, 2**40 + 1, 2**62 + 12345):
        index = rng.integers(0, n, 1000)
        images = forward(index, n, seed=3)
        assert images.max() < n
        assert np.array_equal(inverse(images, n, seed=3), index)


def test_every_epoch_has_each_window_once_in_another_order():
    order = Order(5, ["prose"], [101])
    draws = np.arange(3 * 101)
    source = np.zeros_like(draws)
    epoch, window = order.windows(source, draws)
    epochs = window.reshape(3, 101)
    assert np.array_equal(epoch, draws // 101)
    assert all(np.array_equal(np.sort(one), np.arange(101)) for one in epochs)
    assert not np.array_equal(epochs[0], epochs[1])
    assert not np.array_equal(epochs[1], epochs[2])
    assert np.array_equal(order.draws(source, epoch, window), draws)


def test_asking_in_epoch_two_gives_what_an_unbroken_run_gives():
    draws, source = np.arange(300), np.zeros(300, dtype=np.int64)
    unbroken = Order(5, ["prose"], [101]).windows(source, draws)[1]
    resumed = Order(5, ["prose"], [101]).windows(source[150:], draws[150:])[1]
    assert np.array_equal(unbroken[150:], resumed)


@pytest.mark.parametrize("n", [1, 3, 1000, 2**20 + 1, 2**32, 2**32 + 1, 2**40 + 7])
def test_an_order_that_is_asked_again_gives_the_same_windows_from_its_tables(n):
    order, source = Order(5, ["prose"], [n]), np.zeros(50, dtype=np.int64)
    draws = np.linspace(0, n - 1, 50).astype(np.int64)
    expected = forward(draws, n, order_seed(5, "prose", 0))
    for _ in range(3):
        assert np.array_equal(order.windows(source, draws)[1], expected)
    assert (order._tabled[1] is not None) == (n <= 2**32)
    other = order.windows(source, draws + n)  # the next epoch is not read from this one's tables
    assert np.array_equal(other[1], forward(draws, n, order_seed(5, "prose", 1)))


def test_order_of_a_source_does_not_change_when_others_come_and_go():
    draws = np.arange(500)
    alone = Order(9, ["prose"], [77]).windows(np.zeros_like(draws), draws)
    among = Order(9, ["code", "math", "prose"], [5, 901, 77]).windows(np.full_like(draws, 2), draws)
    assert np.array_equal(alone, among)


def test_neighbouring_seeds_and_epochs_never_share_an_order():
    seeds = {order_seed(seed, "prose", epoch) for seed in range(50) for epoch in range(50)}
    assert len(seeds) == 2500
    assert len({tuple(round_keys(seed)) for seed in seeds}) == 2500


@pytest.mark.parametrize("n", [30_011, 1_000_003, 2**30 + 1])
@pytest.mark.parametrize("seed", [1, 2**63 + 11])
def test_order_passes_six_statistics_of_a_random_permutation(n, seed):
    count = min(n, 100_000)
    x = forward(np.arange(count), n, seed).astype(np.int64)
    scaled = x / n
    noise = 5 / np.sqrt(count)  # five standard deviations of a correlation
    # 1 lowest-bit affine bias: no bit of the index, nor a pair of them, predicts the lowest bit
    low_bit = 1 - 2 * (x & 1)
    index_bits = [1 - 2 * ((np.arange(count) >> bit) & 1) for bit in range(12)]
    pairs = [a * b for i, a in enumerate(index_bits) for b in index_bits[:i]]
    assert max(abs((low_bit * mask).mean()) for mask in index_bits + pairs) < noise
    # 2 neighbour differences are distinct as often as by chance
    differences = np.diff(x)
    expected = 1 - count / (2 * n) if n > 4 * count else 0.6
    assert len(np.unique(differences)) / len(differences) > expected - 0.03
    # 3 serial correlation
    assert abs(np.corrcoef(scaled[:-1], scaled[1:])[0, 1]) < noise
    # 4 chi-square over 100 bins, per degree of freedom
    bins = np.bincount((scaled * 100).astype(int), minlength=100)
    assert ((bins - count / 100) ** 2 / (count / 100)).sum() / 99 < 1.6
    # 5 variance of short-range means against that of independent draws
    means = scaled[: count // 64 * 64].reshape(-1, 64).mean(axis=1)
    assert 0.85 < means.var() * 64 * 12 < 1.15
    # 6 correlation with the index itself
    assert abs(np.corrcoef(np.arange(count), scaled)[0, 1]) < noise
