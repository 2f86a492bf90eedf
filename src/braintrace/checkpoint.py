"""Checkpoints of a learner and its optimiser. Orbax writes them: a checkpoint is
complete, or it does not exist."""

from __future__ import annotations

import ast
import hashlib
import os
import weakref
from collections.abc import Callable, Collection, Iterable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from ._brainstate import brainstate
from .errors import three_parts
from .files import written
from .frontends.module_states import module_states
from .learner.learner import Learner
from .learner.stream import Stream
from .learner.transaction import uninterrupted
from .learner.weights import read_safetensors
from .program.step import path_name, path_names
from .source_lines import use_name

_RENAMED = {'learner.standing': 'learner.rule_state'}
"""States whose names were others in checkpoints of version 0.1.0."""
_MODEL = 'learner.model.'
"""How the names of a model's states begin in a checkpoint."""
_CHECKSUM = 'checksum'
"""The name beside those of the states under which a checkpoint keeps its checksum."""
LARGE = 2**24
"""Bytes of states from which on a training does not wait for its checkpoints."""
_UNDER_WAY: weakref.WeakValueDictionary[Path, Future] = weakref.WeakValueDictionary()
"""What orbax does in each folder. It works in a thread, so that Ctrl-C interrupts only
the thread that waits. Interrupted itself, orbax would go on writing in the background,
and a training that is resumed at once would clean the same folder."""


def states_of(learner: Learner, optimizer: Any = None) -> dict[str, brainstate.State]:
    """All that training moves, by name: model, traces, the rule's own state, optimiser,
    random numbers."""
    found = {
        f'learner.{path_name(path)}': state
        for path, state in module_states(learner).items()
    }
    if optimizer is not None:
        found |= {
            f'optimizer.{name}': state
            for name, state in learner.optimizer_states(optimizer).items()
        }
    return {**found, 'random': brainstate.random.DEFAULT}


def complete(folder: str | Path) -> list[int]:
    """Numbers of the checkpoints in a folder that were written to their end; nothing is
    created."""
    return sorted(int(p.name) for p in Path(folder).glob('*') if p.name.isdecimal())


class Checkpoints:
    """A folder of checkpoints, each by the number of its update; the newest ``keep``
    stay."""

    def __init__(self, folder: str | Path, keep: int = 2):
        try:
            import orbax.checkpoint as orbax
        except ImportError as error:
            raise ImportError(
                three_parts(
                    'checkpoints',
                    'they are written by orbax-checkpoint, which is not installed',
                    "pip install 'braintrace-online[train]'",
                )
            ) from error
        self._orbax, self._keep = orbax, keep
        self.folder = Path(folder).absolute()
        options = orbax.CheckpointManagerOptions(
            max_to_keep=keep, enable_async_checkpointing=False
        )
        self._writer = ThreadPoolExecutor(1)
        self._under_way: Future | None = None

        def opened() -> Any:
            with written(f'checkpoints in {self._name}'):
                return orbax.CheckpointManager(self.folder, options=options)

        if (earlier := _UNDER_WAY.get(self.folder)) is not None:
            wait([earlier])
        self._manager = self._submit(opened).result()

    def _submit(self, work: Callable, *given: Any) -> Future:
        with uninterrupted:
            future = self._writer.submit(work, *given)
            _UNDER_WAY[self.folder] = future
        return future

    @property
    def _name(self) -> str:
        """The folder as the user named it."""
        return os.path.relpath(self.folder)

    def _fix_for(self, unread: int) -> str:
        """How to go on without a checkpoint that cannot be read."""
        older = [update for update in self._manager.all_steps() if update < unread]
        then = f'resumes from checkpoint {max(older)}' if older else 'starts again'
        return f'delete {os.path.join(self._name, str(unread))}; training then {then}'

    @property
    def latest(self) -> int | None:
        """The number of the newest checkpoint."""
        self.finish()
        return self._manager.latest_step()

    def save(
        self,
        update: int,
        states: Mapping[str, brainstate.State],
        background: bool = False,
    ) -> None:
        """Write the values of states as the checkpoint of an update; one that is there
        already stays.

        ``background``: large states are copied, and written while the caller goes on,
        until the next call; :meth:`finish` waits for them.
        """
        self.finish()
        if update in self._manager.all_steps():
            return
        values = _values(states)
        size = sum(x.nbytes for x in jax.tree.leaves(values))
        in_background = background and size >= LARGE and jax.process_count() == 1
        if in_background:
            # A copy: the arrays of states are written over by the next update.
            values = jax.tree.map(np.array, values)
        self._under_way = self._submit(self._write, update, values)
        if not in_background:
            self.finish()

    def finish(self) -> None:
        """Wait until the checkpoint that is being written is complete."""
        under_way, self._under_way = self._under_way, None
        if under_way is not None:
            under_way.result()

    def _write(self, update: int, values: dict[str, dict[str, Any]]) -> None:
        # Large arrays are stored without one, so that a flipped bit would be read
        # as another weight. What other hosts hold cannot be read here.
        if all(map(_is_here, jax.tree.leaves(values))):
            values[_CHECKSUM] = _checksums(values)
        # A full disk is a ValueError of the library that stores the arrays.
        with written(f'checkpoint {update} of {self._name}', ValueError):
            # Orbax deletes those that are not kept, and cannot delete a link to one.
            steps = sorted(self._manager.all_steps())
            old = [self.folder / str(n) for n in steps[: len(steps) - self._keep + 1]]
            for link in filter(Path.is_symlink, old):
                link.unlink()
                self._manager.reload()
            self._manager.save(update, args=self._orbax.args.StandardSave(values))
            self._manager.wait_until_finished()

    def _target(self, update: int, states: Mapping[str, brainstate.State]) -> Any:
        """Shapes and types of what a checkpoint holds, on the devices of these states;
        it may come from a run on others."""
        held = self._orbax.StandardCheckpointHandler().metadata(
            self.folder / str(update) / 'default'
        )
        names = {new: old for old, new in _RENAMED.items()}
        places: dict[str, dict[str, Any]] = {}
        for name, state in states.items():
            places[names.get(name, name)] = {
                f'{i}': x.sharding
                for i, x in enumerate(jax.tree.leaves(state.value))
                if _is_split(x)
            }
        alone = jax.sharding.SingleDeviceSharding(jax.local_devices()[0])

        def one(path: Any, x: Any) -> Any:
            keys = [str(getattr(key, 'key', '')) for key in path]
            place = places.get(keys[0], {}) if keys else {}
            sharding = place.get(keys[-1], alone) if keys else alone
            try:
                sharding.shard_shape(tuple(x.shape))
            except ValueError:
                sharding = alone  # another shape is an error of restore()
            if sharding is alone and jax.process_count() > 1:
                return np.empty(x.shape, x.dtype)  # the same in every process
            return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)

        return jax.tree_util.tree_map_with_path(one, getattr(held, 'tree', held))

    def restore(
        self,
        states: Mapping[str, brainstate.State],
        update: int | None = None,
        *,
        left_out: Callable[[Iterable[str]], Collection[str]] = lambda names: (),
    ) -> int:
        """Put a checkpoint, by default the newest, into states; its number. An error
        leaves them as they were.

        ``left_out``: of the names in the checkpoint those that no state has to have.
        """
        self.finish()
        update = self.latest if update is None else update
        if update is None or update not in self._manager.all_steps():
            raise FileNotFoundError(
                three_parts(
                    f'a checkpoint{"" if update is None else f" {update}"} of '
                    f'{self._name}',
                    f'there are {sorted(self._manager.all_steps()) or "none"}',
                    'a folder that training wrote to with out=...',
                )
            )
        wanted = _values(states)
        try:
            target = self._target(update, states)
            found = self._manager.restore(
                update, args=self._orbax.args.StandardRestore(target)
            )
        except Exception as error:
            raise ValueError(
                three_parts(
                    f'checkpoint {update} of {self._name}',
                    f'it cannot be read: {type(error).__name__}: '
                    f'{str(error).splitlines()[0][:200]}',
                    self._fix_for(update),
                )
            ) from error
        # Checkpoints of earlier versions, and of several hosts, have none.
        checksums = found.pop(_CHECKSUM, None) if isinstance(found, dict) else None
        as_written = found
        if isinstance(found, dict):
            found = {_RENAMED.get(name, name): part for name, part in found.items()}
            unwanted = set(left_out(found)) - wanted.keys()
            found = {name: x for name, x in found.items() if name not in unwanted}
        if differences := _differences(wanted, found):
            raise ValueError(
                three_parts(
                    f'checkpoint {update} of {self._name} for this model',
                    f'it was written by another: {differences}',
                    'the model, rule, batch size and optimiser that it was written '
                    'with',
                )
            )
        if checksums is not None and (damage := _damage(checksums, as_written)):
            raise ValueError(
                three_parts(
                    f'checkpoint {update} of {self._name}',
                    damage,
                    self._fix_for(update),
                )
            )
        new: dict[str, Any] = {}
        for name, state in states.items():
            leaves, tree = jax.tree.flatten(state.value)
            read = [
                _like(x, found[name][f'{i}']) if jnp.size(x) else x
                for i, x in enumerate(leaves)
            ]
            new[name] = jax.tree.unflatten(tree, read)
        with uninterrupted:
            for name, state in states.items():
                state.value = new[name]
        return update


def _save_newest(states: Mapping[str, brainstate.State], folder: str | Path) -> None:
    checkpoints = Checkpoints(folder)
    latest = checkpoints.latest
    checkpoints.save(0 if latest is None else latest + 1, states)


def save_stream(stream: Stream, folder: str | Path) -> None:
    """Write all that a stream moves as the newest checkpoint of a folder."""
    _save_newest(_states_of_stream(stream), folder)


def load_stream(stream: Stream, folder: str | Path) -> None:
    """Put the newest checkpoint of a folder into a stream."""
    Checkpoints(folder).restore(_states_of_stream(stream))


def save_learner(learner: Learner, folder: str | Path, optimizer: Any = None) -> None:
    """Write all that training moves as the newest checkpoint of a folder."""
    _save_newest(states_of(learner, optimizer), folder)


def load_learner(learner: Learner, folder: str | Path, optimizer: Any = None) -> None:
    """Put the newest checkpoint of a folder into a learner and its optimiser.

    Without an optimiser the states of one, or of a stream, are left out.
    """
    others = ('stream.',) if optimizer is not None else ('stream.', 'optimizer.')
    not_ours = lambda names: {name for name in names if name.startswith(others)}
    _written_in(folder).restore(states_of(learner, optimizer), left_out=not_ours)


Model = TypeVar('Model', bound=brainstate.nn.Module)


def load(path: str | Path, model: Model, *, states: bool = False) -> Model:
    """Load saved weights into a model, for inference, and return the model.

    ``path``: a folder or file that :meth:`Learner.save` or :meth:`Learner.save_weights`
    wrote, or the folder of :func:`fit` or of a stream. You need no learner and no rule.

    Parameters and long-term states, such as the running means of a normalisation, are
    set. ``states=True`` also sets hidden and other short-term states, which must have
    the same batch size as when they were saved. Otherwise these states do not change.

    >>> import brainstate, braintrace, jax.numpy as jnp, tempfile
    >>> learner = braintrace.compile(brainstate.nn.GRUCell(2, 3), 'd_rtrl', jnp.ones(2))
    >>> folder = tempfile.mkdtemp()
    >>> learner.save(folder)
    >>> net = braintrace.load(folder, brainstate.nn.GRUCell(2, 3))
    >>> weight = lambda cell: cell.Wh.weight.value['weight']
    >>> bool((weight(net) == weight(learner.model)).all())
    True
    """
    if isinstance(model, Learner):
        raise TypeError(
            three_parts(
                'braintrace.load(path, learner)',
                'it sets the parameters of a model, without a learner',
                'learner.load(path), or braintrace.load(path, learner.model)',
            )
        )
    if isinstance(path, brainstate.nn.Module):
        raise TypeError(
            three_parts(
                'braintrace.load(model, ...)',
                'the path comes first',
                'braintrace.load(path, model)',
            )
        )
    if isinstance(model, type):
        raise TypeError(
            three_parts(
                f'braintrace.load(..., {model.__name__}), a class',
                'it sets the parameters of a model',
                f'a model of it: {model.__name__}(...)',
            )
        )
    if not isinstance(model, brainstate.nn.Module):
        is_file = Path(path).suffix == '.safetensors'
        method = 'load_weights' if is_file else 'load'
        raise TypeError(
            three_parts(
                f'braintrace.load(..., {type(model).__name__})',
                'it sets the states of a brainstate module',
                f'braintrace.compile(...) of the model, then learner.{method}(path)',
            )
        )
    if Path(path).suffix == '.safetensors':
        read_safetensors(module_states(model, brainstate.ParamState), path)
        return model
    wanted = {
        f'{_MODEL}{path_name(place)}': state
        for place, state in module_states(model).items()
        if states or not isinstance(state, brainstate.ShortTermState)
    }

    def not_needed(names: Iterable[str]) -> set[str]:
        """States of the learner itself; and those of the model that a fresh sequence
        starts again, unless they are wanted."""
        own = {name for name in names if not name.startswith(_MODEL)}
        return own if states else own | _short_term(names)

    _written_in(path).restore(wanted, left_out=not_needed)
    return model


load_for_inference = load
"""The same under a longer name, which says that no learner is made."""


def _short_term(names: Iterable[str]) -> set[str]:
    """Names of the model's states for which a checkpoint has a value to start from."""
    start = 'learner._start.'
    places = [name.removeprefix(start) for name in names if name.startswith(start)]
    return {_MODEL + path_name(ast.literal_eval(place)) for place in places}


def _written_in(folder: str | Path) -> Checkpoints:
    """The checkpoints of a folder, or of one that a training wrote to."""
    folder = Path(folder)
    inside = folder / 'checkpoints'
    if not complete(folder) and complete(inside):
        folder = inside
    # Opening a folder of checkpoints would create it.
    if not complete(folder):
        raise FileNotFoundError(
            three_parts(
                f'a checkpoint of {str(folder)!r}',
                'there is none in it' if folder.exists() else 'there is no such folder',
                'a folder that learner.save, stream.save or fit(..., out=...) wrote',
            )
        )
    return Checkpoints(folder)


def _states_of_stream(stream: Stream) -> dict[str, brainstate.State]:
    own = {f'stream.{name}': state for name, state in stream.states.items()}
    return {**states_of(stream.learner, stream.optimizer), **own}


def _values(states: Mapping[str, brainstate.State]) -> dict[str, dict[str, Any]]:
    """Arrays of every state, by name and number; those of size zero, which orbax does
    not store, are left out."""
    return {
        name: {
            f'{i}': _plain(x)
            for i, x in enumerate(jax.tree.leaves(state.value))
            if jnp.size(x)
        }
        for name, state in states.items()
    }


def _is_here(x: Any) -> bool:
    return getattr(x, 'is_fully_addressable', True)


def _checksums(values: Mapping[str, Mapping[str, Any]]) -> dict[str, np.ndarray]:
    """32 bytes that depend on every name, type and shape, and 32 on every value."""
    types, contents = hashlib.sha256(), hashlib.sha256()
    for name in sorted(values):
        for number in sorted(values[name] or {}):
            array = np.ascontiguousarray(values[name][number])
            types.update(f'{name} {number} {array.dtype} {array.shape} '.encode())
            contents.update(array.tobytes())
    digest = lambda found: np.frombuffer(found.digest(), np.uint8)
    return {'types': digest(types), 'values': digest(contents)}


def _damage(checksums: Any, values: Mapping[str, Mapping[str, Any]]) -> str:
    """How the values that were read differ from those that were written, in words;
    empty if they do not."""
    found = _checksums(values)
    is_whole = isinstance(checksums, dict) and checksums.keys() == found.keys()
    same = lambda part: np.array_equal(np.asarray(checksums[part]), found[part])
    if is_whole and same('types') and same('values'):
        return ''
    # Values of another type have another checksum too.
    if is_whole and not same('types'):
        return (
            'its arrays had other types when they were written (jax_enable_x64 must '
            'be as it was then), or it is damaged'
        )
    return 'it is damaged: its checksum is not that of the values in it'


def _is_key(x: Any) -> bool:
    return jnp.issubdtype(jnp.result_type(x), jax.dtypes.prng_key)


def _is_split(x: Any) -> bool:
    return isinstance(getattr(x, 'sharding', None), jax.sharding.NamedSharding)


def _plain(x: Any) -> Any:
    found = jax.random.key_data(x) if _is_key(x) else jnp.asarray(x)
    # What every process has for itself is written once.
    is_own = jax.process_count() > 1 and found.is_fully_addressable
    return np.asarray(found) if is_own else found


def _like(x: Any, found: Any) -> jax.Array:
    if not _is_split(x):
        found = np.asarray(found)  # free to go wherever it is used
    if _is_key(x):
        return jax.random.wrap_key_data(jnp.asarray(found), impl=jax.random.key_impl(x))
    return jnp.asarray(found, jnp.result_type(x))


def _differences(wanted: dict, found: Any) -> str:
    """What sets the arrays of a checkpoint apart from those of a model, in words; empty
    if nothing."""

    def shapes(tree: dict) -> dict[str, Any]:
        found = {}
        for name, part in tree.items():
            for i, x in (part or {}).items():
                own = f' ({i})' if len(part) > 1 else ''
                found[_described(name) + own] = jnp.shape(x)
        return found

    if not isinstance(found, dict):
        return 'it holds no states by name'
    mine, theirs = shapes(wanted), shapes(found)
    notes = [f'no {name}' for name in mine.keys() - theirs.keys()]
    notes += [f'{name} is unknown here' for name in theirs.keys() - mine.keys()]
    notes += [
        f'{n} is {theirs[n]}, not {mine[n]}'
        for n in mine.keys() & theirs.keys()
        if mine[n] != theirs[n]
    ]
    # States and weights first: what traces and starts have follows from them.
    follows = lambda note: _TRACE in note or _START in note
    return '; '.join(sorted(notes, key=lambda note: (follows(note), note))[:5])


_TRACE, _START = 'the trace of ', 'the start of '


def _described(name: str) -> str:
    """An entry of a checkpoint, in words."""
    kind, _, place = name.removeprefix('learner.').partition('.')
    if kind == 'model':
        return place
    try:
        key = ast.literal_eval(place)
    except (SyntaxError, ValueError):
        return name
    if kind == '_start':
        return _START + path_name(key)
    if kind == 'traces':
        names, operation, groups, number = key
        states = path_names(groups)
        more = f' ({number})' if number else ''
        return f'{_TRACE}{", ".join(names)} in {use_name(operation)} on {states}{more}'
    return name
