"""Learners by rule, and the one call that makes them."""

from __future__ import annotations

import inspect
import warnings
from typing import Any

import brainstate
import jax
import jax.numpy as jnp

from .. import rules
from ..errors import one_of, three_parts
from .arguments import check_batch, check_batch_size, length_of
from .base import Learner
from .compiled import make_states
from .frameworks import adapted, following


class D_RTRL(Learner):
    """One trace for each weight, carried through each position's own states."""

    def __init__(self, model: brainstate.nn.Module, **options: Any):
        super().__init__(model, rules.D_RTRL, **options)


class pp_prop(Learner):
    """Traces of inputs and of states apart, each with its own decay: memory linear in neurons.

    ``decay_or_rank``: a decay in (0, 1), a rank r that means (r - 1)/(r + 1), or a pair (x side, f side).
    """

    def __init__(self, model: brainstate.nn.Module, decay_or_rank: Any = 0.9, **options: Any):
        super().__init__(model, rules.pp_prop(decay_or_rank), **options)


ES_D_RTRL = pp_prop


class OSTLRecurrent(Learner):
    """Online spatio-temporal learning with the Jacobian of the unit's own states: the same trace as D_RTRL."""

    def __init__(self, model: brainstate.nn.Module, **options: Any):
        super().__init__(model, rules.OSTL_RECURRENT, **options)


class OSTLFeedforward(Learner):
    """Traces of inputs and of states apart that decay by a number, whatever the units do."""

    def __init__(self, model: brainstate.nn.Module, decay_or_rank: Any = 0.9, **options: Any):
        super().__init__(model, rules.ostl_feedforward(decay_or_rank), **options)


class OTTT(Learner):
    """A leaky trace of the inputs; the other side is that of the step itself. Memory linear in inputs."""

    def __init__(self, model: brainstate.nn.Module, leak: float = 0.9, **options: Any):
        super().__init__(model, rules.ottt(leak), **options)


class RFLO(Learner):
    """One trace for each weight that leaks by a number: random feedback local online learning's trace.

    ``feedback='random'`` is the rule of the paper; see :class:`EProp` for the others.
    """

    def __init__(
        self,
        model: brainstate.nn.Module,
        leak: float = 0.9,
        feedback: str | rules.FixedRandomFeedback = 'symmetric',
        random_feedback_key: Any = 0,
        **options: Any,
    ):
        super().__init__(model, rules.rflo(leak, feedback, random_feedback_key), **options)


class EProp(Learner):
    """The trace of D_RTRL, low-passed, taught by the error at the read-out.

    ``feedback``: 'symmetric' sends it back by the read-out's own weights, 'random' by fixed random ones, 'adaptive' by
    random ones whose distance to the read-out's, wherever that goes, shrinks with every call; or a
    :class:`FixedRandomFeedback`. What lies between layers goes back by its own weights.
    ``kappa_filter_decay``: the filter's κ; None and 0.0 mean no filter.
    ``random_feedback_key``: a whole number or a key of JAX.
    """

    def __init__(
        self,
        model: brainstate.nn.Module,
        feedback: str | rules.FixedRandomFeedback = 'symmetric',
        kappa_filter_decay: float | rules.KappaFilter | None = None,
        random_feedback_key: Any = 0,
        **options: Any,
    ):
        super().__init__(model, rules.eprop(kappa_filter_decay, feedback, random_feedback_key), **options)


class SnAp(Learner):
    """The influence of each parameter on the states that it reaches within n steps.

    What is kept is that of the paper; a loss reads it through the whole of its own step, and not only through what
    will be kept.
    """

    def __init__(self, model: brainstate.nn.Module, n: int = 1, **options: Any):
        super().__init__(model, rules.snap(n), **options)


class RTRL(Learner):
    """The whole influence of parameters on states: BPTT's gradient, forward in time, for small models."""

    def __init__(self, model: brainstate.nn.Module, **options: Any):
        super().__init__(model, rules.RTRL, **options)


class UORO(Learner):
    """One random direction in place of the whole influence: noisy, right in the mean.

    No two calls draw the same: the signs come from ``seed`` and from how often the learner was called.
    """

    def __init__(self, model: brainstate.nn.Module, seed: int = 0, **options: Any):
        super().__init__(model, rules.uoro(seed), **options)


class ThreeFactor(Learner):
    """The trace of D_RTRL taught by a modulator in the place of ∂loss/∂h: one number, one for each sample or neuron.

    A standing one by ``modulator=`` here or ``learner.standing.value``; another for a step by
    ``learner(x, modulator=m)``, also inside a ``step_fn``, where it may be computed from anything known by then, or by
    ``learner.standing.value = m`` after the call, from its output too. What minimises is positive: a reward goes in
    with a minus. Parameters beyond the traces keep the gradient of the loss; those of a leaky read-out, which is a
    state too, are taught by the modulator unless ``trace=lambda path: path[0] != 'out'`` leaves them out.
    """

    def __init__(
        self,
        model: brainstate.nn.Module,
        modulator: Any = 1.0,
        kappa_filter_decay: float | rules.KappaFilter | None = None,
        **options: Any,
    ):
        super().__init__(model, rules.three_factor(kappa_filter_decay), **options)
        self._set_modulator(modulator)


class DNI(Learner):
    """Exact windows of k steps, and from what follows each the credit that a predictor expects.

    The predictor learns whenever the learner is given a sequence, from the credit that comes back to each window's
    start. ``learner(x)`` alone is a window of one step: it uses the predictor and cannot teach it, and expects the
    credit of losses as they are, neither scaled nor masked.
    """

    def __init__(
        self,
        model: brainstate.nn.Module,
        window: int = 10,
        predictor: rules.SyntheticGradient | None = None,
        **options: Any,
    ):
        super().__init__(model, rules.dni(window, predictor or rules.SyntheticGradient()), **options)


def train_synthetic_gradient(learner: Learner, *sequences: Any, step_fn: Any, updates: int = 100) -> list[float]:
    """Let the predictor of a :class:`DNI` learner learn from whole sequences, the model's weights left alone.

    Returns its mean squared distance to the right credit before each update.
    """
    if learner.rule.predictor is None or learner.rule.window is None:
        raise ValueError(
            three_parts(f'train_synthetic_gradient of {learner.rule.name}', 'it has no predictor', "rule 'dni'")
        )
    length = length_of(sequences, step_fn)
    if length <= learner.rule.window:
        raise ValueError(
            three_parts(
                f'{length} steps with windows of {learner.rule.window}',
                'the predictor learns from the credit that a window sends back to what came before it',
                'a sequence of two windows and more, or a smaller window',
            )
        )
    return [learner.teach_predictor(sequences, step_fn) for _ in range(updates)]


class Configured(Learner):
    """A rule put together from parts."""

    def __init__(self, model: brainstate.nn.Module, config: rules.ETraceConfig, **options: Any):
        super().__init__(model, config.rule, **options)


class BPTT(Learner):
    """Plain backpropagation through the whole sequence: the baseline. ``learner(x)`` alone is one of one step."""

    def __init__(self, model: brainstate.nn.Module, **options: Any):
        super().__init__(model, rules.BPTT, **options)


class TBPTT(Learner):
    """Backpropagation inside windows of k steps, nothing across them."""

    def __init__(self, model: brainstate.nn.Module, k: int = 20, **options: Any):
        super().__init__(model, rules.tbptt(k), **options)


_AUTOMATIC = {'fast_solve', 'chunked_trace', 'normalize_matrix_spectrum', 'mode'}
"""Switches of the published package's engine."""

RULES: dict[str, type[Learner]] = {
    'd_rtrl': D_RTRL,
    'pp_prop': pp_prop,
    'es_d_rtrl': ES_D_RTRL,
    'eprop': EProp,
    'ostlrecurrent': OSTLRecurrent,
    'ostlfeedforward': OSTLFeedforward,
    'ottt': OTTT,
    'rflo': RFLO,
    'snap': SnAp,
    'rtrl': RTRL,
    'uoro': UORO,
    'threefactor': ThreeFactor,
    'dni': DNI,
    'bptt': BPTT,
    'tbptt': TBPTT,
}


def compile(
    model: Any,
    rule: str | type[Learner] | rules.ETraceConfig,
    *example_inputs: Any,
    batch_size: int | None = None,
    seed: int | None = None,
    verbose: int = 0,
    vmap: bool = False,
    state: Any = None,
    **options: Any,
) -> Learner:
    """Initialise a model's states, compile it, and give it a learning rule.

    ``rule`` is a learner class, its name in any case, or an :class:`ETraceConfig`. ``options`` go to the learner.
    ``seed``: of brainstate's random numbers, and of a rule that draws. With
    ``vmap`` the model and the example inputs are of one sample, and the learner maps over a batch of ``batch_size``.

    ``model``: a brainstate module; a module of Flax NNX or Equinox, with ``state`` where it takes one as an argument;
    a function ``step(params, state, *inputs) -> (state, out)``, whose params and state come first among the examples.
    Learners of these last three give gradients in the framework's own structure: see :class:`Following`.

    >>> import brainstate, braintrace, jax.numpy as jnp
    >>> net = brainstate.nn.GRUCell(3, 4)
    >>> learner = braintrace.compile(net, 'D_RTRL', jnp.ones((2, 3)), batch_size=2)
    >>> xs = jnp.ones((5, 2, 3))
    >>> gradients = learner.etrace_grad(xs, step_fn=lambda x: jnp.mean(learner(x) ** 2), fresh=True)
    >>> gradients['Wh', 'weight']['weight'].shape
    (7, 4)
    """
    kind = RULES[rules.named(rule)] if isinstance(rule, str) else rule
    if isinstance(rule, rules.ETraceConfig):
        kind, options = Configured, {'config': rule, **options}
    if not (isinstance(kind, type) and issubclass(kind, Learner) and kind is not Learner):
        raise ValueError(three_parts(f'rule={rule!r}', 'there is no such rule', one_of(RULES, rule)))
    check_batch_size(batch_size)
    if seed is not None:
        brainstate.random.seed(seed)
        options = {'seed': seed, **options} if issubclass(kind, UORO) else options
    if vmap and batch_size is None:
        raise ValueError(
            three_parts('vmap=True without a batch size', 'the model is mapped over a batch', 'batch_size=...')
        )
    if not isinstance(model, brainstate.nn.Module):
        model, example_inputs = adapted(model, example_inputs, state, batch_size if vmap else None, seed)
        kind, vmap = following(kind), False
    elif state is not None:
        raise ValueError(
            three_parts('state=... for a brainstate module', 'it keeps its states itself', 'compile without state=')
        )
    elif vmap:
        make_states(model, batch_size, vmap=True)
        batched = lambda x: jnp.broadcast_to(x, (batch_size, *jnp.shape(x)))
        example_inputs = jax.tree.map(batched, example_inputs)
    else:
        make_states(model, batch_size)
    check_batch(example_inputs, batch_size)
    for switch in _AUTOMATIC & options.keys():
        warnings.warn(f'{switch}={options.pop(switch)!r} is ignored: this is automatic here', stacklevel=2)
    try:
        learner = kind(model, vmap=vmap, **options)
    except TypeError as error:
        raise TypeError(
            three_parts(
                f'compile(..., {kind.__name__}, {options})',
                str(error).split('() ')[-1],
                f'options of {kind.__name__} only: {_names(kind)}',
            )
        ) from error
    learner.compile_graph(*example_inputs)
    if verbose:
        learner.report.show()
    return learner


def _names(kind: type[Learner]) -> str:
    """The options of a rule."""
    return ', '.join(n for n in inspect.signature(kind).parameters if n not in ('self', 'model'))
