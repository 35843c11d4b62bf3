"""A reference is a trainer, or the same trainer as it was at a git revision."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from replay_lib.errors import UsageError
from replay_lib.guard.reference import reference_of


def git(where: Path, *arguments: str) -> str:
    identity = ["-c", "user.name=Nobody", "-c", "user.email=nobody@example.org"]
    return subprocess.run(
        ["git", "-C", str(where), *identity, *arguments], check=True, capture_output=True, text=True
    ).stdout.strip()


@pytest.fixture
def repository(tmp_path, monkeypatch) -> Path:
    """A repository with ``src/guarded_loss.py``, changed after its branch ``main``."""
    root = tmp_path / "repository"
    (root / "src").mkdir(parents=True)
    git(root, "init", "--quiet", "--initial-branch=main")
    module = root / "src" / "guarded_loss.py"
    module.write_text("text = 'as on main'\n")
    git(root, "add", ".")
    git(root, "commit", "--quiet", "-m", "One")
    module.write_text("text = 'changed'\n")
    monkeypatch.syspath_prepend(str(root / "src"))
    (tmp_path / "loose_loss.py").touch()
    monkeypatch.syspath_prepend(str(tmp_path))
    return root


def test_trainers_by_name_are_references_as_they_are():
    for name in ("grpo", "axrl", "my_trainer:make"):
        with reference_of(name, "other:make") as reference:
            assert (reference.told, reference.trainer, reference.path) == (name, name, ())


def test_a_revision_is_unpacked_elsewhere_and_removed(repository):
    with reference_of("main", "guarded_loss:make") as reference:
        assert reference.told == "guarded_loss:make at main"
        (place,) = reference.path
        assert (place / "guarded_loss.py").read_text() == "text = 'as on main'\n"
        assert "changed" in (repository / "src" / "guarded_loss.py").read_text()
    assert not place.exists()
    assert git(repository, "status", "--porcelain") == "M src/guarded_loss.py"
    assert "guarded_loss" not in sys.modules  # found, not imported


def test_a_package_in_the_tree_is_found_by_its_parent(repository):
    package = repository / "src" / "guarded_package"
    package.mkdir()
    (package / "__init__.py").write_text("raise RuntimeError('imported')\n")
    git(repository, "add", ".")
    git(repository, "commit", "--quiet", "-m", "Two")
    with reference_of("HEAD", "guarded_package.losses:make") as reference:
        assert (reference.path[0] / "guarded_package" / "__init__.py").is_file()


@pytest.mark.parametrize("name", ["guarded_later", "guarded_package.later"])
def test_a_revision_that_has_no_such_module_yet_is_told_before_anything_is_replayed(
    repository, name
):
    package = repository / "src" / "guarded_package"
    package.mkdir()
    (package / "__init__.py").write_text("raise RuntimeError('imported')\n")
    git(repository, "add", ".")
    git(repository, "commit", "--quiet", "-m", "Two")
    file = repository.joinpath("src", *name.split(".")).with_suffix(".py")
    file.write_text("")
    with pytest.raises(UsageError) as raised, reference_of("HEAD", f"{name}:make"):
        pass
    assert f"--against HEAD: that revision has no module {name!r}. Take" in str(raised.value)
    git(repository, "add", ".")
    git(repository, "commit", "--quiet", "-m", "Three")
    with reference_of("HEAD", f"{name}:make") as reference:
        assert reference.told == f"{name}:make at HEAD"


@pytest.mark.parametrize(
    ("against", "trainer", "told"),
    [
        ("no-such-branch", "guarded_loss:make", "has no such revision"),
        ("--upload-pack=x", "guarded_loss:make", "has no such revision"),
        ("main", "grpo", "not of grpo"),
        ("main", "no_such_module:make", "found no module 'no_such_module'"),
        ("main", "loose_loss:make", "is in no git repository"),
        ("a:b:c", "guarded_loss:make", "expected grpo"),
    ],
)
def test_what_names_no_reference_is_told(repository, against, trainer, told):
    with pytest.raises(UsageError) as raised, reference_of(against, trainer):
        pass
    assert told in str(raised.value)
