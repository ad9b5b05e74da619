"""A flat array that was declared wrongly is found by its statistics; a right one never."""

import numpy as np
import pytest

from base.errors import UserError
from data.foreign.import_checks import ImportSettings
from data.foreign.importing import import_corpus

END = 1


def documents(num_ids=20_000, vocab_size=1000, seed=0) -> np.ndarray:
    """Ids with the frequencies of text, and an end id about every 40 ids."""
    rng = np.random.default_rng(seed)
    ids = 2 + rng.zipf(1.3, num_ids) % (vocab_size - 2)
    ids[rng.random(num_ids) < 1 / 40] = END
    ids[-1] = END
    return ids


def bring(tmp_path, ids, dtype, vocab_size=1000, eod_id=END, name="c", **more) -> list[str]:
    """Import an array of bytes as declared; returns the log."""
    logged = []
    (tmp_path / "x.bin").write_bytes(ids.tobytes())
    settings = ImportSettings(vocab_size=vocab_size, eod_id=eod_id, dtype=dtype, **more)
    import_corpus(str(tmp_path / "x.bin"), tmp_path / name, None, settings, logged.append)
    return logged


@pytest.mark.parametrize(
    ("true", "declared", "num_ids"),
    [
        *(("<u4", "uint16", number) for number in (100, 400, 20_000)),
        *(("<i8", "uint32", number) for number in (100, 400, 20_000)),
        *(("<i8", "uint16", number) for number in (100, 400, 20_000)),
        ("<u2", "uint8", 20_000),  # fewer are too few to tell high bytes from low ones
    ],
)
def test_ids_wider_than_declared_are_refused_and_nothing_is_left(tmp_path, true, declared, num_ids):
    with pytest.raises(UserError, match=r"even and at odd places differ .*declare their true type"):
        bring(tmp_path, documents(num_ids).astype(true), declared)
    assert [path.name for path in tmp_path.iterdir()] == ["x.bin"]
    logged = bring(tmp_path, documents(num_ids).astype(true), declared, unusual="accept")
    assert any("even and at odd places differ" in text for text in logged)


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize(
    ("kind", "dtype"), [("<u2", "uint16"), ("<u4", "uint32"), ("<u8", "uint64")]
)
def test_a_right_declaration_is_taken_with_its_numbers_in_the_log(tmp_path, seed, kind, dtype):
    ids = documents(300 * 3**seed if seed < 6 else 5000, vocab_size=[1000, 60_000][seed % 2])
    logged = bring(tmp_path, ids.astype(kind), dtype, vocab_size=60_000)
    share = np.count_nonzero(ids == END) / len(ids)
    assert any(f"{len(ids):,} ids, {share:.2%} of them the end id 1" in text for text in logged)


def test_a_header_of_no_known_format_is_refused(tmp_path):
    header = np.array([913, 977, 991, 983, 0, 7, 0, 0], dtype="<u2")
    ids = documents().astype("<u2")
    ids[np.isin(ids, header[:4])] = 5
    with pytest.raises(UserError, match=r"7 of its first 12 ids \(\[913, 977, 991, .*nowhere else"):
        bring(tmp_path, np.concatenate([header, ids]), "uint16")
    bring(tmp_path, ids, "uint16")


def test_another_end_id_is_refused_where_it_is_nowhere_or_nearly_everywhere(tmp_path):
    ids = documents().astype("<u2")
    with pytest.raises(UserError, match=r"the end id 0 does not occur in 20,000 ids"):
        bring(tmp_path, ids, "uint16", eod_id=0)
    most = int(np.bincount(ids).argmax())
    ids[::2] = most
    ids[1::3] = most
    with pytest.raises(UserError, match=rf"% of its ids are the end id {most}"):
        bring(tmp_path, ids, "uint16", eod_id=most)
    with pytest.raises(UserError, match="unusual=yes: is neither refuse nor accept"):
        bring(tmp_path, ids, "uint16", unusual="yes")


def test_an_id_beyond_the_vocabulary_names_the_type_too(tmp_path):
    with pytest.raises(UserError, match="name its true dtype, or the tokenizer"):
        bring(tmp_path, documents().astype("<u2"), "uint32")
