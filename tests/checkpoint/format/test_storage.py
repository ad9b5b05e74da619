"""Bytes of a rank and back: any cut from any other, every damage found, nothing executed."""

from __future__ import annotations

import json
import math
import os
import pickle
import random
import time

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from small_fragments import KINDS, Payload, _cut, blank, cut_flat, full_tensors

from base.errors import UserError
from checkpoint.format import blocks, storage
from checkpoint.format.blocks import BLOCK_BYTES, Damaged, check_file
from checkpoint.format.index import Fragment, describe, holes, merge, plan
from checkpoint.format.index_file import data_name, file_digests, index_name, read_index
from checkpoint.format.rectangles import Box
from checkpoint.format.storage import read, write_rank


def cut_sharded(tensors, world, dim):
    """Like tensor parallel: a shard of each tensor along `dim`, vectors whole on rank 0."""

    def parts(full):
        if len(full) == 1 or full[dim] < world:
            return [(Box(full, full), 0, 1)] + [None] * (world - 1)
        edges = [full[dim] * r // world for r in range(world + 1)]
        shapes = [full[:dim] + (edges[r + 1] - edges[r],) + full[dim + 1 :] for r in range(world)]
        return [(Box(full, shapes[r], dim, edges[r]), 0, 1) for r in range(world)]

    return _cut(tensors, world, parts)


def write(folder, ranks):
    """All ranks' files; the entries of a manifest."""
    files = {}
    for rank, fragments in enumerate(ranks):
        files |= write_rank(folder, rank, fragments, {"rank": rank})
    return files


def fill(folder, files, fragments):
    """What a load does on one rank."""
    world = len(files) // 2
    indexes = [read_index(folder, rank, files[index_name(rank)]) for rank in range(world)]
    index = merge(indexes)
    assert holes(index) == []

    def digests(rank):
        return file_digests(folder, rank, indexes[rank], files[data_name(rank)])

    return read(folder, index, digests, plan(index, fragments), fragments)


SHAPES = {"embed": (37, 12), "norm": (12,), "up": (31, 12), "cube": (4, 6, 5), "one": (1, 1)}
CUTS = {
    "flat1": lambda t: cut_flat(t, 1),
    "flat3": lambda t: cut_flat(t, 3),
    "flat4": lambda t: cut_flat(t, 4),
    "rows2": lambda t: cut_sharded(t, 2, 0),
    "columns3": lambda t: cut_sharded(t, 3, 1),
    "columns2": lambda t: cut_sharded(t, 2, -1 % 2),
}


@pytest.mark.parametrize("stored", CUTS)
def test_any_cut_is_read_back_under_any_other_bit_for_bit(stored, tmp_path):
    tensors = full_tensors(SHAPES)
    files = write(tmp_path, CUTS[stored](tensors))
    for cut in CUTS.values():
        for fragments in cut(tensors):
            empty = blank(fragments)
            fill(tmp_path, files, empty)
            for expected, got in zip(fragments, empty, strict=True):
                assert torch.equal(expected.tensor, got.tensor), (expected.name, expected.kind)


@pytest.mark.parametrize("block", [64, 128, 4096])
def test_windows_and_blocks_smaller_than_the_pieces_change_nothing(block, tmp_path, monkeypatch):
    for module in (blocks, storage):
        monkeypatch.setattr(module, "BLOCK_BYTES", block)
        monkeypatch.setattr(module, "WINDOW_BYTES", 2 * block)
    tensors = full_tensors(SHAPES)
    for name, cut in CUTS.items():
        folder = tmp_path / name
        folder.mkdir()
        files = write(folder, cut(tensors))
        for other in ("flat4", "columns2", "rows2", "columns3"):
            for fragments in CUTS[other](tensors):
                empty = blank(fragments)
                fill(folder, files, empty)
                assert all(
                    torch.equal(a.tensor, b.tensor) for a, b in zip(fragments, empty, strict=True)
                )


@pytest.mark.parametrize("block", [64, 4096])
def test_wide_shards_that_interleave_in_a_file_are_read_together(block, tmp_path, monkeypatch):
    """Two column shards wanted by one process: windows of the one lie between rows of the other."""
    for module in (blocks, storage):
        monkeypatch.setattr(module, "BLOCK_BYTES", block)
        monkeypatch.setattr(module, "WINDOW_BYTES", 2 * block)
    tensors = full_tensors({"w": (200, 12), "v": (5,)})
    files = write(tmp_path, cut_flat(tensors, 1))
    wanted = [fragment for rank in cut_sharded(tensors, 3, 1) for fragment in rank]
    empty = blank(wanted)
    fill(tmp_path, files, empty)
    assert all(torch.equal(a.tensor, b.tensor) for a, b in zip(wanted, empty, strict=True))


def test_replicated_data_is_written_once_and_read_by_all(tmp_path):
    tensors = full_tensors({"norm": (12,)})
    (owner,) = cut_flat(tensors, 1)
    copies = [Fragment(f.name, f.kind, f.box, f.start, f.tensor, is_written=False) for f in owner]
    files = write(tmp_path, [owner, copies])
    assert files["rank-00001.bin"][0] == 0
    empty = blank(copies)
    fill(tmp_path, files, empty)
    assert torch.equal(empty[0].tensor, owner[0].tensor)


def test_a_rank_reads_only_the_blocks_that_it_needs(tmp_path):
    tensors = {("w", "weight"): torch.arange(8 * BLOCK_BYTES // 4, dtype=torch.float32)}
    (fragments,) = cut_flat(tensors, 1)
    files = write(tmp_path, [fragments])
    box = fragments[0].box
    wanted = Fragment("w", "weight", box, 3 * BLOCK_BYTES // 4, torch.zeros(BLOCK_BYTES // 4))
    assert fill(tmp_path, files, [wanted]) == BLOCK_BYTES
    assert wanted.tensor[0] == 3 * BLOCK_BYTES // 4


def test_adam_takes_twelve_bytes_per_parameter_plus_less_than_one_percent(tmp_path):
    tensors = full_tensors({f"layers.{i}.w": (256, 256) for i in range(12)})
    files = write(tmp_path, cut_flat(tensors, 4))
    parameters = 12 * 256 * 256
    assert 12 * parameters < sum(size for size, _ in files.values()) < 12.12 * parameters


# Damage


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """(folder, entries, fragments of rank 0) of a small checkpoint with several blocks per file."""
    folder = tmp_path_factory.mktemp("saved")
    tensors = full_tensors({"w": (700, 300), "norm": (12,)})
    ranks = cut_flat(tensors, 2)
    return folder, write(folder, ranks), cut_flat(tensors, 1)[0]


def damage(saved, name, change):
    """Change one file, try to load everything, put the file back; what the load raised."""
    folder, files, fragments = saved
    path = folder / name
    before = path.read_bytes()
    after = change(before)
    path.unlink()
    if after is not None:
        path.write_bytes(after)
    try:
        empty = blank(fragments)
        fill(folder, files, empty)
    except Damaged as error:
        return error
    finally:
        path.unlink(missing_ok=True)
        path.write_bytes(before)
    return None


NAMES = [data_name(0), data_name(1), index_name(0), index_name(1)]


@settings(
    max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(name=st.sampled_from(NAMES), place=st.floats(0, 1, exclude_max=True), bit=st.integers(0, 7))
def test_every_flipped_bit_is_found_and_its_file_named(saved, name, place, bit):
    def flip(data):
        changed = bytearray(data)
        changed[int(place * len(data))] ^= 1 << bit
        return bytes(changed)

    assert name in str(damage(saved, name, flip))


@pytest.mark.parametrize("name", NAMES)
def test_truncation_growth_and_loss_of_any_file_are_found(saved, name):
    changes = [lambda d: d[:-1], lambda d: d[: len(d) // 2], lambda d: b"", lambda d: d + b"\0"]
    for change in [*changes, lambda d: None]:
        assert name in str(damage(saved, name, change))


def test_digests_in_an_index_must_be_those_of_the_manifest(saved):
    """An index and a data file that agree with each other are not enough."""
    folder, files, _ = saved
    index = read_index(folder, 0, files[index_name(0)])
    size, root = files[data_name(0)]
    assert file_digests(folder, 0, index, [size, root])
    for entry in ([size, "0" * 32], [size - 1, root]):
        with pytest.raises(Damaged, match="disagree"):
            file_digests(folder, 0, index, entry)


def test_swapped_files_of_two_ranks_are_found(saved):
    folder, _, _ = saved
    other = (folder / data_name(1)).read_bytes()
    assert data_name(0) in str(damage(saved, data_name(0), lambda d: other))


def test_a_link_or_a_pipe_in_place_of_a_file_is_refused(saved, tmp_path):
    folder, files, fragments = saved
    path = folder / data_name(0)
    moved = tmp_path / "moved"
    path.rename(moved)
    try:
        path.symlink_to(moved)
        with pytest.raises(Damaged, match=data_name(0)):
            fill(folder, files, blank(fragments))
        path.unlink()
        os.mkfifo(path)  # must not wait for a writer
        with pytest.raises(Damaged, match="not a regular file"):
            fill(folder, files, blank(fragments))
        path.unlink()
    finally:
        moved.rename(path)


@pytest.mark.parametrize("name", NAMES)
def test_a_planted_pickle_is_never_executed(saved, tmp_path, name):
    mark = tmp_path / "executed"
    planted = pickle.dumps(Payload(mark))
    assert damage(saved, name, lambda d: planted) is not None
    (saved[0] / "rank-00000.pt").write_bytes(planted)  # a file that no index names
    assert damage(saved, name, lambda d: d) is None
    assert not mark.exists()


def test_a_full_disk_names_the_path(tmp_path):
    tensors = full_tensors({"w": (10, 10)})
    (fragments,) = cut_flat(tensors, 1)
    full = tmp_path / "full"
    full.mkdir()
    (full / data_name(0)).symlink_to("/dev/full")
    with pytest.raises(FileExistsError, match=data_name(0)):  # never follows a link
        write_rank(full, 0, fragments, {})
    with pytest.raises(OSError, match=r"gone/rank-00000\.bin"):
        write_rank(tmp_path / "gone", 0, fragments, {})


# Indexes


def test_pieces_that_overlap_or_leave_a_hole_are_reported(tmp_path):
    tensors = full_tensors({"w": (10, 10), "v": (7,)})
    ranks = cut_flat(tensors, 2)
    short = [[f for f in ranks[0] if f.name != "v"], ranks[1]]
    for name, broken in {"short": short, "double": [ranks[0], ranks[0]]}.items():
        indexes = []
        (tmp_path / name).mkdir()
        files = write(tmp_path / name, broken)
        indexes = [read_index(tmp_path / name, r, files[index_name(r)]) for r in (0, 1)]
        problems = holes(merge(indexes))
        assert any("v (weight)" in line for line in problems)


def test_an_overlap_as_large_as_a_hole_is_found(tmp_path):
    """Sums of elements are right, yet one element would be loaded from nowhere."""
    tensors = full_tensors({"w": (10, 10)})
    ranks = cut_flat(tensors, 2)
    moved = [Fragment(f.name, f.kind, f.box, f.start - 1, f.tensor) for f in ranks[1]]
    files = write(tmp_path, [ranks[0], moved])
    index = merge([read_index(tmp_path, r, files[index_name(r)]) for r in (0, 1)])
    assert "w (weight): some elements are stored twice" in holes(index)[0]
    with pytest.raises(UserError, match="stored twice, some not at all"):
        plan(index, cut_flat(tensors, 1)[0])


@pytest.mark.parametrize(
    "change",
    [
        lambda i: i.update(format=2),
        lambda i: i.update(rank=1),
        lambda i: i.update(bytes=1),
        lambda i: i.pop("groups"),
        lambda i: i["groups"][0]["start"].__setitem__(0, -1),
        lambda i: i["groups"][0]["count"].__setitem__(0, 1 << 40),
        lambda i: i["groups"][0]["count"].__setitem__(0, 1 << 80),
        lambda i: i["groups"][0]["box"].__setitem__(0, 99),
        lambda i: i["groups"][0]["names"].pop(),
        lambda i: i["groups"][0]["kinds"].append(["weight", "complex64"]),
        lambda i: i["groups"][0]["boxes"].__setitem__(0, "abc"),
    ],
)
def test_an_index_that_contradicts_itself_is_damaged(tmp_path, change):
    (fragments,) = cut_flat(full_tensors({"w": (10, 10)}), 1)
    files = write(tmp_path, [fragments])
    index = read_index(tmp_path, 0, files[index_name(0)])
    merge([index])
    change(index)
    with pytest.raises(Damaged, match="index of rank 0"):
        merge([index])


def test_another_model_or_optimizer_is_told_by_name_of_the_tensor(tmp_path):
    (fragments,) = cut_flat(full_tensors({"w": (10, 10), "v": (7,)}), 1)
    files = write(tmp_path, [fragments])
    (others,) = cut_flat(full_tensors({"w": (10, 11), "v": (7,), "head": (3,)}), 1)
    box = Box((7,), (7,))
    momentum = Fragment("v", "momentum_buffer", box, 0, torch.zeros(7))
    half = Fragment("v", "weight", box, 0, torch.zeros(7, dtype=torch.bfloat16))
    with pytest.raises(UserError) as caught:
        fill(tmp_path, files, [*others, momentum, half])
    message = str(caught.value)
    assert "w: stored as (10, 10), wanted as (10, 11)" in message
    assert "head: not in the checkpoint" in message
    assert "v (momentum_buffer): 0 of 7 wanted elements are stored" in message
    assert "v (weight): stored as float32, wanted as bfloat16" in message


class Size:
    """Stands for a tensor of which only the size is asked."""

    dtype = "float32"

    def __init__(self, count):
        self.count = count

    def numel(self):
        return self.count


def seventy_billion():
    """Names and shapes of a 70B decoder."""
    shapes = {"model.embed_tokens.weight": (128256, 8192), "lm_head.weight": (128256, 8192)}
    for i in range(80):
        at = f"model.layers.{i}."
        shapes |= {
            at + "self_attn.q_proj.weight": (8192, 8192),
            at + "self_attn.k_proj.weight": (1024, 8192),
            at + "self_attn.v_proj.weight": (1024, 8192),
            at + "self_attn.o_proj.weight": (8192, 8192),
            at + "mlp.gate_proj.weight": (28672, 8192),
            at + "mlp.up_proj.weight": (28672, 8192),
            at + "mlp.down_proj.weight": (8192, 28672),
            at + "input_layernorm.weight": (8192,),
            at + "post_attention_layernorm.weight": (8192,),
        }
    return shapes | {"model.norm.weight": (8192,)}


def owned(shapes, stage, rank, world):
    """What a rank owns of tensors of these shapes: ZeRO-1's slice of all, or ZeRO-3's of each."""
    offset, size = 0, -(-sum(map(math.prod, shapes.values())) // world)
    fragments = []
    for name, shape in shapes.items():
        count = math.prod(shape)
        if stage == 3:
            part = -(-count // world)
            low, high = min(rank * part, count), min((rank + 1) * part, count)
        else:
            low, high = (min(max(r * size - offset, 0), count) for r in (rank, rank + 1))
            offset += count
        if high > low:
            box = Box(shape, shape)
            fragments += [Fragment(name, kind, box, low, Size(high - low)) for kind in KINDS]
    return fragments


def index_text(rank, groups, size):
    """An index as a rank would write it, with the size of its digests and random states."""
    index = {
        "format": 1,
        "rank": rank,
        "bytes": size,
        "groups": groups,
        "digests": "0" * 32 * -(-size // BLOCK_BYTES),
        "local": {"torch": "A" * 6740, "numpy": "A" * 3330, "python": "A" * 6670},
    }
    return json.dumps(index, separators=(",", ":"))


@pytest.mark.parametrize("stage", [1, 3])
def test_seventy_billion_parameters_on_a_thousand_ranks_plan_in_seconds(stage):
    """Index and planning at full scale, with no data: limits from the goals of the project."""
    world, other, shapes = 1024, 768, seventy_billion()
    texts, save_s, first = [], 0.0, None
    for rank in range(world):
        if stage == 3 and rank % 100:  # the same but for where the pieces begin
            starts = [rank * count for count in first["count"]]
            groups = [first | {"start": starts}]
            size = 12 * sum(first["count"])
        else:
            own = owned(shapes, stage, rank, world)
            began = time.process_time()  # others share the machine
            groups, _ = describe(own)
            save_s = max(save_s, time.process_time() - began)
            size = 4 * sum(f.count for f in own)
            first = first or groups[0]
        texts.append(index_text(rank, groups, size))
    wanted = owned(shapes, stage, other // 2, other)
    began = time.process_time()
    index = merge([json.loads(text) for text in texts])
    jobs = plan(index, wanted)
    load_s = time.process_time() - began
    index_bytes = sum(map(len, texts))
    print(
        f"\nstage {stage}: index {index_bytes / 1e6:.1f} MB, plan a save {save_s:.3f} s, a load"
        f" {load_s:.2f} s, {len(index.section)} rectangles, {len(jobs)} copies"
    )
    assert sum(index.file_bytes) == 12 * sum(map(math.prod, shapes.values()))
    assert holes(index) == []
    assert index_bytes <= 200e6
    assert save_s <= 5
    assert load_s <= 5
    assert (jobs.rows * jobs.columns).sum() == sum(f.count for f in wanted)


def test_check_file_reads_what_it_is_asked_to(tmp_path):
    path = tmp_path / "file"
    data = random.Random(0).randbytes(2 * BLOCK_BYTES + 5)
    path.write_bytes(data)
    parts = [data[i : i + BLOCK_BYTES] for i in range(0, len(data), BLOCK_BYTES)]
    digests = [blocks.digest(part) for part in parts]
    check_file(path, len(data), digests)
    path.write_bytes(data[:-1] + b"!")
    check_file(path, len(data), digests, blocks=[0, 1])
    with pytest.raises(Damaged, match=f"first at byte {2 * BLOCK_BYTES}"):
        check_file(path, len(data), digests, blocks=[2])


def test_a_window_that_leaves_its_tensor_is_refused():
    buffer = torch.arange(8)[1:7]
    assert storage.window(buffer, 1, 2, 2, 3).tolist() == [[2, 3], [5, 6]]
    for first, rows, columns, stride in [(2, 2, 2, 3), (-1, 1, 1, 1), (0, 2, 3, 2)]:
        with pytest.raises(IndexError, match="leaves a tensor"):
            storage.window(buffer, first, rows, columns, stride)
    storage.window(buffer, 0, 1, 6, 6).zero_()
    assert buffer.sum() == 0
