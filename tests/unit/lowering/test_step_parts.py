"""Parts of a lowered step against dense derivatives of the same step by JAX alone.

A step is a function (w, h, x) -> (loss, h) of dictionaries of arrays; every state is a hidden state.
"""

from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from braintrace.analysis.analysed import analyse
from braintrace.compiled_step import Values
from braintrace.derivatives import (
    joint_signals,
    pull_back,
    slopes_at_positions,
    transitions,
)
from braintrace.lowering import Stages, lower
from braintrace.lowering.invariants import StepInvariants
from braintrace.program.bare import program_of_jaxpr
from gradients.cases import B, H, I, drawn

X = jnp.asarray(drawn(B, I))


class Lowered:
    """A step, its stages, and the values of what it reads by variable."""

    def __init__(self, step, w, h):
        self.step = step
        self.given = tuple(
            {k: jnp.asarray(0.7 * drawn(*s, seed=n)) for n, (k, s) in enumerate(p.items())}
            for p in (w, h)
        )  # fmt: skip
        closed = jax.make_jaxpr(lambda w, h, x: step(w, h, x))(*self.given, X)
        *read, x = closed.jaxpr.invars
        self.w, self.h = read[: len(w)], read[len(w) :]
        names, new = sorted(h), closed.jaxpr.outvars[1:]
        program = program_of_jaxpr(
            closed,
            dict(zip(new, self.h, strict=True)),
            self.w,
            dict(zip(self.h, ((n,) for n in names), strict=True)),
            dict(zip(new, ((n,) for n in names), strict=True)),
            {(n,): SimpleNamespace(varshape=h[n]) for n in names},
        )
        self.stages = Stages(analyse(program), program.outputs[:1])
        self.compiled = lower(self.stages)
        values = jax.tree.leaves(self.given)
        self.parameters = Values(zip(self.w, values, strict=False))
        self.states = Values(zip(self.h, values[len(w) :], strict=True))
        self.inputs = Values({x: X})
        self.constants = self.compiled.constants(self.parameters, self.states)

    def values(self):
        """All that derivatives read of one step."""
        step, given = self.compiled, self.states | self.inputs
        given |= step.project(self.constants, self.inputs)
        new, kept = step.advance(self.constants, given)
        given |= kept | {v: new[old] for old, v in self.stages.carried}
        return given | step.complete(self.constants, given)

    def jacobian(self, new, old):
        """∂new/∂old of the step, by position: (B, H, B, H)."""
        w, h = self.given
        return jax.jacrev(lambda v: self.step(w, {**h, old: v}, X)[1][new])(h[old])


def close(a, b):
    np.testing.assert_allclose(a, b, rtol=1e-9, atol=1e-12)


def diagonal(jacobian):
    return jnp.einsum('bhbh->bh', jacobian)


def gru(w, h, x):
    """A product of joined inputs, and a gate that all units share."""
    joined = jnp.concatenate([x, h['h']], -1)
    gate = jax.nn.sigmoid(x @ w['gate'])
    new = gate * h['h'] + (1 - gate) * jnp.tanh(joined @ w['w'])
    return jnp.mean((new @ w['out']) ** 2), {'h': new}


WEIGHTS = {'gate': (I, 1), 'out': (H, 2), 'w': (I + H, H)}


@pytest.fixture
def cell(x64):
    return Lowered(gru, WEIGHTS, {'h': (B, H)})


def test_a_step_in_parts_and_as_a_whole(cell):
    step, (old,) = cell.compiled, cell.h
    loss, wanted = cell.step(*cell.given, X)
    values = cell.values()
    close(values[cell.stages.next_states[0]], wanted['h'])
    close(step.outputs(cell.constants, values)[cell.stages.targets[0]], loss)
    once, _ = step.advance_once(cell.constants, cell.states | cell.inputs)
    close(once[old], wanted['h'])
    for run in (step.run, step.run_deep):
        new, (found,), _ = run(cell.parameters, cell.states, cell.inputs)
        close(new[old], wanted['h'])
        close(found, loss)


def test_the_part_of_a_product_that_reads_inputs_leaves_the_loop(cell):
    products = lambda numbers: [
        [v.aval.shape for v in cell.stages.equations[i].invars]
        for i in numbers
        if cell.stages.equations[i].primitive.name == 'dot_general'
    ]
    in_loop = cell.stages.needed(cell.stages.next_states, cell.stages.projected)
    assert products(in_loop) == [[(B, H), (H, H)]]
    assert [(B, I), (I, H)] in products(cell.stages.core)
    assert [(B, I + H), (I + H, H)] in [
        [v.aval.shape for v in e.invars] for e in cell.stages.unsplit
    ]


def test_derivatives_of_a_run(cell):
    """As a whole it is the step; a deep run cuts what passes from one position to another across time."""
    (old,) = cell.h
    dense = cell.jacobian('h', 'h')
    of = lambda run: jax.jacrev(
        lambda v: run(cell.parameters, Values({old: v}), cell.inputs)[0][old]
    )(cell.states[old])
    close(of(cell.compiled.run), dense)
    mask = jnp.eye(B * H).reshape(B, H, B, H)
    own = diagonal(of(cell.compiled.run_deep))
    gate = jax.nn.sigmoid(X @ cell.given[0]['gate'])
    close(own, jnp.broadcast_to(gate, (B, H)))
    close(of(cell.compiled.run_deep) * (1 - mask), 0 * dense)
    assert float(jnp.abs(dense * (1 - mask)).max()) > 0.01


def test_a_silent_step_sends_nothing_back_from_its_target(cell):
    def loss(parameters, silent):
        given = (cell.states, cell.inputs, jnp.asarray(silent))
        return cell.compiled.run(parameters, *given)[1][0]

    assert not any(jax.tree.leaves(jax.tree.map(jnp.any, jax.grad(loss)(cell.parameters, True))))  # fmt: skip
    found = jax.grad(loss)(cell.parameters, False)
    wanted = jax.grad(lambda w: cell.step(w, cell.given[1], X)[0])(cell.given[0])
    jax.tree.map(close, list(found.values()), list(wanted.values()))


def test_derivatives_of_the_local_step(cell):
    """D, the pull-back to results of taps, and slopes where positions share an element."""
    values, compiled = cell.values(), cell.compiled
    gate = jax.nn.sigmoid(X @ cell.given[0]['gate'])
    ((transition, inner),) = transitions(compiled, cell.constants, values)
    assert not inner  # one state
    assert list(transition) == [(0, 0)]
    close(transition[0, 0], jnp.broadcast_to(gate, (B, H)))
    y = jnp.concatenate([X, cell.given[1]['h']], -1) @ cell.given[0]['w']
    credit = jnp.asarray(drawn(B, H, seed=7))
    (pulled,) = pull_back(compiled, cell.constants, values, [{0: credit}])
    slope = (1 - gate) * (1 - jnp.tanh(y) ** 2)
    sums = [x for v, x in pulled.items() if v.aval.shape == (B, H)]
    assert len(sums) == 2  # of inputs and of states
    for found in sums:
        close(found, slope * credit)
    (slopes,) = slopes_at_positions(compiled, cell.constants, values)
    ((shared, found),) = slopes.items()
    assert shared.aval.shape == (B, 1)
    close(found[0], gate * (1 - gate) * (cell.given[1]['h'] - jnp.tanh(y)))


def coupled(w, h, x):
    """One group of c and h: h reads the new c position by position and through a product; the loss reads both, and
    the old c. A second group reads the new h."""
    c = 0.8 * h['c'] + x @ w['in']
    new_h = jnp.tanh(c) * 0.5 * h['h'] + c @ w['mix']
    g = 0.9 * h['g'] + jnp.tanh(new_h @ w['up'])
    loss = jnp.sum(g**2) + jnp.sum(new_h * h['c']) + 0.3 * jnp.sum(c**3)
    return loss, {'c': c, 'g': g, 'h': new_h}


def test_signals_of_states_that_read_each_other(x64):
    """L: new states of a group are read as they are along kept edges, and perturbed elsewhere; R: the old c beside all
    new states. By hand, one perturbation for each."""
    shapes = {'in': (I, H), 'mix': (H, H), 'up': (H, H)}
    step = Lowered(coupled, shapes, dict.fromkeys('cgh', (B, H)))
    (w, h), values = step.given, step.values()

    def loss(d, old_c):
        c = 0.8 * h['c'] + X @ w['in']
        read = c + d['c']
        new_h = jnp.tanh(c) * 0.5 * h['h'] + read @ w['mix'] + d['h']
        g = 0.9 * h['g'] + jnp.tanh(new_h @ w['up']) + d['g']
        return jnp.sum(g**2) + jnp.sum(new_h * old_c) + 0.3 * jnp.sum(read**3)

    zeros = {n: jnp.zeros((B, H)) for n in 'cgh'}
    right, old_c = jax.grad(loss, (0, 1))(zeros, h['c'])
    inner = [t for _, t in transitions(step.compiled, step.constants, values)]
    slopes = [[] for _ in inner]
    one = [jnp.ones(())]
    _, _, signals, reads = joint_signals(
        step.compiled, step.constants, values, one, inner, slopes
    )
    by_name = {
        path[0]: (signals[g].get(i), reads[g].get(i))
        for g, group in enumerate(step.stages.analysed.groups)
        for i, path in enumerate(group.hidden_paths)
    }
    assert len(step.stages.analysed.groups) == 2
    for name in 'cgh':
        close(by_name[name][0], right[name])
    close(by_name['c'][1], old_c)
    assert by_name['h'][1] is None
    assert by_name['g'][1] is None


# ---------------------------------------------------------------- invariants


def leaky(w, h, x):
    """One constant leak, one that a parameter sets, and a path that depends on the input."""
    a = 0.9 * h['a'] + x @ w['a']
    b = w['decay'] * h['b'] + jnp.tanh(x @ w['b'])
    return jnp.sum((a + b) ** 2), {'a': a, 'b': b}


def test_what_holds_at_all_values(x64):
    step = Lowered(leaky, {'a': (I, H), 'b': (I, H), 'decay': (H,)}, {'a': (B, H), 'b': (B, H)})  # fmt: skip
    known = StepInvariants(step.stages)
    a, b = (step.stages.locals[g] for g in (0, 1))
    assert [g.hidden_paths for g in step.stages.analysed.groups] == [
        (('a',),),
        (('b',),),
    ]
    (into_a,) = a.taps
    assert (known.leak(0, into_a), known.kept(0)) == (0.9, 0.9)
    assert known.path_is_steady(0, into_a)
    assert known.is_read(0, into_a)
    assert known.kept(1) is None
    (product,) = [v for v in b.taps if not known.path_is_steady(1, v)]
    assert known.leak(1, product) is None
    for parameter in step.stages.program.parameters:
        assert known.moves_states(parameter)
        assert known.reaches_outputs(parameter)


def test_a_parameter_that_only_the_loss_reads(cell):
    known = StepInvariants(cell.stages)
    moved = [known.moves_states(p) for p in cell.stages.program.parameters]
    assert moved == [True, False, True]  # gate, out, w


# ---------------------------------------------------------------- loss and effects


LOSSES = {
    'mean': (lambda z: jnp.mean(z**2), True),
    'function of a sum': (lambda z: jnp.exp(0.1 * jnp.sum(z)), True),
    'largest': (jnp.max, False),
    'product of sums': (lambda z: jnp.sum(z) * jnp.sum(z**2), False),
}


@pytest.mark.parametrize('name', LOSSES)
def test_a_loss_as_a_sum_over_samples(name, x64):
    loss, is_sum = LOSSES[name]

    def step(w, h, x):
        new = jnp.tanh(0.5 * h['h'] + x @ w['w'])
        return loss(new), {'h': new}

    lowered = Lowered(step, {'w': (I, H)}, {'h': (B, H)})
    terms = lowered.compiled.find_loss_terms()
    assert (terms is not None) == is_sum
    if is_sum:
        found = terms.of_step(lowered.constants, lowered.values())
        assert found.shape == (B,)
        close(terms.total(lowered.constants, found), step(*lowered.given, X)[0])


def test_elements_that_act_on_more_than_their_group(x64):
    """The last column is an output."""

    def step(w, h, x):
        drive, output = jnp.split(x @ w['w'], [H], axis=1)
        return jnp.sum(output), {'h': 0.5 * h['h'] + jnp.tanh(drive)}

    lowered = Lowered(step, {'w': (I, H + 1)}, {'h': (B, H)})
    (y,) = lowered.stages.tap_results
    assert lowered.compiled.other_effects(0, y) == (slice(0, B), slice(H, H + 1))


def test_nothing_acts_on_more_than_its_group(x64):
    def step(w, h, x):
        new = 0.5 * h['h'] + jnp.tanh(x @ w['w'])
        return jnp.sum(new), {'h': new}

    lowered = Lowered(step, {'w': (I, H)}, {'h': (B, H)})
    (y,) = lowered.stages.tap_results
    assert lowered.compiled.other_effects(0, y) is None


def test_a_result_of_both_kinds_is_computed_twice(x64):
    """Of five elements four are summed in pairs, and one is shared by two positions."""

    def step(w, h, x):
        y = jnp.tanh(x @ w['w'])
        summed = y[:, :4].reshape(B, 2, 2).sum(-1)
        parts = [summed, jnp.broadcast_to(y[:, 4:], (B, 2))]
        new = 0.9 * h['h'] + jnp.concatenate(parts, axis=1)
        return jnp.sum(new**2), {'h': new}

    lowered = Lowered(step, {'w': (I, 5)}, {'h': (B, 4)})
    single, shared = lowered.stages.tap_results
    labels = lowered.stages.analysed.positions[0].labels
    np.testing.assert_array_equal((labels[single] >= 0)[0], [1, 1, 1, 1, 0])
    np.testing.assert_array_equal((labels[shared] == -2)[0], [0, 0, 0, 0, 1])
    close(lowered.values()[lowered.stages.next_states[0]], step(*lowered.given, X)[1]['h'])  # fmt: skip
