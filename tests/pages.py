"""Models whose reports are looked at: by test_page.py as text, by `make browser` in a browser."""

from __future__ import annotations

import brainstate
import jax
import jax.numpy as jnp

import braintrace as bt

B = 2
ZERO = (
    brainstate.nn.init.ZeroInit()
)  # random draws take longer to compile than everything else here
SCRIPT, BOLD = '<script>alert(1)</script>', 'h"&\'<b>'
LONG = 'an_attribute_whose_name_goes_on_and_on_until_no_box_could_hold_it'


def zeros(*shape):
    return brainstate.HiddenState(jnp.zeros((B, *shape)))


class Net(brainstate.nn.Module):
    """A stock cell and a linear read-out."""

    def __init__(self, cell):
        super().__init__()
        self.cell = cell
        self.readout = brainstate.nn.Linear(4, 2, w_init=ZERO)

    def update(self, x):
        return self.readout(self.cell(x))


class Layer(brainstate.nn.Module):
    """Leaky units with exponential synapses, driven from below and by their own last activity."""

    def __init__(self, inputs, units):
        super().__init__()
        self.units = units
        self.feed = brainstate.nn.Linear(inputs, units, w_init=ZERO)
        self.recur = brainstate.nn.Linear(units, units, b_init=None, w_init=ZERO)

    def init_state(self, batch_size=None, **kwargs):
        self.V, self.g = zeros(self.units), zeros(self.units)

    def update(self, x):
        fired = jnp.tanh(self.V.value)
        self.g.value = 0.8 * self.g.value + self.feed(x) + self.recur(fired)
        self.V.value = 0.9 * self.V.value + self.g.value
        return jnp.tanh(self.V.value)


class Stack(brainstate.nn.Module):
    """Layers, each fed by the one below, or with ``skips`` by all of them; the top may feed back to the bottom."""

    def __init__(self, layers, skips=False, feedback=False):
        super().__init__()
        self.layers = [Layer(3 if i == 0 else 4, 4) for i in range(layers)]
        self.readout = brainstate.nn.Linear(4, 2, w_init=ZERO)
        self.back = brainstate.nn.Linear(4, 3, w_init=ZERO) if feedback else None
        self.skips = skips

    def update(self, x):
        if self.back is not None:
            x = x + self.back(self.layers[-1].V.value)
        for i, layer in enumerate(self.layers):
            x = layer(x) + (x if self.skips and i else 0)
        return self.readout(x)


class Convolution(brainstate.nn.Module):
    """A convolution into leaky units."""

    def __init__(self):
        super().__init__()
        self.conv = brainstate.nn.Conv2d((4, 4, 2), 3, 3, w_init=ZERO)

    def init_state(self, batch_size=None, **kwargs):
        self.V = zeros(4, 4, 3)

    def update(self, x):
        self.V.value = 0.9 * self.V.value + self.conv(x)
        return self.V.value.mean((1, 2, 3))


class Strange(brainstate.nn.Module):
    """Names that must not be believed, an idle parameter, a state that is not hidden, cuts in the middle of ways."""

    def __init__(self):
        super().__init__()
        setattr(self, SCRIPT, brainstate.ParamState(jnp.ones((3, 4))))
        setattr(self, LONG, [brainstate.nn.Linear(4, 4, w_init=ZERO) for _ in range(2)])
        self.重み = brainstate.ParamState(jnp.ones((4, 4)))
        self.idle = brainstate.ParamState(jnp.ones(2))

    def init_state(self, batch_size=None, **kwargs):
        setattr(self, BOLD, zeros(4))
        self.v = zeros(4)
        self.other = brainstate.ShortTermState(jnp.zeros((B, 4)))

    def update(self, x):
        h, v = getattr(self, BOLD), self.v
        self.other.value = 0.9 * self.other.value + v.value
        y = x @ getattr(self, SCRIPT).value + jnp.roll(
            h.value, 1, -1
        )  # <b> & "a comment"
        for layer in getattr(self, LONG):
            y = jnp.tanh(layer(y))
        h.value = (
            0.9 * h.value
            + (y - y.mean(-1, keepdims=True))
            + self.other.value @ self.重み.value
        )
        v.value = 0.5 * v.value + h.value @ self.重み.value
        return h.value, v.value, jax.lax.stop_gradient(h.value)


Strange.__name__ = '<i>Strange</i>'


class Loop(brainstate.nn.Module):
    """Low-rank weights, and a loop that mixes positions inside."""

    def __init__(self):
        super().__init__()
        self.low = brainstate.ParamState({'a': jnp.ones((3, 2)), 'b': jnp.ones((2, 4))})
        self.r = brainstate.ParamState(jnp.ones((4, 4)))

    def init_state(self, batch_size=None, **kwargs):
        self.h = zeros(4)

    def update(self, x):
        drive = x @ self.low.value['a'] @ self.low.value['b']
        self.h.value = jax.lax.fori_loop(
            0,
            3,
            lambda _, h: 0.9 * h + drive + jnp.tanh(h) @ self.r.value,
            self.h.value,
        )
        return self.h.value


def learner(model, x, rule='d_rtrl', **options):
    return bt.compile(model, rule, x, batch_size=B, **options)


def graph(model, x):
    brainstate.nn.init_all_states(model, batch_size=B)
    return bt.compile_etrace_graph(model, x)


def function(params, state, x):
    return {
        'h': 0.9 * state['h'] + jnp.tanh(x @ params['w'] + params['b']),
        'n': state['n'] + 1,
    }, state['h'].sum()


def plain():
    arguments = (
        {'w': jnp.ones((3, 4)), 'b': jnp.ones(4)},
        {'h': jnp.zeros(4), 'n': 0},
        jnp.ones(3),
    )
    return bt.compile_etrace_graph(function, *arguments)


X = jnp.ones((B, 3))
MADE = {
    'gru': lambda: learner(Net(brainstate.nn.GRUCell(3, 4, w_init=ZERO)), X).report,
    'lstm': lambda: (
        learner(
            Net(brainstate.nn.LSTMCell(3, 4, w_init=ZERO)),
            X,
            'pp_prop',
            decay_or_rank=0.9,
        ).report
    ),
    'rtrl': lambda: (
        learner(Net(brainstate.nn.ValinaRNNCell(3, 4, w_init=ZERO)), X, 'rtrl').report
    ),
    'stack': lambda: graph(Stack(3), X).report,
    'deep': lambda: graph(Stack(10), X).report,
    'skips': lambda: graph(Stack(6, skips=True, feedback=True), X).report,
    'convolution': lambda: graph(Convolution(), jnp.ones((B, 4, 4, 2))).report,
    'loop': lambda: graph(Loop(), X).report,
    'function': lambda: plain().report,
    'strange': lambda: graph(Strange(), X).report,
}
"""A report of each."""


def plan(report):
    """A memory plan of made-up numbers for the traces of a report."""
    traces = {key: 1000 * (i + 1) for i, key in enumerate(report.traces or {})}
    return bt.MemoryPlan(100, traces, 2_000_000, 1_500_000, 5_000_000)


def pages():
    """Every report as a page."""
    for name, make in MADE.items():
        report = make()
        yield name, report.to_html(memory=plan(report) if report.rule else None)


def example():
    """The page that the docs show."""
    made = learner(Stack(2), X)
    return made.report.to_html(memory=made.memory_plan(200))
