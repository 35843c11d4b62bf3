"""Files that are replaced whole: a killed process leaves the old content or the new one."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path


def replace_file(file: Path, content: bytes) -> None:
    """Write beside ``file``, flush to the disk, then rename; the directory must exist."""
    handle, temporary = tempfile.mkstemp(dir=file.parent, prefix=f".{file.name}.")
    try:
        with os.fdopen(handle, "wb") as out:
            out.write(content)
            out.flush()
            os.fsync(out.fileno())
        # mkstemp's files are private; keep the old one's mode, and let a new one be read by all
        Path(temporary).chmod(file.stat().st_mode & 0o777 if file.exists() else 0o644)
        Path(temporary).replace(file)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise
