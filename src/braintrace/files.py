"""Writing files so that a crash leaves the old one or the new one, never a part."""

from __future__ import annotations

import os
import tempfile
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


@contextmanager
def alone_in(folder: str | Path | None) -> Iterator[None]:
    """Keep a folder to one training at a time: another one in it is an error.

    The operating system ends this with the process, however that ends.
    """
    try:
        import fcntl
    except ImportError:  # Windows has no such locks
        folder = None
    if folder is None:
        yield
        return
    with written(str(folder)):
        Path(folder).mkdir(parents=True, exist_ok=True)
        held = os.open(folder, os.O_RDONLY)
    try:
        try:
            fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise RuntimeError(
                three_parts(
                    f'a training in {folder}',
                    'another process is writing there',
                    'another folder, or wait until that process has ended',
                )
            ) from error
        except OSError:
            pass  # some network file systems have no locks
        yield
    finally:
        os.close(held)


@contextmanager
def replacing(file: str | Path) -> Iterator[Path]:
    """A path to write to; what is written there then takes the place of a file.

    It lies in a new folder beside the file. Only its owner may write there, so nobody
    can have put a link to another file in the way.
    """
    file = Path(file)
    with (
        written(str(file)),
        tempfile.TemporaryDirectory(prefix='.part-', dir=file.parent) as folder,
    ):
        beside = Path(folder, 'file')
        yield beside
        os.replace(beside, file)


def write_whole(file: str | Path, text: str) -> None:
    """Write a text to a file, whole or not at all.

    >>> folder = Path(tempfile.mkdtemp())
    >>> write_whole(folder / 'a.txt', 'new')
    >>> [(p.name, p.read_text()) for p in folder.iterdir()]
    [('a.txt', 'new')]
    """
    with replacing(file) as beside, beside.open('w', encoding='utf-8') as part:
        part.write(text)
        part.flush()
        # Without this a power cut could leave the new name with an empty file.
        os.fsync(part.fileno())
