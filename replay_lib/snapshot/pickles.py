"""Read a ``torch.save`` file that nobody vouches for.

Three steps, each able to refuse: the archive must be whole (stored records, checksums); a
rehearsal walks the pickle with inert objects and refuses every global that is not on the short
list and every tensor larger than its record; then ``torch.load(weights_only=True)`` reads it
with our stand-ins and nothing else on its list. Nothing named by the file ever runs.
"""

from __future__ import annotations

import contextlib
import io
import pickle
import zipfile
from _compat_pickle import IMPORT_MAPPING, NAME_MAPPING
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from replay_lib.errors import (
    IncompleteSnapshotError,
    SnapshotError,
    SpikeReplayError,
    UnsafePickleError,
    fault,
)
from replay_lib.snapshot.documents import COPY_AGAIN, missing

_BYTES_OF_STORAGE = {
    "torch.DoubleStorage": 8,
    "torch.FloatStorage": 4,
    "torch.HalfStorage": 2,
    "torch.BFloat16Storage": 2,
    "torch.LongStorage": 8,
    "torch.IntStorage": 4,
    "torch.ShortStorage": 2,
    "torch.CharStorage": 1,
    "torch.ByteStorage": 1,
    "torch.BoolStorage": 1,
}
#: What any file of plain tensors, dictionaries, lists and numbers may name.
PLAIN_GLOBALS = frozenset(
    {
        "torch._utils._rebuild_tensor_v2",
        "torch._utils._rebuild_parameter",
        "torch.Size",
        "collections.OrderedDict",
        "_codecs.encode",
        "builtins.set",
    }
)
_WHOLE = "a whole file written by torch.save"


def load_untrusted(path: Path, table: Mapping[str, Callable[..., Any]], why: str) -> Any:
    """The object in ``path``, with ``table``'s stand-ins for the classes it may name.

    Tensors are on the CPU. Raises UnsafePickleError naming a global that is not on the list,
    IncompleteSnapshotError where the file is missing or cut short, and SnapshotError for
    anything else that stops it from being read.
    """
    if not path.is_file():
        raise missing(path, why)
    with path.open("rb") as stream:
        return load_stream(stream, path, table)


def load_stream(stream: Any, where: str | Path, table: Mapping[str, Callable[..., Any]]) -> Any:
    """As :func:`load_untrusted`, from a seekable binary stream named ``where`` in errors."""
    import torch

    try:
        prefix, sizes, program = _check_archive(stream, where)
        _Rehearsal(program, where, set(table), prefix, sizes).load()
        stream.seek(0)
        with only(table):
            return torch.load(stream, map_location="cpu", weights_only=True)
    except SpikeReplayError:
        raise
    except Exception as error:  # whatever a corrupt file provokes ends as our error
        raise broken(where, error) from error


def file_names(path: Path, name: str) -> bool:
    """Whether the pickle in ``path`` may speak of ``name``: its bytes are searched, nothing is run.

    True as well where the file cannot be read like this; reading it whole tells why. No torch.
    """
    try:
        with zipfile.ZipFile(path) as archive:
            infos = [i for i in archive.infolist() if i.filename.endswith("data.pkl")]
            stored = all(i.compress_type == zipfile.ZIP_STORED for i in infos)
            if len(infos) != 1 or not stored:
                return True
            return name.encode() in _read_program(archive, infos[0].filename)
    except (OSError, ValueError, zipfile.BadZipFile):
        return True


def broken(where: str | Path, error: BaseException | str) -> SnapshotError:
    """The error for a file whose bytes make no sense."""
    if isinstance(error, BaseException):
        first = (str(error).splitlines() or [""])[0][:120]
        error = f"{type(error).__name__}: {first}" if first else type(error).__name__
    return SnapshotError(fault(where, None, f"broken bytes ({error})", _WHOLE, f"{COPY_AGAIN}."))


@contextlib.contextmanager
def only(table: Mapping[str, Callable[..., Any]]) -> Iterator[None]:
    """torch's list of safe globals is exactly ``table`` inside, and what it was before outside.

    Other packages extend that list for the whole process; a snapshot must not profit from it.
    """
    import torch

    before = torch.serialization.get_safe_globals()
    torch.serialization.clear_safe_globals()
    try:
        entries: list[Any] = [(item, name) for name, item in table.items()]
        with torch.serialization.safe_globals(entries):
            yield
    finally:
        torch.serialization.clear_safe_globals()
        torch.serialization.add_safe_globals(before)


def _check_archive(stream: Any, where: str | Path) -> tuple[str, dict[str, int], bytes]:
    """Prefix of the archive's records, their sizes in bytes, and the pickle program."""
    try:
        archive = zipfile.ZipFile(stream)
    except zipfile.BadZipFile as error:
        raise _not_an_archive(stream, where, error) from error
    with archive:
        infos = archive.infolist()
        programs = [i.filename for i in infos if i.filename.endswith("data.pkl")]
        if len(programs) != 1 or len({i.filename for i in infos}) != len(infos):
            raise broken(where, f"{len(programs)} pickles among {len(infos)} records, not one")
        if any(i.compress_type != zipfile.ZIP_STORED for i in infos):
            raise broken(where, "compressed records, which torch.save never writes")
        # a trainer may switch checksums off (torch.serialization.set_crc32_options): all zero
        if any(i.CRC for i in infos) and (bad := archive.testzip()) is not None:
            raise broken(where, f"record {bad} does not match its checksum")
        sizes = {i.filename: i.file_size for i in infos}
        prefix = programs[0].removesuffix("data.pkl")
        return prefix, sizes, _read_program(archive, programs[0])


def _read_program(archive: zipfile.ZipFile, name: str) -> bytes:
    info = archive.getinfo(name)
    assert archive.fp is not None
    if info.CRC:
        return archive.read(name)
    archive.fp.seek(info.header_offset + 26)  # zip: two lengths, then name and extra field
    skip = int.from_bytes(archive.fp.read(2), "little") + int.from_bytes(
        archive.fp.read(2), "little"
    )
    archive.fp.seek(info.header_offset + 30 + skip)
    return archive.fp.read(info.file_size)


def _not_an_archive(stream: Any, where: str | Path, error: Exception) -> SnapshotError:
    stream.seek(0)
    head = stream.read(4)
    if head in (b"PK\x03\x04", b""):
        found = "a file without the table that ends a whole file (cut short)"
        return IncompleteSnapshotError(fault(where, None, found, _WHOLE, f"{COPY_AGAIN}."))
    return broken(where, error)


class _Inert:
    """Takes any argument, state and item, and keeps none."""

    def __new__(cls, *_args: Any) -> _Inert:
        return super().__new__(cls)

    def __init__(self, *_args: Any) -> None:
        pass

    def __setstate__(self, _state: Any) -> None:
        pass

    def __setitem__(self, _key: Any, _value: Any) -> None:
        pass


def python3_name(module: str, name: str) -> str:
    """Full name of a global; protocol 2 writes Python 2's names for builtins."""
    if (module, name) in NAME_MAPPING:
        module, name = NAME_MAPPING[(module, name)]
    return f"{IMPORT_MAPPING.get(module, module)}.{name}"


def unsafe(where: str | Path, full_name: str) -> UnsafePickleError:
    """The error for a global that is not on the list."""
    return UnsafePickleError(
        fault(
            where,
            None,
            f"a pickle that asks for {full_name}",
            "only the classes that a snapshot of AXRL holds",
            "Nothing of it was run. Do not load this file with other tools; if the trainer is "
            "yours and the class is plain data, ask for it to be added to the list.",
        )
    )


# The pure-Python unpickler: the C one lets a short file ask for a memo of many gigabytes.
class _Rehearsal(pickle._Unpickler):
    def __init__(
        self,
        program: bytes,
        where: str | Path,
        allowed: set[str],
        prefix: str,
        sizes: Mapping[str, int],
    ) -> None:
        super().__init__(io.BytesIO(program))
        self._where, self._allowed, self._prefix, self._sizes = where, allowed, prefix, sizes

    def find_class(self, module: str, name: str) -> Any:
        full_name = python3_name(module, name)
        if full_name in _BYTES_OF_STORAGE:
            return _BYTES_OF_STORAGE[full_name]
        if full_name in PLAIN_GLOBALS or full_name in self._allowed:
            return _Inert
        raise unsafe(self._where, full_name)

    def persistent_load(self, pid: Any) -> Any:
        """A tensor's storage: its record must hold exactly the bytes that the pickle claims."""
        kind, width, key, _device, count = pid
        record = f"{self._prefix}data/{key}"
        if kind != "storage" or not isinstance(width, int) or not isinstance(count, int):
            raise broken(self._where, f"a storage described as {pid!r:.80}")
        if self._sizes.get(record) != width * count:
            found = self._sizes.get(record)
            raise broken(self._where, f"record {record} of {found} bytes for {width * count}")
        return _Inert()
