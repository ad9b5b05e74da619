"""Secrets are taken out of whatever is written down, and nothing else is."""

from __future__ import annotations

import json
import sys

import pytest

from base.errors import UserError
from base.redaction import MASK, looks_secret, redact, redacted, secret_values
from recipes.compose import compose, recipe_yaml
from record import run_folder
from record.bundle import write_bundle
from record.records import read_events, record_event
from runtime.process import process

SECRET = "s3cr3t-Planted-91"
TOKENS = [
    "ghp_" + "a1B2" * 9, "github_pat_" + "x" * 30, "hf_" + "Ab3" * 11, "sk-" + "k1" * 16,
    "AKIA" + "ABCD1234" * 2, "xoxb-12345-67890-abcdef",
    "eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiIxMjM0NTYifQ.c2lnbmF0dXJl", "nvapi-" + "k1" * 16,
    "sk_live_" + "a1B2" * 5, "dckr_pat_" + "a1B2" * 5, "r8_" + "a1B2" * 8,
]  # fmt: skip


@pytest.mark.parametrize(
    "line",
    [
        "api_key: {}", 'api_key: "{}"', "WANDB_API_KEY={}", '{{"hf_token": "{}", "n": 1}}',
        "password='{}'", "--api-key {}", "--password={}", "https://me:{}@host/x", "auth: {}",
        "Authorization: Bearer {}", "--env=DB_PASSWORD={}", "accessKey = {}",
        "-----BEGIN RSA PRIVATE KEY-----\n{}\n-----END RSA PRIVATE KEY-----",
        "  - secret: {}", "cookie: {}; path=/", "Authorization: token {}", "GITHUB_PAT={}",
        "DB_PASS={}", "PGPASSWORD={}", "passwords: [one, {}]", "postgres://u:p@{}@host/db",
        "https://hooks.slack.com/services/T012AB3CD/B01XYZ/{}", "curl -u me:{} https://host",
        "https://discord.com/api/webhooks/123456/{}", "https://api.telegram.org/bot12:{}/send",
        "https://x.blob.core.windows.net/c?sv=2&sig={}", "https://host/k?X-Amz-Signature={}",
        "machine host login me password {}", "sshpass -p {} ssh host",
    ],
)  # fmt: skip
def test_a_planted_secret_is_hidden_and_its_name_stays(line):
    shown = redact(line.format(SECRET))
    assert SECRET not in shown
    assert MASK in shown
    assert redact(shown) == shown  # a second time changes nothing


@pytest.mark.parametrize("token", TOKENS)
def test_tokens_are_known_by_their_form(token):
    assert token not in redact(f"could not log in with {token} to the hub")


@pytest.mark.parametrize(
    "line",
    [
        "tokens: 100", "batch_tokens: 8192", 'tokenizer: "bpe"', "eos_token: </s>",
        "num_key_value_heads: 4", "keyboard: 1", "the token was refused", "tokens_per_s: 3",
        "api_key: null", "TOKENIZERS_PARALLELISM=false", "author=me", "commit: " + "0f" * 20,
        "http://localhost:6006/", "loss 2.2 at step 5", "mail me@host",
        "PASS=WANDB_MODE", "PWD=/home/me", "forward_pass: 3", "sig = signal.SIGTERM",
        "https://host/services/compute-engine", "python -u file:name", "https://host/a@b",
    ],
)  # fmt: skip
def test_what_is_no_secret_stays(line):
    assert redact(line) == line


@pytest.mark.parametrize(
    "piece",
    ["a", "a.", "0a", "a-", "a=", 'a="', "://", "eyJ-", "token=", "https://hooks.", "curl a -u a:"],
)
def test_long_words_take_no_time_worth_mentioning(piece):
    """With backtracking, or a recursion, these would take minutes, or end the run."""
    text = piece * (40_000 // len(piece))
    assert redact(text + " HF_TOKEN=s3cr3t").endswith("HF_TOKEN=***" if "=" not in piece else "***")


def test_values_go_by_their_keys_wherever_they_lie():
    value = {"argv": ["x", "--api-key", SECRET, "-n", "3"], "token": 5, "a": [{"password": SECRET}],
             "HF_TOKEN": SECRET, "auth": None, "n": 1.5}  # fmt: skip
    found = redacted(value)
    assert SECRET not in json.dumps(found)
    assert (found["n"], found["auth"], found["argv"][-2:]) == (1.5, None, ["-n", "3"])
    known = secret_values({"HF_TOKEN": SECRET, "PATH": "/bin", "X_TOKEN": "a"})
    assert known == [SECRET]
    assert redact(f"anywhere {SECRET}!", known) == f"anywhere {MASK}!"
    assert looks_secret("SLACK_WEBHOOK_SECRET")
    assert not looks_secret("TOKENIZERS_PARALLELISM")


def test_recipes_keep_every_knob():
    text = recipe_yaml(compose("tiny").recipe)
    assert redact(text) == text


def test_what_is_masked_stays_as_it_is():
    """Records are masked when they are written, and again when a bundle is made of them."""
    line = '{"reason": "password=***", "more": "x: \\"token=***\\""}'
    assert redact(line) == line
    assert redact(redact(f"{line} --token {SECRET}")) == f"{line} --token ***"


def test_planted_secrets_reach_no_file_of_a_run(tmp_path, monkeypatch, capsys):
    """From the recipe, the command line, the environment and a traceback; in the bundle too."""
    monkeypatch.setenv("HUB_TOKEN", SECRET)
    other = "https://user:Hunter2Hunter2@data.example/corpus"
    folder = tmp_path / "runs" / "a"
    documents = {
        "recipe.yaml": f"run: a\npassword: {SECRET}\ncorpus: {other}\n",
        "environment.json": {"argv": ["pretrain.py", f"x={other}", "--token", SECRET],
                             "diff": f"+KEY = '{SECRET}'\n+u = '{other}'"},
    }  # fmt: skip
    run_folder.open_folder(folder, documents, False).release()
    record_event(folder, "failed", attempt=1, reason=f"403 for {other} with {SECRET}")
    (folder / "logs").mkdir()
    (folder / "logs" / "rank-00000.log").write_text(f"login with {SECRET}\n")
    bundle = write_bundle(folder, "step-00000007", {"WHY.txt": f"token={SECRET} at {other}"})
    (folder / "logs" / "rank-00000.log").unlink()  # what a rank prints is not written by us
    again = write_bundle(folder, "step-00000007", {})
    assert (bundle.name, again.name) == ("step-00000007", "step-00000007-2")
    process.report(UserError(f"corpus={other}: no such folder ({SECRET})"))
    try:
        raise RuntimeError(f"login with {SECRET} at {other}")
    except RuntimeError:
        process.print_without_secrets(*sys.exc_info())
    said = capsys.readouterr().err
    assert "Traceback" in said
    assert "no such folder" in said
    files = [path for path in folder.rglob("*") if path.is_file()]
    names = {path.name for path in bundle.iterdir()}
    assert names == {"WHY.txt", "events.jsonl", "recipe.yaml", "environment.json", "logs"}
    for text in [said, *(path.read_text() for path in files)]:
        assert SECRET not in text
        assert "Hunter2" not in text
    assert read_events(folder)[0]["kind"] == read_events(bundle)[0]["kind"] == "failed"
    assert "data.example" in (bundle / "recipe.yaml").read_text()
