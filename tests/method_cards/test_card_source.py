"""A function taken out of its file, as code that stands alone."""

from __future__ import annotations

import pytest

from replay_lib.errors import PatchError
from replay_lib.method_cards.source import code_of
from replay_lib.methods import find, load_methods
from replay_lib.patch import Patch, Seam
from tests.method_cards.make_cards import own_methods


def names_of(code: str) -> dict[str, object]:
    names: dict[str, object] = {}
    exec(compile(code, "card", "exec"), names)
    return names


def test_a_function_takes_with_it_what_it_needs_and_nothing_else(tmp_path, monkeypatch):
    module = own_methods(tmp_path, monkeypatch)
    code = code_of(find(f"{module}:stay_near", {}), {"factor": 0.5})
    assert "# how far apart, in nats\nBOUND = 0.1" in code and "def _near(" in code
    assert code.startswith("from __future__ import annotations\nimport math\nfrom replay_lib.patch")
    assert "import os" not in code and "UNUSED" not in code and "two_at_once" not in code
    assert code.endswith("patch = stay_near(factor=0.5)\n")
    patch = names_of(code)["patch"]
    assert isinstance(patch, Patch) and patch.seam is Seam.BATCH


def test_several_patches_stay_several(tmp_path, monkeypatch):
    module = own_methods(tmp_path, monkeypatch)
    patches = names_of(code_of(find(f"{module}:two_at_once", {}), {}))["patch"]
    assert [p.seam for p in patches] == [Seam.BATCH, Seam.SETTINGS]


@pytest.mark.parametrize("slug", ["clip-advantages", "enable-token-mismatch-tis-max2"])
def test_a_declared_method_is_taken_with_its_declaration(slug):
    method = load_methods()[slug]
    patch = names_of(code_of(method, method.defaults))["patch"]
    assert isinstance(patch, Patch) and patch.seam is method.seams[0]


def test_every_registered_method_can_be_taken():
    for method in load_methods().values():
        if method.seams and not method.needs:
            assert "patch" in names_of(code_of(method, {})), method.slug


def test_a_function_inside_another_is_refused(tmp_path, monkeypatch):
    module = own_methods(tmp_path, monkeypatch)
    with pytest.raises(PatchError) as caught:
        code_of(find(f"{module}:hidden", {}), {})
    assert str(caught.value) == (
        f"mitigation {module}:hidden: source: found its function is '_made.<locals>.hidden', "
        "expected a function at the top level of a file"
    )


def test_code_that_does_not_run_alone_is_refused(tmp_path, monkeypatch):
    module = own_methods(tmp_path, monkeypatch, "own_with_globals")
    file = tmp_path / f"{module}.py"
    file.write_text(
        file.read_text() + "globals()['SECRET'] = 2.0\n\ndef odd():\n    "
        '"""Odd."""\n    return settings_patch(mismatch_token_clip_max=SECRET)\n'
    )
    with pytest.raises(PatchError, match=r"code that does not run alone \(NameError"):
        code_of(find(f"{module}:odd", {}), {})
