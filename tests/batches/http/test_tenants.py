"""Whose key it is."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest

from echo_sgl.batches.http.tenants import (
    OPERATOR,
    FileTenants,
    KeysFileError,
    Tenants,
    read_keys_file,
)

KEY = "a-key-of-enough-letters"


def digest(key: str) -> str:
    return hashlib.sha256(key.encode()).hexdigest()


def test_without_keys_there_is_one_tenant() -> None:
    assert Tenants(None).of_header(None) == OPERATOR
    assert Tenants(None).of_header("Bearer anything") == OPERATOR


@pytest.mark.parametrize(
    ("header", "tenant"),
    [
        ("Bearer operator", OPERATOR),
        ("bearer operator", OPERATOR),
        (f"Bearer {KEY}", "ann"),
        ("Bearer wrong", None),
        ("Bearer ", None),
        ("Bearer", None),
        ("Basic operator", None),
        (f"Bearer {digest(KEY)}", None),
        ("operator", None),
        ("", None),
        (None, None),
    ],
)
def test_a_bearer_token_names_its_tenant(header: str | None, tenant: str | None) -> None:
    assert Tenants("operator", {digest(KEY): "ann"}).of_header(header) == tenant


def test_a_keys_file_holds_plain_and_hashed_keys(tmp_path: Path) -> None:
    path = tmp_path / "keys"
    path.write_text(f"# keys\n\nann {KEY}\n ann   {KEY}-new\nbob sha256:{digest('x').upper()}\n")
    assert read_keys_file(path) == {
        digest(KEY): "ann",
        digest(f"{KEY}-new"): "ann",
        digest("x"): "bob",
    }


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ("ann short", "at least 16 characters"),
        ("ann", "at least 16 characters"),
        (f"ann {KEY} {KEY}", "without blanks"),
        (f"../ann {KEY}", "tenant's name"),
        (f"default {KEY}", "holder of --api-key"),
        (f"{'x' * 65} {KEY}", "tenant's name"),
        ("ann sha256:abc", "64 hex digits"),
        (f"good {KEY}\nother {KEY}", "line 2: other's key is another's too"),
    ],
)
def test_a_wrong_keys_file_is_refused_without_showing_a_key(
    tmp_path: Path, line: str, reason: str
) -> None:
    path = tmp_path / "keys"
    path.write_text(line)
    with pytest.raises(KeysFileError, match=reason) as caught:
        read_keys_file(path)
    assert KEY not in str(caught.value)


def test_a_keys_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(KeysFileError, match="cannot be read"):
        read_keys_file(tmp_path / "none")


def test_a_changed_keys_file_holds_from_the_next_request_on(tmp_path: Path) -> None:
    path, draft = tmp_path / "keys", tmp_path / "draft"
    path.write_text(f"ann {KEY}\n")
    tenants = FileTenants("operator", path)
    assert tenants.of_header(f"Bearer {KEY}") == "ann"
    path.write_text(f"ann {KEY}-new\nbob {KEY}-bob\n")
    assert tenants.of_header(f"Bearer {KEY}-bob") == "bob"
    assert tenants.of_header(f"Bearer {KEY}") is None
    draft.write_text(f"eve {KEY}\n")
    draft.replace(path)
    assert tenants.of_header(f"Bearer {KEY}") == "eve"
    assert tenants.of_header("Bearer operator") == OPERATOR


@pytest.mark.parametrize("content", [None, "ann short", f"default {KEY}"])
def test_a_keys_file_that_becomes_unusable_changes_nothing_and_is_logged_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, content: str | None
) -> None:
    path = tmp_path / "keys"
    path.write_text(f"ann {KEY}\n")
    tenants = FileTenants("operator", path)
    if content is None:
        path.unlink()
    else:
        path.write_text(content)
    for _ in range(3):
        assert tenants.of_header(f"Bearer {KEY}") == "ann"
    errors = [record for record in caplog.records if record.levelname == "ERROR"]
    assert len(errors) == 1
    assert "the keys stay as they were" in errors[0].message
    assert KEY not in errors[0].message
    path.write_text(f"bob {KEY}-mended\n")
    assert tenants.of_header(f"Bearer {KEY}-mended") == "bob"
    assert tenants.of_header(f"Bearer {KEY}") is None
