"""What went wrong in a step of a brainstate module, in three parts."""

from __future__ import annotations

import difflib
import re
from typing import Any, cast

import brainunit as u
import jax
import numpy as np

from .._brainstate import brainstate
from ..errors import CompilationError, InputError, three_parts
from ..source_lines import failing_line

AS_ARRAYS = 'jax.numpy.asarray(x): JAX reads a list as a container of many numbers'


def explain_failure(
    model: Any, args: tuple, error: Exception, what: str = 'a step'
) -> CompilationError:
    """The error of a step, or of a function around it, that fails on such inputs."""
    # `Sequential` prints the layer that failed; what failed in it is the cause.
    while isinstance(error, brainstate.BrainStateError) and error.__cause__:
        error = cast(Exception, error.__cause__)
    name, line = type(model).__name__, failing_line(error)
    if isinstance(error, AttributeError) and isinstance(
        getattr(error, 'obj', None), brainstate.nn.Module
    ):
        return CompilationError(_explain_attribute(name, error.obj, error.name, line))
    listed = [i for i, x in enumerate(args) if is_nested_list(x)]
    if listed:
        shapes = tuple(_shape_text(x) for x in args)
    else:
        shapes = jax.tree.map(lambda x: tuple(jax.numpy.shape(x)), args)
    # The text of a KeyError is the repr of its message.
    is_quoted = isinstance(error, KeyError) and len(error.args) == 1
    text = str(error.args[0] if is_quoted else error).replace('\n', '\n    ')
    return InputError(
        three_parts(
            f'{what} of {name} on inputs of shapes {shapes}',
            f'the step itself fails with {type(error).__name__}: {text}{line}',
            AS_ARRAYS if listed else _fix_of(error, args, what),
        )
    )


def is_nested_list(x: Any) -> bool:
    """Whether an input is a list of Python numbers, which JAX reads as many inputs."""
    leaves = jax.tree.leaves(x)
    return (
        isinstance(x, list)
        and bool(leaves)
        and all(isinstance(leaf, (bool, int, float)) for leaf in leaves)
    )


def _is_shape(x: Any) -> bool:
    """Whether an input is a tuple of whole numbers."""
    return isinstance(x, tuple) and bool(x) and all(type(n) is int for n in x)


def _shape_text(x: Any) -> Any:
    """The shape of an input; that of a list of numbers as numpy reads it."""
    if not is_nested_list(x):
        return jax.tree.map(lambda leaf: tuple(jax.numpy.shape(leaf)), x)
    try:
        return f'a list of shape {np.shape(x)}'
    except ValueError:
        return 'a list'


def unset_setting(error: BaseException | None) -> str | None:
    """The setting of brainstate that is not set and that a step cannot do without, if
    that is behind an error."""
    while error is not None:
        unset = re.search(r"Key '(\w+)' not found in environment", str(error))
        if unset is not None:
            return unset[1]
        error = error.__cause__
    return None


def unset_environment(error: Exception) -> str | None:
    """The advice for a model that reads a setting of brainstate that is not set."""
    unset = unset_setting(error)
    if unset is None:
        return None
    if unset == 'fit':
        return (
            'brainstate.environ.set(fit=True) before the model is compiled, which '
            'turns dropout on; to turn it off in a call: '
            'with brainstate.environ.context(fit=False)'
        )
    if unset != 'dt':
        return f'brainstate.environ.set({unset}=...) before the model is made'
    return (
        'brainstate.environ.set(dt=1.0) before the model is made, or a time such as '
        '0.1 * brainunit.ms; on the command line --dt 1.0 or --dt 0.1ms'
    )


def _fix_of(error: Exception, args: tuple, what: str) -> str:
    """The advice that fits the kind of failure."""
    known = unset_environment(error) or fix_of_value(error) or _fix_of_units(error)
    if known is not None:
        return known
    if what == 'a step_fn' and re.search("'(tuple|list|dict)'", str(error)):
        return (
            'learner(x) gives what the model gives, and here that is not one array: '
            'y, _ = learner(x)'
        )
    if isinstance(error, (TypeError, ValueError)) and what == 'a step_fn':
        return (
            'arrays that fit each other: outputs of the learner, targets and weights '
            'have the batch axis of the inputs'
        )
    shape = next((x for x in args if _is_shape(x)), None)
    if shape is not None:
        return f'an array, not its shape: jnp.zeros({shape})'
    if isinstance(error, (TypeError, ValueError)):
        shapes = [np.shape(x) for x in jax.tree.leaves(args)]
        batches = [shape[0] for shape in shapes if len(shape) > 1]
        size = batches[0] if batches else 'B'
        if any(len(shape) > 2 for shape in shapes):
            return (
                'inputs of one step: xs[0], if they are a sequence (time, batch, ...); '
                'if they are one step, check their shapes and batch axes, and '
                f'compile(..., batch_size={size}) gives a batch axis to the states'
            )
        return (
            'inputs for which model(*inputs) runs: check their shapes and batch axes; '
            f'compile(..., batch_size={size}) gives one to the states'
        )
    return 'correct that line, so that model(*inputs) runs on its own'


def _fix_of_units(error: Exception) -> str | None:
    """The advice for numbers and quantities that do not fit."""
    about_units = isinstance(error, (u.UnitMismatchError, u.DimensionMismatchError))
    if not about_units and 'Quantity(unit=' not in str(error):
        return None
    return (
        'units that fit at this line: in a model with units, inputs, constants and '
        'the time step have units too, as in '
        'brainstate.environ.set(dt=1.0 * brainunit.ms), on the command line --dt 1ms'
    )


def fix_of_value(error: Exception) -> str | None:
    """The advice for code that reads the value of an array while a step is traced."""
    if isinstance(error, jax.errors.TracerArrayConversionError):
        return (
            'jax.numpy in place of numpy inside a step: jnp.asarray, jnp.mean; or '
            'has_aux=True to read an array after the call'
        )
    if isinstance(error, jax.errors.TracerBoolConversionError):
        return (
            'jax.numpy.where, jax.lax.cond or jax.lax.scan where Python code needs the '
            'value of an array'
        )
    if isinstance(error, jax.errors.TracerIntegerConversionError):
        return (
            'jax.numpy indexing, as jnp.take(x, i), where Python needs a whole number'
        )
    if isinstance(error, jax.errors.ConcretizationTypeError):
        return (
            'the array as it is: return jnp.mean(...), without float(...) or .item(); '
            'after the call its result is a number. Where Python code needs the '
            'value of '
            'an array: jax.numpy.where, jax.lax.cond or jax.lax.scan'
        )
    return None


def _explain_attribute(name: str, owner: Any, attribute: Any, line: str) -> str:
    kind = type(owner).__name__
    known = [n for n in (*vars(owner), *dir(type(owner))) if not n.startswith('_')]
    similar = difflib.get_close_matches(attribute, dict.fromkeys(known), n=3)
    meant = f'; perhaps {" or ".join(map(repr, similar))}' if similar else ''
    if _lacks_states(owner):
        return three_parts(
            f'a step of {name} whose states are not initialised',
            f'{kind} has no attribute {attribute!r}; modules create their states in '
            f'init_state{line}',
            'brainstate.nn.init_all_states(model) (or batch_size=...) before '
            f'compiling{meant}',
        )
    return three_parts(
        f'a step of {name} that reads {attribute!r} of a {kind}',
        f'{kind} has no such attribute{line}',
        'an attribute that __init__ sets, or init_state, which '
        f'brainstate.nn.init_all_states(model) calls{meant}',
    )


def _lacks_states(module: Any) -> bool:
    """Whether a class has an ``init_state`` of its own, and its module no state."""
    if type(module).init_state is brainstate.nn.Module.init_state:
        return False
    return not any(
        isinstance(v, brainstate.ShortTermState) for v in vars(module).values()
    )
