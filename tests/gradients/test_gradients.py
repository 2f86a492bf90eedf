"""What a learner's report says of each parameter's gradient, proven by numbers for every rule.

The oracle is `brainstate.transform.grad` of the plain loop over the model: nothing of the package takes part in it.
Rules are run in two calls, so that what they carry from one to the other counts. `make zoo` runs all pairs.
"""

import os
import re

import brainstate
import braintools
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import braintrace
from braintrace import ETraceConfig, FixedRandomFeedback
from braintrace.learner.by_rule import RULES
from braintrace.rules import PRESETS
from braintrace.rules.exactness import ParameterFacts, SiteFacts, gradient_of

nn = brainstate.nn
ALL = os.environ.get('ZOO') == 'all'
B, I, H, O, T = 2, 3, 4, 2, 4  # batch, inputs, units, outputs, steps  # noqa: E741
EQUAL = 'equal to BPTT'


@pytest.fixture(autouse=True)
def _double(x64):
    """All of this file is in float64, the states of stock cells too."""
    with brainstate.environ.context(precision=64):
        yield


# ---------------------------------------------------------------- models


class Net(nn.Module):
    """Something with states, and a linear read-out of it."""

    def __init__(self, cell):
        super().__init__()
        self.cell = cell
        self.readout = nn.Linear(H, O)

    def update(self, x):
        return self.readout(self.cell(x))


class Units(nn.Module):
    """One state a unit, made by ``step`` from the old one and its drive; ``own`` is a weight of each unit alone."""

    def __init__(self, step):
        super().__init__()
        self.step = step
        self.feed = nn.Linear(I, H)
        self.own = brainstate.ParamState(jnp.linspace(0.1, 0.4, H))

    def init_state(self, batch_size=None, **kwargs):
        self.h = brainstate.HiddenState(jnp.zeros((batch_size, H)))

    def update(self, x):
        self.h.value = self.step(self.h.value, self.feed(x), self.own.value)
        return self.h.value


class AdaptiveLIF(nn.Module):
    """Spiking units whose threshold rises with their own spikes; no unit feeds another."""

    def __init__(self, inputs=I):
        super().__init__()
        self.feed = nn.Linear(inputs, H)

    def init_state(self, batch_size=None, **kwargs):
        self.V = brainstate.HiddenState(jnp.zeros((batch_size, H)))
        self.a = brainstate.HiddenState(jnp.zeros((batch_size, H)))

    def update(self, x):
        z = braintools.surrogate.sigmoid(self.V.value - 0.3 - 0.2 * self.a.value)
        self.a.value = 0.95 * self.a.value + z
        self.V.value = 0.8 * self.V.value + self.feed(x) - 0.3 * z
        return braintools.surrogate.sigmoid(self.V.value - 0.3 - 0.2 * self.a.value)


class Stack(nn.Module):
    """Two layers: the lower one feeds the upper one within a step."""

    def __init__(self):
        super().__init__()
        self.layers = [AdaptiveLIF(I), AdaptiveLIF(H)]

    def update(self, x):
        for layer in self.layers:
            x = layer(x)
        return x


class LeakyReadout(nn.Module):
    """Units that feed a read-out with a memory of its own."""

    def __init__(self):
        super().__init__()
        self.cell = Units(lambda h, y, w: 0.9 * h + y + w)
        self.into = nn.Linear(H, O)

    def init_state(self, batch_size=None, **kwargs):
        self.y = brainstate.HiddenState(jnp.zeros((batch_size, O)))

    def update(self, x):
        self.y.value = 0.8 * self.y.value + self.into(self.cell(x))
        return self.y.value


class TwoWays(nn.Module):
    """Units seen by way of a read-out, beside units that are seen as they are."""

    def __init__(self):
        super().__init__()
        self.cell, self.seen = AdaptiveLIF(), AdaptiveLIF()
        self.readout = nn.Linear(H, O)

    def update(self, x):
        return self.readout(self.cell(x)) + self.seen(x)[:, :O]


class Populations(nn.Module):
    """Excitatory and inhibitory units that read each other's old states."""

    def __init__(self, recurrent):
        super().__init__()
        self.feed, self.ei, self.ie = nn.Linear(I, H), nn.Linear(H, 3), nn.Linear(3, H)
        self.ee = nn.Linear(H, H) if recurrent else None

    def init_state(self, batch_size=None, **kwargs):
        self.E = brainstate.HiddenState(jnp.zeros((batch_size, H)))
        self.I = brainstate.HiddenState(jnp.zeros((batch_size, 3)))

    def update(self, x):
        excited, inhibited = jnp.tanh(self.E.value), jnp.tanh(self.I.value)
        drive = self.feed(x) - self.ie(inhibited)
        if self.ee is not None:
            drive = drive + self.ee(excited)
        self.I.value = 0.8 * self.I.value + self.ei(excited)
        self.E.value = 0.9 * self.E.value + drive
        return self.E.value


MODELS = {
    'gru': lambda: Net(nn.GRUCell(I, H)),
    'lstm': lambda: Net(nn.LSTMCell(I, H)),
    'independent': lambda: Net(Units(lambda h, y, w: 0.7 * h + jnp.tanh(y + w * h))),
    'leaky': lambda: Net(Units(lambda h, y, w: 0.9 * h + jnp.tanh(y + w))),
    'integrator': lambda: Net(Units(lambda h, y, w: 0.9 * h + y + w)),
    'memoryless': lambda: Net(Units(lambda h, y, w: y * w)),
    'adaptive_lif': lambda: Net(AdaptiveLIF()),
    'stack': lambda: Net(Stack()),
    'leaky_readout': LeakyReadout,
    'two_ways': TwoWays,
    'populations': lambda: Net(Populations(recurrent=False)),
    'recurrent_populations': lambda: Net(Populations(recurrent=True)),
}
WHOLE = {
    'dni': {'window': 2},
    'tbptt': {'k': 2},
}
VARIANTS = {
    'd_rtrl, readout': ('d_rtrl', {'reach': 'readout'}),
    'eprop, κ': ('eprop', {'kappa_filter_decay': 0.5}),
    'eprop, random': ('eprop', {'feedback': 'random'}),
    'eprop, adaptive': ('eprop', {'feedback': FixedRandomFeedback(1, align=0.9)}),
    'rflo, random': ('rflo', {'feedback': 'random'}),
    'rflo, 0.5': ('rflo', {'leak': 0.5}),
    'ottt, 0.5': ('ottt', {'leak': 0.5}),
    'pp_prop, two decays': ('pp_prop', {'decay_or_rank': (0.9, 0.5)}),
    'pp_prop, no state decay': ('pp_prop', {'decay_or_rank': (0.9, 1)}),
    'snap, 3': ('snap', {'n': 3}),
    'parts: no recursion': (ETraceConfig(temporal_recursion='none'), {}),
    'parts: leak and filter': (
        ETraceConfig(
            temporal_recursion='scalar_leak', decay=0.9, trace_filter='kappa', kappa=0.5
        ),
        {},
    ),
}
USED = {
    rule: (rule, WHOLE.get(rule, {})) for rule in RULES if rule != 'es_d_rtrl'
} | VARIANTS


def compiled(model, rule, **options):
    brainstate.random.seed(1)
    learner = braintrace.compile(
        MODELS[model](), rule, jnp.zeros((B, I)), batch_size=B, **options
    )
    for state in learner.param_states.values():  # biases too are not zero
        state.value = jax.tree.map(
            lambda x: x + 0.1 * brainstate.random.normal(size=x.shape), state.value
        )
    return learner


def data():
    rng = np.random.default_rng(2)
    return jnp.asarray(rng.normal(size=(T, B, I))), jnp.asarray(
        rng.normal(size=(T, B, O))
    )


def gradients_by_hand(model, cut=False):
    """Gradients of the summed loss by path, by plain reverse mode; ``cut``: states of earlier steps are constants."""
    xs, ys = data()
    hidden = list(model.states(brainstate.HiddenState).values())

    def step(x, y):
        for state in hidden if cut else ():
            state.value = jax.lax.stop_gradient(state.value)
        return jnp.sum((model(x) - y) ** 2)

    loss = lambda: jnp.sum(brainstate.transform.for_loop(step, xs, ys))
    return brainstate.transform.jit(
        brainstate.transform.grad(loss, model.states(brainstate.ParamState))
    )()


ORACLES = {}
"""(BPTT, sum of one-step gradients) by model; its weights are the same at every build."""


def oracles(name, learner):
    if name not in ORACLES:
        found = []
        for cut in (False, True):
            learner.reset_state()
            found.append(by_name(gradients_by_hand(learner.model, cut)))
        ORACLES[name] = found
    return ORACLES[name]


def in_two_calls(learner):
    """The rule's gradients, by path. BPTT and ``reach='deep'`` are judged inside a call, so all steps are in one."""
    xs, ys = data()
    step = lambda x, y: jnp.sum((learner(x) - y) ** 2)
    parts = (
        [slice(0, T)]
        if learner.rule.name == 'BPTT' or learner.rule.deep
        else [slice(0, T // 2), slice(T // 2, T)]
    )
    learner.reset_state()
    found = [
        learner.etrace_grad(xs[p], ys[p], step_fn=step, reduction='sum') for p in parts
    ]
    return jax.tree.map(lambda *g: sum(g), *found)


def by_name(gradients):
    """Arrays by their name in a report."""
    return {
        '.'.join(map(str, (*path, *(key.key for key in keys)))): np.asarray(array)
        for path, tree in gradients.items()
        for keys, array in jax.tree_util.tree_flatten_with_path(tree)[0]
    }


def distance(a, b):
    return np.linalg.norm(a - b) / max(np.linalg.norm(b), 1e-30)


# ---------------------------------------------------------------- words and numbers


def proven(model, rule, **options):
    """The report of a learner after its words were checked by numbers."""
    learner = compiled(model, rule, **options)
    report, (true, single) = learner.report, oracles(model, learner)
    mine = by_name(in_two_calls(learner))
    assert mine.keys() == report.gradients.keys()
    for name, (kind, reason) in report.gradients.items():
        assert reason
        if kind == EQUAL:
            assert distance(mine[name], true[name]) < 1e-9, (name, reason)
        elif kind == 'one step':
            assert distance(mine[name], single[name]) < 1e-9, (name, reason)
        elif kind == 'none':
            assert not mine[name].any(), (name, reason)
        else:
            assert kind in ('local', 'approximate')
            assert distance(mine[name], true[name]) > 1e-4, (name, reason)
    return report


PAIRS = [(m, u) for m in MODELS for u in USED]
DAILY = [
    (m, u)
    for m, u in PAIRS
    if m in ('gru', 'integrator')
    or u in ('pp_prop', 'ottt', 'rflo', 'snap')
    or (m == 'leaky_readout' and ('eprop' in u or 'readout' in u))
]


@pytest.mark.parametrize(('model', 'used'), PAIRS if ALL else DAILY)
def test_the_report_is_true(model, used):
    rule, options = USED[used]
    report = proven(model, rule, **options)
    kinds = {given.kind for given in report.gradients.values()}
    if model != 'leaky_readout':
        read = {
            name: given.kind
            for name, given in report.gradients.items()
            if name.startswith('readout')
        }
        assert set(read.values()) == {EQUAL}
    if used in ('bptt', 'rtrl'):
        assert kinds == {EQUAL}
    if used in ('threefactor', 'eprop, κ') or (
        used in ('uoro', 'tbptt', 'dni') and model != 'memoryless'
    ):
        assert 'approximate' in kinds


def kinds_of(model, rule, **options):
    """What a rule gives the parameters below the read-out."""
    report = compiled(model, rule, **options).report
    return {
        given.kind
        for name, given in report.gradients.items()
        if not name.startswith(('readout', 'into'))
    }


def test_pp_prop_never_promises_bptt_through_time():
    for model in (
        'gru',
        'lstm',
        'independent',
        'leaky',
        'integrator',
        'adaptive_lif',
        'stack',
    ):
        assert kinds_of(model, 'pp_prop') == {'approximate'}, model


def test_rules_are_equal_where_their_own_trace_is_exact():
    decay = {'decay_or_rank': 0.9}
    for rule, options in (('ottt', {}), ('ostlfeedforward', decay), ('rflo', {})):
        assert kinds_of('integrator', rule, **options) == {EQUAL}
    assert kinds_of('integrator', 'ottt', leak=0.8) == {'approximate'}
    assert kinds_of('leaky', 'rflo') == {EQUAL}
    assert kinds_of('leaky', 'ottt') == {'approximate'}
    assert kinds_of('adaptive_lif', 'rflo') == {'approximate'}
    assert kinds_of('adaptive_lif', 'snap', n=1) == {'approximate'}
    assert kinds_of('adaptive_lif', 'snap', n=2) == {EQUAL}
    assert kinds_of('gru', 'd_rtrl') == {'local'}


def test_random_feedback_leaves_what_no_read_out_lies_before():
    report = proven('two_ways', 'eprop', feedback='random')
    assert report.gradients['seen.feed.weight.weight'].kind == EQUAL
    assert report.gradients['cell.feed.weight.weight'].kind == 'approximate'
    assert 'random weights' in report.gradients['cell.feed.weight.weight'].reason


def test_random_feedback_replaces_the_weights_of_read_outs_only():
    """Between layers errors pass back through the weights of the layers: where these are zero, nothing does."""
    learner = compiled('stack', 'eprop', feedback='random')
    upper = learner.model.cell.layers[1].feed.weight
    upper.value = {**upper.value, 'weight': jnp.zeros((H, H))}
    found = by_name(in_two_calls(learner))
    assert found['cell.layers.1.feed.weight.weight'].any()
    assert not found['cell.layers.0.feed.weight.weight'].any()


def test_parameters_left_without_a_trace():
    report = proven('independent', 'd_rtrl', trace=lambda path: 'own' in path)
    assert report.gradients['cell.own'].kind == EQUAL
    assert report.gradients['cell.feed.weight.weight'].kind == 'one step'
    assert 'trace=' in report.gradients['cell.feed.weight.weight'].reason


def test_traces_of_a_narrow_type():
    report = proven('independent', 'd_rtrl', trace_dtype=jnp.bfloat16)
    assert report.gradients['cell.own'] == (
        'approximate',
        'the trace is stored in bfloat16',
    )


def test_credit_from_layer_to_layer():
    report = proven('stack', 'd_rtrl', reach='deep')
    assert {given.kind for given in report.gradients.values()} == {EQUAL}
    lower = report.gradients['cell.layers.0.feed.weight.weight']
    assert 'inside a call no path is cut; from call to call' in lower.reason


@pytest.mark.parametrize('model', ['gru', 'populations', 'recurrent_populations'])
def test_deep_names_the_paths_that_are_cut(model):
    report = proven(model, 'd_rtrl', reach='deep')
    kinds = {given.kind for given in report.gradients.values()}
    assert kinds == ({EQUAL} if model == 'populations' else {EQUAL, 'local'})
    for given in report.gradients.values():
        assert given.kind == EQUAL or 'across positions, cut at matmul' in given.reason


# ---------------------------------------------------------------- the same words everywhere


def test_all_that_is_shown_says_the_same(capsys):
    learner = compiled('gru', 'pp_prop')
    report = learner.report
    kinds = {name: given.kind for name, given in report.gradients.items()}
    assert set(kinds.values()) == {'approximate', EQUAL}
    rows = dict(
        re.findall(
            r'^  (\S+)  +(equal to BPTT|approximate)  ', str(report), re.MULTILINE
        )
    )
    assert rows == kinds
    assert 'Parameters, and what pp_prop gives' in str(report)
    assert repr(report).startswith(
        'CompilationReport(pp_prop; 1 hidden group(s); 4 approximate, 2 equal to BPTT,'
    )
    assert report.counts['approximate'] == 4
    assert report.etrace_weights == dict.fromkeys(report.etrace_weights, 'approximate')
    learner.show_graph()
    shown = capsys.readouterr().out
    assert '(approximate)' in shown
    assert '(local)' not in shown
    page = report.to_html()
    cells = re.findall(
        r'<td data-sort="\d+"><span class="chip [^"]*">([^<]*)</span></td>', page
    )
    assert cells == list(kinds.values())
    assert (
        'pp_prop gives 2 a gradient equal to BPTT&#x27;s and 4 an approximation.'
        in page
    )
    assert 'chip exact' not in page

    xs, ys = data()
    step = lambda x, y: jnp.sum((learner(x) - y) ** 2)
    check = learner.gradient_check(xs, ys, step_fn=step)
    assert {row.name: row.gradient for row in check.rows} == kinds
    assert 'exact' not in str(check)
    both = learner.gradient_check(xs, ys, step_fn=step, rules=['d_rtrl', 'rtrl'])
    assert {row.gradient for row in both['RTRL'].rows} == {EQUAL}
    assert both['D_RTRL']['cell.Wh.weight.weight'].gradient == 'local'
    assert both['D_RTRL']['cell.Wh.weight.weight'].credit == 'local'


def test_a_graph_has_classes_and_no_rule():
    learner = compiled('adaptive_lif', 'pp_prop')
    report = learner.graph.report
    assert {given.kind for given in report.gradients.values()} == {'exact'}
    assert 'Parameters, and what exact local traces would give (credit class)' in str(
        report
    )
    assert 'chip exact' in report.to_html()


def test_rules_without_local_traces_show_no_cuts():
    for rule in ('rtrl', 'bptt', 'snap', 'uoro'):
        report = compiled('gru', rule).report
        assert 'cut' not in report.counts
        assert 'cut at' not in str(report)
        assert 'matmul' not in report.to_html().split('id="diagnostics"')[1]
    assert compiled('gru', 'rflo').report.counts['cut']


def test_what_a_rule_makes_of_facts():
    silent = ParameterFacts(
        'none', 'nothing reads it', temporal=True, sites=(SiteFacts(),)
    )
    assert gradient_of(PRESETS['d_rtrl'].default, silent) == (
        'none',
        'nothing reads it',
    )
    assert gradient_of(PRESETS['rtrl'].default, silent).kind == EQUAL
    assert gradient_of(PRESETS['threefactor'].default, silent).kind == 'approximate'
    idle = silent._replace(temporal=False)
    for rule in (PRESETS[name].default for name in ('d_rtrl', 'rtrl', 'bptt')):
        assert gradient_of(rule, idle).kind == 'none'
