"""Writing files so that a crash leaves the old one or the new one, never a part."""

from __future__ import annotations

import os
from pathlib import Path


def write_whole(file: str | Path, text: str) -> None:
    """Write a text beside a file, then put it in the file's place.

    >>> import pathlib, tempfile
    >>> folder = pathlib.Path(tempfile.mkdtemp())
    >>> write_whole(folder / 'a.txt', 'new')
    >>> [(p.name, p.read_text()) for p in folder.iterdir()]
    [('a.txt', 'new')]
    """
    file = Path(file)
    beside = file.with_name(f'.{file.name}.part')
    with beside.open('w', encoding='utf-8') as part:
        part.write(text)
        part.flush()
        # Without this a power cut could leave the new name with an empty file.
        os.fsync(part.fileno())
    os.replace(beside, file)
