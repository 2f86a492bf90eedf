"""`compile`, which makes a learner, and a learner class for every rule."""

from __future__ import annotations

import difflib
import functools
import inspect
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import brainstate
import jax
import jax.numpy as jnp

from ..errors import ArgumentError, one_of, three_parts
from ..program.data import first_step
from ..rules import PRESETS, ETraceConfig, Preset, Rule, named
from ..rules.feedback import feedback_signal
from .arguments import length_of
from .batch import check_batch
from .credit_warnings import warn_of_credit
from .learner import Learner
from .model_states import check_batch_size, make_states
from .models import AdaptedModel
from .spellings import positions

AUTOMATIC = (
    'fast_solve',
    'chunked_trace',
    'control_flow',
    'snap_max_jacobian_elements',
    'projection_eps',
    'normalize_matrix_spectrum',
    'mode',
)
"""Switches of the published package's engine: accepted, and automatic here."""


def _new_class(preset: Preset, base: type[Learner]) -> type[Learner]:
    """A learner class with the name, options and docstring of a rule.

    A rule's own options come first by position, then ``name`` and ``vjp_method``.
    ``config``: an :class:`ETraceConfig` of the same kind of trace in place of the rule.
    """
    is_modulated = preset.default.is_modulated
    shown = [p for p in preset.options if p.kind is not p.KEYWORD_ONLY]
    shown += [_parameter('name'), _parameter('vjp_method', preset.vjp_method)]
    if is_modulated:
        shown.append(_parameter('modulator', 1.0))
    by_position = [p.name for p in shown]

    def __init__(
        self: Learner, model: brainstate.nn.Module, *args: Any, **options: Any
    ) -> None:
        options = {**_by_name(preset, by_position, args, options), **options}
        modulator = options.pop('modulator', None) if is_modulated else None
        rule = _take_rule(preset, options)
        options.setdefault('vjp_method', preset.vjp_method)
        Learner.__init__(self, model, rule, **options)
        if modulator is not None:
            self.set_modulator(modulator)

    own, model, *_ = inspect.signature(Learner.__init__).parameters.values()
    by_name = [p for p in preset.options if p.kind is p.KEYWORD_ONLY]
    signature = inspect.Signature([own, model, *shown, *by_name])
    setattr(__init__, '__signature__', signature)  # noqa: B010 - not one for mypy
    body = {
        '__init__': __init__,
        '__doc__': preset.make.__doc__,
        '__module__': __name__,
        'preset': preset,
    }
    return type(preset.title, (base,), body)


def _take_rule(preset: Preset, options: dict[str, Any]) -> Rule:
    """The rule that options ask for; what is left of them is for the learner."""
    for switch in [name for name in AUTOMATIC if name in options]:
        value = options.pop(switch)
        if value is not None:
            text = f'{switch}={value!r} is ignored: this is automatic here'
            warnings.warn(text, stacklevel=3)
    own = [p.name for p in preset.options]
    feedback_key = None
    if 'random_feedback_key' not in own:
        feedback_key = options.pop('random_feedback_key', None)
    if 'seed' in own and 'projection_key' in options:
        options['seed'] = options.pop('projection_key')
    given = {name: options.pop(name) for name in own if name in options}
    config = options.pop('config', None)
    if config is not None:
        _check_config(preset, config, given)
    rule = preset.make(**given) if config is None else config.rule
    is_sparse = 'sparse_n' in rule.trace.config
    if is_sparse and options.pop('trace_dtype', None) is not None:
        text = f'trace_dtype is ignored: {rule.name} holds one influence in the type of'
        warnings.warn(f'{text} the states', stacklevel=3)
    if feedback_key is not None and rule.signal.has_feedback_weights:
        rule = replace(rule, signal=feedback_signal('random', feedback_key))
    return rule


def _parameter(name: str, default: Any = None) -> inspect.Parameter:
    return inspect.Parameter(
        name, inspect.Parameter.POSITIONAL_OR_KEYWORD, default=default
    )


def _by_name(
    preset: Preset, names: Sequence[str], args: tuple, options: Mapping[str, Any]
) -> dict[str, Any]:
    """Arguments by position, by their names."""
    if args:
        names = positions(preset.title) or names
    if len(args) > len(names):
        raise TypeError(
            three_parts(
                f'{preset.title}(model, ...) with {len(args)} more arguments',
                f'by position it takes {", ".join(names)}',
                'the others by name',
            )
        )
    given = dict(zip(names, args, strict=False))
    if twice := given.keys() & options.keys():
        name = twice.pop()
        raise TypeError(
            three_parts(
                f'{preset.title}(...) with multiple values for argument {name!r}',
                'it is given by position and by name',
                f'{name}=... once',
            )
        )
    return given


def _check_config(preset: Preset, config: ETraceConfig, given: Mapping) -> None:
    """Raise unless a configuration is one of the learner class it was given to.

    Decays are part of a configuration, and those beside it are left out: constructors
    of the published package have to be given some.
    """
    if not isinstance(config, ETraceConfig):
        raise TypeError(
            three_parts(
                f'{preset.title}(config={config!r})',
                'a configuration names the parts of a rule',
                'config=ETraceConfig(...)',
            )
        )
    beside = given.keys() - {'decay_or_rank'}
    if family(config.rule) is not family(preset.default) or beside:
        raise ValueError(
            three_parts(
                f'{preset.title}(config={config.name}, {dict(given)})',
                f'the configuration is a whole rule, and {preset.title} has other '
                'traces '
                'or was given options beside it',
                f'braintrace.compile(model, {config.name}, ...)',
            )
        )


def _base(preset: str, title: str) -> type[Learner]:
    return _new_class(replace(PRESETS[preset], title=title), Learner)


# Learners by what they carry from call to call. Each is the learner of any
# configuration with such traces, and without one that of the rule named here.
ParamDimVjpAlgorithm = _base('d_rtrl', 'ParamDimVjpAlgorithm')
IODimVjpAlgorithm = _base('pp_prop', 'IODimVjpAlgorithm')
RandomProjectionVjpAlgorithm = _base('uoro', 'RandomProjectionVjpAlgorithm')


def family(rule: Rule) -> type[Learner]:
    """The class of learners that have such traces."""
    families: dict[str, type[Learner]] = {
        'per_param': ParamDimVjpAlgorithm,
        'io_factorized': IODimVjpAlgorithm,
        'random_projection': RandomProjectionVjpAlgorithm,
        'none': Learner,
    }
    return families[rule.trace.config.get('trace_factorization', 'per_param')]


@functools.cache
def learner_class(preset: Preset) -> type[Learner]:
    """The learner class of a rule. It has the name, the options and the docstring of
    the rule."""
    return _new_class(preset, family(preset.default))


D_RTRL = learner_class(PRESETS['d_rtrl'])
pp_prop = ES_D_RTRL = learner_class(PRESETS['pp_prop'])
OSTLRecurrent = learner_class(PRESETS['ostlrecurrent'])
OSTLFeedforward = learner_class(PRESETS['ostlfeedforward'])
OTTT = learner_class(PRESETS['ottt'])
RFLO = learner_class(PRESETS['rflo'])
EProp = learner_class(PRESETS['eprop'])
SnAp = learner_class(PRESETS['snap'])
RTRL = learner_class(PRESETS['rtrl'])
UORO = learner_class(PRESETS['uoro'])
ThreeFactor = learner_class(PRESETS['threefactor'])
DNI = learner_class(PRESETS['dni'])
BPTT = learner_class(PRESETS['bptt'])
TBPTT = learner_class(PRESETS['tbptt'])

RULES = {name: learner_class(preset) for name, preset in PRESETS.items()}
"""The learner class of every rule, by each name of the rule."""


class Configured(Learner):
    """A rule with windows, made from parts."""

    def __init__(
        self, model: brainstate.nn.Module, config: ETraceConfig, **options: Any
    ):
        super().__init__(model, config.rule, **options)


def compile(
    model: Any,
    rule: Any = None,
    *example_inputs: Any,
    batch_size: int | None = None,
    seed: int | None = None,
    verbose: int = 0,
    vmap: bool = False,
    state: Any = None,
    **options: Any,
) -> Learner:
    """Initialise the states of a model, compile it, and return a learner.

    ``model``:

    - a brainstate module;
    - a module of Flax NNX or Equinox, with ``state`` if the module takes its state as
      an argument;
    - a function ``step(params, state, *inputs) -> (state, out)``. Pass the first params
      and state before the example inputs.

    For models other than brainstate modules, gradients have the structure of the
    framework, and the learner has ``params`` and ``state`` (docs/frameworks.md).

    ``rule``: a learner class, its name, or an :class:`ETraceConfig`. ``algorithm=`` is
    another name for ``rule``.

    ``vmap``: the model describes one sample, and the learner maps it over a batch of
    ``batch_size``. The example inputs may be those of a batch or of one sample.

    ``seed``: for the random numbers of brainstate, and for rules that draw random
    numbers. ``options`` are passed to the :class:`Learner`.

    A :class:`CreditWarning` names parameters that get no gradient, and parameters whose
    credit all passes a leaky read-out or another group that keeps most of its value, if
    the traces leave this memory out. If what the group keeps is not constant, ``fit``
    warns at the first batch. :meth:`Learner.gradient_check` measures what is left out.

    >>> import brainstate, braintrace, jax.numpy as jnp
    >>> net = brainstate.nn.GRUCell(3, 4)
    >>> learner = braintrace.compile(net, 'D_RTRL', jnp.ones((2, 3)), batch_size=2)
    >>> xs = jnp.ones((5, 2, 3))
    >>> step = lambda x: jnp.mean(learner(x) ** 2)
    >>> gradients = learner.etrace_grad(xs, step_fn=step, fresh=True)
    >>> gradients['Wh', 'weight']['weight'].shape
    (7, 4)
    """
    if 'algorithm' in options:
        example_inputs = example_inputs if rule is None else (rule, *example_inputs)
        rule = options.pop('algorithm')
    kind = _learner_of(rule)
    if isinstance(model, Learner):
        raise _learner_as_model(model)
    if isinstance(rule, ETraceConfig):
        options = {'config': rule, **options}
    check_batch_size(batch_size)
    if seed is not None:
        brainstate.random.seed(seed)
        preset = getattr(kind, 'preset', None)
        if preset and any(p.name == 'seed' for p in preset.options):
            options = {'seed': seed, **options}
    if vmap and batch_size is None:
        why = 'the model is mapped over a batch'
        raise ValueError(
            three_parts('vmap=True without a batch size', why, 'batch_size=...')
        )
    if not isinstance(model, brainstate.nn.Module):
        batch = batch_size if vmap else None
        model = AdaptedModel.of(model, example_inputs, state, batch, seed)
        example_inputs, vmap = model.pure.inputs, False
    elif state is not None:
        given, why = 'state=... for a brainstate module', 'it keeps its states itself'
        raise ValueError(three_parts(given, why, 'compile without state='))
    else:
        make_states(model, batch_size, vmap)
    if vmap:
        learner = _made(kind, model, vmap, options)
        _compile_mapped(learner, first_step(example_inputs), batch_size)
    else:
        check_batch(first_step(example_inputs), batch_size)
        learner = _made(kind, model, vmap, options)
        learner._kept.has_batch_size = batch_size is not None
        learner.compile_graph(*example_inputs)
    warn_of_credit(learner)
    if verbose:
        learner.report.show()
    return learner


def _learner_as_model(given: Learner) -> ArgumentError:
    """The error of a learner that was given where a model is needed."""
    name = type(given).__name__
    return ArgumentError(
        three_parts(
            f'a {name} learner as the model',
            'a learner is a model with its rule and its traces already',
            'compile(learner.model, ...), the model alone',
        )
    )


def _compile_mapped(learner: Learner, examples: tuple, batch_size: Any) -> None:
    """Compile a learner of a mapped model for examples of a batch, or of one sample."""
    shapes = [jnp.shape(x) for x in jax.tree.leaves(examples)]
    batched = all(shape[:1] == (batch_size,) for shape in shapes)
    repeat = lambda x: jnp.broadcast_to(x, (batch_size, *jnp.shape(x)))
    repeated = jax.tree.map(repeat, examples)
    if not batched:
        learner.compile_graph(*repeated)
        return
    try:
        learner.compile_graph(*examples)
    except Exception:
        # One sample may have as many features as the batch has samples.
        try:
            learner.compile_graph(*repeated)
        except Exception:
            repeated = None
        if repeated is None:
            raise


def _learner_of(rule: Any) -> Any:
    """The learner class of a rule, however it is given."""
    if isinstance(rule, str):
        return learner_class(named(rule))
    if isinstance(rule, ETraceConfig):
        kind = family(rule.rule)
        return Configured if kind is Learner else kind
    if isinstance(rule, type) and issubclass(rule, Learner) and rule is not Learner:
        return rule
    if rule is None or hasattr(rule, 'shape'):
        given = 'no rule' if rule is None else f'an array of shape {rule.shape}'
        raise ArgumentError(
            three_parts(
                f'compile(model, ...) with {given} as its second argument',
                'the rule stands between the model and the example inputs',
                f"compile(model, 'd_rtrl', x); {one_of(PRESETS)}",
            )
        )
    if isinstance(rule, Learner):
        raise ArgumentError(
            three_parts(
                f'a {type(rule).__name__} learner as the rule',
                'a learner has a model of its own',
                f'its class, braintrace.{type(rule).__name__}, with its options: '
                'compile(model, rule, x, ...); or learner.compile_graph(x)',
            )
        )
    raise ArgumentError(
        three_parts(f'rule={rule!r}', 'there is no such rule', one_of(PRESETS, rule))
    )


def _made(kind: Any, model: Any, vmap: bool, options: dict[str, Any]) -> Learner:
    try:
        return kind(model, vmap=vmap, **options)
    except ArgumentError:  # a TypeError as well, and says more
        raise
    except TypeError as error:
        names = [
            n for n in inspect.signature(kind).parameters if n not in ('self', 'model')
        ]
        unknown = [name for name in options if name not in names]
        near = difflib.get_close_matches(' '.join(unknown), ['batch_size', *names], 1)
        asked = f'{near[0]}=...? ' if near else ''
        raise TypeError(
            three_parts(
                f'compile(..., {kind.__name__}, {options})',
                str(error).split('() ')[-1],
                f'{asked}batch_size and options of {kind.__name__} only: '
                f'{", ".join(names)}',
            )
        ) from error


def train_synthetic_gradient(
    learner: Learner, *sequences: Any, step_fn: Any, updates: int = 100
) -> list[float]:
    """Train the predictor of a :class:`DNI` learner on whole sequences, without
    changing the weights of the model.

    Returns the mean squared error of the predicted credit before each update.
    """
    window = learner.rule.window
    if learner.rule.predictor is None or window is None or window.steps is None:
        given = f'train_synthetic_gradient of {learner.rule.name}'
        raise ValueError(three_parts(given, 'it has no predictor', "rule 'dni'"))
    length = length_of(sequences, step_fn)
    if length <= window.steps:
        raise ValueError(
            three_parts(
                f'{length} steps with windows of {window.steps}',
                'the predictor learns from the credit that a window sends back to '
                'what came '
                'before it',
                'a sequence of two windows and more, or a smaller window',
            )
        )
    return [learner.update_predictor(sequences, step_fn) for _ in range(updates)]
