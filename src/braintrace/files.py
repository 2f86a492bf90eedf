"""Writing files so that a crash leaves the old one or the new one, never a part."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from .errors import is_explained, three_parts


@contextmanager
def written(what: str, *kinds: type[Exception]) -> Iterator[None]:
    """Say in three parts what could not be written: the disk may be full, or a folder
    read only.

    ``kinds``: errors besides those of the operating system.
    """
    try:
        yield
    except (OSError, *kinds) as error:
        if is_explained(error):
            raise
        reason = str(error).splitlines()[0][:500] if str(error) else ''
        raise OSError(
            three_parts(
                what,
                f'it cannot be written: {type(error).__name__}: {reason}',
                'a folder where you may write, with space left; a training whose '
                'folder '
                'has become so is resumed from its newest checkpoint',
            )
        ) from error


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
    with written(str(file)):
        with beside.open('w', encoding='utf-8') as part:
            part.write(text)
            part.flush()
            # Without this a power cut could leave the new name with an empty file.
            os.fsync(part.fileno())
        os.replace(beside, file)
