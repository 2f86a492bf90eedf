"""Flax NNX modules, unmodified: gradients beside those of nnx.grad over a loop, and training in its own idiom."""

import copy
import os

import jax
import jax.numpy as jnp
import optax
import pytest
from flax import nnx

import braintrace as bt
from braintrace.learner.transaction import Transaction
from formulas import close

ALL = os.environ.get('ZOO') == 'all'
B, I, H, T = 2, 3, 4, 4  # noqa: E741
XS = jax.random.normal(jax.random.key(1), (T, B, I))
CELLS = {
    'gru': lambda: nnx.GRUCell(I, H, rngs=nnx.Rngs(0)),
    'lstm': lambda: nnx.LSTMCell(I, H, rngs=nnx.Rngs(0)),
    'optimized lstm': lambda: nnx.OptimizedLSTMCell(I, H, rngs=nnx.Rngs(0)),
    'simple': lambda: nnx.SimpleCell(I, H, rngs=nnx.Rngs(0)),
    'residual': lambda: nnx.SimpleCell(I, H, residual=True, rngs=nnx.Rngs(0)),
}


@nnx.jit
def bptt(model, xs, carry=None):
    """The mean loss of a sequence, differentiated by nnx."""

    def loss(model):
        total, c = 0.0, carry
        for x in xs:
            c, y = (c, model(x)) if carry is None else model(c, x)
            total += jnp.mean(y**2)
        return total / len(xs)

    return nnx.grad(loss)(model)


def squared(learner):
    return lambda x: jnp.mean(learner(x) ** 2)


def credits_of(learner):
    return {r.context['name']: r.context['credit'] for r in learner.report.credits}


@pytest.mark.parametrize('name', CELLS)
def test_stock_cells_give_the_gradient_of_bptt(name):
    """By influences carried forward; a cell much like another in one window."""
    cell = CELLS[name]()
    learner = bt.compile(
        cell, 'rtrl' if ALL or name in ('gru', 'residual') else 'tbptt', XS[0]
    )
    want = bptt(cell, XS, cell.initialize_carry((B, I), nnx.Rngs(0)))
    close(learner.etrace_grad(XS, step_fn=squared(learner)), want)


@pytest.mark.parametrize('name', ['gru', 'lstm', 'optimized lstm', 'residual'])
def test_reports_name_variables_as_flax_does(name):
    cell = CELLS[name]()
    graph = bt.compile_etrace_graph(cell, XS[0])
    states = {'carry.0', 'carry.1'} if 'lstm' in name else {'carry'}
    (group,) = graph.hidden_groups
    assert {'.'.join(p) for p in group.hidden_paths} == states
    paths = {
        '.'.join(path) for path, _ in nnx.to_flat_state(nnx.state(cell, nnx.Param))
    }
    found = {r.context['name']: r.context['credit'] for r in graph.report.credits}
    assert found == dict.fromkeys(paths, 'local')
    out, new, _ = graph.module_info.jaxpr_call(XS[0])
    carry, want = cell(cell.initialize_carry((B, I), nnx.Rngs(0)), XS[0])
    close([out, jax.tree.leaves(new)], [want, jax.tree.leaves(carry)])
    zeros = graph.hidden_perturb.init_perturb_data()
    close(graph.call_hidden_perturb((XS[0],), zeros), want)


def test_d_rtrl_of_a_cell_without_memory_of_its_own_is_one_step():
    """tanh(W x + U h): h reaches itself through U only, so every step counts for itself."""
    cell = CELLS['simple']()
    learner = bt.compile(cell, 'd_rtrl', XS[0])
    assert set(credits_of(learner).values()) == {'instantaneous'}
    carry, total = (
        jnp.zeros((B, H)),
        jax.tree.map(jnp.zeros_like, nnx.state(cell, nnx.Param)),
    )
    for x in XS:
        step = bptt(cell, x[None], carry)
        total = jax.tree.map(lambda a, b: a + b / T, total, step)
        carry, _ = cell(carry, x)
    close(learner.etrace_grad(XS, step_fn=squared(learner)), total)


class Membrane(nnx.Variable):
    pass


class Spiking(nnx.Module):
    """Adaptive neurons that keep V, adaptation and a count of steps in Variables of their own, and a read-out."""

    def __init__(self, rngs, drop=0.0):
        self.dense = nnx.Linear(I, H, rngs=rngs)
        self.out = nnx.Linear(H, 2, rngs=rngs)
        self.decay = nnx.Param(jnp.full(H, 0.9))
        self.V = Membrane(jnp.zeros((B, H)))
        self.a = nnx.Variable(jnp.zeros((B, H)))
        self.steps = nnx.Variable(jnp.zeros((), jnp.int32))
        self.scale = nnx.Variable(jnp.full(H, 2.0))
        self.drop = nnx.Dropout(drop, rngs=rngs)

    def __call__(self, x):
        spike = jax.nn.sigmoid(4 * (self.V[...] - 1))
        self.a[...] = 0.8 * self.a[...] + spike
        self.V[...] = (
            self.decay[...] * self.V[...]
            + self.scale[...] * self.dense(x)
            - 0.3 * self.a[...]
        )
        self.steps[...] += 1
        return self.out(self.drop(self.V[...]))


def test_states_in_variables():
    model = Spiking(nnx.Rngs(0))
    learner = bt.compile(model, 'd_rtrl', XS[0])
    (group,) = learner.report.hidden_groups
    assert set(group.hidden_paths) == {('V',), ('a',)}
    assert learner.report.dynamic_states == (('steps',),)
    names = ['decay', 'dense.bias', 'dense.kernel', 'out.bias', 'out.kernel']
    assert credits_of(learner) == dict.fromkeys(names, 'exact')
    learner.etrace_evolve(XS)  # traces go on from here
    close(
        learner.etrace_grad(XS, step_fn=squared(learner)),
        second_pass(Spiking(nnx.Rngs(0)), XS),
    )
    assert int(model.steps[...]) == 2 * T
    learner.reset_state()
    assert int(model.steps[...]) == 0
    assert float(jnp.abs(model.V[...]).max()) == 0


@nnx.jit
@nnx.grad
def second_pass(model, xs):
    """The loss of a second pass over the sequence, credit reaching back into the first."""
    for x in xs:
        model(x)
    return sum(jnp.mean(model(x) ** 2) for x in xs) / len(xs)


class Handing(nnx.Module):
    """A convolutional LSTM of one channel and a GRU on top of it, their carries handed around by the caller."""

    def __init__(self, rngs):
        self.gates = nnx.Conv(2, 4, (3,), rngs=rngs)
        self.top = nnx.GRUCell(I, H, rngs=rngs)
        self.out = nnx.Linear(H, 2, rngs=rngs)

    def __call__(self, carry, x):
        below, above = carry['below'], carry['above']
        z = self.gates(jnp.concatenate([x[..., None], below[0]], -1))
        i, f, g, o = jnp.split(z, 4, axis=-1)
        c = nnx.sigmoid(f) * below[1] + nnx.sigmoid(i) * jnp.tanh(g)
        h = nnx.sigmoid(o) * jnp.tanh(c)
        above, y = self.top(above, h[..., 0])
        return {'below': (h, c), 'above': above}, self.out(y)


def test_carries_handed_around():
    model = Handing(nnx.Rngs(0))
    zeros = jnp.zeros((B, I, 1))
    carry = {'below': (zeros, zeros), 'above': jnp.zeros((B, H))}
    learner = bt.compile(model, 'rtrl' if ALL else 'tbptt', XS[0], state=carry)
    below, above = sorted(learner.report.hidden_groups, key=lambda g: -g.num_state)
    assert set(below.hidden_paths) == {('carry', 'below', '0'), ('carry', 'below', '1')}
    assert above.hidden_paths == [('carry', 'above')]
    close(
        learner.etrace_grad(XS, step_fn=squared(learner), fresh=True),
        bptt(model, XS, carry),
    )
    last = learner.state
    learner.state = carry
    close(learner.state, carry)
    for x in XS:
        carry, _ = nnx.jit(model)(carry, x)
    close(last, carry)
    with pytest.raises(ValueError, match='a carry'):
        learner.state = zeros


def test_training_as_in_flax():
    model = Spiking(nnx.Rngs(0), drop=0.2)
    learner = bt.compile(model, 'd_rtrl', XS[0])
    optimizer = nnx.Optimizer(model, optax.sgd(0.05), wrt=nnx.Param)
    step, losses, counts = squared(learner), [], []
    for _ in range(15):
        grads, loss = learner.etrace_grad(
            XS, step_fn=step, fresh=True, return_value=True
        )
        optimizer.update(model, grads)
        losses.append(float(loss.mean()))
        counts.append(int(model.drop.rngs.count[...]))
    assert losses[-1] < 0.2 * losses[0]
    assert counts == [
        T * (i + 1) for i in range(15)
    ]  # random streams go on, fresh or not
    kept = learner._kept.programs.values()
    compiled = [p.run for p in kept if isinstance(p, Transaction)]
    assert [run._cache_size() for run in compiled] == [1]  # one for the sequence

    before = learner.params
    model.out.bias[...] = model.out.bias[...] + 100.0
    assert float(learner(XS[0]).min()) > 50  # what is changed outside is followed
    learner.params = before
    assert float(model.out.bias[...].max()) < 50

    losses = learner.etrace_online(XS, step_fn=step, optimizer=optax.sgd(0.1))
    assert losses.shape == (T,)
    assert float(jnp.abs(model.out.bias[...] - before['out']['bias'][...]).max()) > 0
    close(learner.params, nnx.state(model, nnx.Param))


def test_modes_are_followed_and_jit_is_refused_or_given_the_model():
    model = Spiking(nnx.Rngs(0), drop=0.5)
    learner = bt.compile(model, 'd_rtrl', XS[0])
    step = squared(learner)
    optimizer = nnx.Optimizer(model, optax.sgd(0.05), wrt=nnx.Param)

    @nnx.jit
    def train(model, optimizer, xs):
        options = {'fresh': True, 'return_value': True, 'loss_output': 'reduced'}
        grads, loss = learner.etrace_grad(xs, step_fn=step, params=model, **options)
        optimizer.update(model, grads)
        return loss

    losses = [float(train(model, optimizer, XS)) for _ in range(15)]
    assert losses[-1] < 0.5 * losses[0]
    assert int(model.drop.rngs.count[...]) == 15 * T
    assert (
        int(model.steps[...]) == 0
    )  # a call with a model of its own leaves the states alone

    for call in (
        lambda x: learner(x),
        lambda x: learner.etrace_grad(x[None], step_fn=step),
    ):
        with pytest.raises(bt.CompilationError, match='inside jit'):
            jax.jit(call)(XS[0])
    with pytest.raises(ValueError, match='fresh=False'):
        learner.etrace_grad(XS, step_fn=step, params=model, chunk_size=2)

    model.eval()
    with pytest.raises(bt.CompilationError, match='mode differ'):
        learner.etrace_grad(XS, step_fn=step, params=model, fresh=True)
    want = nnx.clone(model)(XS[0])
    close(learner(XS[0]), want)
    assert int(model.drop.rngs.count[...]) == 15 * T
    assert int(model.steps[...]) == 1


def test_a_larger_batch():
    cell = CELLS['gru']()
    learner = bt.compile(cell, 'd_rtrl', XS[0], batch_size=B)
    learner.reset_state(batch_size=5)
    assert learner(jnp.ones((5, I))).shape == (5, H)
    assert learner.state.shape == (5, H)
    assert ('dense_h', 'kernel') in learner.param_states
    assert learner.traces_of(('dense_h', 'kernel'))


class NoState(nnx.Module):
    def __init__(self):
        self.w = nnx.Param(jnp.ones((I, H)))

    def __call__(self, x):
        return x @ self.w[...]


class Writes(NoState):
    def __call__(self, x):
        self.w[...] = 0.9 * self.w[...]
        return super().__call__(x)


class Makes(NoState):
    def __call__(self, x):
        self.h = nnx.Variable(super().__call__(x))
        return self.h[...]


class Branches(Spiking):
    def __call__(self, x):
        return super().__call__(x) if x.sum() > 0 else x


def test_variables_in_a_list_are_layers():
    class Line(nnx.Module):
        def __init__(self):
            line = [nnx.Variable(jnp.zeros((B, H))) for _ in range(2)]
            self.line = nnx.List(line) if hasattr(nnx, 'List') else line
            self.w = nnx.Param(jnp.ones((I, H)))

        def __call__(self, x):
            first, second = self.line
            late = second[...]
            second[...] = first[...]
            first[...] = jnp.tanh(x @ self.w[...])
            return late

    with pytest.warns(bt.CreditWarning, match='dictionary'):
        learner = bt.compile(Line(), 'd_rtrl', XS[0])
    assert len(learner.graph.hidden_groups) == 2


BAD = {
    'no state': (lambda: (NoState(), {}), r'no hidden state(.|\n)*state=carry'),
    'a Param written': (
        lambda: (Writes(), {}),
        r'writes Param w(.|\n)*another nnx.Variable',
    ),
    'a Variable made': (
        lambda: (Makes(), {}),
        r'makes or drops Variables(.|\n)*__init__',
    ),
    'a branch': (
        lambda: (Branches(nnx.Rngs(0)), {}),
        r'TracerBoolConversionError(.|\n)*jax.numpy.where',
    ),
    'no carry': (lambda: (Handing(nnx.Rngs(0)), {}), r'and no carry(.|\n)*state=carry'),
    'a carry too many': (
        lambda: (Spiking(nnx.Rngs(0)), {'state': XS[0]}),
        r'and a carry(.|\n)*if and only if',
    ),
    'a carry of another form': (
        lambda: (CELLS['lstm'](), {'state': jnp.zeros((B, H))}),
        'with a carry of(.|\n)*returns',
    ),
    'a map': (
        lambda: (CELLS['gru'](), {'vmap': True, 'batch_size': B}),
        r'vmap=True(.|\n)*batch axis',
    ),
}


@pytest.mark.parametrize('name', BAD)
def test_bad_modules(name):
    make, why = BAD[name]
    model, options = make()
    with pytest.raises((bt.CompilationError, ValueError), match=why):
        bt.compile(model, 'd_rtrl', XS[0], **options)


def test_a_learner_that_follows_its_module_is_not_copied():
    learner = bt.compile(CELLS['simple'](), 'd_rtrl', XS[0])
    with pytest.raises(bt.CompilationError, match=r'nnx\.clone'):
        copy.deepcopy(learner)


def test_optimisers_of_flax_stay_outside():
    model = CELLS['gru']()
    learner = bt.compile(model, 'd_rtrl', XS[0])
    with pytest.raises(TypeError, match='in etrace_online'):
        learner.etrace_online(
            XS,
            step_fn=squared(learner),
            optimizer=nnx.Optimizer(model, optax.sgd(0.1), wrt=nnx.Param),
        )
