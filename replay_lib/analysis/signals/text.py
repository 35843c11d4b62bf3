"""Decode token ids with the tokenizer at a path; needs the package ``tokenizers``, nothing else."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from replay_lib.analysis.signals.outliers import Decode
from replay_lib.errors import UsageError, fault

FILE = "tokenizer.json"


def decoder(path: Path) -> Decode:
    """From a ``tokenizer.json``, or a directory that holds one; ids it does not know are told.

    UsageError where there is none, it cannot be read, or ``tokenizers`` is not installed.
    """
    file = path / FILE if path.is_dir() else path
    if not file.is_file():
        raise UsageError(fault(file, None, "no such file", f"a {FILE}, or a directory with one"))
    try:
        from tokenizers import Tokenizer
    except ImportError as error:
        found, then = "no package 'tokenizers'", "Install it: pip install 'axrl-spike-replay[text]'"
        raise UsageError(fault("--tokenizer", None, found, "the package", then)) from error
    try:
        tokenizer: Any = Tokenizer.from_file(str(file))
    except Exception as error:  # the package raises Exception itself
        found = f"what cannot be read ({str(error).splitlines()[0]:.80})"
        raise UsageError(
            fault(file, None, found, f"a {FILE} of the package 'tokenizers'")
        ) from error

    def decode(ids: list[int]) -> str:
        if any(tokenizer.id_to_token(i) is None for i in ids if i >= 0) or min(ids) < 0:
            return " ".join(_one(tokenizer, i) for i in ids)
        text: str = tokenizer.decode(ids, skip_special_tokens=False)
        return text

    return decode


def _one(tokenizer: Any, number: int) -> str:
    known = tokenizer.id_to_token(number) if number >= 0 else None
    return f"<{number}?>" if known is None else str(known)
