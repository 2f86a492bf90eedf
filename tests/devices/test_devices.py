"""Learners on several devices equal those on one; a process of its own has eight."""

import functools
import os
import re
import subprocess
import sys
from pathlib import Path

import brainevent
import brainstate
import braintools
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

import braintrace
from braintrace.learner.access import place_inputs, synchronised
from braintrace.learner.binding import bind_step_fn
from braintrace.learner.carried import read_traces, rule_value
from braintrace.learner.placement import Placement
from braintrace.learner.sequences import gradient_program_of
from braintrace.operations import whole_traces

DEVICES = 8
has_devices = pytest.mark.skipif(
    jax.device_count() < DEVICES, reason='run by test_on_eight_devices'
)
is_long = pytest.mark.skipif(
    os.environ.get('ZOO') != 'all', reason='`make zoo` runs all'
)
T, BATCH, INPUTS, UNITS = 6, 8, 4, 16


def test_on_eight_devices():
    """All tests of this file that need devices."""
    command = [sys.executable, '-m', 'pytest', '-p', 'no:xdist', __file__]
    # Its messages are not among those of the daily tests in one process.
    settings = {'JAX_NUM_CPU_DEVICES': str(DEVICES), 'MESSAGES': ''}
    if jax.device_count() == DEVICES:
        pytest.skip('this is that run')
    done = subprocess.run(
        command,
        env=os.environ | settings,
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        timeout=900,
    )
    assert done.returncode == 0, done.stdout[-4000:]
    passed = int(re.search(r'(\d+) passed', done.stdout)[1])
    assert passed >= 12


# ---------------------------------------------------------------- models


class Sparse(brainstate.nn.Module):
    """Rates with sparse recurrent connections."""

    def __init__(self):
        super().__init__()
        rng = np.random.default_rng(0)
        order = rng.random((UNITS, UNITS)).argsort(axis=1)
        dense = 0.3 * rng.normal(size=(UNITS, UNITS)) * (order < 8)  # 128 synapses
        matrix = brainevent.CSR.fromdense(jnp.asarray(dense, 'float32'))
        self.recurrent = brainstate.nn.SparseLinear(matrix)
        self.feed = brainstate.nn.Linear(INPUTS, UNITS)

    def init_state(self, batch_size=None, **kwargs):
        self.h = brainstate.HiddenState(jnp.zeros((batch_size, UNITS)))

    def update(self, x):
        drive = self.feed(x) + self.recurrent(self.h.value)
        self.h.value = 0.8 * self.h.value + jnp.tanh(drive)
        return self.h.value


class Convolution(brainstate.nn.Module):
    """A leaky state after a convolution, which reads it again."""

    def __init__(self):
        super().__init__()
        self.feed = brainstate.nn.Conv1d((6, INPUTS), UNITS, 3)

    def init_state(self, batch_size=None, **kwargs):
        self.h = brainstate.HiddenState(jnp.zeros((batch_size, 6, UNITS)))

    def update(self, x):
        image = jnp.repeat(x[:, None], 6, axis=1) * jnp.arange(1.0, 7.0)[:, None]
        self.h.value = 0.8 * self.h.value + jnp.tanh(self.feed(image))
        return self.h.value


class Adaptive(brainstate.nn.Module):
    """An adaptive integrate-and-fire layer with a read-out."""

    def __init__(self):
        super().__init__()
        self.feed = brainstate.nn.Linear(INPUTS, UNITS)
        self.recurrent = brainstate.nn.Linear(UNITS, UNITS, b_init=None)
        self.readout = brainstate.nn.Linear(UNITS, 3)

    def init_state(self, batch_size=None, **kwargs):
        self.v = brainstate.HiddenState(jnp.zeros((batch_size, UNITS)))
        self.a = brainstate.HiddenState(jnp.zeros((batch_size, UNITS)))

    def update(self, x):
        spike = braintools.surrogate.sigmoid(self.v.value - 0.3 - self.a.value)
        drive = self.feed(x) + self.recurrent(spike)
        self.a.value = 0.9 * self.a.value + 0.1 * spike
        self.v.value = 0.8 * self.v.value + drive - 0.3 * spike
        return self.readout(spike)


MODELS = {
    'adaptive': Adaptive,
    'gru': lambda: brainstate.nn.GRUCell(INPUTS, UNITS),
    'lstm': lambda: brainstate.nn.LSTMCell(INPUTS, UNITS),
    'sparse': Sparse,
    'convolution': Convolution,
    'stack': lambda: brainstate.nn.Sequential(
        brainstate.nn.GRUCell(INPUTS, UNITS), brainstate.nn.GRUCell(UNITS, UNITS)
    ),
}
SPLITS = {
    'data': ((8,), {'batch': 'data'}),
    'neurons': ((8,), {'neurons': 'model'}),
    'both': ((4, 2), {'batch': 'data', 'neurons': 'model'}),
}


def mesh_of(split, kind=AxisType.Auto):
    shape, shard = SPLITS[split]
    names = tuple(shard.values())
    return jax.make_mesh(shape, names, axis_types=(kind,) * len(names))


def made(name, rule='d_rtrl', **options):
    brainstate.random.seed(0)
    x = jnp.zeros((BATCH, INPUTS))
    return braintrace.compile(MODELS[name](), rule, x, batch_size=BATCH, **options)


def inputs():
    draw = np.random.default_rng(1).normal(size=(T, BATCH, INPUTS))
    return jnp.asarray(draw, 'float32')


def results(learner, xs):
    """A gradient with traces carried, then updates at every step."""
    step = lambda x: jnp.mean((learner(x) - 0.5) ** 2)
    learner.etrace_grad(xs, step_fn=step)
    found = {'carried': learner.etrace_grad(xs, step_fn=step)}
    learner.etrace_online(xs, step_fn=step, optimizer=optax.sgd(0.1))
    found['traces'] = [trace.value for trace in learner.traces.values()]
    found['weights'] = [state.value for state in learner.param_states.values()]
    found['states'] = [state.value for state in learner.hidden_states.values()]
    return found


@functools.cache
def on_one_device(name):
    return results(made(name), inputs())


def assert_same(found, wanted, limit=1e-6):
    pairs = list(zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True))
    assert any(np.any(np.asarray(theirs)) for _, theirs in pairs)
    for mine, theirs in pairs:
        mine, theirs = np.asarray(mine), np.asarray(theirs)
        scale = max(1.0, float(np.max(np.abs(theirs), initial=0)))
        assert np.max(np.abs(mine - theirs), initial=0) <= limit * scale


# ---------------------------------------------------------------- equal to one device


def programs(learner, fresh=False):
    """The text of the compiled gradient, with traces carried unless ``fresh``."""
    step = lambda x: jnp.mean((learner(x) - 0.5) ** 2)
    with synchronised(learner):
        xs = place_inputs(learner, (inputs(),), 1)
        binding = bind_step_fn(learner, step, xs)
        solver, program = gradient_program_of(learner, binding, learner.rule, fresh)
        traces = [] if fresh else read_traces(learner, solver)
        given = (*binding.read(), traces, binding.inputs(xs), jnp.ones(T), 1.0)
        state = rule_value(learner)
        return program.run.lower(*given, state, masked=False).compile().as_text()


def gathered_sizes(text):
    """Elements of every array that is gathered from other devices."""
    found = [0]
    for line in text.splitlines():
        result = re.search(r' = (.*?) all-gather(-start)?\(', line)
        if result is not None:
            shapes = re.findall(r'\w+\[([\d,]*)\]', result[1])
            sizes = [np.prod([int(n) for n in s.split(',') if n]) for s in shapes]
            found.append(int(max(sizes)))
    return found


def exchanges(text):
    """Operations between devices: those of the whole program, and of them those that
    some loop repeats."""
    lines_of, name = {}, ''
    for line in text.splitlines():
        head = re.match(r'(?:ENTRY )?%?([\w.-]+) .*\{$', line)
        name = head[1] if head else name
        lines_of.setdefault(name, []).append(line)
    called = lambda line: re.findall(
        r'(?:body|condition|calls|to_apply)=%?([\w.-]+)', line
    )
    todo = [
        body
        for lines in lines_of.values()
        for line in lines
        for body in re.findall(r' while\(.*body=%?([\w.-]+)', line)
    ]
    assert todo
    repeated = set()
    while todo:
        name = todo.pop()
        if name not in repeated:
            repeated.add(name)
            todo += [c for line in lines_of[name] for c in called(line)]
    is_exchange = re.compile(
        r' (all-reduce|all-gather|all-to-all|reduce-scatter|collective-permute)'
        r'(-start)?\('
    ).search
    of = lambda names: [x for n in names for x in lines_of[n] if is_exchange(x)]
    return of(lines_of), of(repeated)


@has_devices
@pytest.mark.parametrize(('rule', 'fresh'), [('d_rtrl', True), ('pp_prop', False)])
@pytest.mark.parametrize('name', MODELS)
def test_gradients_are_summed_once(name, rule, fresh):
    """If samples are split, one sum after all blocks has the gradients and the losses,
    and no loop over blocks or steps has anything to exchange."""
    found = []
    for placed in ({}, {'mesh': mesh_of('data'), 'shard': {'batch': 'data'}}):
        learner = made(name, rule, block=2, **placed)
        step = lambda x, learner=learner: jnp.mean((learner(x) - 0.5) ** 2)
        given = {'step_fn': step, 'fresh': fresh, 'return_value': True}
        found.append([learner.etrace_grad(inputs(), **given) for _ in range(2)])
    assert_same(found[1], found[0])
    every, repeated = exchanges(programs(learner, fresh))
    assert sum('all-reduce' in line for line in every) == 1
    # JAX joins the steps and samples of a convolution in one axis and gathers inputs;
    # factors of an LSTM pick values of positions from an array of all samples.
    if (name, fresh) in (
        ('convolution', True),
        ('convolution', False),
        ('lstm', False),
    ):
        repeated = [line for line in repeated if 'all-gather' not in line]
    assert repeated == []


@has_devices
@pytest.mark.parametrize('split', SPLITS)
@pytest.mark.parametrize('name', MODELS)
def test_equal_to_one_device(name, split):
    wanted = on_one_device(name)
    assert all(np.any(np.asarray(g)) for g in jax.tree.leaves(wanted['carried']))
    learner = made(name, mesh=mesh_of(split), shard=SPLITS[split][1])
    assert_same(results(learner, inputs()), wanted)
    for trace in learner.traces.values():
        for array in jax.tree.leaves(trace.value):
            shard = array.addressable_shards[0].data
            assert shard.size * DEVICES == array.size, array.sharding
    for state in learner.hidden_states.values():
        shard = state.value.addressable_shards[0].data
        assert shard.size * DEVICES == state.value.size
    sizes = [a.size for t in learner.traces.values() for a in jax.tree.leaves(t.value)]
    text = programs(learner)
    assert max(gathered_sizes(text)) < max(sizes)
    # Activity of other neurons has to be gathered where there are recurrent weights.
    is_gathered = split != 'data' and name != 'convolution'
    assert max(gathered_sizes(text)) > 0 or not is_gathered
    assert ('braintrace_to_' in text) == (name == 'sparse')


@has_devices
@pytest.mark.parametrize('split', SPLITS)
@pytest.mark.parametrize('name', ['adaptive', 'gru'])
def test_each_device_visits_its_own_traces_by_a_kernel(name, split, monkeypatch):
    wanted = on_one_device(name)
    learner = made(name, mesh=mesh_of(split), shard=SPLITS[split][1])
    monkeypatch.setattr(whole_traces, 'LEAST_FOR_KERNEL', 1)
    assert_same(results(learner, inputs()), wanted)
    assert 'braintrace_visit' in programs(learner)


RULES = sorted(
    name
    for name, preset in braintrace.rules.PRESETS.items()
    if preset.default.has_trace
)


@has_devices
@pytest.mark.parametrize('rule', RULES)
def test_every_rule_with_a_trace(rule):
    options = {'seed': 0} if rule in ('uoro', 'kf_rtrl') else {}
    step_of = lambda learner: lambda x: jnp.mean((learner(x) - 0.5) ** 2)
    found = []
    for placed in ({}, {'mesh': mesh_of('both')}):
        learner = made('adaptive', rule, **options, **placed)
        learner.etrace_evolve(inputs()[:2])
        given = {'step_fn': step_of(learner)}
        found.append(learner.etrace_grad(inputs(), **given))
    assert_same(found[1], found[0], 2e-6)


@has_devices
@pytest.mark.parametrize('kind', [AxisType.Auto, AxisType.Explicit])
def test_inputs_that_are_split_say_how(kind):
    wanted = on_one_device('gru')
    split = NamedSharding(mesh_of('data', kind), PartitionSpec(None, 'data'))
    learner = made('gru')
    assert_same(results(learner, jax.device_put(inputs(), split)), wanted)
    for trace in learner.traces.values():
        for array in jax.tree.leaves(trace.value):
            assert array.addressable_shards[0].data.size * DEVICES == array.size


@has_devices
def test_other_ways_of_running():
    found = []
    for placed in ({}, {'mesh': mesh_of('both')}):
        learner = made('adaptive', **placed)
        step = lambda x, learner=learner: jnp.mean((learner(x) - 0.5) ** 2)
        mine = [learner.evaluate(inputs())]
        mine.append(learner.etrace_grad(inputs(), step_fn=step, fresh=True))
        learner.etrace_evolve(inputs()[:2])
        stream = learner.stream(step, optax.adam(1e-2), decay=0.9)
        mine += [stream(x) for x in inputs()[:3]]
        assert stream.program_count == 1
        mine += [stream.gradient(inputs()[3]), stream.predict(inputs()[4])]
        stream.apply(scale=0.1)
        loss = functools.partial(step, inputs()[5])
        grad = brainstate.transform.grad(loss, learner.param_states)
        mine += [dict(grad()), [t.value for t in learner.traces.values()]]
        found.append(mine)
    assert_same(found[1], found[0])


@has_devices
@is_long
def test_explicit_axes():
    wanted = on_one_device('gru')
    mesh = mesh_of('both', AxisType.Explicit)
    assert_same(results(made('gru', mesh=mesh), inputs()), wanted)


@has_devices
@is_long
def test_measuring():
    step_of = lambda learner: lambda x: jnp.mean((learner(x) - 0.5) ** 2)
    found = []
    for placed in ({}, {'mesh': mesh_of('both')}):
        learner = made('gru', **placed)
        check = learner.gradient_check(inputs(), step_fn=step_of(learner))
        sure = learner.certificate(inputs(), step_fn=step_of(learner), directions=2)
        found.append([[row.cosine for row in check.rows], sure.descent])
    assert_same(found[1], found[0], 1e-5)


@has_devices
def test_training():
    def batches(number):
        draw = np.random.default_rng(number).normal(size=(T, BATCH, INPUTS))
        return (draw.astype('float32'),)

    losses = []
    for placed in ({}, {'mesh': 'cores'}):
        learner = made('gru', **placed)
        step = lambda x, learner=learner: (jnp.mean((learner(x) - 0.5) ** 2), None)
        given = {'step_fn': step, 'optimizer': optax.adam(1e-2), 'updates': 3}
        result = braintrace.fit(learner, batches, **given, show=False)
        losses.append([record['loss'] for record in result.records])
    assert_same(losses[1], losses[0])
    assert losses[0][2] < losses[0][0]


@has_devices
@is_long
def test_a_mapped_model_and_a_new_batch_size():
    def one(placed):
        brainstate.random.seed(0)
        cell = brainstate.nn.GRUCell(INPUTS, UNITS)
        x = jnp.zeros((BATCH, INPUTS))
        learner = braintrace.compile(
            cell, 'd_rtrl', x, batch_size=BATCH, vmap=True, **placed
        )
        step = lambda x: jnp.mean((learner(x) - 0.5) ** 2)
        first = learner.etrace_grad(inputs(), step_fn=step)
        learner.reset_state(batch_size=16)
        more = jnp.concatenate([inputs(), inputs()], axis=1)
        return first, learner.etrace_grad(more, step_fn=step), learner

    *found, learner = one({'mesh': mesh_of('data')})
    assert_same(found, one({})[:2])
    for state in learner.hidden_states.values():
        assert state.value.addressable_shards[0].data.shape[0] == 2


@has_devices
def test_memory_of_each_device():
    learner = made('adaptive')
    whole = learner.memory_plan(T)
    part = learner.memory_plan(T, mesh=mesh_of('both'))
    assert sum(part.traces.values()) * DEVICES == sum(whole.traces.values())
    assert part.one_pass < whole.one_pass / 3


@has_devices
def test_a_checkpoint_moves_to_other_numbers_of_devices(tmp_path):
    """Saved on 8 devices, continued on 2, then on 1, as if on one throughout."""

    def continued(learner, folder):
        step = lambda x: jnp.mean((learner(x) - 0.5) ** 2)
        if folder.exists():
            learner.load(folder)
        learner.etrace_online(inputs(), step_fn=step, optimizer=optax.sgd(0.1))
        learner.save(folder)
        return [s.value for s in (*learner.traces.values(), *learner.states().values())]

    one_device = tmp_path / 'one'
    for count in (8, 2, 1):
        mesh = jax.sharding.Mesh(np.array(jax.devices()[:count]), ('data',))
        learner = made('adaptive', mesh=mesh)
        found = continued(learner, tmp_path / 'moved')
        used = {len(x.sharding.device_set) for x in jax.tree.leaves(found)}
        assert max(used) == count
        # Three runs of updates, each of which starts from the rounding of the last.
        assert_same(found, continued(made('adaptive'), one_device), 1e-5)


# ---------------------------------------------------------------- what cannot work


@has_devices
def test_a_batch_that_devices_do_not_divide():
    mesh, x = mesh_of('data'), jnp.zeros((6, INPUTS))
    cell = brainstate.nn.GRUCell(INPUTS, UNITS)
    with pytest.raises(ValueError, match='6 on 8'):
        braintrace.compile(cell, 'd_rtrl', x, batch_size=6, mesh=mesh)


@has_devices
def test_a_model_without_samples():
    mesh, x = mesh_of('data'), jnp.zeros(INPUTS)
    cell = brainstate.nn.GRUCell(INPUTS, UNITS)
    with pytest.raises(ValueError, match='first axis'):
        braintrace.compile(cell, 'd_rtrl', x, mesh=mesh)


@pytest.mark.parametrize(
    ('options', 'told'),
    [
        ({'mesh': 3}, 'mesh=3'),
        ({'mesh': 'rows'}, "mesh='rows'"),
        ({'shard': {'batch': 'data'}}, 'shard without mesh'),
        ({'mesh': 'cores', 'shard': {'samples': 'data'}}, 'samples|one CPU device'),
        ({'mesh': 'cores', 'shard': {'batch': 'rows'}}, 'rows|one CPU device'),
    ],
)
def test_mistakes(options, told):
    with pytest.raises((TypeError, ValueError), match=told):
        Placement.of(options.get('mesh'), options.get('shard'))
