"""Where mitigations come from: the built-in directory, a user's directory, module:function."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from replay_lib.engine.protocol import MitigationCall
from replay_lib.errors import PatchError, did_you_mean
from replay_lib.methods import builtin_dir, callable_alone, find, left_out, load_methods, resolve
from replay_lib.patch import Seam, mitigation, settings_patch

BUILT_IN = [
    "balance-negative-advantages",
    "disable-routing-replay",
    "enable-token-mismatch-tis-max2",
    "replay-r3-on-loss-tokens-only",
    "use-current-routing-for-first-moe-layer",
]

METHOD = """
from replay_lib.patch import mitigation, settings_patch

@mitigation(slug={slug!r}, family="settings", summary="Clip.", source="a test")
def method(clip=1.0):
    return settings_patch(mismatch_token_clip_max=clip)
"""


def write_method(directory: Path, name: str, slug: str) -> Path:
    directory.mkdir(exist_ok=True)
    file = directory / name
    file.write_text(METHOD.format(slug=slug))
    return file


def load_error(directory: Path) -> str:
    with pytest.raises(PatchError) as caught:
        load_methods([directory])
    return str(caught.value)


class Settings:
    """Stands in for loss settings: a settings patch only calls ``replace``."""

    def replace(self, **fields: object) -> dict[str, object]:
        return fields


def test_the_built_in_methods_are_listed_by_slug_with_family_seams_and_parameters():
    methods = load_methods()
    assert [s for s in methods if s in BUILT_IN] == BUILT_IN
    assert {s: (methods[s].family, methods[s].seams, methods[s].defaults) for s in BUILT_IN} == {
        "balance-negative-advantages": (
            "advantage",
            (Seam.BATCH,),
            {"eps": 1e-6, "scale_up": False},
        ),
        "disable-routing-replay": ("routing", (Seam.ROUTING,), {}),
        "enable-token-mismatch-tis-max2": ("settings", (Seam.SETTINGS,), {"clip_max": 2.0}),
        "replay-r3-on-loss-tokens-only": ("routing", (Seam.ROUTING,), {}),
        "use-current-routing-for-first-moe-layer": ("routing", (Seam.ROUTING,), {"layers": 1}),
    }
    assert [s for s in BUILT_IN if methods[s].diagnostic] == ["disable-routing-replay"]
    assert all(m.summary and m.source for m in methods.values())


def test_a_users_directory_adds_to_the_built_in_methods(tmp_path):
    write_method(tmp_path / "mine", "clip_hard.py", "clip-hard")
    methods = load_methods([tmp_path / "mine"])
    assert set(methods) == {*load_methods(), "clip-hard"}
    assert list(methods) == sorted(methods)
    (patch,) = resolve(MitigationCall(slug="clip-hard", params={"clip": 3.0}), methods)
    assert patch.seam is Seam.SETTINGS
    assert patch.apply(Settings()) == {"mismatch_token_clip_max": 3.0}


def test_naming_the_built_in_directory_again_is_no_duplicate():
    assert list(load_methods([builtin_dir()])) == list(load_methods())


def test_a_file_with_a_leading_underscore_is_not_a_method(tmp_path):
    (tmp_path / "_shared.py").write_text("raise RuntimeError('never loaded')\n")
    assert list(load_methods([tmp_path])) == list(load_methods())


def test_two_files_of_one_slug_are_an_error_that_names_both(tmp_path):
    first = write_method(tmp_path / "a", "clip_hard.py", "clip-hard")
    second = write_method(tmp_path / "b", "clip_hard.py", "clip-hard")
    with pytest.raises(PatchError) as caught:
        load_methods([tmp_path / "a", tmp_path / "b"])
    assert str(caught.value) == (
        f"{second}: slug: found 'clip-hard', which {first} declares too, expected every slug once. "
        f"Rename one of the two files and its slug"
    )


def test_a_file_that_declares_nothing_is_an_error(tmp_path):
    (tmp_path / "empty.py").write_text("x = 1\n")
    assert load_error(tmp_path) == (
        f"{tmp_path / 'empty.py'}: mitigations: found none, expected exactly one a file. "
        f"Declare it with @replay_lib.patch.mitigation(slug=...)"
    )


def test_a_file_that_declares_two_is_an_error(tmp_path):
    file = write_method(tmp_path, "clip_hard.py", "clip-hard")
    file.write_text(file.read_text() + METHOD.format(slug="other").replace("def method", "def two"))
    assert "mitigations: found 'clip-hard', 'other', expected exactly one" in load_error(tmp_path)


@pytest.mark.parametrize("slug", ["Clip-Hard", "clip_hard", "-clip", "clip--hard", ""])
def test_a_malformed_slug_is_an_error(tmp_path, slug):
    file = write_method(tmp_path, "clip_hard.py", slug)
    assert load_error(tmp_path) == (
        f"{file}: slug: found {slug!r}, expected lower-case words and digits joined by hyphens"
    )


def test_a_slug_that_does_not_match_its_file_is_an_error(tmp_path):
    file = write_method(tmp_path, "clip_hard.py", "clip-soft")
    assert load_error(tmp_path) == (
        f"{file}: slug: found 'clip-soft', expected the file to be named clip_soft.py"
    )


def test_a_file_that_does_not_load_is_an_error_that_says_why(tmp_path):
    file = tmp_path / "broken.py"
    file.write_text("import no_such_module_anywhere\n")
    assert load_error(tmp_path) == (
        f"{file}: found ModuleNotFoundError: No module named 'no_such_module_anywhere', "
        f"expected a file that loads without error"
    )
    assert not [name for name in sys.modules if name.endswith("_broken")]


def test_a_parameter_without_default_is_an_error(tmp_path):
    file = write_method(tmp_path, "clip_hard.py", "clip-hard")
    file.write_text(file.read_text().replace("clip=1.0", "clip"))
    assert "mitigation clip-hard: parameter clip has no default" in load_error(tmp_path)


def test_a_directory_that_is_not_there_is_an_error(tmp_path):
    missing = tmp_path / "gone"
    assert load_error(missing) == (
        f"{missing}: found no such directory, expected a directory of mitigation files"
    )


def test_an_unknown_slug_lists_the_known_ones():
    with pytest.raises(PatchError) as caught:
        find("nothing-of-the-kind", load_methods())
    text = str(caught.value)
    assert text.startswith(
        "mitigation nothing-of-the-kind: not registered; known: adagc, add-entropy-"
    )
    assert text.endswith(
        "A method of your own is named module:function, or put into a directory given by "
        "--mitigations"
    )


@pytest.mark.parametrize(
    ("slug", "told"),
    [
        ("disable_routing_replay", "did you mean disable-routing-replay"),
        ("clip-advantage", "did you mean clip-advantages"),
        ("advantages-clipped", "known: adagc, add-"),
    ],
)
def test_a_misspelt_slug_is_told_the_nearest(slug, told):
    with pytest.raises(PatchError) as caught:
        find(slug, load_methods())
    text = str(caught.value)
    assert text.startswith(f"mitigation {slug}: not registered; {told}")
    assert ("? All are listed by spike-replay methods. A method of" in text) == ("did you" in told)


def test_nearest_names_come_first():
    known = ["clip-a", "clip-ab", "clip-abc", "clip-abcd", "other"]
    assert did_you_mean("clip-abc", known) == "did you mean clip-abc, clip-abcd or clip-ab?"
    assert did_you_mean("other2", known) == "did you mean other?"
    assert did_you_mean("entirely", known) is None


def test_an_unknown_parameter_lists_the_known_ones():
    call = MitigationCall(slug="balance-negative-advantages", params={"epsilon": 1})
    with pytest.raises(PatchError) as caught:
        resolve(call, load_methods())
    assert str(caught.value) == (
        "mitigation balance-negative-advantages: unknown parameter epsilon; "
        "known: eps=1e-06, scale_up=False"
    )


@pytest.fixture
def user_module(tmp_path, monkeypatch):
    (tmp_path / "my_methods_for_tests.py").write_text(
        METHOD.format(slug="declared")
        + "from replay_lib.errors import PatchError, did_you_mean\n"
        + '''
def both(clip=1.0, seen=()):
    """Clip twice.

    More words.
    """
    return [settings_patch(a=clip), settings_patch(b=clip)]

def nothing():
    return []

def wrong():
    return "a string"

def needs(clip):
    return settings_patch(a=clip)

def free(value=None):
    return settings_patch(a=value)

def breaks(clip=1.0):
    return settings_patch(a=1 / (clip - 1.0))

def leaves():
    raise SystemExit(0)

def refuses():
    raise PatchError("a word of its own")

number = 3
'''
    )
    monkeypatch.syspath_prepend(tmp_path)
    yield "my_methods_for_tests"
    sys.modules.pop("my_methods_for_tests", None)


def test_a_users_function_is_called_by_module_and_name(user_module):
    call = MitigationCall(slug=f"{user_module}:both", params={"clip": 4})
    first, second = resolve(call, {})
    assert first.apply(Settings()) == {"a": 4}
    assert second.apply(Settings()) == {"b": 4}
    method = find(call.slug, {})
    assert (method.slug, method.family, method.summary) == (call.slug, "user", "Clip twice.")
    assert method.source.endswith("my_methods_for_tests.py")


def test_a_users_mitigation_keeps_its_own_declaration(user_module):
    assert find(f"{user_module}:method", {}).slug == "declared"


@pytest.mark.parametrize("name", ["nothing", "wrong"])
def test_a_users_function_that_returns_no_patch_is_an_error(user_module, name):
    slug = f"{user_module}:{name}"
    found = {"nothing": "[]", "wrong": "'a string'"}[name]
    with pytest.raises(PatchError) as caught:
        resolve(MitigationCall(slug=slug), {})
    assert str(caught.value) == f"mitigation {slug}: found {found}, expected a patch or several"


@pytest.mark.parametrize(
    ("name", "told"),
    [("breaks", "ZeroDivisionError: float division by zero"), ("leaves", "SystemExit: 0")],
)
def test_a_function_that_raises_is_an_error_that_names_the_method(user_module, name, told):
    slug = f"{user_module}:{name}"
    with pytest.raises(PatchError) as caught:
        resolve(MitigationCall(slug=slug), {})
    assert str(caught.value) == f"mitigation {slug}: its function raised {told}"


def test_a_function_may_refuse_in_its_own_words(user_module):
    with pytest.raises(PatchError, match=r"^a word of its own$"):
        resolve(MitigationCall(slug=f"{user_module}:refuses"), {})


def test_a_parameter_of_any_kind_is_finite(user_module):
    slug = f"{user_module}:free"
    assert resolve(MitigationCall(slug=slug, params={"value": "inf"}), {})
    with pytest.raises(PatchError) as caught:
        resolve(MitigationCall(slug=slug, params={"value": float("inf")}), {})
    assert str(caught.value) == f"mitigation {slug}: value: found inf, expected a finite number"


def test_a_users_function_needs_defaults_too(user_module):
    with pytest.raises(PatchError, match=r"my_methods_for_tests:needs: parameter clip has no def"):
        find(f"{user_module}:needs", {})


def declared(build, needs=("path",)):
    declare = mitigation(slug="s", family="f", summary="s", source="s", needs=needs)
    return declare(build)


def test_a_method_may_need_a_parameter():
    def build(path: str, share: float = 0.5):
        return settings_patch(at=path, share=share)

    method = declared(build)
    assert (method.needs, method.defaults) == (("path",), {"share": 0.5})
    assert method.usage == "s:path=PATH"
    assert method.seams == (Seam.SETTINGS,)
    (patch,) = method.patches({"path": "x"})
    assert patch.apply(Settings()) == {"at": "x", "share": 0.5}
    assert callable_alone({"s": method}) == [] and left_out({}) == ""
    with pytest.raises(PatchError, match=r"^mitigation s: found no path, which it needs; write s:"):
        method.patches()


def test_what_it_needs_has_no_default_and_is_declared():
    def none(path: str):
        return settings_patch(at=path)

    def some(path: str = "x"):
        return settings_patch(at=path)

    def unknown(path):
        return settings_patch(at=path)

    for build, needs, told in (
        (none, (), "parameter path has no default, and needs does not name it"),
        (some, ("path",), "parameter path has a default, though needs names it"),
        (unknown, ("path",), "needs: found 'path', expected a parameter annotated as one of str"),
        (some, ("other",), "needs: found 'other', expected a parameter annotated as one of str"),
    ):
        with pytest.raises(PatchError) as caught:
            declared(build, needs)
        assert str(caught.value).startswith(f"mitigation s: {told}")


@pytest.mark.parametrize(("name", "found"), [("absent", "nothing"), ("number", "int")])
def test_a_name_that_is_no_function_is_an_error(user_module, name, found):
    with pytest.raises(PatchError, match=f"found {found} under the name '{name}' in .*, expected"):
        find(f"{user_module}:{name}", {})


def test_a_module_that_cannot_be_imported_is_an_error():
    with pytest.raises(PatchError) as caught:
        find("no_such_module_anywhere:f", {})
    assert str(caught.value) == (
        "mitigation no_such_module_anywhere:f: module 'no_such_module_anywhere' cannot be "
        "imported: ModuleNotFoundError: No module named 'no_such_module_anywhere'. It must be on "
        "PYTHONPATH of the worker as well"
    )


def test_listing_methods_imports_no_torch():
    code = (
        "import sys; from replay_lib.methods import load_methods; "
        "assert load_methods(); [m.seams for m in load_methods().values()]; "
        "sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
