"""record/failure.py: type, text and place of the exception that ended a rank."""

from __future__ import annotations

import json
import os

import pytest

from base.errors import UserError
from base.run_variables import BEATS
from record import failure
from record.attempts import Attempt, with_failure
from record.heartbeat import Heart


def raised(error: BaseException) -> failure.Failure:
    try:
        raise error
    except type(error) as caught:
        return failure.failure_of(caught, "step", 8)


def test_type_text_place_phase_and_step_of_an_exception():
    found = raised(ValueError("a shape\nof two lines"))
    assert (found.type, found.text, found.phase, found.step) == (
        "ValueError", "a shape\nof two lines", "step", 8,
    )  # fmt: skip
    assert found.place.startswith("tests/record/test_failure.py:")
    assert found.place.endswith(" in raised")
    assert str(found) == f"ValueError: a shape, at {found.place}"
    assert failure.Failure.from_dict(json.loads(json.dumps(vars(found)))) == found
    assert failure.Failure.from_dict({"strange": 1}) is None
    assert failure.Failure.from_dict(None) is None


def test_a_library_that_raised_is_named_beside_the_line_of_the_project():
    try:
        json.loads("{")
    except ValueError as error:
        found = failure.failure_of(error)
    assert found.type == "json.decoder.JSONDecodeError"
    assert found.place.startswith("tests/record/test_failure.py:")
    assert "(raised in " in found.place
    assert "json/decoder.py:" in found.place


def test_a_refusal_is_a_sentence_without_a_type():
    assert str(raised(UserError("block 3 is damaged", "and block 4"))) == (
        "block 3 is damaged; and block 4"
    )


def test_secrets_are_redacted(monkeypatch):
    monkeypatch.setenv("MY_API_KEY", "s3cr3t-s3cr3t")
    assert "s3cr3t" not in raised(RuntimeError("login with s3cr3t-s3cr3t failed")).text


@pytest.mark.parametrize("prefix", ["", "[rank1]: "])
def test_a_traceback_in_an_error_output_gives_the_same(prefix):
    lines = [
        "something else",
        "Traceback (most recent call last):",
        f'  File "{failure.ROOT}/pretrain.py", line 9, in <module>',
        "    import numpy",
        f'  File "{failure.ROOT}/.venv/lib/python3.11/site-packages/torch/x.py", line 7, in load',
        "    raise ImportError(",
        "    ^^^^^^^^^^^^^^^^^^",
        "torch.OutOfMemoryError: libcuda.so: no such file",
        "a second line",
        "",
    ]
    found = failure.failure_in([f"{prefix}{line}" for line in lines])
    assert found.type == "torch.OutOfMemoryError"
    assert found.text.splitlines()[0] == "libcuda.so: no such file"
    assert found.place == "pretrain.py:9 in <module> (raised in torch/x.py:7 in load)"
    assert failure.failure_in(["no traceback", "ValueError: text"]) is None
    assert failure.failure_in(["Traceback (most recent call last):", "  torn"]) is None


def test_the_loss_of_another_rank_is_a_consequence():
    assert raised(RuntimeError("[gloo/tcp/pair.cc:1] Connection closed by peer")).is_consequence
    assert not raised(RuntimeError("mat1 and mat2 do not fit")).is_consequence


def test_the_first_exception_of_a_rank_counts_and_reaches_its_launcher(tmp_path):
    heart = Heart()
    heart.begin({BEATS: str(tmp_path), "RANK": "3"})
    heart.beat("save", 12)

    def fail() -> None:
        with heart.reporting():
            try:
                with heart.reporting():
                    raise ValueError("first")
            finally:
                heart.beat("end")
                raise OSError("then")

    with pytest.raises(OSError, match="then"):
        fail()
    found = failure.read_failure(tmp_path / "rank-00003.failure")
    assert (found.type, found.text, found.phase, found.step) == ("ValueError", "first", "save", 12)
    assert found == heart.failure
    attempt = with_failure(Attempt(0.0, 1.0, cause="failed", phase="end"), found)
    assert (attempt.phase, attempt.why) == ("save", str(found))
    assert attempt.written()["error"]["text"] == "first"


def test_requests_to_end_and_named_exceptions_are_no_failures(tmp_path):
    heart = Heart()
    heart.begin({BEATS: str(tmp_path)})
    with pytest.raises(KeyboardInterrupt), heart.reporting():
        raise KeyboardInterrupt
    with pytest.raises(LookupError), heart.reporting(LookupError):
        raise LookupError
    assert heart.failure is None
    assert not os.path.exists(tmp_path / "rank-00000.failure")
    assert failure.read_failure(tmp_path / "rank-00000.failure") is None
