"""Token files with a header are refused by name; arrays of ids are never taken for one."""

import io
import json
import pickle
import struct
import tarfile
import zipfile

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from base.errors import UserError
from data.foreign.import_checks import ImportSettings
from data.foreign.importing import import_corpus
from data.foreign.known_formats import refused_format
from data.foreign.token_files import find_foreign

IDS = np.random.default_rng(7).zipf(1.3, 6000) % 1000


def numpy_file(save, *arrays, **named) -> bytes:
    file = io.BytesIO()
    save(file, *arrays, **named)
    return file.getvalue()


def offset_table(between: bytes = b"") -> bytes:
    """A chunk of litData: items behind a table of offsets; of MDS with its JSON in between."""
    items = [part.astype("<u2").tobytes() for part in np.split(IDS, 6)]
    first = 4 * (len(items) + 2) + len(between)
    ends = first + np.cumsum([0, *map(len, items)])
    return struct.pack("<I", len(items)) + ends.astype("<u4").tobytes() + between + b"".join(items)


def packed() -> bytes:
    header = b"LITPKDS" + struct.pack("<QBQ", 1, 8, len(IDS))
    return header + IDS.astype("<u2").tobytes()


def llm_c(magic=20240520, kind="<u2") -> bytes:
    header = np.zeros(256, "<i4")
    header[:3] = magic, 1, len(IDS)
    return header.tobytes() + IDS.astype(kind).tobytes()


def archive(kind) -> bytes:
    file = io.BytesIO()
    data = IDS.astype("<u2").tobytes()
    if kind == "zip":
        with zipfile.ZipFile(file, "w") as out:
            out.writestr("ids", data)
    else:
        with tarfile.open(fileobj=file, mode="w") as out:
            one = tarfile.TarInfo("ids")
            one.size = len(data)
            out.addfile(one, io.BytesIO(data))
    return file.getvalue()


def arrow(kind) -> bytes:
    table, sink = pa.table({"ids": IDS}), pa.BufferOutputStream()
    if kind == "parquet":
        pq.write_table(table, sink)
    else:
        new = pa.ipc.new_file if kind == "file" else pa.ipc.new_stream
        with new(sink, table.schema) as writer:
            writer.write_table(table)
    return sink.getvalue().to_pybytes()


def safetensors() -> bytes:
    data = IDS.astype("<i4").tobytes()
    head = json.dumps({"ids": {"dtype": "I32", "shape": [6000], "data_offsets": [0, len(data)]}})
    return struct.pack("<Q", len(head)) + head.encode() + data


FORMATS = {
    r"lit-gpt or TinyLlama \(LITPKDS\)": packed(),
    "shard of llm.c, with a header": llm_c(),
    "llm.c, with a header of 1024 bytes; .*'uint32'": llm_c(20240801, "<u4"),
    "llm.c, of 13022 bytes where its header states 13024": llm_c()[:-2],
    "chunk of litData": offset_table(),
    r"chunk of MosaicML Streaming \(MDS\)": offset_table(b'{"column_names": ["tokens"]}'),
    "has a numpy header": numpy_file(np.save, IDS),
    "is a zip archive": numpy_file(np.savez, a=IDS),
    "is a zip archive .*pt": archive("zip"),
    "is a tar archive": archive("tar"),
    "is a Parquet file": arrow("parquet"),
    "is Arrow data": arrow("file"),
    "is Arrow data;": arrow("stream"),
    "is a safetensors file": safetensors(),
    "is a Python pickle": pickle.dumps(IDS.tolist()),
    "is a Python pickle;": pickle.dumps(IDS, protocol=2),
    "is a Git LFS pointer": b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n",
    "is the index of a Megatron pair": b"MMIDIDX\x00\x00" + bytes(100),
    "is text": json.dumps({"text": "na\u00efve words " * 20}, ensure_ascii=False).encode(),
}


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("suffix", [".bin", ".npy"])
def test_a_file_with_a_header_is_refused_by_its_name(tmp_path, name, suffix):
    path = tmp_path / f"x{suffix}"
    path.write_bytes(FORMATS[name] + bytes(-len(FORMATS[name]) % 2) * ("llm" not in name))
    for dtype in ("uint16", None):  # declared as an array or not
        with pytest.raises(UserError, match=name):
            find_foreign(str(path), 0, dtype)


def test_a_way_out_that_is_printed_gives_the_ids(tmp_path):
    """The command in the refusal of a packed file, run as it stands."""
    path = tmp_path / "x"
    path.write_bytes(packed())
    text = refused_format(path)
    command = text.partition("without the header: ")[2].partition(", and import")[0]
    eval(command, {"np": np, "x": str(path), "y": str(tmp_path / "y")})
    assert np.fromfile(tmp_path / "y", "<u2").tolist() == IDS.tolist()


@pytest.mark.parametrize("kind", ["u1", "<u2", "<u4", "<i8"])
def test_no_plain_array_is_taken_for_another_format(tmp_path, kind):
    rng = np.random.default_rng(3)
    path = tmp_path / "x.bin"
    first = [640, 1152, 35615, 20240520 % 65536, 1, 2, 3, 0]  # ids as some magics begin
    for number in range(200):
        ids = rng.integers(0, 250 if kind == "u1" else 50_000, rng.integers(1, 700))
        ids[0] = first[number % 8] % 250 if kind == "u1" else first[number % 8]
        ids.astype(kind).tofile(path)
        assert refused_format(path, np.dtype(kind).itemsize) is None


def test_an_array_is_taken_only_where_it_is_declared(tmp_path):
    ids = IDS.astype("<u2")
    ids.tofile(tmp_path / "x.bin")
    settings = ImportSettings(vocab_size=1000, eod_id=1)
    with pytest.raises(UserError, match=r"no header of a known format; .* OVERRIDES=dtype=uint16"):
        import_corpus(str(tmp_path / "x.bin"), tmp_path / "c", None, settings)
    declared = ImportSettings(vocab_size=1000, eod_id=1, dtype="uint16")
    manifest = import_corpus(str(tmp_path / "x.bin"), tmp_path / "c", None, declared)
    assert manifest["splits"]["train"][0]["tokens"] == len(ids)


def test_files_with_other_suffixes_are_named_by_their_format(tmp_path):
    np.savez(tmp_path / "ids.npz", a=np.arange(9))
    (tmp_path / "ids.tfrecord").write_bytes(bytes(range(100)))
    with pytest.raises(UserError) as refused:
        find_foreign(str(tmp_path), 0, None)
    zipped, other = refused.value.problems
    assert zipped.startswith(
        f"{tmp_path}/ids.npz: is a zip archive (.npz, .pt or other); write its"
    )
    assert other == f"{tmp_path}/ids.tfrecord: ends in none of .bin, .ds, .npy"
    with pytest.raises(UserError, match=r"ids.npz: is a zip archive"):
        find_foreign(str(tmp_path / "ids.npz"), 0, "uint16")
