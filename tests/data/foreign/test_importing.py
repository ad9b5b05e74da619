"""Tokenized files of other tools become corpora with the same tokens; ours are read by them."""

import json
import subprocess
import sys

import numpy as np
import pytest
from digests import digest
from index_bytes import encode
from ranks import PATIENCE, ROOT

from base.errors import UserError
from commands.corpus_verify import verify_corpus
from data.corpus.corpus import BEGIN_SHARED, BEGIN_STORED, open_corpus, read_manifest
from data.corpus.tokenizer import byte_tokenizer
from data.foreign.import_checks import ImportSettings
from data.foreign.importing import import_corpus
from data.foreign.token_files import find_foreign
from data.stream.schedule import read_schedule
from data.stream.stream import open_stream
from data.text.settings import read_knobs
from recipes.schema import Data, Source

DOCUMENTS = [[5, 6, 7, 0], [8, 0], [9, 9, 9, 9, 9, 0], [300, 1, 0]]
FLAT = [i for ids in DOCUMENTS for i in ids]
LENGTHS = [len(ids) for ids in DOCUMENTS]


def bring(source, out, *words, tokenizer=None, log=lambda text: None, is_quick=False):
    words = words if tokenizer else ("vocab_size=1000", "eod_id=0", *words)
    settings = read_knobs(ImportSettings, words, "make corpus-import")
    return import_corpus(str(source), out, tokenizer, settings, log, is_quick)


def megatron(folder, code=8, kind="<u2", documents=DOCUMENTS, name="s"):
    """A pair of files as Megatron's writer lays them out."""
    folder.mkdir(parents=True, exist_ok=True)
    lengths = [len(one) for one in documents]
    size = np.dtype(kind).itemsize
    offsets = (np.cumsum([0, *lengths[:-1]]) * size).tolist()
    ids = np.array([i for one in documents for i in one], dtype=kind).tobytes()
    prefix = encode(folder, code, lengths, offsets, list(range(len(lengths) + 1)), ids)
    for suffix in (".bin", ".idx"):
        (folder / f"s{suffix}").rename(folder / (name + suffix))
    return folder / name if name != "s" else prefix


def tokens_of(folder, split="train"):
    found = open_corpus(folder).splits[split]
    ids = found.read(np.array([0]), found.num_tokens)[0]
    _, starts = found.document_starts(np.array([0]), found.num_tokens)
    return [part.tolist() for part in np.split(ids, starts[1:])]


# type code, what the writer meant by it: Megatron and GPT-NeoX 8 and 4, DeepSpeed 6 to 8
@pytest.mark.parametrize(
    ("code", "kind"),
    [(8, "<u2"), (4, "<i4"), (3, "<i2"), (5, "<i8"), (6, "<u2"), (7, "<u4"), (8, "<u8")],
)
def test_type_codes_of_megatron_neox_and_deepspeed_give_the_same_tokens(tmp_path, code, kind):
    prefix = megatron(tmp_path / "in", code, kind)
    manifest = bring(prefix, tmp_path / "c")
    assert tokens_of(tmp_path / "c") == DOCUMENTS
    assert manifest["dtype"] == ("int32" if kind == "<i4" else "uint16")
    assert manifest["eod_policy"] == "append"
    is_linked = (tmp_path / "c" / "train-00000.bin").is_symlink()
    assert is_linked == (kind in ("<u2", "<i4"))


def test_one_byte_ids_are_widened(tmp_path):
    documents = [[5, 6, 0], [200, 0]]
    bring(megatron(tmp_path / "in", 1, "u1", documents), tmp_path / "c")
    assert tokens_of(tmp_path / "c") == documents


def test_names_with_dots_folders_and_several_files_in_numeric_order(tmp_path):
    for number in (10, 2, 1):
        megatron(tmp_path / "in", documents=[[number, 0]], name=f"my.data_{number}_text")
    bring(tmp_path / "in", tmp_path / "c")
    assert tokens_of(tmp_path / "c") == [[1, 0], [2, 0], [10, 0]]
    bring(tmp_path / "in" / "my.data_2_text", tmp_path / "d")
    assert tokens_of(tmp_path / "d") == [[2, 0]]
    bring(tmp_path / "in" / "*_1*", tmp_path / "e", "copy=true")
    assert tokens_of(tmp_path / "e") == [[1, 0], [10, 0]]
    assert not (tmp_path / "e" / "train-00000.bin").is_symlink()
    with pytest.raises(UserError, match="there is no such Megatron prefix"):
        bring(tmp_path / "nothing", tmp_path / "f")


def test_documents_of_several_sequences_of_none_and_without_an_end(tmp_path):
    (tmp_path / "in").mkdir()
    ids = np.array([5, 6, 0, 7, 8, 9, 0, 4], dtype="<u2").tobytes()
    # Sequences of 1, 2, 0, 4 and 1 tokens; documents of 2, 2 and 1 of them.
    encode(tmp_path / "in", 8, [1, 2, 0, 4, 1], [0, 2, 6, 6, 14], [0, 2, 4, 5], ids)
    said = []
    expected = [[5, 6, 0], [7, 8, 9, 0], [4]]
    for name, words in (("c", ()), ("d", ("copy=true",))):
        manifest = bring(tmp_path / "in" / "s", tmp_path / name, *words, log=said.append)
        assert tokens_of(tmp_path / name) == expected
        assert manifest["eod_policy"] == "as found"
    assert any("without the end id 0 at their end: 1 of 3 documents" in text for text in said)


def test_an_index_that_does_not_end_and_offsets_that_wrapped_are_mended_aloud(tmp_path):
    (tmp_path / "in").mkdir()
    ids = np.array(FLAT, dtype="<u2").tobytes()
    offsets = (np.cumsum([0, *LENGTHS[:-1]]) * 2).tolist()
    encode(tmp_path / "in", 8, LENGTHS, offsets, [0, 1, 2, 3], ids)
    said = []
    bring(tmp_path / "in" / "s", tmp_path / "c", log=said.append)
    assert tokens_of(tmp_path / "c") == DOCUMENTS
    assert "the document array ends at 3" in said[0]


@pytest.mark.parametrize("bytes_before", [2**31, 2**32])
def test_offsets_past_two_and_four_gib_end_documents_where_they_should(tmp_path, bytes_before):
    """A sparse file; offsets as a writer leaves them that adds in int32, and as it should."""
    (tmp_path / "in").mkdir()
    big = bytes_before // 2 // 4
    lengths = [big, big, big, big, 3, 2]
    exact = (np.cumsum([0, *lengths[:-1]]) * 2).tolist()
    wrapped = np.array(exact).astype(np.int32).astype(np.int64).tolist()
    for offsets in (exact, wrapped):
        encode(tmp_path / "in", 8, lengths, offsets, list(range(7)), b"")
        with open(tmp_path / "in" / "s.bin", "wb") as file:
            file.truncate(sum(lengths) * 2)
        (one,) = find_foreign(str(tmp_path / "in" / "s"), 0, None)
        (ends,) = one._ends()
        assert ends.tolist() == np.cumsum(lengths).tolist()
        assert bool(one.shard.notes) == (offsets is wrapped)


# What TokenizedFile of datatrove 0.10.1 wrote for DOCUMENTS, by token_size, with
# save_loss_metadata, save_final_metadata and tokenizer_name_or_path="t".
DATATROVE = {
    2: {
        "x.ds": "0500060007000000080000000900090009000900090000002c0101000000",
        "x.ds.index": "040000000000000006000000000000000c000000000000000f00000000000000",
        "x.ds.loss": "01" * 15,
        "x.ds.metadata": b"t|2\n15\n15.0 T".hex(),
    },
    4: {
        "x.ds": "".join(f"{i % 256:02x}{i // 256:02x}0000" for i in FLAT),
        "x.ds.index": "040000000000000006000000000000000c000000000000000f00000000000000",
        "x.ds.loss": "01" * 15,
        "x.ds.metadata": b"t|4\n15\n15.0 T".hex(),
    },
}


def test_datatrove_files_give_their_documents(tmp_path):
    for size, name in ((2, "a"), (4, "b")):
        folder = tmp_path / name
        folder.mkdir()
        for file, written in DATATROVE[size].items():
            (folder / file).write_bytes(bytes.fromhex(written))
        bring(folder, tmp_path / f"c{name}")
        assert tokens_of(tmp_path / f"c{name}") == DOCUMENTS
    loss, said = tmp_path / "b" / "x.ds.loss", []
    loss.write_bytes(b"\1\1\0\0" + b"\1" * 11)
    with pytest.raises(UserError, match=r"x.ds.loss: takes 2 tokens out .*loss=ignore"):
        bring(tmp_path / "b", tmp_path / "d")
    bring(tmp_path / "b", tmp_path / "d", "loss=ignore", log=said.append)
    assert tokens_of(tmp_path / "d") == DOCUMENTS
    assert "2 tokens give loss although .loss files take them out" in said
    with pytest.raises(UserError, match="loss=no: is neither keep nor ignore"):
        bring(tmp_path / "b", tmp_path / "e", "loss=no")
    loss.write_bytes(b"\1" * 14)
    with pytest.raises(UserError, match=r"x.ds.loss: found 14 bytes, expected one for each of the"):
        bring(tmp_path / "b", tmp_path / "e", "loss=ignore")
    assert digest(tmp_path / "ca").splitlines()[1:] != []
    (tmp_path / "a" / "x.ds").write_bytes(b"\0" * 7)
    with pytest.raises(UserError, match=r"x.ds: found 7 bytes, expected 30 or 60"):
        bring(tmp_path / "a", tmp_path / "d")
    (tmp_path / "a" / "x.ds.index").unlink()
    with pytest.raises(UserError, match=r"x.ds.index: is not there"):
        bring(tmp_path / "a", tmp_path / "d")


def test_flat_arrays_are_cut_after_the_end_id(tmp_path, monkeypatch):
    monkeypatch.setattr("data.foreign.token_files.CHUNK_TOKENS", 5)
    for kind in ("uint16", "uint32"):
        folder = tmp_path / kind
        folder.mkdir()
        np.array([*FLAT, 4, 4], dtype=kind).tofile(folder / "part-0.npy")
        said = []
        bring(folder, tmp_path / f"c{kind}", f"dtype={kind}", log=said.append)
        assert tokens_of(tmp_path / f"c{kind}") == [*DOCUMENTS, [4, 4]]
        assert any("at their end: 1 of 5 documents" in text for text in said)
    with pytest.raises(UserError, match="has no index and no header of a known format"):
        bring(folder, tmp_path / "d")
    with pytest.raises(UserError, match="dtype=float32: is not one of uint8"):
        bring(folder, tmp_path / "d", "dtype=float32")
    np.save(folder / "part-0.npy", np.array(FLAT))
    with pytest.raises(UserError, match="has a numpy header"):
        bring(folder, tmp_path / "d", "dtype=uint16")
    (folder / "part-0.npy").write_bytes(b"abc")
    with pytest.raises(UserError, match="3 bytes are no whole number of uint16"):
        bring(folder, tmp_path / "d", "dtype=uint16")


def test_ids_beyond_the_vocabulary_and_lacking_facts_are_refused(tmp_path):
    prefix = megatron(tmp_path / "in")
    for words in (("vocab_size=300", "eod_id=0"), ("vocab_size=300", "eod_id=0", "copy=true")):
        settings = read_knobs(ImportSettings, words, "x")
        with pytest.raises(UserError, match=r"holds the id.* 300, expected 0 to 299"):
            import_corpus(str(prefix), tmp_path / "c", None, settings)
    for words, problem in (
        (("vocab_size=0", "eod_id=0"), "vocab_size=0: is not from 1 to"),
        (("vocab_size=400", "eod_id=-1"), "eod_id=-1: is no id from 0 to 399"),
        (("vocab_size=400", "eod_id=400"), "eod_id=400: is no id from 0 to 399"),
    ):
        settings = read_knobs(ImportSettings, words, "x")
        with pytest.raises(UserError, match=problem):
            import_corpus(str(prefix), tmp_path / "c", None, settings)
    with pytest.raises(UserError, match="TOKENIZER= is not given"):
        import_corpus(str(prefix), tmp_path / "c", None, ImportSettings())
    with pytest.raises(UserError, match="eod_id=0: the tokenizer's end token has the id 256"):
        bring(prefix, tmp_path / "c", "eod_id=0", tokenizer=byte_tokenizer())
    with pytest.raises(UserError, match="give one of them"):
        bring(prefix, tmp_path / "c", "valid=0.1", f"valid_in={prefix}")
    with pytest.raises(UserError, match="holds no tokens to train on"):
        bring(megatron(tmp_path / "none", documents=[[]]), tmp_path / "c")
    assert not [p for p in tmp_path.iterdir() if p.name.endswith(".work") or p.name == "c"]
    (tmp_path / "c").mkdir()
    with pytest.raises(UserError, match="is there already"):
        bring(prefix, tmp_path / "c")


@pytest.mark.parametrize("damage", ["cut", "old", "short"])
def test_damaged_pairs_are_refused_with_their_names(tmp_path, damage):
    prefix = megatron(tmp_path / "in")
    data = prefix.with_suffix(".idx").read_bytes()
    if damage == "cut":
        prefix.with_suffix(".bin").write_bytes(b"\0" * 29)
    else:
        new = b"TNTIDX\0\0" + data[8:] if damage == "old" else data[:20]
        prefix.with_suffix(".idx").write_bytes(new)
    problem = {
        "cut": r"s\.bin: found 29 bytes, expected 15 tokens of type code 8: uint16 as Megatron .*"
        r"uint64 as DeepSpeed",
        "old": "has the old TNTIDX format",
        "short": r"s\.idx: is cut or empty",
    }[damage]
    with pytest.raises(UserError, match=problem):
        bring(prefix, tmp_path / "c")


def test_half_a_pair_and_the_same_ids_twice_are_refused(tmp_path):
    prefix = megatron(tmp_path / "in")
    half = prefix.with_name("half.idx")
    half.write_bytes(prefix.with_suffix(".idx").read_bytes())
    with pytest.raises(UserError, match=r"half\.bin: there is an .idx but no .bin"):
        bring(prefix.parent, tmp_path / "c")
    half.with_suffix(".bin").symlink_to(prefix.with_suffix(".bin"))
    with pytest.raises(UserError, match="is the same file as"):
        bring(prefix.parent, tmp_path / "c")
    half.with_suffix(".bin").unlink()
    bring(prefix, tmp_path / "alone")
    prefix.with_suffix(".bin").rename(tmp_path / "moved.bin")
    with pytest.raises(UserError, match=r"found no such file \(it is a link to .*s\.bin\)"):
        open_corpus(tmp_path / "alone")
    (tmp_path / "moved.bin").rename(prefix.with_suffix(".bin"))
    half.with_suffix(".bin").write_bytes(prefix.with_suffix(".bin").read_bytes())
    with pytest.raises(UserError, match="holds the same ids as"):
        bring(prefix.parent, tmp_path / "c")
    assert not (tmp_path / "c").exists()


def test_what_is_held_out_never_overlaps(tmp_path):
    documents = [[i, i + 1, 0] for i in range(1, 200)] * 2
    prefix = megatron(tmp_path / "in", documents=documents)
    bring(prefix, tmp_path / "c", "valid=0.2")
    train, valid = ({tuple(d) for d in tokens_of(tmp_path / "c", s)} for s in ("train", "valid"))
    assert len(train | valid) == 199
    assert not train & valid
    assert 20 < len(valid) < 60
    held = megatron(tmp_path / "held", documents=[[7, 8, 0], [900, 0]])
    with pytest.raises(UserError, match="2 documents of IN are also held out"):
        bring(prefix, tmp_path / "d", f"valid_in={held}")
    held = megatron(tmp_path / "held", documents=[[900, 0], [7, 7, 0]])
    bring(prefix, tmp_path / "d", f"valid_in={held}")
    assert tokens_of(tmp_path / "d", "valid") == [[900, 0], [7, 7, 0]]
    lines = [json.loads(line) for line in (tmp_path / "d" / "inputs.jsonl").open()]
    assert [(line["split"], line["linked"]) for line in lines] == [("train", True), ("valid", True)]
    assert read_manifest(tmp_path / "d")["name"] == "imported"


def steps_of(folder, steps=3):
    """Input ids of the first steps of a run on a corpus."""
    data = Data(sources={"a": Source(corpus=str(folder))})
    stream = open_stream(data, 1, 4, read_schedule(8, 4), folder, 1000)
    batches = [stream.step(step, 0, 1, 2).micro_batches[0] for step in range(1, steps + 1)]
    return [(batch.input_ids.tolist(), batch.segment_ids.tolist()) for batch in batches]


def test_documents_without_an_end_are_trained_on_with_their_boundaries(tmp_path):
    prefix = megatron(tmp_path / "in", documents=[[number] * 3 for number in range(1, 12)])
    bring(prefix, tmp_path / "c")
    for inputs, segments in steps_of(tmp_path / "c"):
        for ids, numbers in zip(inputs, segments, strict=True):
            assert np.array_equal(np.diff(ids) != 0, np.diff(numbers) != 0)


def test_a_quick_import_reads_no_token_and_gives_the_same_run(tmp_path, monkeypatch):
    prefix = megatron(tmp_path / "in")
    bring(prefix, tmp_path / "c")
    said = []
    with monkeypatch.context() as patch:
        patch.setattr("data.foreign.token_files.np.fromfile", None)  # what reads tokens
        manifest = bring(prefix, tmp_path / "q", is_quick=True, log=said.append)
    assert "no token was read" in said[0]
    assert manifest["not_read"]
    assert {path.name for path in (tmp_path / "q").iterdir()} == {
        "train-00000.bin", "train-00000.idx", "inputs.jsonl", "manifest.json"
    }  # fmt: skip
    assert tokens_of(tmp_path / "q") == DOCUMENTS
    assert steps_of(tmp_path / "q") == steps_of(tmp_path / "c")
    (note,) = open_corpus(tmp_path / "q").notes
    assert "damage in a .bin is not noticed" in note
    assert manifest["corpus_id"] != read_manifest(tmp_path / "c")["corpus_id"]
    assert verify_corpus(tmp_path / "q")["corpus_id"] == manifest["corpus_id"]
    held = megatron(tmp_path / "held", documents=[[900, 0]])
    bring(prefix, tmp_path / "h", f"valid_in={held}", is_quick=True)
    assert tokens_of(tmp_path / "h", "valid") == [[900, 0]]


def test_a_quick_import_finds_wrong_sizes_and_ids_when_they_are_used(tmp_path):
    prefix = megatron(tmp_path / "in", documents=[[5, 2000, 7, 8, 0]] * 3)
    bring(prefix, tmp_path / "q", is_quick=True)
    with pytest.raises(UserError, match="found token id 2000, expected ids from 0 to 999"):
        steps_of(tmp_path / "q")
    with pytest.raises(UserError, match="expected ids from 0 to 999, found 0 to 2000"):
        verify_corpus(tmp_path / "q")
    with open(prefix.with_suffix(".bin"), "ab") as file:
        file.write(b"\0\0")
    with pytest.raises(UserError, match="expected 30 bytes, found 32 bytes"):
        open_corpus(tmp_path / "q")


def test_a_quick_import_refuses_what_must_be_read(tmp_path):
    megatron(tmp_path / "in", name="a")
    megatron(tmp_path / "in", 5, "<i8", name="b")
    with pytest.raises(UserError) as refused:
        bring(tmp_path / "in", tmp_path / "c", "valid=0.1", "copy=true", is_quick=True)
    text = "\n".join(refused.value.problems)
    assert "QUICK=1: valid would read every token" in text
    assert "QUICK=1: copy would" in text
    assert "b.bin: holds int64, the corpus is uint16; it must be written anew" in text
    assert "a.bin" not in text
    assert not (tmp_path / "c").exists()


def test_contiguous_shares_of_each_file_as_megatron_cuts_them(tmp_path, monkeypatch):
    monkeypatch.setattr("data.foreign.token_files.CHUNK_TOKENS", 20)
    for name, first in (("a", 0), ("b", 500)):
        documents = [[1 + first + number, 0] for number in range(125)]
        megatron(tmp_path / "in", documents=documents, name=name)
    said = []
    manifest = bring(tmp_path / "in", tmp_path / "c", "split=969,30,1", log=said.append)
    # 125 documents: Megatron's int(round(0.969 * 125)) = 121, int(round(0.999 * 125)) = 125
    assert tokens_of(tmp_path / "c", "valid") == [
        [1 + first + number, 0] for first in (0, 500) for number in range(121, 125)
    ]
    assert len(tokens_of(tmp_path / "c")) == 2 * 121
    assert manifest["counts"] == {"documents": 250, "documents_without_end": 0}
    manifest = bring(tmp_path / "in", tmp_path / "d", "split=8,1,1", log=said.append)
    assert manifest["counts"]["documents_left_out"] == 2 * 13
    assert len(tokens_of(tmp_path / "d", "valid")) == 2 * 12
    assert any("left out by split=8,1,1: 26 of 250 documents" in text for text in said)
    for split in ("969", "0,1", "a,b", "1,-1", "1,2,3,4"):
        with pytest.raises(UserError, match=f"split={split}: expected shares"):
            bring(tmp_path / "in", tmp_path / "e", f"split={split}")
    with pytest.raises(UserError, match="split=1000,1: no document is held out"):
        bring(tmp_path / "in", tmp_path / "e", "split=1000,1")
    np.array(FLAT, dtype="<u2").tofile(tmp_path / "flat.npy")
    with pytest.raises(UserError, match=r"flat.npy: has no index, .* split= cannot cut it"):
        bring(tmp_path / "flat.npy", tmp_path / "e", "split=9,1", "dtype=uint16")


MEGATRON = """
import sys, warnings
warnings.simplefilter("ignore")
import numpy, torch
from megatron.core.datasets.indexed_dataset import IndexedDataset, IndexedDatasetBuilder
root = sys.argv[1]
for name, dtype in (("u2", numpy.uint16), ("i4", numpy.int32)):
    builder = IndexedDatasetBuilder(f"{root}/{name}.bin", dtype=dtype)
    for document in ([5, 6, 7, 0], [8, 0], [9, 9, 9, 9, 9, 0], [300, 1, 0]):
        builder.add_item(torch.tensor(document))
        builder.end_document()
    builder.add_document(torch.tensor([1, 2, 3, 0]), [2, 0, 2])
    builder.finalize(f"{root}/{name}.idx")
ours = IndexedDataset(f"{root}/ours/train-00000")
print([ours[i].tolist() for i in range(len(ours))], ours.document_indices.tolist())
"""


def test_megatron_core_reads_our_files_and_we_read_its(tmp_path):
    pytest.importorskip("megatron.core.package_info", reason="pip install --no-deps megatron-core")
    from small_corpora import write_corpus

    write_corpus(tmp_path / "ours", [one[:-1] for one in DOCUMENTS])
    done = subprocess.run(
        [sys.executable, "-c", MEGATRON, str(tmp_path)],
        capture_output=True,
        text=True,
        check=False,
        timeout=200 * PATIENCE,
        cwd=ROOT,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip().splitlines()[-1] == f"{DOCUMENTS} [0, 1, 2, 3, 4]"
    for name, dtype in (("u2", "uint16"), ("i4", "int32")):
        manifest = bring(tmp_path / name, tmp_path / f"c{name}")
        assert manifest["dtype"] == dtype
        assert tokens_of(tmp_path / f"c{name}") == [*DOCUMENTS, [1, 2, 3, 0]]
        assert (tmp_path / f"c{name}" / "train-00000.bin").is_symlink()


@pytest.mark.parametrize("is_quick", [False, True])
@pytest.mark.parametrize(
    ("documents", "words", "policy", "begin_id"),
    [
        (DOCUMENTS, (), BEGIN_SHARED, 0),  # each ends with the end id
        ([[900, *one] for one in DOCUMENTS], ("begin_id=900",), BEGIN_STORED, 900),
        ([[900, 5, 6], [900, 7]], ("begin_id=900",), BEGIN_STORED, 900),  # without end ids
        ([[900, 5, 0], [7, 0]], ("begin_id=900",), BEGIN_SHARED, 0),  # not all of them
        ([[5, 6], [7, 0]], (), "none", None),
    ],
)
def test_what_precedes_a_document_is_found_in_the_files(
    tmp_path, documents, words, policy, begin_id, is_quick
):
    prefix = megatron(tmp_path / "in", documents=documents)
    manifest = bring(prefix, tmp_path / "c", *words, is_quick=is_quick)
    assert (manifest["begin_policy"], manifest["begin_id"]) == (policy, begin_id)
    corpus = open_corpus(tmp_path / "c")
    assert (corpus.begin_id, corpus.is_begin_shared) == (begin_id, policy == BEGIN_SHARED)


def test_a_quick_import_with_a_document_that_does_not_end_is_refused_at_its_use(
    tmp_path, monkeypatch
):
    """Its ends are looked at in some documents only: the others are checked as they are used."""
    documents = [[5, 6, 7, 0], [8, 9, 1, 2], [5, 6, 7, 0], [3, 4, 5, 0]]
    monkeypatch.setattr("data.foreign.token_files.Foreign.edges.__defaults__", (2,))
    bring(megatron(tmp_path / "in", documents=documents * 3), tmp_path / "q", is_quick=True)
    with pytest.raises(UserError, match="expected the end id 0 before a document start"):
        steps_of(tmp_path / "q")
