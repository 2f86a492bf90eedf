"""The settings of a training, as its folder keeps them, and what may be run of them."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from ..errors import printable, three_parts
from ..files import write_whole, written

FORMAT = 1
"""The version of ``config.json``; a higher one is of a later braintrace."""

CHANGEABLE = ('updates', 'save_every', 'certificate_every')
"""Settings that a resumed training may change: no update depends on them."""


@dataclass(frozen=True)
class Config:
    """All that a training is made from."""

    task: str
    rule: str = 'd_rtrl'
    model: str = 'gru'
    units: int | None = None
    batch: int = 32
    updates: int = 500
    lr: float = 1e-3
    rate_target: float | None = None
    seed: int = 0
    task_options: dict[str, Any] = field(default_factory=dict)
    rule_options: dict[str, Any] = field(default_factory=dict)
    save_every: int = 25
    certificate_every: int | None = None
    dt: str | None = None

    @property
    def names_code(self) -> bool:
        """Whether the model is code of the user's, to be imported."""
        return ':' in self.model


def _is_whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_count(value: Any) -> bool:
    return _is_whole(value) and value >= 1


def _is_number(value: Any) -> bool:
    return _is_whole(value) or isinstance(value, float)


_Kind = tuple[Callable[[Any], bool], str]
"""What a setting must be, and how to say it."""


def _or_null(kind: _Kind) -> _Kind:
    fits, name = kind
    return lambda value: value is None or fits(value), f'null or {name}'


_TEXT: _Kind = (lambda value: isinstance(value, str), 'a text')
_TABLE: _Kind = (lambda value: isinstance(value, dict), 'options by name')
_COUNT: _Kind = (_is_count, 'a whole number of at least 1')
_NUMBER: _Kind = (_is_number, 'a number')
_KINDS: dict[str, _Kind] = {
    'task': _TEXT,
    'rule': _TEXT,
    'model': _TEXT,
    'units': _or_null(_COUNT),
    'batch': _COUNT,
    'updates': _COUNT,
    'lr': (
        lambda value: _is_number(value) and 0 < value < math.inf,
        'a number above 0',
    ),
    'rate_target': _or_null(_NUMBER),
    'seed': (lambda value: _is_whole(value) and value >= 0, 'a whole number from 0'),
    'task_options': _TABLE,
    'rule_options': _TABLE,
    'save_every': _COUNT,
    'certificate_every': _or_null(_COUNT),
    'dt': _or_null(_TEXT),
}


# ---------------------------------------------------------------- files


def _files(out: Path) -> tuple[Path, Path]:
    """The settings of a training, and a copy by which later changes are seen."""
    return out / 'config.json', out / 'checkpoints' / 'config.json'


def save(out: Path, config: Config) -> None:
    """Write the settings of a training into its folder."""
    text = json.dumps({'format': FORMAT, **asdict(config)}, indent=1) + '\n'
    for file in reversed(_files(out)):
        with written(str(file)):
            file.parent.mkdir(parents=True, exist_ok=True)
        write_whole(file, text)


def read(out: Path) -> Config:
    """The settings in the folder of a training; raises if they are damaged, or are not
    those it began with."""
    file, copy = _files(out)
    if not file.exists() and copy.exists():
        file = copy  # ended between the two: see save()
    if not file.exists():
        raise FileNotFoundError(
            three_parts(
                f'--resume {out}', 'it holds no config.json', 'the folder of a training'
            )
        )
    try:
        began = _read(copy, '') if copy.exists() else None
    except ValueError:  # a copy that is damaged shows nothing
        began = None
    fix = 'a new training in another folder'
    if began is not None:
        fix = f'cp {copy} {file}, the settings as they were at the start; or {fix}'
    config = _read(file, fix)
    if began is None:
        return config
    before, now = asdict(began), asdict(config)
    changed = [
        name for name in now if now[name] != before[name] and name not in CHANGEABLE
    ]
    if changed:
        changes = ', '.join(
            f'{name} is {now[name]!r} and was {before[name]!r}' for name in changed
        )
        raise ValueError(
            three_parts(
                f'--resume {out}, whose config.json was changed: {changes}',
                'a training continues with its first settings: only the number of '
                'updates may change',
                fix,
            )
        )
    return config


def _read(file: Path, fix: str) -> Config:
    """The settings in a file, every one checked."""
    wrong = lambda why: ValueError(three_parts(f'the settings in {file}', why, fix))
    try:
        text = file.read_text('utf-8')
        found = json.loads(text)
    except (OSError, ValueError, RecursionError) as error:
        is_empty = isinstance(error, ValueError) and file.stat().st_size == 0
        why = 'the file is empty' if is_empty else f'it cannot be read: {error}'
        raise wrong(why) from error
    if not isinstance(found, dict):
        raise wrong(f'it holds a {type(found).__name__}, not settings by name')
    version = found.pop('format', FORMAT)
    if not _is_count(version):
        raise wrong(f'its format is {version!r}, not a whole number of at least 1')
    if version > FORMAT:
        why = (
            f'its format is {version}, of a later version of braintrace; this one '
            f'knows formats up to {FORMAT}'
        )
        raise ValueError(
            three_parts(
                f'the settings in {file}',
                why,
                'the version of braintrace that wrote it',
            )
        )
    if 'task' not in found:
        raise wrong('it names no task')
    if unknown := found.keys() - {f.name for f in fields(Config)}:
        raise wrong(f'it has settings that are not known: {", ".join(sorted(unknown))}')
    for name, value in found.items():
        fits, kind = _KINDS[name]
        if not fits(value):
            raise wrong(f'{name} is {value!r}, not {kind}')
    return Config(**found)


# ---------------------------------------------------------------- trust


def check_trust(config: Config, out: Path, trusted: bool) -> None:
    """Raise unless the user agrees that the code a folder names is run.

    ``trusted``: they said so on the command line. Otherwise they are asked, if there is
    a terminal.
    """
    if trusted or not config.names_code:
        return
    where = config.model.rpartition(':')[0]
    code = (
        f'the file {Path(where).absolute()}'
        if where.endswith('.py')
        else f'the Python module {where}'
    )
    fix = (
        f'--trust if you know that code; or name it yourself: --model {config.model!r}'
    )
    if not sys.stdin.isatty():
        raise PermissionError(
            three_parts(
                f'--resume {out}, whose model is {config.model}',
                f'that runs {code}, which config.json of the folder names, '
                'and there is no terminal to ask for your consent',
                fix,
            )
        )
    names = f'{out / "config.json"} names the model {config.model}.'
    question = f'{names} To go on, {code} is run.'
    print(printable(question), file=sys.stderr)
    print('Run it? [y/N] ', end='', file=sys.stderr, flush=True)
    if sys.stdin.readline().strip().lower() not in ('y', 'yes'):
        raise PermissionError(
            three_parts(
                f'--resume {out}, whose model is {config.model}',
                f'that runs {code}, and you did not agree',
                fix,
            )
        )
