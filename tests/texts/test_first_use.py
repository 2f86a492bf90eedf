"""What a new user writes by mistake, and what is printed."""

import functools
import re
import subprocess
import sys
import warnings
from pathlib import Path

import brainstate
import brainunit as u
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import braintrace as bt
from braintrace import cli, overview, plots
from braintrace.cli import look, settings
from braintrace.errors import RecompilationWarning
from braintrace.learner.binding import bind_step_fn
from braintrace.learner.carried import rule_value
from braintrace.learner.check import compare
from braintrace.learner.sequences import gradient_program_of

X = jnp.ones((4, 3))
XS = jnp.ones((5, 4, 3))
OTHER = jnp.ones((5, 2, 3))


class Leak(brainstate.nn.Module):
    """Units that decay, with a read-out; `kind` is that of their state."""

    kind = brainstate.HiddenState

    def __init__(self, inputs=3, units=6, outputs=2):
        super().__init__()
        self.units = units
        self.feed = brainstate.ParamState(0.1 * jnp.ones((inputs, units)))
        self.out = brainstate.ParamState(0.1 * jnp.ones((units, outputs)))

    def init_state(self, batch_size=None, **kwargs):
        shape = (self.units,) if batch_size is None else (batch_size, self.units)
        self.h = self.kind(jnp.zeros(shape))

    def update(self, x):
        self.h.value = jnp.tanh(0.9 * self.h.value + x @ self.feed.value)
        return self.h.value @ self.out.value


@pytest.fixture(scope='module')
def learner():
    return bt.compile(Leak(), 'd_rtrl', X, batch_size=4)


@pytest.fixture(scope='module')
def plan(learner):
    return learner.memory_plan(20)


def mean_square(learner):
    return lambda x: jnp.mean(learner(x) ** 2)


def parts_of(error):
    """What was written, why, and the fix."""
    written, rest = str(error).split('\n  Why: ')
    return (written, *rest.rsplit('\n  Fix: ', 1))


# ---------------------------------------------------------------- what is printed


def test_a_learner_is_shown_in_five_lines(learner):
    assert repr(learner).splitlines() == [
        'D_RTRL learner of Leak, batch 4',
        '  inputs      (4, 3)',
        '  parameters  30 numbers in 2 arrays: 2 equal to BPTT',
        '  groups      h (4, 6)',
        '  traces      288 B in 1 part',
    ]
    assert repr(bt.D_RTRL(Leak())) == 'D_RTRL learner of Leak, not compiled'


def test_a_memory_plan_is_shown_in_five_lines(plan):
    lines = repr(plan).splitlines()
    assert lines[:2] == ['MemoryPlan of 20 steps', '  traces      288 B in 1 part']
    assert [line[:12].strip() for line in lines[2:]] == [
        'one pass',
        'two passes',
        'BPTT',
    ]


def test_a_memory_plan_that_is_compiled_quickly_has_the_same_sizes(
    learner, plan, monkeypatch
):
    monkeypatch.setattr('braintrace.learner.memory._QUICK', None)
    assert learner.memory_plan(20) == plan


# ---------------------------------------------------------------- another batch

CALLS = {
    'call': lambda m: m(OTHER[0]),
    'window': lambda m: m(bt.MultiStepData(OTHER)),
    'gradient': lambda m: m.etrace_grad(OTHER, step_fn=mean_square(m)),
    'fresh': lambda m: m.etrace_grad(OTHER, step_fn=mean_square(m), fresh=True),
    'evaluate': lambda m: m.evaluate(OTHER),
    'evaluate a step_fn': lambda m: m.evaluate(OTHER, step_fn=mean_square(m)),
    'evolve': lambda m: m.etrace_evolve(OTHER),
    'online': lambda m: m.etrace_online(
        OTHER, step_fn=mean_square(m), optimizer=optax.sgd(0.1)
    ),
    'stream': lambda m: m.stream(mean_square(m), optax.sgd(0.1))(OTHER[0]),
    'certificate': lambda m: m.certificate(OTHER, step_fn=mean_square(m)),
}


@pytest.mark.parametrize('name', CALLS)
def test_another_batch(learner, name):
    before = learner.model.h.value
    with pytest.raises(bt.CompilationError, match='batch 4, got 2'):
        CALLS[name](learner)
    np.testing.assert_array_equal(learner.model.h.value, before)


def test_another_batch_of_inputs_and_targets():
    net = brainstate.nn.Sequential(
        brainstate.nn.GRUCell(3, 4), brainstate.nn.Linear(4, 2)
    )
    learner = bt.compile(net, 'd_rtrl', X, batch_size=4)
    step_fn = lambda x, y: jnp.mean((learner(x) - y) ** 2)
    with pytest.raises(bt.CompilationError, match='batch 4, got 2'):
        learner.etrace_grad(OTHER, OTHER[..., :2], step_fn=step_fn)
    with pytest.raises(bt.CompilationError, match='batch 4, got 2'):
        learner(OTHER[0])


def test_the_advice_for_another_batch_helps():
    learner = bt.compile(Leak(), 'd_rtrl', X, batch_size=4)
    learner.reset_state(batch_size=2)
    assert learner.evaluate(OTHER).shape == (5, 2, 2)
    learner.reset_state(batch_size=1)
    # States of one sample would be broadcast to the inputs.
    with pytest.raises(bt.CompilationError, match='batch 1, got 2'):
        learner.evaluate(OTHER)


@pytest.mark.parametrize('call', ['etrace_grad', 'evaluate'])
def test_a_batch_in_front_of_time(learner, call):
    with pytest.raises(bt.CompilationError, match='batch first') as caught:
        getattr(learner, call)(XS.swapaxes(0, 1), step_fn=mean_square(learner))
    # A sequence of that many steps may also be one of another batch.
    assert 'reset_state(batch_size=5)' in str(caught.value)
    with pytest.raises(bt.CompilationError) as caught:
        learner(OTHER[0])
    assert 'batch first' not in str(caught.value)


class Loader:
    """Batches of samples with labels, as PyTorch's loaders give them."""

    def __iter__(self):
        for _ in range(3):
            yield np.ones((4, 5, 3), np.float32), np.zeros(4, np.int64)


def test_a_loader_with_the_batch_first(learner):
    def step(x, label):
        return jnp.mean((learner(x) - label[:, None]) ** 2)

    train = lambda data: bt.fit(
        learner, data, step_fn=step, optimizer=optax.sgd(0.1), updates=2, show=False
    )
    with pytest.raises(bt.CompilationError, match='Batches'):
        train(Loader())
    repeated = lambda x, label: (x.swapaxes(0, 1), np.repeat(label[None], 5, axis=0))
    assert len(train(bt.Batches(Loader(), repeated))['loss']) == 2


def test_batches_that_are_dictionaries(learner):
    data = [{'x': XS, 'y': jnp.zeros((5, 4))}]
    train = lambda step: bt.fit(
        learner, data, step_fn=step, optimizer=optax.sgd(0.1), updates=1, show=False
    )
    with pytest.raises(TypeError, match='lambda batch'):
        train(lambda x, y: jnp.mean(learner(x) - y[:, None]))
    step = lambda batch: jnp.mean(learner(batch['x']) - batch['y'][:, None])
    assert len(train(step)['loss']) == 1


def test_a_last_batch_that_is_smaller(learner):
    data = [(XS,), (OTHER,)]
    options = {'optimizer': optax.sgd(0.1), 'updates': 2, 'show': False}
    with pytest.raises(bt.CompilationError, match='drop_last') as caught:
        bt.fit(learner, data, step_fn=mean_square(learner), **options)
    assert 'reset_state' not in str(caught.value)


class Collecting(Leak):
    """Collects what it gets in a dictionary, as neurons of brainpy.state do."""

    collected = None

    def update(self, x):
        if self.collected:
            raise ValueError('defined twice')
        self.collected = {'x': x}
        self.h.value = jnp.tanh(0.9 * self.h.value + x @ self.feed.value)
        return self.h.value + self.collected.pop('x').sum()


@pytest.mark.parametrize('call', ['etrace_grad', 'evaluate', 'update'])
def test_a_call_that_failed_leaves_nothing_behind_in_the_model(call):
    net = Collecting()
    net.collected = None
    learner = bt.compile(net, 'd_rtrl', X, batch_size=4)
    step = {} if call == 'update' else {'step_fn': mean_square(learner)}
    wrong, right = (OTHER[0], X) if call == 'update' else (OTHER, XS)
    with pytest.raises(bt.CompilationError, match='batch 4, got 2'):
        getattr(learner, call)(wrong, **step)
    getattr(learner, call)(right, **step)


def test_an_input_that_is_broadcast_over_the_batch_is_no_mistake(learner):
    assert learner.evaluate(jnp.ones((5, 1, 3))).shape == (5, 4, 2)


# ---------------------------------------------------------------- values inside a step

LOSSES = {
    'float': (lambda y: float(jnp.mean(y)), r'without float\(\.\.\.\)'),
    'item': (lambda y: jnp.mean(y).item(), r'\.item\(\)'),
    'numpy': (lambda y: jnp.mean(np.asarray(y)), 'jax.numpy in place of numpy'),
    'numpy function': (lambda y: np.square(y).mean(), 'jax.numpy in place of numpy'),
    'if': (lambda y: y.sum() if y.sum() > 0 else 0.0, 'jax.numpy.where'),
    'index': (lambda y: [y.sum(), y.sum()][jnp.argmax(y[0])], 'jnp.take'),
}


@pytest.mark.parametrize('name', LOSSES)
def test_a_value_that_a_step_does_not_have(learner, name):
    loss, advice = LOSSES[name]
    step_fn = lambda x: loss(learner(x))
    for call in (learner.etrace_grad, learner.evaluate):
        with pytest.raises(bt.CompilationError, match=advice) as caught:
            call(XS, step_fn=step_fn)
        assert Path(__file__).name in parts_of(caught.value)[1]


@pytest.mark.parametrize('call', ['etrace_grad', 'evaluate'])
def test_a_step_function_that_is_defined_for_every_call(call):
    learner = bt.compile(Leak(), 'd_rtrl', X, batch_size=4)
    run = getattr(learner, call)
    with warnings.catch_warnings():
        warnings.simplefilter('error')
        once = mean_square(learner)
        for _ in range(6):
            run(XS, step_fn=once)
        for _ in range(2):
            run(XS, step_fn=mean_square(learner))
    with pytest.warns(RecompilationWarning, match='compiled 4 times') as caught:
        [run(XS, step_fn=mean_square(learner)) for _ in range(4)]
    (warning,) = caught
    assert Path(__file__).name in str(warning.message)


def test_step_functions_of_other_code_or_shapes_are_no_copies():
    learner = bt.compile(Leak(), 'd_rtrl', X, batch_size=4)
    powers = [
        lambda x: jnp.mean(learner(x)),
        lambda x: jnp.mean(learner(x) ** 2),
        lambda x: jnp.mean(learner(x) ** 3),
        lambda x: jnp.mean(learner(x) ** 4),
    ]
    with warnings.catch_warnings():
        warnings.simplefilter('error')
        for step in powers:
            stream = learner.stream(step, optax.sgd(0.1))
            stream(X)
        for batch in (2, 3, 4, 5):
            learner.reset_state(batch_size=batch)
            x = jnp.ones((5, batch, 3))
            learner.etrace_grad(x, step_fn=mean_square(learner))


def test_lists_of_numbers(learner):
    nested = np.ones((5, 4, 3)).tolist()
    for call in (learner.etrace_grad, learner.evaluate):
        with pytest.raises(TypeError, match='nested list'):
            call(nested, step_fn=mean_square(learner))
    with pytest.raises(bt.CompilationError, match='a list of shape'):
        bt.compile(Leak(), 'd_rtrl', nested[0], batch_size=4)


WRONG_INPUTS = {
    'channels': (lambda m: m.evaluate(jnp.ones((5, 4, 7))), '(4, 7)', 'shape'),
    'call': (lambda m: m(jnp.ones((4, 7))), '(4, 7)', 'shape'),
    'targets': (
        lambda m: m.evaluate(XS, XS),
        'shape (4, 3) float32 and shape (4, 3) float32',
        'targets belong in a step_fn',
    ),
    'none': (lambda m: m(), 'no input', 'as in compile'),
    'tuple': (lambda m: m((1.0, 2.0)), 'a tuple of 2', 'jnp.asarray(x)'),
    'predict': (
        lambda m: m.stream(mean_square(m)).predict(X, X),
        'shape (4, 3) float32 and shape (4, 3) float32',
        'targets belong in a step_fn',
    ),
}


@pytest.mark.parametrize('name', WRONG_INPUTS)
def test_inputs_unlike_the_compiled_example(learner, name):
    call, shown, advice = WRONG_INPUTS[name]
    with pytest.raises(bt.CompilationError, match=re.escape(shown)) as caught:
        call(learner)
    assert advice in parts_of(caught.value)[2]
    assert 'learner/' not in str(caught.value)  # no line of this package


def test_inputs_of_another_type():
    model = brainstate.nn.Conv2d((6, 6, 1), 2, 3)

    class Net(Leak):
        def __init__(self):
            super().__init__(inputs=72)
            self.conv = model

        def update(self, x):
            return super().update(self.conv(x).reshape(4, -1))

    learner = bt.compile(Net(), 'd_rtrl', jnp.ones((4, 6, 6, 1)), batch_size=4)
    with pytest.raises(bt.CompilationError, match='astype'):
        learner.evaluate(np.ones((5, 4, 6, 6, 1), bool))


def test_what_is_no_sequence(learner):
    step_fn = lambda x, y: jnp.mean((learner(x) - y) ** 2)
    with pytest.raises(ValueError, match='2 sequences'):
        learner.etrace_grad(XS, jnp.ones((4, 2)), step_fn=step_fn)
    steps = [*jnp.ones((50, 4, 3))]
    for targets in ([], [jnp.ones((50, 4, 2))]):
        with pytest.raises(ValueError, match=r'jnp\.stack') as caught:
            learner.etrace_grad(steps, *targets, step_fn=lambda x, *_: learner(x).sum())
        assert len(parts_of(caught.value)[0]) < 100
    stream = learner.stream(mean_square(learner))
    with pytest.raises(TypeError, match='nested list'):
        stream.gradient([1.0, 2.0])
    with pytest.raises(bt.CompilationError, match='chunk=5'):
        stream.gradient(XS)


def test_an_example_of_several_steps():
    with pytest.raises(bt.CompilationError, match='one step, as xs'):
        bt.compile(Leak(), 'd_rtrl', XS, batch_size=4)


def test_what_is_no_optimizer_and_what_are_no_gradients(learner):
    found = learner.etrace_grad(
        XS, step_fn=mean_square(learner), fresh=True, return_value=True
    )
    with pytest.raises(TypeError, match='optimizer=adam'):
        learner.apply(found[0], optax.adam)
    with pytest.raises(ValueError, match='gradients in a tuple'):
        learner.apply(found, optax.adam(1e-3))
    with pytest.raises(ValueError, match='nothing'):
        learner.etrace_grad(XS, step_fn=mean_square(learner), weights=['nothing'])
    with pytest.raises(bt.CompilationError, match='has_aux=True'):
        learner.etrace_grad(XS, step_fn=lambda x: (jnp.sum(learner(x)), x))


def test_a_name_selects_a_parameter(learner):
    found = learner.etrace_grad(XS, step_fn=mean_square(learner), weights='out')
    assert list(found) == [('out',)]


def test_a_learner_in_place_of_a_rule(learner):
    with pytest.raises(ValueError, match='as the rule'):
        bt.compile(Leak(), learner, X, batch_size=4)


def test_a_learner_of_one_sample_gets_no_batch():
    learner = bt.compile(Leak(), 'd_rtrl', X[0])
    before = learner.evaluate(XS[:, 0])
    with pytest.raises(ValueError, match='without a batch'):
        learner.reset_state(batch_size=2)
    # Nothing was changed.
    np.testing.assert_array_equal(learner.evaluate(XS[:, 0]), before)


def leak_of(params, h, x):
    h = jnp.tanh(0.9 * h + x @ params)
    return h, h


FUNCTIONS = {
    'state of one sample': ((leak_of, jnp.zeros(6), X), 'state with the batch axis'),
    'list': ((leak_of, jnp.zeros((4, 6)), np.ones((4, 3)).tolist()), 'asarray'),
    'float': (
        (lambda p, h, x: (h, float((x @ p).sum())), jnp.zeros((4, 6)), X),
        r'without float\(\.\.\.\)',
    ),
    'other': ((lambda p, h, x: h, jnp.zeros((4, 6)), X), r'-> \(state, out\)'),
}


@pytest.mark.parametrize('name', FUNCTIONS)
def test_advice_for_a_step_function(name):
    (function, h, x), advice = FUNCTIONS[name]
    with pytest.raises(bt.CompilationError, match=advice):
        bt.compile(function, 'd_rtrl', jnp.ones((3, 6)), h, x)


def test_columns_of_a_check_stand_below_their_names():
    row = compare('w', 'exact', 'local', jnp.ones(2), jnp.ones(2))
    _, head, line = str(bt.GradientCheck('D_RTRL', (row,))).splitlines()
    assert head.index('gradient') == line.index('local')
    assert len(head) == len(line)


def test_gradients_that_are_both_zero_are_not_called_equal():
    row = compare('w', 'exact', 'local', jnp.zeros(2), jnp.zeros(2))
    check = bt.GradientCheck('D_RTRL', (row,))
    assert '1.000' not in str(check)
    assert str(check).endswith('both gradients are zero')
    assert 'both zero' in str(bt.RuleComparison((check,)))
    lost = compare('w', 'exact', 'local', jnp.zeros(2), jnp.ones(2))
    assert not lost.is_zero


def test_a_model_for_inference_by_either_name():
    assert bt.load_for_inference is bt.load


# ---------------------------------------------------------------- models


@pytest.mark.parametrize(
    'use',
    [
        lambda: bt.compile(Leak, 'd_rtrl', X, batch_size=4),
        lambda: bt.D_RTRL(Leak),
        lambda: bt.compile_etrace_graph(Leak, X),
    ],
    ids=['compile', 'learner', 'graph'],
)
def test_a_class_in_place_of_a_model(use):
    with pytest.raises(TypeError, match='the class Leak'):
        use()


def test_an_example_in_place_of_the_rule():
    for wrong, shown in (((X,), 'an array of shape'), ((), 'no rule')):
        with pytest.raises(ValueError, match=shown):
            bt.compile(Leak(), *wrong, batch_size=4)


def test_shapes_that_do_not_fit(learner):
    # Without a batch size the states have no batch axis.
    with pytest.raises(bt.CompilationError, match='batch_size=4'):
        bt.compile(bt.nn.GRUCell(3, 6), 'd_rtrl', X)
    step_fn = lambda x, y: jnp.mean((learner(x) - y) ** 2)
    with pytest.raises(bt.CompilationError, match='targets'):
        learner.etrace_grad(XS, jnp.ones((5, 3, 2)), step_fn=step_fn)


def test_a_model_that_needs_a_batch_size():
    class Batched(Leak):
        def init_state(self, batch_size=None, **kwargs):
            self.h = self.kind(jnp.zeros((batch_size, self.units)))

    with pytest.raises(bt.CompilationError, match='without a batch size'):
        bt.compile(Batched(), 'd_rtrl', X)
    with pytest.raises(bt.CompilationError, match='with vmap=True'):
        bt.compile(Batched(), 'd_rtrl', X, batch_size=4, vmap=True)


def test_a_call_before_compiling():
    learner = bt.D_RTRL(Leak())
    uses = [
        lambda: learner(X),
        lambda: learner.etrace_grad(XS, step_fn=mean_square(learner)),
        lambda: learner.report,
        lambda: learner.memory_plan(10),
    ]
    for use in uses:
        with pytest.raises(ValueError, match='before compiling'):
            use()


@pytest.mark.parametrize('kind', [brainstate.State, brainstate.ShortTermState])
def test_a_recurrent_state_of_another_kind_is_named(kind):
    model = type('Short', (Leak,), {'kind': kind})()
    with pytest.raises(bt.CompilationError, match=': h is kept'):
        bt.compile(model, 'd_rtrl', X, batch_size=4)


def test_a_second_state_of_another_kind_is_warned_of():
    class Two(Leak):
        def __init__(self):
            super().__init__()
            self.slow = brainstate.ParamState(0.1 * jnp.ones((3, 2)))

        def init_state(self, batch_size=None, **kwargs):
            super().init_state(batch_size)
            self.y = brainstate.State(jnp.zeros((batch_size, 2)))

        def update(self, x):
            self.y.value = 0.9 * self.y.value + x @ self.slow.value
            return super().update(x) + self.y.value

    with pytest.warns(bt.CreditWarning, match='slow the gradient of one step'):
        learner = bt.compile(Two(), 'd_rtrl', X, batch_size=4)
    check = learner.gradient_check(XS, step_fn=mean_square(learner))
    ratios = {row.name: row.norm_ratio for row in check.rows}
    assert ratios['slow'] < 0.5
    assert ratios['feed'] == pytest.approx(1, rel=1e-5)


def test_units_that_do_not_fit():
    class Units(Leak):
        def update(self, x):
            dt = brainstate.environ.get('dt')
            return super().update(x * u.math.exp(-dt / (5.0 * u.ms)))

    with brainstate.environ.context(dt=1.0), pytest.raises(ValueError, match='units'):
        bt.compile(Units(), 'd_rtrl', X, batch_size=4)


class NeedsTimeStep(Leak):
    def update(self, x):
        return super().update(x * brainstate.environ.get('dt'))


def test_a_model_that_needs_a_time_step(tmp_path, capsys):
    with pytest.raises(bt.CompilationError, match=r'set\(dt='):
        bt.compile(NeedsTimeStep(), 'd_rtrl', X, batch_size=4)
    file = tmp_path / 'timed.py'
    file.write_text(
        'import brainstate\n'
        'def make():\n'
        '    dt = brainstate.environ.get_dt()\n'
        '    return brainstate.nn.GRUCell(2, int(3 * dt))\n'
    )
    arguments = ['explain', f'{file}:make', '--input', '2,2']
    assert cli.main(arguments) == cli.USAGE
    said = capsys.readouterr().err
    assert "Key 'dt'" in said
    assert 'timed.py:3' in said
    assert '--dt 1.0' in said
    assert cli.main([*arguments, '--dt', 'soon']) == cli.USAGE
    assert '--dt soon' in capsys.readouterr().err
    with look.time_step('2.0'):
        assert look.load(f'{file}:make').num_out == 6
    assert brainstate.environ.get('dt', default=None) is None
    with look.time_step('0.1ms'):
        assert brainstate.environ.get('dt') == 0.1 * u.ms


def test_a_resumed_training_has_the_time_step_it_began_with(tmp_path):
    config = settings.Config('copying', dt='0.5ms')
    settings.save(tmp_path, config)
    assert settings.read(tmp_path).dt == '0.5ms'


# ---------------------------------------------------------------- credit


class Blocked(Leak):
    """One parameter behind a stopped gradient, one that is never read."""

    def __init__(self):
        super().__init__()
        self.blocked = brainstate.ParamState(jnp.ones((6, 2)))
        self.unread = brainstate.ParamState(jnp.ones(2))

    def update(self, x):
        y = super().update(x)
        return y + jax.lax.stop_gradient(self.h.value @ self.blocked.value)


class Slow(Leak):
    """Outputs that are added up in a leaky read-out."""

    keep = 0.95

    def init_state(self, batch_size=None, **kwargs):
        super().init_state(batch_size)
        self.y = brainstate.HiddenState(jnp.zeros((batch_size, 2)))

    def update(self, x):
        self.y.value = self.keep * self.y.value + super().update(x)
        return self.y.value


def test_a_parameter_without_credit():
    with pytest.warns(bt.CreditWarning, match='gives blocked no') as caught:
        learner = bt.compile(Blocked(), 'd_rtrl', X, batch_size=4)
    (warning,) = caught
    assert warning.filename == __file__
    # Whether a parameter is read is known with the step function: fit warns then, and
    # says nothing twice.
    train = lambda step: bt.fit(
        learner,
        lambda i: (XS,),
        step_fn=step,
        optimizer=optax.sgd(0.1),
        updates=1,
        show=False,
    )
    with pytest.warns(bt.CreditWarning, match='blocked, unread') as caught:
        train(mean_square(learner))
    assert len(caught) == 1
    with warnings.catch_warnings():
        warnings.simplefilter('error')
        train(mean_square(learner))


class Dead(Leak):
    """A second layer that no output reads."""

    def __init__(self):
        super().__init__()
        self.other = Leak()

    def update(self, x):
        self.other(x)
        return super().update(x)


def test_the_traces_of_a_parameter_without_credit_are_counted_and_may_be_left_out():
    with pytest.warns(bt.CreditWarning, match='traces take 288 B'):
        learner = bt.compile(Dead(), 'd_rtrl', X, batch_size=4)
    assert len(learner.traces) == 2
    for chosen in ('credited', lambda path: path[0] != 'other'):
        with pytest.warns(bt.CreditWarning) as caught:
            learner = bt.compile(Dead(), 'd_rtrl', X, batch_size=4, trace=chosen)
        assert 'traces take' not in str(caught[0].message)
        assert len(learner.traces) == 1
        assert learner.traces_of(('other', 'feed')) == {}
        assert 'traces      288 B in 1 part' in repr(learner.memory_plan(20))


def test_traces_are_left_out_only_where_no_output_gives_credit():
    """The gradients of outputs do not change; a loss that reads another state gets the
    one-step gradient of its parameters."""
    found = {}
    for choice in ('auto', 'credited'):
        with pytest.warns(bt.CreditWarning):
            learner = bt.compile(Dead(), 'd_rtrl', X, batch_size=4, trace=choice)
        state = learner.model.other.h
        for name, step in {
            'output': mean_square(learner),
            'state': lambda x, m=learner, h=state: (m(x), jnp.sum(h.value))[1],
        }.items():
            learner.reset_state()
            halves = [learner.etrace_grad(x, step_fn=step) for x in (XS[:3], XS[3:])]
            found[choice, name] = halves[1]
    feed, own = ('other', 'feed'), ('feed',)
    for name, path in (('output', own), ('output', feed), ('state', own)):
        np.testing.assert_array_equal(
            found['auto', name][path], found['credited', name][path]
        )
    assert (
        np.abs(found['auto', 'state'][feed]).min()
        > 1.2 * np.abs(found['credited', 'state'][feed]).max()
    )
    assert np.abs(found['credited', 'state'][feed]).min() > 0
    # With reach='deep' nothing of a window is lost, and the other layer still has none.
    with pytest.warns(bt.CreditWarning):
        deep = bt.compile(
            Dead(), 'd_rtrl', X, batch_size=4, trace='credited', reach='deep'
        )
    assert len(deep.traces) == 1


@pytest.mark.parametrize(
    ('rule', 'options'),
    [('d_rtrl', {'passes': 1}), ('pp_prop', {'decay_or_rank': 0.9})],
    ids=['d_rtrl', 'pp_prop'],
)
def test_a_fresh_sequence_has_no_traces_of_what_its_loss_never_reads(rule, options):
    """The traces are discarded, so no other loss can read them; gradients are the same
    to the bit as with all traces."""
    xs = jax.random.normal(jax.random.key(0), (7, 4, 3))
    model = Dead()
    model.other = Leak(units=11)
    with pytest.warns(bt.CreditWarning):
        learner = bt.compile(model, rule, X, batch_size=4, **options)
    losses = {
        'output': mean_square(learner),
        'state': lambda x: (learner(x), jnp.sum(model.other.h.value))[1],
    }
    for name, step in losses.items():
        learner.reset_state()
        carried = learner.etrace_grad(xs, step_fn=step)
        binding = bind_step_fn(learner, step, (xs,))
        program = lambda fresh, b=binding: gradient_program_of(
            learner, b, learner.rule, fresh
        )
        traces = program(False)[0].trace_shapes
        solver, run = program(True)
        # One loss reads the first layer alone, the other the second.
        assert len(solver.trace_shapes) == len(traces) - 1 == 1
        given = (*binding.read(), [], binding.inputs((xs,)), jnp.ones(7), 1.0)
        lowered = run.run.lower(*given, rule_value(learner), masked=False)
        if rule == 'd_rtrl':
            shapes = {'output': '4x3x6xf32', 'state': '4x3x11xf32'}
            own = shapes.pop(name)
            assert own in lowered.as_text()
            assert all(other not in lowered.as_text() for other in shapes.values())
        fresh = learner.etrace_grad(xs, step_fn=step, fresh=True)
        jax.tree.map(np.testing.assert_array_equal, fresh, carried)
    learner.reset_state()
    assert len(learner.traces) == 2


class Delayed(brainstate.nn.Module):
    """A layer whose spikes reach the next one, which is read out slowly, two steps
    later."""

    def __init__(self, delay):
        super().__init__()
        self.first, self.second = Leak(outputs=6), Slow(inputs=6)
        self.delay = delay

    def update(self, x):
        return self.second(self.delay(self.first(x)))


class Buffer(brainstate.nn.Module):
    """A delay whose buffer is no hidden state."""

    def init_state(self, batch_size=None, **kwargs):
        self.past = brainstate.ShortTermState(jnp.zeros((2, 4, 6)))

    def update(self, x):
        late = self.past.value[-1]
        self.past.value = jnp.concatenate([x[None], self.past.value[:-1]])
        return late


def test_a_delay_without_credit_and_one_with_it():
    with pytest.warns(bt.CreditWarning, match=r'nir\.Delay'):
        bt.compile(Delayed(Buffer()), 'd_rtrl', X, batch_size=4, reach='readout')
    delay = bt.nir.Delay(delay=np.full(6, 2.0), dt=1.0)
    with pytest.warns(bt.CreditWarning, match=r'passes second\.y, down to about 1/20'):
        learner = bt.compile(Delayed(delay), 'd_rtrl', X, batch_size=4, reach='readout')
    check = learner.gradient_check(jnp.ones((60, 4, 3)), step_fn=mean_square(learner))
    assert check['first.feed'].norm_ratio < 0.2 < check['second.feed'].norm_ratio
    given = learner.report.gradients['first.out']
    assert given.kind == 'local'
    # One memory is not carried and left out at once.
    assert 'traces carry the memory' not in given.reason
    assert "for second.h and not for layers below; reach='deep'" in given.reason


class Interneurons(brainstate.nn.Module):
    """Excitatory units, which alone are read, and inhibitory ones between them."""

    def __init__(self, keep, reads_new):
        super().__init__()
        self.keep, self.reads_new = keep, reads_new
        brainstate.random.seed(0)
        shapes = {'feed': (3, 8), 'ei': (8, 4), 'ie': (4, 8)}
        for name, shape in shapes.items():
            value = 0.5 * brainstate.random.normal(size=shape)
            setattr(self, name, brainstate.ParamState(value))

    def init_state(self, batch_size=None, **kwargs):
        self.E = brainstate.HiddenState(jnp.zeros((batch_size, 8)))
        self.I = brainstate.HiddenState(jnp.zeros((batch_size, 4)))

    def update(self, x):
        old = self.I.value
        self.I.value = 0.5 * old + jnp.tanh(self.E.value) @ self.ei.value
        read = self.I.value if self.reads_new else old
        drive = x @ self.feed.value - jnp.tanh(read) @ self.ie.value
        self.E.value = self.keep * self.E.value + (1 - self.keep) * drive
        return self.E.value


@pytest.mark.parametrize('reads_new', [True, False])
def test_interneurons_whose_credit_passes_the_memory_of_others(reads_new):
    xs = jax.random.normal(jax.random.key(0), (80, 4, 3))
    model = lambda: Interneurons(0.98, reads_new)
    told = 'ei only part.*1/50' if reads_new else 'ei no gradient'
    with pytest.warns(bt.CreditWarning, match=told):
        learner = bt.compile(model(), 'd_rtrl', X, batch_size=4)
    check = learner.gradient_check(xs, step_fn=mean_square(learner))
    ratios = {row.name: row.norm_ratio for row in check.rows}
    assert ratios['ei'] < 0.05
    assert min(ratios['feed'], ratios['ie']) > 0.5
    with warnings.catch_warnings():
        warnings.simplefilter('error')
        learner = bt.compile(model(), 'd_rtrl', X, batch_size=4, reach='deep')
    check = learner.gradient_check(xs, step_fn=mean_square(learner))
    assert {row.gradient for row in check.rows} == {'equal to BPTT'}
    assert all(row.relative_error < 1e-5 for row in check.rows)
    with pytest.warns(bt.CreditWarning, match="'d_rtrl' with reach='deep'"):
        bt.compile(model(), 'rflo', X, batch_size=4)


def test_interneurons_of_units_whose_memory_is_not_constant():
    class Nonlinear(Interneurons):
        def update(self, x):
            super().update(x)
            self.E.value = self.E.value - 0.01 * jnp.tanh(self.E.value) ** 3
            return self.E.value

    with warnings.catch_warnings():
        warnings.simplefilter('error')
        learner = bt.compile(Nonlinear(0.98, reads_new=True), 'd_rtrl', X, batch_size=4)
    options = {'optimizer': optax.sgd(0.1), 'updates': 1, 'show': False}
    with pytest.warns(bt.CreditWarning, match='ei only part.*1/50'):
        bt.fit(learner, lambda i: (XS,), step_fn=mean_square(learner), **options)


def test_a_model_is_compiled_inside_of_jit_and_for_shapes():
    """What is estimated for warnings needs no values."""
    model, shape = Interneurons(0.98, True), jax.ShapeDtypeStruct(X.shape, X.dtype)

    def gradients(x):
        learner = bt.compile(model, 'd_rtrl', x, batch_size=4)
        return learner.etrace_grad(x[None], step_fn=mean_square(learner))

    with pytest.warns(bt.CreditWarning):
        assert jax.jit(gradients)(X)['ei',].shape == (8, 4)
    with pytest.warns(bt.CreditWarning):
        bt.compile(Interneurons(0.98, True), 'd_rtrl', shape, batch_size=4)


class TwoHeads(Leak):
    def __init__(self):
        super().__init__()
        self.second = brainstate.ParamState(jnp.ones((6, 1)))

    def update(self, x):
        return super().update(x), self.h.value @ self.second.value


def test_an_output_that_the_loss_does_not_read():
    with warnings.catch_warnings():
        warnings.simplefilter('error')
        learner = bt.compile(TwoHeads(), 'd_rtrl', X, batch_size=4)
    options = {'optimizer': optax.sgd(0.1), 'updates': 1, 'show': False}

    def step(x):
        first, second = learner(x)
        return jnp.mean(first**2), second  # measured, and not learned

    options['metrics'] = lambda second, x: {'second': second.mean()}
    with pytest.warns(bt.CreditWarning, match='second no gradient'):
        bt.fit(learner, lambda i: (XS,), step_fn=step, **options)


class DelayLine(Leak):
    """Units behind a delay line of two states, kept in a list or in a dictionary."""

    def __init__(self, kept_in):
        super().__init__()
        self.kept_in = kept_in

    def init_state(self, batch_size=None, **kwargs):
        super().init_state(batch_size)
        line = [brainstate.HiddenState(jnp.zeros((batch_size, 6))) for _ in range(2)]
        self.line = line if self.kept_in is list else {'new': line[0], 'old': line[1]}

    def update(self, x):
        first, second = self.line if self.kept_in is list else self.line.values()
        late = second.value
        second.value, first.value = first.value, jnp.tanh(x @ self.feed.value)
        self.h.value = 0.9 * self.h.value + late
        return (self.h.value + first.value) @ self.out.value


def test_credit_that_is_lost_between_states_of_a_list():
    with pytest.warns(bt.CreditWarning, match='states of a list') as caught:
        learner = bt.compile(DelayLine(list), 'd_rtrl', X, batch_size=4)
    assert len(caught) == 1
    given = learner.report.gradients['feed']
    assert given.kind == 'one step'
    assert 'another group because their paths part at an integer key' in given.reason
    (record,) = (r for r in learner.report.diagnostics if r.kind == 'cut')
    assert record.level == 'warning'
    assert record.message.endswith('because their paths part at an integer key')
    with warnings.catch_warnings():
        warnings.simplefilter('error', bt.CreditWarning)
        bt.compile(DelayLine(list), 'bptt', X, batch_size=4)
        fixed = bt.compile(DelayLine(dict), 'd_rtrl', X, batch_size=4)
    errors = [
        {row.name: row.relative_error for row in check.rows}['feed']
        for check in (
            each.gradient_check(XS, step_fn=mean_square(each))
            for each in (learner, fixed)
        )
    ]
    assert errors[0] > 0.1
    assert errors[1] < 1e-5


def test_layers_of_a_list_that_meet_in_products_are_not_warned_of():
    layers = [Leak(outputs=6), Leak(inputs=6)]
    with warnings.catch_warnings():
        warnings.simplefilter('error', bt.CreditWarning)
        bt.compile(brainstate.nn.Sequential(*layers), 'd_rtrl', X, batch_size=4)


def test_a_read_out_whose_memory_costs_most_of_the_credit():
    with pytest.warns(bt.CreditWarning, match='feed about 1/20') as caught:
        bt.compile(Slow(), 'd_rtrl', X, batch_size=4)
    assert len(caught) == 1


def test_the_advice_about_a_read_out_fits_the_rule_and_the_layer():
    class Deep(brainstate.nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second = Leak(outputs=6), Slow(inputs=6)

        def update(self, x):
            return self.second(self.first(x))

    brainstate.random.seed(0)
    ratios = {}
    for reach in ('local', 'readout', 'deep'):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter('always')
            learner = bt.compile(Deep(), 'd_rtrl', X, batch_size=4, reach=reach)
        if reach == 'local':
            below, own = str(caught[0].message).split('\nD_RTRL gives')
            assert "Fix: reach='deep'" in below
            assert below.startswith('D_RTRL gives first.feed, first.out about')
            assert own.startswith(' second.feed about')
            assert "Fix: reach='readout'" in own
        xs = jnp.ones((60, 4, 3))
        check = learner.gradient_check(xs, step_fn=mean_square(learner))
        ratios[reach] = {row.name: row.norm_ratio for row in check.rows}
    first = [ratios[reach]['first.feed'] for reach in ('local', 'readout', 'deep')]
    second = [ratios[reach]['second.feed'] for reach in ('local', 'readout')]
    # What is advised helps, and what is not does nothing.
    assert first[0] < 0.2
    assert first[1] == pytest.approx(first[0], rel=1e-5)
    assert first[2] > 0.9
    assert second[0] < 0.2
    assert second[1] > 0.9
    with pytest.warns(bt.CreditWarning, match="'d_rtrl' with reach='readout'"):
        bt.compile(Slow(), 'pp_prop', X, batch_size=4)


def test_the_warned_share_of_the_credit_is_right():
    """The last loss of a long constant sequence, by D-RTRL over BPTT: near 1/20."""
    with warnings.catch_warnings():
        warnings.simplefilter('ignore', bt.CreditWarning)
        learner = bt.compile(Slow(), 'd_rtrl', X, batch_size=4)
    mask = jnp.zeros(300).at[-1].set(1)
    xs = jnp.ones((300, 4, 3))
    step = lambda x: jnp.sum(learner(x))
    check = learner.gradient_check(xs, step_fn=step, mask=mask)
    (row,) = [row for row in check.rows if row.name == 'feed']
    assert 1 / row.norm_ratio == pytest.approx(20, rel=0.15)


@pytest.mark.parametrize(
    ('model', 'rule', 'options'),
    [
        (Leak, 'd_rtrl', {}),
        (Slow, 'd_rtrl', {'reach': 'readout'}),
        (Slow, 'bptt', {}),
        (type('Quick', (Slow,), {'keep': 0.3}), 'd_rtrl', {}),
        (lambda: Interneurons(0.3, reads_new=True), 'd_rtrl', {}),
        (lambda: Interneurons(0.98, reads_new=True), 'rtrl', {}),
    ],
    ids=['exact', 'readout', 'bptt', 'short memory', 'forgetful units', 'rtrl'],
)
def test_no_warning_without_a_reason(model, rule, options):
    with warnings.catch_warnings():
        warnings.simplefilter('error')
        bt.compile(model(), rule, X, batch_size=4, **options)


# ---------------------------------------------------------------- importing


def run_python(code):
    done = subprocess.run(
        [sys.executable, '-c', code], capture_output=True, text=True, check=True
    )
    return done.stdout.split()


def test_the_help_loads_neither_jax_nor_brainstate():
    code = (
        'import sys, braintrace.cli\n'
        'try: braintrace.cli.main(["train", "--help"])\n'
        'except SystemExit: pass\n'
        'print("LOADED", *({"jax", "numpy", "brainstate"} & sys.modules.keys()))'
    )
    said = run_python(code)
    assert said[said.index('LOADED') + 1 :] == []
    assert '--dt' in said


def test_the_help_names_every_task_and_network():
    assert tuple(bt.tasks.TASKS) == cli.TASKS
    assert tuple(bt.networks.NETWORKS) == cli.NETWORKS


def test_the_first_use_may_be_inside_a_traced_function():
    code = (
        'import jax, braintrace\n'
        'f = jax.jit(lambda x: braintrace.matmul(x, x))\n'
        'f(jax.numpy.ones((2, 2)))\n'
        'import brainstate\n'
        'print(brainstate.random.randn(3).shape[0])'
    )
    assert run_python(code) == ['3']


def test_a_part_of_the_package_keeps_the_precision():
    code = (
        "import jax; jax.config.update('jax_enable_x64', True)\n"
        'import braintrace.networks\n'
        'print(jax.config.jax_enable_x64)'
    )
    assert run_python(code) == ['True']


def test_plots_is_a_part_of_the_package():
    assert bt.plots is plots
    assert 'plots' in dir(bt)
    assert callable(plots.learning_curves)


# ---------------------------------------------------------------- reports


class Stock(brainstate.nn.Module):
    """A layer of a library, called by the user's own line."""

    def __init__(self):
        super().__init__()
        self.cell = brainstate.nn.GRUCell(3, 6)

    def update(self, x):
        return self.cell(x)  # the line that reports name


OWN_LINE = next(
    n
    for n, line in enumerate(Path(__file__).read_text().splitlines(), 1)
    if line.endswith('# the line that reports name')
)


@pytest.fixture(scope='module')
def stock():
    return bt.compile(Stock(), 'd_rtrl', X, batch_size=4)


def test_a_reason_names_the_layer_and_the_line_that_calls_it(stock):
    own = f'{Path(__file__).name}:{OWN_LINE}'
    given = stock.report.gradients['cell.Wh.weight.weight']
    assert re.search(
        rf'cut at matmul \(brainstate/nn/\S+:\d+, called at \S*{own}\)', given.reason
    )
    (cut, *_) = [r for r in stock.report.diagnostics if r.kind == 'cut']
    assert cut.context['source'].endswith(own)
    assert '/brainstate/nn/' in cut.context['library']
    page = stock.report.to_html()
    assert re.search(rf'{own}</div><div title="[^"]*">in brainstate/nn/', page)


def test_sizes_of_every_site_in_text_and_page(stock, plan):
    text, page = str(stock.report), stock.report.to_html()
    assert 'matmul + add  9×6, 6 → 4×6' in text
    trace = re.search(r'9×6, 6 → 4×6\s+(trace [\d.]+ \w+)', text)[1]
    boxes = re.search(r'<svg.*?</svg>', page, re.DOTALL)[0]
    for words in ('9×6, 6 → 4×6', trace, 'positions 4×6', '1 state each'):
        assert words in text
        assert words in boxes
    page = stock.report.to_html(memory=plan)
    for name, _ in plan.ways:
        assert name in str(plan)
        assert name in page
    assert 'dot_general' not in f'{text}{plan}{page}'


def test_names_that_are_not_there(learner):
    history = bt.History([{'update': 1, 'loss': 0.5, 'accuracy': 0.7}])
    row = compare('feed', 'exact', 'local', jnp.ones(2), jnp.ones(2))
    check = bt.GradientCheck('D_RTRL', (row,))
    wrong = {
        'accuracy': lambda: history['acuracy'],
        'feed': lambda: bt.RuleComparison((check,))['D_RTRL']['fed'],
        'D_RTRL': lambda: bt.RuleComparison((check,))['RFLO'],
    }
    for advice, use in wrong.items():
        with pytest.raises(KeyError, match=f"'{advice}'"):
            use()
    for owner, name in ((learner, 'etrace_gard'), (bt, 'compil')):
        with pytest.raises(AttributeError) as caught:
            getattr(owner, name)
        # Python suggests the nearest name from these.
        assert caught.value.name == name
        assert caught.value.obj is owner


# ---------------------------------------------------------------- pictures

EVIDENCE = bt.tasks.EvidenceAccumulation(
    cues=2, cue=4, every=6, delay=20, recall=4, group=2, rate=0.5
)
COPYING = bt.tasks.Copying(length=2, lag=2)
SERIES = bt.tasks.task('henon', steps=12)
HISTORY = bt.History(
    [{'update': i, 'loss': 1 / i, 'seconds': i, 'accuracy': 0.5} for i in (1, 2, 3)]
)


@pytest.fixture
def figures(monkeypatch):
    """Figures in the order in which they are saved."""
    from matplotlib.figure import Figure

    found = []
    save = lambda figure, file, **options: found.append(figure)
    monkeypatch.setattr(Figure, 'savefig', save)
    return found


@functools.cache
def trained(name):
    """The task of a case, a learner of it, and one batch."""
    task, network, rule = CASES[name]
    net = bt.networks.network(network, task.inputs, task.outputs, units=5)
    example = jnp.zeros((2, task.inputs))
    learner = bt.compile(net, rule, example, batch_size=2)
    return task, learner, bt.Supervised(learner, task, 2).batches(0)


def check_axes(figure):
    """Every panel names its axes or shares them, and its lines and colours."""
    bars = [ax for ax in figure.axes if hasattr(ax, '_colorbar')]
    panels = [ax for ax in figure.axes if ax not in bars and ax.axison]
    assert len(bars) == sum(bool(ax.images) for ax in panels)
    assert all(bar.get_ylabel() for bar in bars)
    for ax in panels:
        shared = ax.get_shared_x_axes().get_siblings(ax)
        named = [a for a in shared if a.get_xlabel() and a.xaxis.get_ticklabels()]
        groups = [t.get_text() for t in ax.get_xticklabels()]
        assert named or 'left' in groups
        rows = [t.get_text() for t in ax.get_yticklabels()]
        assert ax.get_ylabel() or 'left' in rows
        lines = {line.get_color() for line in ax.lines if len(line.get_xdata()) > 1}
        curves = [line for line in ax.lines if line.get_marker() == 'None']
        if len(lines) > 1 and len(curves) > 2:
            assert ax.get_legend() is not None


CASES = {
    'decision': (EVIDENCE, 'alif', 'd_rtrl'),
    'classes': (COPYING, 'gru', 'pp_prop'),
    'values': (SERIES, 'rnn', 'bptt'),
}


@pytest.mark.parametrize('name', CASES)
def test_pictures_name_their_axes_and_colours(figures, name):
    task, learner, trial = trained(name)
    plots.activity(learner, trial, task.kind, 'activity.png')
    assert plots.traces(learner, trial[0], 'traces.png') is learner.rule.has_trace
    plots.learning_curves({'a': [HISTORY], 'b': [HISTORY, HISTORY]}, 'learning.png')
    assert len(figures) == 2 + learner.rule.has_trace
    for figure in figures:
        check_axes(figure)


def test_a_map_of_traces_has_units_in_rows_and_inputs_in_columns():
    learner = bt.compile(Leak(), 'd_rtrl', X, batch_size=4)
    learner.etrace_evolve(jnp.zeros((5, 4, 3)).at[..., 1].set(1))
    ((name, values),) = plots.trace_maps(learner, ('feed',))
    assert name == 'feed on h'
    assert values.shape == (6, 3)
    assert np.abs(values[:, 1]).min() > 0.5
    assert np.abs(np.delete(values, 1, axis=1)).max() == 0


def test_parts_of_a_trace_are_named_by_their_states():
    net = bt.networks.network('alif', 3, 2, units=4)
    learner = bt.compile(net, 'd_rtrl', jnp.ones((4, 3)), batch_size=4, reach='readout')
    learner.etrace_evolve(jnp.ones((5, 4, 3)))
    names = [name for name, _ in plots.trace_maps(learner, ('feed',))]
    assert names == [f'feed on {x}' for x in ('V', 'a', 'rate.r', 'read-out')]


def test_maps_of_traces_on_a_state_of_several():
    class Late(Leak):
        def __init__(self):
            super().__init__(outputs=6)
            self.delay = bt.nir.Delay(delay=np.full(6, 1.0), dt=1.0)

        def update(self, x):
            super().update(x)
            return self.delay(self.h.value)

    learner = bt.compile(Late(), 'd_rtrl', X, batch_size=4)
    learner.etrace_evolve(XS[:4])
    before = dict(plots.trace_maps(learner, ('feed',)))
    learner.etrace_evolve(XS[4:])
    maps = plots.trace_maps(learner, ('feed',))
    assert {name for name, _ in maps} == {
        'feed on delay.past (0)',
        'feed on delay.past (1)',
        'feed on h',
    }
    assert all(values.shape == (6, 3) for _, values in maps)
    # The delay holds what h was now and one step ago.
    found = dict(maps)
    now, earlier = (found[f'feed on delay.past ({i})'] for i in (0, 1))
    np.testing.assert_allclose(now, found['feed on h'], rtol=1e-6)
    np.testing.assert_allclose(earlier, before['feed on h'], rtol=1e-6)
    assert np.abs(now - earlier).min() > 0.01


def test_long_titles_of_traces_are_wrapped(figures):
    net = brainstate.nn.Sequential(
        brainstate.nn.Sequential(brainstate.nn.Sequential(brainstate.nn.GRUCell(3, 4)))
    )
    learner = bt.compile(net, 'd_rtrl', X, batch_size=4)
    plots.traces(learner, XS, 'traces.png')
    titles = [ax.get_title() for ax in figures[0].axes if ax.axison]
    assert any('\n' in title for title in titles)
    assert max(len(line) for title in titles for line in title.splitlines()) <= 45


@pytest.mark.parametrize('name', CASES)
def test_the_overview_of_a_training(figures, name):
    task, learner, trial = trained(name)
    before = {path: state.value for path, state in learner.hidden_states.items()}
    page = overview.Overview(learner, task, trial, HISTORY)
    for dark in (False, True):
        page.save('overview.png', 'A title', 'a note', dark=dark)
    for path, value in before.items():
        np.testing.assert_array_equal(learner.hidden_states[path].value, value)
    for figure, style in zip(figures, (overview.LIGHT, overview.DARK), strict=True):
        check_axes(figure)
        texts = {
            t.get_text() for t in figure.findobj(match=lambda a: hasattr(a, 'get_text'))
        }
        assert {'A title', 'a note'} <= texts
        titles = [ax.get_title(loc='left') for ax in figure.axes]
        assert any(title.startswith('Task') for title in titles)
        assert any('races' in title for title in titles) is learner.rule.has_trace
        assert figure.axes[0].get_facecolor()[:3] == pytest.approx(
            tuple(int(style.page[i : i + 2], 16) / 255 for i in (1, 3, 5))
        )


def test_the_traces_of_a_slow_state_last_longer():
    _, learner, trial = trained('decision')
    found = overview.TracesInTime(learner, np.asarray(trial[0]), reads=12)
    names = found.by_memory()
    assert names.index('a') < names.index('V')
    assert found.states['V'].shape == (len(found.steps), EVIDENCE.inputs)
    # At every read the maps are those of a sequence that ends there.
    with learner.unmoved():
        learner.reset_state()
        learner.etrace_evolve(jnp.asarray(trial[0][: found.steps[-1]]))
        maps = dict(plots.trace_maps(learner, ('feed',)))
    np.testing.assert_allclose(
        found.states['a'][-1], np.abs(maps['feed on a']).mean(0), rtol=1e-5
    )


# ------------------------------------------------------------ more mistakes


def said(call, kind=Exception):
    """The text of the error that a call raises."""
    with pytest.raises(kind) as error:
        call()
    text = str(error.value)
    assert 'Why:' in text
    assert 'Fix:' in text
    return text


def test_a_sequence_as_the_example_of_a_step():
    net = brainstate.nn.GRUCell(3, 4)
    text = said(lambda: bt.compile(net, 'd_rtrl', jnp.ones((10, 4, 3)), batch_size=4))
    assert 'xs[0]' in text


def test_a_learner_as_the_model(learner):
    text = said(lambda: bt.compile(learner, 'd_rtrl', X, batch_size=4), ValueError)
    assert 'as the model' in text


def test_one_step_where_a_sequence_is_needed(learner):
    assert 'learner.evaluate(x[None])' in said(lambda: learner.evaluate(X))
    assert learner.evaluate(X[None]).shape == (1, 4, 2)


def test_a_function_of_batches_without_an_argument(learner):
    def batches():
        yield (XS,)

    options = {'optimizer': optax.sgd(0.1), 'updates': 1, 'show': False}
    step = lambda x: jnp.mean(learner(x) ** 2)
    text = said(lambda: bt.fit(learner, batches, step_fn=step, **options), TypeError)
    assert 'the number of the update' in text
    assert len(bt.fit(learner, batches(), step_fn=step, **options)['loss']) == 1


def test_weights_in_a_file_of_another_name(learner, tmp_path):
    text = said(lambda: learner.save_weights(tmp_path / 'net.npz'), ValueError)
    assert 'net.safetensors' in text
    text = said(lambda: learner.save(tmp_path / 'net.safetensors'), ValueError)
    assert 'save_weights' in text
    assert not list(tmp_path.iterdir())


def test_weights_that_are_no_dictionary_or_have_other_names(learner):
    assert 'a dictionary' in said(lambda: learner.set_weights([1, 2]), TypeError)
    text = said(lambda: learner.set_weights({'fed': np.zeros((3, 6))}), ValueError)
    assert "'feed'?" in text


def test_a_level_that_reports_do_not_have(learner):
    text = said(lambda: learner.report.show('loud'), ValueError)
    assert "'notice'" in text


def test_a_task_by_its_name_or_its_class(learner):
    named = said(lambda: bt.Supervised(learner, 'copying', 4), TypeError)
    assert "braintrace.tasks.task('copying')" in named
    of_class = said(lambda: bt.Supervised(learner, bt.tasks.Copying, 4), TypeError)
    assert 'Copying(...)' in of_class


def test_a_history_is_shown_in_a_few_lines():
    records = [
        {'update': i + 1, 'loss': 2.0 - i, 'valid_loss': 1.5, 'seconds': 1.0 * i}
        for i in range(2)
    ]
    shown = repr(bt.History([*records, {'update': 3, 'loss': 0.25, 'seconds': 9.0}]))
    assert shown.splitlines()[0] == 'History of 3 updates, finished'
    assert '  loss        2 → 0.25' in shown
    assert '  valid_loss  1.5 → 1.5' in shown
    assert len(shown.splitlines()) == 4


def test_a_class_on_the_command_line(tmp_path, monkeypatch):
    (tmp_path / 'own.py').write_text(
        'import brainstate\n'
        'class Net(brainstate.nn.Module):\n'
        '    def __init__(self, units):\n'
        '        super().__init__()\n'
        '        self.units = units\n'
    )
    monkeypatch.chdir(tmp_path)
    assert 'units' in said(lambda: look.load('own.py:Net'), ValueError)
    assert look.load('own.py:Net(units=7)').units == 7


def test_layers_of_a_sequence_of_layers_are_named_by_their_own_lines():
    net = brainstate.nn.Sequential(
        brainstate.nn.GRUCell(3, 4), brainstate.nn.Linear(4, 2)
    )
    text = str(bt.compile(net, 'd_rtrl', X, batch_size=4).report)
    assert '_rnns.py' in text
    assert '_module.py' not in text


def test_the_line_of_a_step_of_another_framework_that_fails():
    eqx = pytest.importorskip('equinox')

    class Cell(eqx.Module):
        w: jax.Array

        def __call__(self, x, h):
            return jnp.concatenate([x, h[None]]) @ self.w

    text = said(
        lambda: bt.compile(Cell(jnp.ones((3, 3))), 'd_rtrl', X, state=jnp.zeros((4, 3)))
    )
    assert 'test_first_use.py' in text
    assert 'jnp.concatenate' in text


def test_metrics_of_a_training_with_updates_along_the_sequence(learner):
    def step(x):
        output = learner(x)
        return jnp.mean(output**2), output

    seen = []

    def metrics(outputs, xs):
        seen.append(outputs.shape)
        return {'largest': jnp.abs(outputs).max()}

    history = bt.fit(
        learner,
        [(XS,)],
        step_fn=step,
        metrics=metrics,
        optimizer=optax.sgd(0.1),
        updates=2,
        update_every=2,  # the last of the five steps are a shorter part
        show=False,
    )
    assert seen == [(5, 4, 2)] * 2
    assert np.isfinite(history['largest']).all()


def test_outputs_of_online_steps(learner):
    def step(x):
        output = learner(x)
        return jnp.mean(output**2), output

    options = {'optimizer': optax.sgd(0.0), 'update_every': 2}
    learner.reset_state()
    losses, outputs = learner.etrace_online(XS, step_fn=step, has_aux=True, **options)
    # The weights stay: these are the outputs of the model.
    np.testing.assert_allclose(outputs, learner.evaluate(XS), rtol=1e-6)
    np.testing.assert_allclose(losses, (outputs**2).mean((1, 2)), rtol=1e-6)
    one = lambda x: step(x)[0]
    with pytest.raises(ValueError, match='has_aux=True'):
        learner.etrace_online(XS, step_fn=one, has_aux=True, **options)


# ------------------------------------------------------------ pictures of one's own data


def test_pictures_of_a_learner_without_a_batch_axis(figures):
    net = Leak()
    alone = bt.compile(net, 'd_rtrl', jnp.ones(3))
    xs = np.random.default_rng(0).normal(size=(7, 3)).astype('float32')
    found = plots.record(alone, xs)
    assert found['h'].shape == (7, 6)
    np.testing.assert_allclose(found['output'], alone.evaluate(xs), rtol=1e-6)
    plots.activity(alone, (xs, xs[:, :2]), 'values', 'activity.png')
    assert plots.traces(alone, xs, 'traces.png')
    alone.etrace_evolve(xs)
    ((_, values),) = plots.trace_maps(alone, ('feed',))
    assert values.shape == (6, 3)
    for figure in figures:
        check_axes(figure)


def test_histories_for_learning_curves(figures):
    plots.learning_curves(HISTORY, 'learning.png')
    plots.learning_curves({'a': HISTORY, 'b': [HISTORY, HISTORY]}, 'learning.png')
    for figure in figures:
        check_axes(figure)


def test_pictures_of_what_is_no_trial(learner):
    wrong = said(lambda: plots.activity(learner, (XS, XS), 'sines', 'a.png'))
    assert "'values'" in wrong
    assert '(inputs, targets)' in said(
        lambda: plots.activity(learner, XS, 'values', 'a.png')
    )


def test_an_overview_without_metrics_has_no_empty_panel(figures, learner):
    class Numbers:
        inputs, outputs, steps, kind = 3, 2, 5, 'values'

    records = [{'update': i + 1, 'loss': 1.0, 'seconds': 1.0} for i in range(3)]
    trial = (np.asarray(XS), np.zeros((5, 4, 2)))
    page = overview.Overview(learner, Numbers(), trial, bt.History(records))
    page.save('overview.png')
    panels = [ax for ax in figures[0].axes if ax.axison]
    assert all(ax.lines or ax.images or ax.collections for ax in panels)


# ------------------------------------------------------------ arguments in another order


def test_arguments_in_another_order(learner, tmp_path):
    step = lambda x: jnp.mean(learner(x) ** 2)
    gradients = learner.etrace_grad(XS, step_fn=step, fresh=True)
    text = said(lambda: learner.apply(optax.sgd(0.1), gradients), ValueError)
    assert 'apply(gradients, optimizer)' in text
    learner.save(tmp_path)
    text = said(lambda: bt.load(learner.model, tmp_path), TypeError)
    assert 'load(path, model)' in text
    assert 'learner.load(path)' in said(lambda: bt.load(tmp_path, learner), TypeError)


def test_a_learner_as_a_file_of_nir(learner, tmp_path):
    pytest.importorskip('nir')
    text = said(lambda: bt.nir.write(tmp_path / 'net.nir', learner), TypeError)
    assert 'learner.model' in text


def test_callbacks_that_are_no_list_of_functions(learner):
    step = lambda x: jnp.mean(learner(x) ** 2)
    options = {'optimizer': optax.sgd(0.1), 'updates': 1, 'show': False}
    for wrong in (bt.EarlyStop('loss', 3), ['print'], 'print'):
        text = said(
            lambda wrong=wrong: bt.fit(
                learner, [(XS,)], step_fn=step, callbacks=wrong, **options
            ),
            TypeError,
        )
        assert 'callbacks=[' in text


def test_a_task_without_its_members(learner):
    text = said(lambda: bt.Supervised(learner, object(), 4), TypeError)
    assert 'no kind and no batch' in text


def test_a_plan_for_an_array(learner):
    text = said(lambda: learner.memory_plan(np.ones((50, 4, 3))), ValueError)
    assert 'memory_plan(len(xs))' in text
    assert len(text) < 200


def test_a_loss_of_outputs_that_are_a_tuple():
    class Two(Leak):
        def update(self, x):
            return super().update(x), x

    two = bt.compile(Two(), 'd_rtrl', X, batch_size=4)
    step = lambda x: jnp.mean(two(x) ** 2)
    assert 'y, _ = learner(x)' in said(lambda: two.etrace_grad(XS, step_fn=step))


def test_a_spike_without_a_surrogate():
    class Spiking(Leak):
        def update(self, x):
            self.h.value = 0.9 * self.h.value + x @ self.feed.value
            return (self.h.value > 0.5).astype('float32') @ self.out.value

    with pytest.warns(bt.CreditWarning, match='with a surrogate'):
        bt.compile(Spiking(), 'd_rtrl', X, batch_size=4)


class Assigned(Leak):
    def update(self, x):
        self.h = 0.9 * self.h.value + x @ self.feed.value
        return self.h


def test_a_state_that_is_replaced_by_an_array():
    with pytest.raises(bt.CompilationError, match='only reads h'):
        bt.compile(Assigned(), 'd_rtrl', X, batch_size=4)


# ---------------------------------------------------------------- settings


class Dropped(brainstate.nn.Module):
    """Units that decay, on inputs of which half are left out while `fit` is set."""

    def __init__(self):
        super().__init__()
        self.drop = brainstate.nn.Dropout(0.5)
        self.inner = Leak()

    def update(self, x):
        return self.inner(self.drop(x))


def test_dropout_is_off_where_fit_is_false():
    brainstate.random.seed(0)
    with brainstate.environ.context(fit=True):
        learner = bt.compile(Dropped(), 'd_rtrl', X, batch_size=4)
        given = learner.evaluate(XS)
    inner = bt.compile(learner.model.inner, 'd_rtrl', X, batch_size=4)
    with brainstate.environ.context(fit=False):
        without = learner.evaluate(XS)
        stepped = learner(XS[0])
        stream = learner.stream(lambda x: jnp.mean(learner(x) ** 2), optax.sgd(0.0))
        learner.reset_state()
        streamed = stream(XS[0]).outputs
        settled = stream(XS[0]).outputs
    assert np.allclose(without, inner.evaluate(XS))
    assert np.allclose(stepped, without[0])
    assert np.allclose(streamed, without[0])
    assert not np.allclose(without, given)
    with brainstate.environ.context(fit=True):
        assert np.array_equal(learner.evaluate(XS), given)
        # Without dropout all samples and outputs are the same.
        assert len(np.unique(settled)) == 1
        assert len(np.unique(stream(XS[0]).outputs)) > 1


def test_validation_is_without_dropout():
    seen = []

    def step(x):
        seen.append(brainstate.environ.get('fit'))
        return jnp.mean(learner(x) ** 2)

    with brainstate.environ.context(fit=True):
        learner = bt.compile(Dropped(), 'd_rtrl', X, batch_size=4)
        options = {'optimizer': optax.sgd(0.0), 'updates': 2, 'show': False}
        found = bt.fit(learner, [(XS,)], step_fn=step, validate=[(XS,)], **options)
    assert set(seen) == {True, False}
    inner = bt.compile(learner.model.inner, 'd_rtrl', X, batch_size=4)
    expected = np.mean(inner.evaluate(XS) ** 2)
    assert np.allclose(found['valid_loss'][-1], expected, rtol=1e-5)


def test_a_model_that_reads_fit():
    with pytest.raises(bt.CompilationError, match=r'set\(fit=True\)'):
        bt.compile(Dropped(), 'd_rtrl', X, batch_size=4)


def test_a_time_step_that_changes():
    class Decay(brainstate.nn.Module):
        def __init__(self):
            super().__init__()
            self.w = brainstate.ParamState(jnp.ones(3))

        def init_state(self, batch_size=None, **kwargs):
            self.h = brainstate.HiddenState(jnp.zeros((batch_size, 3)))

        def update(self, x):
            dt = brainstate.environ.get('dt')
            self.h.value = self.h.value * jnp.exp(-dt / (5.0 * u.ms))
            self.h.value += self.w.value * x
            return self.h.value

    with brainstate.environ.context(dt=1.0 * u.ms):
        learner = bt.compile(Decay(), 'd_rtrl', X, batch_size=4)
        first = learner.evaluate(XS)
    with brainstate.environ.context(dt=5.0 * u.ms):
        second = learner.evaluate(XS)
    assert np.allclose(first[1], 1 + np.exp(-0.2))
    assert np.allclose(second[1], 1 + np.exp(-1.0))


# ---------------------------------------------------------------- other mistakes


def test_labels_without_a_time_axis_in_fit(learner):
    """The error names the sequences, although the loss fails first."""

    def step(x, label):
        logits = learner(x)
        return optax.softmax_cross_entropy_with_integer_labels(logits, label).mean()

    given = {'optimizer': optax.sgd(0.1), 'updates': 1, 'show': False}
    data = [(jnp.ones((3, 4, 3)), jnp.zeros(4, int))]
    with pytest.raises(ValueError, match=r'\(3, 4, 3\), \(4,\)'):
        bt.fit(learner, data, step_fn=step, **given)


def test_a_model_in_place_of_the_learner_in_fit(learner):
    with pytest.raises(TypeError, match=r'fit\(Leak, ...\)'):
        bt.fit(learner.model, [(XS,)], step_fn=lambda x: 0.0, optimizer=1, updates=1)


def test_a_shape_in_place_of_an_example():
    with pytest.raises(bt.CompilationError, match=r'jnp.zeros\(\(4, 3\)\)'):
        bt.compile(Leak(), 'd_rtrl', (4, 3), batch_size=4)


def test_a_misspelled_option_of_compile():
    with pytest.raises(TypeError, match=r'batch_size=...\?'):
        bt.compile(Leak(), 'd_rtrl', jnp.ones(3), batchsize=4)


def test_a_class_to_load_into(tmp_path):
    with pytest.raises(TypeError, match='a class'):
        bt.load(tmp_path, Leak)


def test_what_fails_inside_a_sequence_of_layers_is_named():
    """`Sequential` raises an error of its own, which prints the layer."""

    class Timed(brainstate.nn.Module):
        def update(self, x):
            return x * brainstate.environ.get('dt')

    net = brainstate.nn.Sequential(Timed(), Leak())
    with pytest.raises(bt.CompilationError, match=r'--dt 0\.1ms') as caught:
        bt.compile(net, 'd_rtrl', X, batch_size=4)
    assert 'test_first_use.py:' in str(caught.value)
    assert 'ShapedArray' not in str(caught.value)
    net = brainstate.nn.Sequential(brainstate.nn.Linear(3, 5), Leak())
    with pytest.raises(bt.CompilationError, match='dot_general'):
        bt.compile(net, 'd_rtrl', X, batch_size=4)


def test_weights_for_a_model_of_another_framework(tmp_path):
    with pytest.raises(TypeError, match='load_weights'):
        bt.load(tmp_path / 'net.safetensors', lambda params, state, x: (state, x))


def test_the_command_alone_prints_its_help(capsys):
    assert cli.main([]) == cli.USAGE
    assert 'examples:' in capsys.readouterr().err


def test_a_model_on_the_command_line_that_needs_arguments(tmp_path, monkeypatch):
    file = tmp_path / 'own.py'
    file.write_text('def build(inputs, outputs, units=3):\n    pass\n')
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match=r'inputs=\.\.\., outputs='):
        look.load('own.py:build')
    with pytest.raises(ValueError, match="no 'other'"):
        look.load('own.py:other')


def test_an_optimizer_that_is_made_for_every_update():
    learner = bt.compile(Leak(), 'd_rtrl', X, batch_size=4)
    gradients = learner.weights()
    for _ in range(3):
        learner.apply(gradients, optax.adam(1e-3))
    with pytest.warns(RecompilationWarning, match='outside the loop'):
        learner.apply(gradients, optax.adam(1e-3))
    with warnings.catch_warnings():
        warnings.simplefilter('error')
        learner.apply(gradients, optax.adam(1e-3))
