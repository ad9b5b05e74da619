"""Audits: documents of a step and steps of a document, against a scan; the command on a record."""

import numpy as np
import pytest
from small_corpora import flip_byte, random_documents, stream_of, write_corpus

from base import jsonl
from base.errors import UserError
from commands import audit, audit_diff
from data.stream.collect import LedgerCollector
from data.stream.ledger import Ledger
from data.stream.trace import origins, pieces_of_step, steps_of_document
from recipes.compose import compose, recipe_yaml
from recipes.schema import Skip, Source
from record import history

STEPS = 60


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    """Prose with empty documents between others; code in one shard."""
    root = tmp_path_factory.mktemp("corpora")
    documents = random_documents(700, 1, 40, seed=1)
    write_corpus(root / "prose", documents, shard_bytes=3000)
    write_corpus(root / "code", random_documents(400, 20, 90, seed=2))
    return root


@pytest.fixture(scope="module", params=[(16, False), (64, False), (32, True)])
def stream(root, request):
    """Everything at once: two sources, stages, skips of each kind, several epochs of code."""
    mask = {"source": "code", "documents": (3, 60), "steps": (10, 30)}
    sources = {
        "prose": Source(corpus="prose", weight=((0, 3), (20, 1))),
        "code": Source(corpus="code", weight=((0, 1), (20, 9))),
    }
    return stream_of(
        root,
        sources,
        batch=[[0, 16 * 16], [30, 32 * 16], [45, 64 * 16]],
        window_tokens=request.param[0],
        shift_windows=request.param[1],
        skip=Skip(advance=[(5, 9), (33, 34)], no_update=[(12, 14)], mask=(mask,)),
    )


def scan(stream):
    """{(source, document): {(data step, sample)}} of the whole run, by reading every sample."""
    seen = {}
    for data_step in range(stream.skips.data_step(STEPS) + 1):
        first, _ = stream.sample_range(data_step)
        source, start, _ = stream.whole_batch(data_step)
        for sample, (number, token) in enumerate(zip(source.tolist(), start.tolist(), strict=True)):
            split = stream.split(number)
            bounds = np.array(
                [split.document_range(d)[0] for d in range(split.num_documents)]
                if number not in BOUNDS
                else BOUNDS[number]
            )
            BOUNDS[number] = bounds
            low, high = np.searchsorted(bounds, [token, token + stream.seq_len], side="right") - 1
            for document in range(low, high + 1):
                seen.setdefault((number, document), set()).add((data_step, first + sample))
    return seen


BOUNDS: dict = {}


def test_steps_of_a_document_equal_a_scan_for_every_document(stream):
    """1,100 documents of two sources, each with every step of the run that sees it."""
    expected = scan(stream)
    assert stream.usage(STEPS)[0].epochs > 1
    effects = set()
    for number, uid in enumerate(stream.uids):
        for document in range(stream.split(number).num_documents):
            found = steps_of_document(stream, uid, document, STEPS)
            places = [(one.data_step, one.sample) for one in found]
            assert sorted(places) == places
            assert set(places) == expected.get((number, document), set())
            assert len(set(places)) == len(places)
            for one in found:
                assert one.step == int(stream.skips.steps_of(np.array([one.data_step]))[0])
                effects.add(one.effect)
    assert effects == {"trained", "left out", "no update", "masked"}


def test_documents_of_a_step_put_together_are_the_tokens_that_were_trained_on(stream):
    for step in (1, 9, 30, 50):
        data_step = stream.skips.data_step(step)
        source, _, rows = stream.whole_batch(data_step)
        first, _ = stream.sample_range(data_step)
        pieces = pieces_of_step(stream, data_step)
        for row, tokens in enumerate(rows.tokens):
            mine = [piece for piece in pieces if piece.sample == first + row]
            split = stream.split(int(source[row]))
            text = []
            for piece in mine:
                low, high = split.document_range(piece.document)
                whole = split.read(np.array([low]), high - low)[0]
                assert piece.column == len(text)
                text += whole[piece.first : piece.end].tolist()
            assert text == tokens.tolist()


def test_origins_come_from_the_side_file_and_are_missing_without_one(root, tmp_path):
    import pyarrow as pa
    import pyarrow.parquet as pq

    write_corpus(tmp_path / "c", random_documents(50, 5, 20), shard_bytes=500)
    corpus = stream_of(tmp_path, {"c": 1}).corpora[0]
    before, entries = 0, corpus.manifest["splits"]["train"]
    assert len(entries) > 2
    for entry in entries[1:]:
        before = sum(e["documents"] for e in entries[: entries.index(entry)])
        numbers = range(before, before + entry["documents"])
        columns = {"document": numbers, "source": [f"f{n}" for n in numbers], "row": numbers}
        path = tmp_path / "c" / f"{entry['name']}.docs.parquet"
        pq.write_table(pa.table({k: list(v) for k, v in columns.items()}), path, row_group_size=3)
    found = origins(corpus, range(50))
    assert set(found) == set(range(entries[0]["documents"], 50))
    assert all(one["source"] == f"f{n}" and one["row"] == n for n, one in found.items())


@pytest.fixture
def recorded(root, tmp_path, monkeypatch):
    """A run folder as training leaves it, without the training."""
    for module in (audit, audit_diff):
        monkeypatch.setattr(module, "ROOT", tmp_path)
    (tmp_path / "corpora").symlink_to(root)
    words = ["steps=30", "seq_len=16", "batch_tokens=256", "model.vocab_size=1000", "warmup=1"]
    words += ["~data.sources.prose.build", "data.sources.prose.corpus=corpora/prose"]
    words += ["data.skip.advance=[[4,6]]"]
    recipe = compose("tiny", words).recipe
    stream = audit.stream_of(recipe)
    for name, count in (("one", 20), ("two", 25)):
        folder = tmp_path / "runs" / name
        folder.mkdir(parents=True)
        (folder / "recipe.yaml").write_text(recipe_yaml(recipe))
        collector = LedgerCollector(
            Ledger(folder / "ledger"), lambda own: own[None], 10, None, stream.skips.fingerprint()
        )
        for step in range(1, count + 1):
            collector.add(stream.step(step, 0, 1, 16))
        collector.flush()
    return tmp_path / "runs"


def test_the_verb_confirms_a_record_and_sees_a_change(recorded, capsys):
    assert audit.main(["one"]) == 0
    assert "20 of 20 recorded steps rebuilt and equal" in capsys.readouterr().out
    assert audit.main(["one", "--step", "6", "--text"]) == 0
    out = capsys.readouterr().out
    assert "step 6 in segment 0: data step 7, samples 112 to 127" in out
    assert "equal to what was recorded" in out
    assert audit.main(["one", "--step", "25"]) == 0
    assert "not recorded: this step is to come" in capsys.readouterr().out
    assert audit_diff.main(["one", "two"]) == 0
    assert "all 20 steps in both are equal" in capsys.readouterr().out
    ledger = recorded / "one" / "ledger" / "steps.jsonl"
    lines = ledger.read_text().splitlines()
    hash_ = lines[6].split('"batch_hash": "')[1][:16]
    changed = lines[6].replace(hash_, "0" * 16)
    ledger.write_text("\n".join([*lines[:6], changed, *lines[7:]]) + "\n")
    assert audit.main(["one"]) == 1  # a line that was edited: its digest tells
    assert "left out" in capsys.readouterr().out
    fields = jsonl.decode(lines[6].encode()) | {"batch_hash": "0" * 16}
    lines[6] = jsonl.encode(fields).decode().rstrip("\n")
    ledger.write_text("\n".join(lines) + "\n")
    assert audit.main(["one", "--every", "2"]) == 1
    assert f"step 7: rebuilt {hash_}, recorded {'0' * 16}" in capsys.readouterr().out
    assert audit.main(["one", "--step", "7"]) == 1
    assert "DIFFERS" in capsys.readouterr().out
    assert audit_diff.main(["one", "two"]) == 1
    assert "1 of 20 steps in both differ, the first is step 7" in capsys.readouterr().out


def test_the_verb_lists_past_and_future_steps_of_a_document(recorded, capsys):
    seen = 0
    for document in range(12):
        assert audit.main(["one", "--doc", str(document)]) == 0
        out = capsys.readouterr().out
        rows = [line.split() for line in out.splitlines() if line.strip()[:1] in "-123456789"]
        for row in rows:
            seen += 1
            if row[0] == "-":
                assert row[1] in ("4", "5")
                assert row[-2:] == ["left", "out"]
            else:
                is_past = int(row[0]) <= 20
                assert row[4:] == (["trained"] if is_past else ["to", "come:", "trained"])
    assert seen > 3


def test_the_verb_shows_the_tokens_that_a_mask_would_name(recorded, root, capsys):
    assert audit.main(["one", "--doc", "3", "--text"]) == 0
    whole = capsys.readouterr().out
    ids = stream_of(root, {"prose": 1}).split(0)
    low, high = ids.document_range(3)
    tokens = ids.read(np.array([low]), high - low)[0].tolist()
    assert f"prose:3: {len(tokens)} tokens" in whole
    shown = {int(line.split()[0]): line.split()[1] for line in whole.splitlines() if '"' in line}
    assert shown == {number: f'"{token}"' for number, token in enumerate(tokens)}
    assert audit.main(["one", "--doc", "3", "--text", "--tokens", "1:3"]) == 0
    part = capsys.readouterr().out
    assert ", of them 1 to 2," in part
    lines = [line.split() for line in part.splitlines() if '"' in line]
    assert lines == [["1", shown[1]], ["2", shown[2]]]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["one", "--doc", "3", "--tokens", "0:999"], "TOKENS=0:999: document 3 has"),
        (["one", "--doc", "3", "--tokens", "2:2"], "TOKENS=2:2: document 3 has"),
        (["one", "--doc", "3", "--tokens", "2"], "TOKENS=2: expected FIRST:END"),
        (["one", "--tokens", "0:2"], "give DOC= too"),
        (["nobody"], "RUN=nobody: no run here"),
        (["one", "--every", "0"], "EVERY=0: give 1 or more"),
        (["one", "--step", "31"], "STEP=31: one has the steps 1 to 30"),
        (["one", "--doc", "700"], "prose has the training documents 0 to 699"),
        (["one", "--doc", "code:3"], "no source 'code'; there are: prose"),
        (["one", "--doc", "x"], "DOC=x"),
    ],
)
def test_what_cannot_be_audited_is_refused(recorded, capsys, arguments, message):
    assert audit.main(arguments) == 93
    assert message in capsys.readouterr().err


def test_a_comparison_with_a_run_that_is_not_there_is_refused(recorded, capsys):
    assert audit_diff.main(["one", "nobody"]) == 93
    assert "RUN=nobody" in capsys.readouterr().err


def test_an_audit_over_damaged_text_names_the_file(recorded, root, tmp_path, capsys):
    copy = tmp_path / "other"
    copy.mkdir()
    write_corpus(copy / "prose", random_documents(700, 1, 40, seed=1), shard_bytes=3000)
    (tmp_path / "corpora").unlink()
    (tmp_path / "corpora").symlink_to(copy)
    flip_byte(copy / "prose" / "train-00002.bin", 99)
    assert audit.main(["one"]) == 93
    assert "train-00002.bin: bytes 0 to" in capsys.readouterr().err


def test_each_step_is_rebuilt_with_the_recipe_that_held_then(recorded, capsys):
    """seq_len was 32 for steps 1 to 10; history says so, the recipe says 16."""
    folder = recorded / "one"
    recipe = compose(str(folder / "recipe.yaml"), ["seq_len=32"]).recipe
    old = audit.stream_of(recipe)
    now = audit.stream_of(compose(str(folder / "recipe.yaml")).recipe)
    (folder / "ledger" / "steps.jsonl").unlink()
    collector = LedgerCollector(Ledger(folder / "ledger"), lambda own: own[None], 10)
    for step in range(1, 21):
        collector.add((old if step <= 10 else now).step(step, 0, 1, 8))
    collector.flush()
    assert audit.main(["one"]) == 1
    capsys.readouterr()
    history.begin(folder, None)
    for change in (
        {"key": "seq_len", "stored": 32, "now": 16},
        {"key": "optim.lr", "stored": 0.1, "now": 0.2},
    ):
        history.append(folder, {"kind": "override", "first_step": 11, **change})
    assert audit.main(["one"]) == 0
    assert audit.main(["one", "--doc", "3"]) == 0


def test_unknown_documents_of_a_library_call_fail_loudly(stream):
    with pytest.raises((AssertionError, UserError)):
        steps_of_document(stream, "prose", 10**6, STEPS)
