"""Refuses run folders that untrusted users of the machine could change.

Weights and recipe of a run are read back from its folder, and a digest is no signature: a user who
may write the folder may change what is trained. Rule: root, users who may change this project's
code, and the owner of the folder that holds the run are trusted; nobody else is. Files made by this
project are never writable by others, whatever the umask: `keep_to_owner`.
"""

from __future__ import annotations

import contextlib
import grp
import os
import pwd
import stat
import tempfile
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from base.errors import UserError
from base.paths import ROOT
from base.values import listed
from checkpoint.format.manifest import NAME as MANIFEST
from checkpoint.format.manifest import all_committed

CODE = ROOT
RECORD = (".json", ".jsonl", ".yaml")  # history, skips, description of the run
OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH


def keep_to_owner() -> None:
    """Set the umask so that only the owner may write what this process and its children make."""
    os.umask(os.umask(0o077) | OTHERS_WRITE)


@dataclass(frozen=True)
class Access:
    """Owner, group and mode of a folder or file."""

    path: Path
    uid: int
    gid: int
    mode: int

    def __str__(self) -> str:
        return str(self.path)


def access(path: Path) -> Access:
    """Owner, group and mode of `path`, or of the target where it is a link."""
    found = os.stat(path)
    return Access(path, found.st_uid, found.st_gid, found.st_mode)


def refuse_unsafe(folder: Path, code: Path = CODE) -> None:
    """Raise UserError where people who are not trusted could change the run in `folder`."""
    if not folder.is_dir():
        return
    places, known = [access(path) for path in weighty(folder)], access(code)
    trusted = {0, os.geteuid(), access(folder.parent).uid, known.uid}
    found = _risks(places, known, trusted)
    # On file systems that map users or keep no modes, one's own new files look foreign, too.
    own = own_access(folder) if found else None
    if own is not None:
        kept = [_without(place, own.mode & OTHERS_WRITE) for place in places]
        found = _risks(kept, known, trusted | {own.uid})
    if found:
        raise UserError(*(_line(folder, place, risk) for risk, place in found.items()))


def _risks(places: Iterable[Access], code: Access, trusted: set[int]) -> dict[str, Access]:
    """{risk: the first place that has it}."""
    found: dict[str, Access] = {}
    for place in places:
        risk = judge(place, code, trusted)
        if risk:
            found.setdefault(risk, place)
    return found


def weighty(folder: Path) -> list[Path]:
    """The files and folders whose content a start relies on.

    These are the folders and records of the run, the manifests of its checkpoints (which hold the
    digests of all other files), and the files of the newest checkpoint.
    """
    saved = [path for *_, path in all_committed(folder / "checkpoints")]
    paths = [folder, folder / "checkpoints", folder / "lease", folder / "ledger", *saved]
    paths += [path / MANIFEST for path in saved[:-1]]
    for place in (folder, folder / "ledger"):
        paths += [path for path in place.glob("*.*") if path.suffix in RECORD]
    if saved:
        paths += [Path(entry.path) for entry in os.scandir(saved[-1])]
    return [path for path in paths if path.exists()]


def judge(place: Access, code: Access, trusted: Iterable[int]) -> str | None:
    """The risk of a place: `everyone`, `group <id>` or `user <id>`; None where there is none."""
    if place.uid not in trusted:
        return f"user {place.uid}"
    if place.mode & stat.S_IWOTH and not code.mode & stat.S_IWOTH:
        return "everyone"
    if place.mode & stat.S_IWGRP:
        is_of_code = code.gid == place.gid and code.mode & stat.S_IWGRP
        if not is_of_code and not code.mode & stat.S_IWOTH:
            others = members(place.gid) - {_name(uid) for uid in trusted}
            if others:
                return f"group {place.gid}"
    return None


def members(gid: int) -> set[str]:
    """Names of all users whom the system knows to be in a group.

    A user's private group has only that user; a number without a name, as in containers, has none.
    """
    with contextlib.suppress(KeyError):
        listed = set(grp.getgrgid(gid).gr_mem)
        return listed | {user.pw_name for user in pwd.getpwall() if user.pw_gid == gid}
    return set()


def own_access(folder: Path) -> Access | None:
    """Access of a folder that is made inside `folder` for the owner only; None where that fails.

    It shows how the file system changes owners and modes.
    """
    try:
        made = tempfile.mkdtemp(prefix=".probe-", dir=folder)
    except OSError:
        return None
    try:
        return access(Path(made))
    finally:
        os.rmdir(made)


def _without(place: Access, bits: int) -> Access:
    return Access(place.path, place.uid, place.gid, place.mode & ~bits)


def _name(uid: int) -> str:
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return str(uid)


def _line(folder: Path, place: Access, risk: str) -> str:
    kind, _, number = risk.partition(" ")
    danger = "who could change the weights that are read back"
    if kind == "user":
        return (
            f"run={folder.name}: {place} belongs to user {_name(int(number))}, {danger}; take it"
            f" over (chown -R {os.geteuid()} {folder}), or choose another name"
            f" (run={folder.name}-2)"
        )
    if kind == "group":
        names = sorted(members(int(number)))
        shown = listed(names, 3)
        return (
            f"run={folder.name}: {place} may be written by its group ({shown}), {danger}; shut it"
            f" (chmod -R g-w {folder})"
        )
    return (
        f"run={folder.name}: {place} may be written by everyone on this machine, {danger}; shut it"
        f" (chmod -R o-w {folder})"
    )
