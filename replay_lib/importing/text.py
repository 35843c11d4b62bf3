"""Encode text with the tokenizer at a path; needs the package ``tokenizers``, nothing else."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from replay_lib.errors import UsageError, fault

FILE = "tokenizer.json"


def encoder(path: Path) -> Callable[[str], list[int]]:
    """From a ``tokenizer.json``, or a directory that holds one; no special tokens are added.

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
        tokenizer = Tokenizer.from_file(str(file))
    except Exception as error:  # the package raises Exception itself
        found = f"what cannot be read ({str(error).splitlines()[0]:.80})"
        raise UsageError(fault(file, None, found, f"a {FILE} of 'tokenizers'")) from error

    def encode(text: str) -> list[int]:
        ids: list[int] = tokenizer.encode(text, add_special_tokens=False).ids
        return ids

    return encode
