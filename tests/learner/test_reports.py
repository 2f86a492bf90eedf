"""What a learner's report says of each parameter's gradient; `test_table` proves it by numbers for its rows."""

import re

import brainstate
import jax.numpy as jnp
import pytest

from formulas import FULL, assert_equal, relative_error, total_of
from gradients.cases import T, compiled, oracle_of

EQUAL = 'equal to BPTT'


@pytest.fixture(autouse=True)
def _double(x64):
    with brainstate.environ.context(precision=64):
        yield


def report(name, rule, **options):
    return compiled(name, rule, **options)[0].report


def kinds_of(name, rule, **options):
    """What a rule gives the parameters below the read-out."""
    gives = report(name, rule, **options).gradients.items()
    return {given.kind for leaf, given in gives if not leaf.startswith('out')}


def test_pp_prop_never_promises_bptt_through_time():
    for name in ('gru', 'lstm', 'independent', 'only_leaks', 'integrator', 'lif_stack'):
        assert kinds_of(name, 'pp_prop') == {'approximate'}, name


def test_rules_are_equal_where_their_own_trace_is_exact():
    decay = {'decay_or_rank': 0.9}
    for rule, options in (('ottt', {}), ('ostlfeedforward', decay), ('rflo', {})):
        assert kinds_of('integrator', rule, **options) == {EQUAL}
    assert kinds_of('integrator', 'ottt', leak=0.8) == {'approximate'}
    assert kinds_of('only_leaks', 'rflo') == {EQUAL}
    assert kinds_of('only_leaks', 'ottt') == {'approximate'}
    assert kinds_of('feedforward_alif', 'rflo') == {'approximate'}
    assert kinds_of('feedforward_alif', 'snap', n=1) == {'approximate'}
    assert kinds_of('feedforward_alif', 'snap', n=2) == {EQUAL}
    assert kinds_of('gru', 'd_rtrl') == {'local'}


def test_rules_that_draw_or_predict_are_approximate():
    for rule in ('uoro', 'tbptt', 'dni', 'threefactor'):
        assert 'approximate' in kinds_of('gru', rule)


def numbers(name, **options):
    learner, step = compiled(name, 'd_rtrl', **options)
    o = oracle_of(name)
    found = [
        learner.etrace_grad(o.xs[at], o.ys[at], step_fn=step, reduction='sum')
        for at in (slice(0, 4), slice(4, T))
    ]
    return learner.report.gradients, total_of(found), o.bptt(), o.bptt(FULL, True)


def test_parameters_left_without_a_trace():
    gives, found, true, single = numbers(
        'independent', trace=lambda path: 'own' in path
    )
    assert gives['own'].kind == EQUAL
    assert_equal(found['own'], true['own'])
    assert gives['w'].kind == 'one step'
    assert 'trace=' in gives['w'].reason
    assert_equal(found['w'], single['w'])


def test_traces_of_a_narrow_type():
    gives, found, true, _ = numbers('independent', trace_dtype=jnp.bfloat16)
    assert gives['own'].kind == 'approximate'
    assert 'bfloat16' in gives['own'].reason
    assert 1e-6 < relative_error(found['own'], true['own']) < 1e-1


def test_credit_from_layer_to_layer():
    gives = report('lif_stack', 'd_rtrl', reach='deep').gradients
    assert {given.kind for given in gives.values()} == {EQUAL}
    assert 'inside a call' in gives['layers.0'].reason
    assert kinds_of('lif_stack', 'd_rtrl') == {EQUAL, 'local'}


def test_all_that_is_shown_says_the_same(capsys):
    learner, step = compiled('gru', 'pp_prop')
    report, o = learner.report, oracle_of('gru')
    kinds = {name: given.kind for name, given in report.gradients.items()}
    assert set(kinds.values()) == {'approximate', EQUAL}
    shown = re.findall(
        r'^  (\S+)  +(equal to BPTT|approximate)  ', str(report), re.MULTILINE
    )
    assert dict(shown) == kinds
    assert 'pp_prop' in repr(report)
    assert '4 approximate, 2 equal to BPTT' in repr(report)
    assert report.counts['approximate'] == 4
    assert report.etrace_weights == dict.fromkeys(report.etrace_weights, 'approximate')
    learner.show_graph()
    graph = capsys.readouterr().out
    assert '(approximate)' in graph
    assert '(local)' not in graph
    page = report.to_html()
    chip = r'<td data-sort="\d+"><span class="chip [^"]*">([^<]*)</span></td>'
    assert re.findall(chip, page) == list(kinds.values())
    assert 'chip exact' not in page
    check = learner.gradient_check(o.xs, o.ys, step_fn=step)
    assert {row.name: row.gradient for row in check.rows} == kinds
    assert 'exact' not in str(check)
    both = learner.gradient_check(o.xs, o.ys, step_fn=step, rules=['d_rtrl', 'rtrl'])
    assert {row.gradient for row in both['RTRL'].rows} == {EQUAL}
    row = both['D_RTRL']['cell.Wh.weight.weight']
    assert row.gradient == row.credit == 'local'


def test_a_graph_has_classes_and_no_rule():
    report = compiled('feedforward_alif', 'pp_prop')[0].graph.report
    assert {given.kind for given in report.gradients.values()} == {'exact'}
    assert 'credit class' in str(report)
    assert 'chip exact' in report.to_html()


def test_rules_without_local_traces_show_no_cuts():
    for rule in ('rtrl', 'bptt', 'snap', 'uoro'):
        shown = report('gru', rule)
        assert 'cut' not in shown.counts
        assert 'cut at' not in str(shown)
        assert 'matmul' not in shown.to_html().split('id="diagnostics"')[1]
    assert report('gru', 'rflo').counts['cut']
