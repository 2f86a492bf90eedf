"""The one call that makes a learner, and a learner class for every rule."""

from __future__ import annotations

import functools
import inspect
import warnings
from typing import Any

import brainstate
import jax
import jax.numpy as jnp

from ..errors import one_of, three_parts
from ..rules import PRESETS, ETraceConfig, Preset, named
from .arguments import check_batch, check_batch_size, length_of
from .foreign import adapted, foreign
from .learner import Learner
from .model_states import make_states


@functools.cache
def learner_class(preset: Preset) -> type[Learner]:
    """The learner of a rule: its class has the rule's name, options and docstring."""

    def __init__(
        self: Learner, model: brainstate.nn.Module, *args: Any, **options: Any
    ) -> None:
        given = inspect.signature(preset.make).bind_partial(*args).arguments
        own = {p.name: options.pop(p.name) for p in preset.options if p.name in options}
        modulator = (
            options.pop('modulator', None) if preset.default.is_modulated else None
        )
        Learner.__init__(self, model, preset.make(**given, **own), **options)
        if modulator is not None:
            self.set_modulator(modulator)

    parameters = list(inspect.signature(Learner.__init__).parameters.values())
    first = [p for p in parameters if p.name in ('self', 'model')]
    own = [p.replace(kind=p.POSITIONAL_OR_KEYWORD) for p in preset.options]
    if preset.default.is_modulated:
        kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
        own.insert(0, inspect.Parameter('modulator', kind, default=1.0))
    last = [p for p in parameters if p.kind is p.VAR_KEYWORD]
    __init__.__signature__ = inspect.Signature([*first, *own, *last])  # type: ignore[attr-defined]
    body = {
        '__init__': __init__,
        '__doc__': preset.make.__doc__,
        '__module__': __name__,
        'preset': preset,
    }
    return type(preset.title, (Learner,), body)


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
    """A rule put together from parts."""

    def __init__(
        self, model: brainstate.nn.Module, config: ETraceConfig, **options: Any
    ):
        super().__init__(model, config.rule, **options)


_AUTOMATIC = {'fast_solve', 'chunked_trace', 'normalize_matrix_spectrum', 'mode'}
"""Switches of the published package's engine."""


def compile(
    model: Any,
    rule: str | type[Learner] | ETraceConfig,
    *example_inputs: Any,
    batch_size: int | None = None,
    seed: int | None = None,
    verbose: int = 0,
    vmap: bool = False,
    state: Any = None,
    **options: Any,
) -> Learner:
    """Initialise a model's states, compile it, and give it a learning rule.

    ``rule`` is a learner class, its name in any case, or an :class:`ETraceConfig`.
    ``options`` go to the learner. ``seed``: of brainstate's random numbers, and of a
    rule that draws. With ``vmap`` the model and the example inputs are of one sample,
    and the learner maps over a batch of ``batch_size``.

    ``model``: a brainstate module; a module of Flax NNX or Equinox, with ``state``
    where it takes one as an argument; a function ``step(params, state, *inputs) ->
    (state, out)``, whose params and state come first among the examples. Learners of
    these last three give gradients in the framework's own structure: see
    :class:`ForeignLearner`.

    >>> import brainstate, braintrace, jax.numpy as jnp
    >>> net = brainstate.nn.GRUCell(3, 4)
    >>> learner = braintrace.compile(net, 'D_RTRL', jnp.ones((2, 3)), batch_size=2)
    >>> xs = jnp.ones((5, 2, 3))
    >>> step = lambda x: jnp.mean(learner(x) ** 2)
    >>> gradients = learner.etrace_grad(xs, step_fn=step, fresh=True)
    >>> gradients['Wh', 'weight']['weight'].shape
    (7, 4)
    """
    kind = _learner_of(rule)
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
        model, example_inputs = adapted(model, example_inputs, state, batch, seed)
        kind, vmap = foreign(kind), False
    elif state is not None:
        given, why = 'state=... for a brainstate module', 'it keeps its states itself'
        raise ValueError(three_parts(given, why, 'compile without state='))
    else:
        make_states(model, batch_size, vmap)
        if vmap:
            batched = lambda x: jnp.broadcast_to(x, (batch_size, *jnp.shape(x)))
            example_inputs = jax.tree.map(batched, example_inputs)
    check_batch(example_inputs, batch_size)
    for switch in _AUTOMATIC & options.keys():
        text = f'{switch}={options.pop(switch)!r} is ignored: this is automatic here'
        warnings.warn(text, stacklevel=2)
    learner = _made(kind, model, vmap, options)
    learner.compile_graph(*example_inputs)
    if verbose:
        learner.report.show()
    return learner


def _learner_of(rule: Any) -> Any:
    """The learner class of a rule, however it is given."""
    if isinstance(rule, str):
        return learner_class(named(rule))
    if isinstance(rule, ETraceConfig):
        return Configured
    if isinstance(rule, type) and issubclass(rule, Learner) and rule is not Learner:
        return rule
    raise ValueError(
        three_parts(f'rule={rule!r}', 'there is no such rule', one_of(PRESETS, rule))
    )


def _made(kind: Any, model: Any, vmap: bool, options: dict[str, Any]) -> Learner:
    try:
        return kind(model, vmap=vmap, **options)
    except TypeError as error:
        names = [
            n for n in inspect.signature(kind).parameters if n not in ('self', 'model')
        ]
        raise TypeError(
            three_parts(
                f'compile(..., {kind.__name__}, {options})',
                str(error).split('() ')[-1],
                f'options of {kind.__name__} only: {", ".join(names)}',
            )
        ) from error


def train_synthetic_gradient(
    learner: Learner, *sequences: Any, step_fn: Any, updates: int = 100
) -> list[float]:
    """Train the predictor of a :class:`DNI` learner on whole sequences; the weights
    stay.

    Returns its mean squared distance to the right credit before each update.
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
                'the predictor learns from the credit that a window sends back to what came '
                'before it',
                'a sequence of two windows and more, or a smaller window',
            )
        )
    return [learner.teach_predictor(sequences, step_fn) for _ in range(updates)]
