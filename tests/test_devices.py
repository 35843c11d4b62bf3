"""What a machine has against what a case needs."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from replay_lib import devices
from replay_lib.case import Needs
from replay_lib.engine import machine as machine_module
from replay_lib.engine.nodes import nodes_hint


def machine(monkeypatch: pytest.MonkeyPatch, cards: int, gib: float) -> None:
    monkeypatch.setattr(devices, "cuda_devices", lambda: cards)
    monkeypatch.setattr(devices, "memory_gib", lambda _device: gib)


@pytest.mark.parametrize(
    ("cards", "device", "needs", "reason"),
    [
        (0, "auto", Needs(), None),
        (0, "cpu", Needs(devices=4), None),
        (1, "auto", Needs(devices=2), f"it needs 2 NVIDIA device(s), 1 found{nodes_hint(2, 1)}"),
        (0, "cuda", Needs(), "it needs 1 NVIDIA device(s), 0 found"),
        (
            0,
            "auto",
            Needs(device="cuda"),
            "it needs an NVIDIA device and is to run on the CPU",
        ),
        (1, "cpu", Needs(device="cuda"), "it needs an NVIDIA device and is to run on the CPU"),
        (1, "auto", Needs(device="cuda", memory_gib=80.0), None),
        (
            1,
            "cuda",
            Needs(memory_gib=81.0),
            "it needs 81 GiB of memory on cuda, 80.0 found",
        ),
    ],
)
def test_unmet(
    monkeypatch: pytest.MonkeyPatch, cards: int, device: str, needs: Needs, reason: str | None
) -> None:
    machine(monkeypatch, cards, 80.0)
    assert devices.unmet(needs, device) == reason


def test_memory_that_the_driver_does_not_tell_is_not_a_refusal(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(devices, "cuda_devices", lambda: 1)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert devices.memory_gib("cuda") is None
    assert devices.unmet(Needs(memory_gib=80.0), "cuda") is None


@pytest.mark.parametrize(
    ("visible", "seen"), [(None, 2), ("", 0), ("-1", 0), ("1", 1), ("0,1", 2), ("0,1,2", 2)]
)
def test_hidden_devices_are_not_counted(
    monkeypatch: pytest.MonkeyPatch, visible: str | None, seen: int
) -> None:
    monkeypatch.setattr(Path, "glob", lambda *_: iter([Path("nvidia0"), Path("nvidia1")]))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert devices.cuda_devices() == seen


def test_xdist_workers_take_sets_of_devices_in_turn(monkeypatch):
    seen = []
    monkeypatch.setattr(devices, "visible_devices", lambda: ("4", "5", "6", "7", "8"))
    for worker, size in (("gw0", 1), ("gw6", 1), ("gw0", 2), ("gw1", 2), ("gw2", 2), ("gw1", 3)):
        monkeypatch.setenv(devices.XDIST_WORKER, worker)
        monkeypatch.setenv(devices.VISIBLE, "before")
        with devices.own_devices(size):
            seen.append(os.environ[devices.VISIBLE])
        assert os.environ[devices.VISIBLE] == "before"
    assert seen == ["4", "5", "4,5", "6,7", "4,5", "before"]


def test_devices_stay_as_they_are_without_xdist_and_are_given_back(monkeypatch):
    monkeypatch.setattr(devices, "visible_devices", lambda: ("0", "1"))
    monkeypatch.delenv(devices.VISIBLE, raising=False)
    monkeypatch.delenv(devices.XDIST_WORKER, raising=False)
    with devices.own_devices(1):
        assert devices.VISIBLE not in os.environ
    monkeypatch.setenv(devices.XDIST_WORKER, "gw1")
    with pytest.raises(KeyError), devices.own_devices(1):
        assert os.environ[devices.VISIBLE] == "1"
        raise KeyError
    assert devices.VISIBLE not in os.environ


def test_visible_devices_are_those_that_the_environment_names(monkeypatch, tmp_path):
    for name in ("nvidia0", "nvidia1", "nvidia2", "nvidiactl"):
        (tmp_path / name).touch()
    monkeypatch.setattr(machine_module, "Path", lambda _dev: tmp_path)
    expected = {
        None: ("0", "1", "2"),
        "": (),
        "-1": (),
        "2,0": ("2", "0"),
        "GPU-a1, 1": ("GPU-a1", "1"),
    }
    for named, devices_seen in expected.items():
        if named is None:
            monkeypatch.delenv(devices.VISIBLE, raising=False)
        else:
            monkeypatch.setenv(devices.VISIBLE, named)
        assert machine_module.visible_devices() == devices_seen
        assert machine_module.cuda_devices() == len(devices_seen)


def test_several_machines_have_the_devices_of_all(monkeypatch):
    machine(monkeypatch, 8, 80.0)
    assert devices.unmet(Needs(devices=16), "cuda", nodes=2) is None
    told = devices.unmet(Needs(devices=17), "cuda", nodes=2)
    assert told == f"it needs 17 NVIDIA device(s), 8 on this one of 2 nodes{nodes_hint(17, 8)}"
