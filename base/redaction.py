"""Removal of secrets from whatever is written or sent: values of secret names, tokens, URLs.

    redact(text) -> text                  lines of YAML, JSON, shell, tracebacks, command lines
    redacted(value) -> value              nested plain values
    secret_values(environ) -> values      values of variables with secret names, masked everywhere

A name is judged by its words: `WANDB_API_KEY` and `--hf-token` are secret, `tokens` and `eos_token`
are not.

Rule: in doubt a value is masked, and no part of a masked value is left.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable, Mapping
from typing import Any

MASK = "***"
# Shorter values of variables would be found inside innocent words.
SHORTEST = 6
WORDS = {
    "token", "secret", "password", "passwd", "passphrase", "credential", "apikey", "accesskey",
    "privatekey", "authtoken", "auth", "authorization", "bearer", "cookie", "private",
}  # fmt: skip
ENDS = ("password", "passwd", "secret", "apikey")  # PGPASSWORD
# As the last word of a variable: DB_PASS, MYSQL_PWD, GITHUB_PAT; `forward_pass` and PWD are none.
OF_VARIABLES = ("PASS", "PWD", "PW", "PAT")
KEYS = {"api", "access", "private", "secret", "signing", "encryption", "ssh", "account"}  # ..._key
# Tokens of a text, not of a service.
OF_TEXT = {
    "bos", "eos", "pad", "unk", "sep", "cls", "mask", "special", "next", "per", "added", "end",
}  # fmt: skip
# Formats that services document: GitHub, GitLab, Hugging Face, OpenAI and Anthropic, AWS, Google,
# Slack, Stripe, NVIDIA, Docker, SendGrid, Replicate, Tailscale, npm, PyPI, JSON web tokens.
TOKENS = re.compile(
    r"\b(?:gh[pousr]_\w{20,}|github_pat_\w{20,}|glpat-[\w-]{16,}|hf_[A-Za-z0-9]{16,}"
    r"|sk-[\w-]{16,}|A(?:KI|SI)A[0-9A-Z]{16}|AIza[\w-]{30,}|xox[a-z]-[\w-]{10,}|npm_\w{30,}"
    r"|[sr]k_(?:live|test)_\w{16,}|nvapi-[\w-]{16,}|dckr_pat_[\w-]{16,}|xapp-[\w-]{10,}"
    r"|SG\.[\w-]{16,}+\.[\w-]{16,}|ya29\.[\w-]{16,}|r8_\w{20,}|tskey-[\w-]{16,}"
    r"|pypi-[\w-]{30,}|eyJ[\w-]{8,2000}+\.[\w-]{8,}+\.[\w-]*)"
)
# Whoever knows such an address may write to it; alerts are sent to some of them.
WEBHOOK = re.compile(
    r"\b(https?://(?:hooks\.[\w.:-]++/|[\w.:-]++/(?:[\w.-]++/)?"
    r"(?:webhooks?|webhookb2|integration|bot(?=\d+:))/?))[^\s'\"<>,;)\]}]{12,}",
    re.IGNORECASE,
)
SIGNED = re.compile(r"([?&](?:[\w-]{1,40}-)?sig(?:nature)?=)[^\s&'\"]+", re.IGNORECASE)
USER_INFO = re.compile(r"\b([a-zA-Z][a-zA-Z0-9+.-]{0,30}://)[^\s/?#'\"]+@")
# `curl -u me:pw`, `sshpass -p pw`, a line of .netrc.
SPOKEN = re.compile(
    r"(\bcurl [^\n|;]{0,200}?(?<= )(?:-u|--user)[ =][^\s:]{1,200}:|\bsshpass -p ?"
    r"|\blogin \S{1,200} password )[^\s'\"]+"
)
PRIVATE_KEY = re.compile(
    r"-----BEGIN [A-Z ]*PRIVATE KEY-----.*?(?:-----END [A-Z ]*PRIVATE KEY-----|\Z)", re.DOTALL
)
BEARER = re.compile(
    r"\b(bearer|basic|authorization[\"']?[ \t]*[:=][ \t]*[\"']?\w{1,20})[ \t]+[\w.~+/=-]{8,}",
    re.IGNORECASE,
)
# Possessive (`*+`) and never begun inside a word, so the time grows with the length of a word.
NAMED = re.compile(
    r"""(?<![\w.-])[\d.-]*+(?P<name>[A-Za-z_][\w.-]*+)"""
    r"""(?P<mark>["']?[ \t]*[:=][ \t]*|(?<=\w)[ \t]+(?=\S))"""
)
VALUE = re.compile(r""""(?:[^"\\\n]|\\.)*+"|'(?:[^'\\\n]|\\.)*+'|\[[^\]\n]++\]|[^\s,;&}\]]+""")
EMPTY = ("", '""', "''", "null", "None", "~", "true", "false", "True", "False")


def looks_secret(name: str) -> bool:
    """True where the value of this name may be a secret."""
    spaced = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", " ", name)
    words = [word.lower() for word in re.split(r"[^A-Za-z0-9]+", spaced) if word]
    for previous, word in itertools.pairwise(["", *words]):
        # Several `tokens` are text.
        one = word if word == "tokens" else word.removesuffix("s")
        if {word, one} & WORDS and not (word == "token" and previous in OF_TEXT):
            return True
        if one.endswith(ENDS) or (one == "key" and previous in KEYS):
            return True
    return name.isupper() and name.endswith(tuple(f"_{last}" for last in OF_VARIABLES))


def redact(text: str, known: Iterable[str] = ()) -> str:
    """`text` without secrets; the values in `known` are masked everywhere."""
    for value in sorted(known, key=len, reverse=True):
        text = text.replace(value, MASK)
    text = PRIVATE_KEY.sub(MASK, text)
    text = USER_INFO.sub(rf"\g<1>{MASK}@", text)
    text = WEBHOOK.sub(rf"\g<1>{MASK}", text)
    text = SIGNED.sub(rf"\g<1>{MASK}", text)
    text = SPOKEN.sub(rf"\g<1>{MASK}", text)
    text = TOKENS.sub(MASK, text)
    text = BEARER.sub(rf"\g<1> {MASK}", text)
    return _without_values(text)


def _without_values(text: str) -> str:
    """`text` without the values that are given to secret names."""
    parts, at = [], 0
    while found := NAMED.search(text, at):
        start = at
        at = found.end()
        # A blank gives a value only to an option: `--token abc`, but not "the token was refused".
        is_option = text.endswith("--", 0, found.start("name")) or not found["mark"].isspace()
        given = VALUE.match(text, at) if is_option and looks_secret(found["name"]) else None
        parts.append(text[start:at])
        # A value that an earlier pass masked still has its quotes.
        is_masked = given and given[0].strip("\"'\\") == MASK
        if given and given[0] not in EMPTY and not is_masked:
            value = given[0]
            quote = value[0] if value[0] in "\"'" else '"' if ":" in found["mark"] else ""
            parts.append(f"{quote}{MASK}{quote}")
            at = given.end()
        # Else the value may itself be the name of another: "--env=API_KEY=abc".
    return "".join([*parts, text[at:]])


def redacted(value: Any, known: Iterable[str] = ()) -> Any:
    """Nested plain values without secrets in texts and without the values of secret names."""
    if isinstance(value, str):
        return redact(value, known)
    if isinstance(value, Mapping):
        return {
            redact(str(name), known): MASK
            if looks_secret(str(name)) and item not in (None, "", (), [], True, False)
            else redacted(item, known)
            for name, item in value.items()
        }
    if isinstance(value, (list, tuple)):
        return [redacted(item, known) for item in _options(value)]
    return value


def _options(words: Iterable[Any]) -> list[Any]:
    """The arguments of a command line; the one after an option with a secret name is masked."""
    found: list[Any] = []
    for word in words:
        before = found[-1] if found else None
        is_value = isinstance(before, str) and isinstance(word, str) and before.startswith("-")
        is_value = is_value and "=" not in before and not word.startswith("-")
        found.append(MASK if is_value and looks_secret(before) else word)
    return found


def secret_values(environ: Mapping[str, str]) -> list[str]:
    """Values of variables whose names look secret, for `known` of `redact`."""
    return [
        value
        for name, value in environ.items()
        if looks_secret(name) and len(value) >= SHORTEST and value not in EMPTY
    ]
