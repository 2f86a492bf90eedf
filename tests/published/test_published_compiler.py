"""The compiler's records, reports, switches and executors as the published package has
them."""

import inspect
import io
import warnings

import brainstate
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import braintrace as bt
from braintrace.graph.diagnostics import CUTS, RELATIONS

INPUTS, H = 3, 4
X = jnp.asarray(np.random.default_rng(0).normal(size=INPUTS), jnp.float32)
Kind = bt.DiagnosticKind

NAMES = [
    'RELATION_INCLUDED',
    'RELATION_EXCLUDED_NO_PARAMSTATE',
    'RELATION_EXCLUDED_NON_TEMPORAL',
    'RELATION_EXCLUDED_SHAPE_MISMATCH',
    'RELATION_EXCLUDED_WEIGHT_TO_WEIGHT',
    'RELATION_PARTIAL_PATH',
    'TRAINABLE_INVAR_NOT_PARAMSTATE',
    'COND_IF_CONVERTED',
    'COND_CONVERSION_SKIPPED',
    'SCAN_UNROLLED',
    'SCAN_UNROLL_SKIPPED',
    'RELATION_EXCLUDED_SLICED_WEIGHT',
    'SCAN_DESCENT_APPLIED',
    'SCAN_DESCENT_SKIPPED',
    'SCAN_DESCENT_NO_RELATIONS',
    'WEIGHT_IN_WHILE',
    'CONTROL_FLOW_OPAQUE_FWD',
    'CONTROL_FLOW_RECURRENT_MIXING',
    'PRIMITIVE_INSIDE_NESTED_JIT',
    'PRIMITIVE_INSIDE_CONTROL_FLOW',
    'MULTI_OUTPUT_PRIMITIVE_DETECTED',
    'PYTREE_WEIGHT_LEAF_AMBIGUOUS',
    'SNAP_PATTERN_CONSERVATIVE',
    'SNAP_PATTERN_DEGENERATE',
    'TRANSITION_TAIL_BOUNDED',
    'HIDDEN_GROUP_MERGED',
    'STATE_MISMATCH',
    'WEIGHT_IN_CONTROL_FLOW',
]
"""All kinds of the published package."""


class Net(brainstate.nn.Module):
    """An LSTM with a read-out, a counter and parameters that the step does not read."""

    def __init__(self):
        super().__init__()
        brainstate.random.seed(0)
        self.rnn = bt.nn.LSTMCell(INPUTS, H)
        self.out = bt.nn.Linear(H, 2)
        self.idle = brainstate.ParamState(jnp.ones(2))
        self.count = brainstate.ShortTermState(jnp.zeros(()))

    def update(self, x):
        self.count.value = self.count.value + 1
        return self.out(self.rnn(x))


class TwoWays(brainstate.nn.Module):
    """``first`` reaches h directly and through ``second``; h has several widths."""

    def __init__(self, loop=False):
        super().__init__()
        normal = np.random.default_rng(1).normal
        array = lambda *shape: brainstate.ParamState(
            jnp.asarray(normal(size=shape), jnp.float32)
        )
        self.first = array(INPUTS, H)
        self.second = array(H, H)
        self.pair = brainstate.ParamState({'a': jnp.ones(H), 'b': jnp.ones(H)})
        self.h = brainstate.HiddenState(jnp.zeros(H))
        self.loop = loop

    def update(self, x):
        y = bt.matmul(x, jnp.abs(self.first.value))
        z = bt.matmul(jnp.tanh(y), self.second.value)
        decayed = self.h.value * self.pair.value['b']
        if self.loop:
            body = lambda h, _: (jnp.tanh(h * self.pair.value['a']), None)
            decayed = jax.lax.scan(body, decayed, None, length=3)[0]
        self.h.value = jnp.tanh(decayed + y + z)
        return self.h.value


def ready(kind, *args, **options):
    model = kind(*args, **options)
    brainstate.nn.init_all_states(model)
    return model


def graph_of(kind, *args, **options):
    return bt.compile_etrace_graph(ready(kind, *args, **options), X)


def values_of(graph):
    """New hidden values of a step, and the value of every variable that it gives."""
    info = graph.module_info
    _, hidden, _, extra = info.jaxpr_call(X)
    results = jax.core.eval_jaxpr(
        info.jaxpr, info.closed_jaxpr.consts, *info.flat_inputs((X,), None, {})
    )
    inputs = dict(zip(info.jaxpr.invars, info.flat_inputs((X,), None, {}), strict=True))
    outputs = dict(zip(map(id, info.jaxpr.outvars), results, strict=True))
    outputs |= {id(v): value for v, value in (inputs | extra).items()}
    return hidden, outputs


# ---------------------------------------------------------------- kinds and records


def test_every_kind_has_its_name_in_lower_case_as_its_value():
    assert len(NAMES) == 28
    for name in NAMES:
        assert Kind[name].value == name.lower()
        assert Kind(name.lower()) is getattr(Kind, name)


def test_relations_are_findings():
    graph = graph_of(Net)
    (merged,) = graph.explain(kind=Kind.HIDDEN_GROUP_MERGED)
    assert set(merged.hidden_paths) == {('rnn', 'h'), ('rnn', 'c')}
    included = graph.explain(kind='relation_included')
    sites = graph.hidden_param_op_relations
    assert [r.weight_path for r in included] == [s.path for s in sites]
    assert [r.primitive for r in included] == [s.primitive for s in sites]
    assert all(r.context['hidden_group_indices'] == (0,) for r in included)
    assert {r.weight_path[1] for r in included} == {'Wi', 'Wg', 'Wf', 'Wo'}
    for record, site in zip(included, sites, strict=True):
        assert list(record.hidden_paths) == site.connected_hidden_paths
        assert record.level is bt.DiagnosticLevel.INFO
    (readout,) = graph.explain(kind=Kind.RELATION_EXCLUDED_NON_TEMPORAL)
    assert readout.weight_path == ('out', 'weight')
    (unread,) = graph.explain(kind=Kind.STATE_MISMATCH)
    assert unread.weight_path == ('idle',)
    assert unread.context['state_path'] == ('idle',)
    only = graph.explain(
        weight_path=('rnn', 'Wi', 'weight'),
        hidden_path=('rnn', 'c'),
        kind=Kind.RELATION_INCLUDED,
    )
    assert only
    assert all(record in included for record in only)
    assert len(only) < len(included)


def test_a_parameter_with_a_second_way_that_is_cut():
    graph = graph_of(TwoWays)
    (partial,) = graph.explain(kind=Kind.RELATION_PARTIAL_PATH)
    assert partial.weight_path == ('first',)
    assert partial.hidden_paths == (('h',),)
    classes = {
        site.path: site.path_classification for site in graph.hidden_param_op_relations
    }
    assert classes == {
        ('first',): {('h',): 'mixed'},
        ('second',): {('h',): 'all_direct'},
        ('pair',): {('h',): 'all_direct'},
    }


def test_a_parameter_whose_every_way_is_cut():
    graph = graph_of(bt.nn.GRUCell, INPUTS, H)
    (reset,) = graph.explain(kind=Kind.RELATION_EXCLUDED_WEIGHT_TO_WEIGHT)
    assert reset.weight_path == ('Wr', 'weight')
    assert not graph.explain(kind=Kind.RELATION_EXCLUDED_NON_TEMPORAL)
    # A rule without cuts loses nothing there.
    learner = bt.compile(bt.nn.GRUCell(INPUTS, H), 'rtrl', X)
    assert not {r.kind for r in learner.report.diagnostics} & set(CUTS)


def test_reports_show_relations_only_once():
    graph = graph_of(Net)
    assert {r.kind for r in graph.diagnostics} & set(RELATIONS)
    for kind in RELATIONS:
        assert f'{kind}:' not in graph.report.to_str('info')
        assert kind not in repr(graph.report)
    section = graph.report.to_html().split('id="diagnostics"')[1]
    assert 'relation included' not in section


# ---------------------------------------------------------------- the report


def test_a_report_from_a_graph():
    graph = graph_of(Net)
    report = bt.CompilationReport(graph)
    assert isinstance(report, bt.CompilationReport)
    assert report.graph is graph
    (group,) = report.hidden_groups
    assert group[0] == 0
    assert set(group[1]) == {('rnn', 'h'), ('rnn', 'c')}
    assert {path for path, _ in report.etrace_weights} == {
        ('rnn', gate, 'weight') for gate in ('Wi', 'Wg', 'Wf', 'Wo')
    }
    assert len(report.etrace_weights) == 8
    assert all(indices == [0] for _, indices in report.etrace_weights)
    assert dict(report.excluded_weights) == {
        ('out', 'weight'): 'relation_excluded_non_temporal',
        ('idle',): 'state_mismatch',
    }
    assert report.dynamic_states == [('count',)]
    assert report.diagnostics == graph.diagnostics
    assert report.counts == {
        'hidden_groups': 1,
        'etrace_weights': 8,
        'excluded_weights': 2,
        'warnings': len([r for r in graph.diagnostics if r.level == 'warning']),
        'errors': 0,
    }
    assert repr(report).startswith('CompilationReport(hidden_groups=1, ')


def test_the_levels_of_a_report_from_a_graph():
    report = bt.CompilationReport(graph=graph_of(TwoWays))
    assert report.to_str() == report.to_str(1) == report.to_str(level=0)
    assert 'Diagnostics' not in report.to_str(1)
    assert 'cut:' not in report.to_str(2)
    assert 'cut:' in report.to_str(3)
    assert report.to_str('info') == report.to_str(3)
    file = io.StringIO()
    assert report.show(3, file=file) is None
    assert file.getvalue() == report.to_str(3) + '\n'


def test_the_report_of_a_learner_counts_by_both_names():
    report = bt.compile(Net(), 'd_rtrl', X).report
    assert isinstance(report, bt.CompilationReport)
    assert report.counts['hidden_groups'] == 1
    assert report.counts['etrace_weights'] == 4
    assert report.counts['excluded_weights'] == 2
    assert report.counts['errors'] == 0
    assert 'hidden_groups' not in report.counts
    with pytest.raises(KeyError):
        report.counts['nothing']


# ---------------------------------------------------------------- members of records


def test_members_of_hidden_groups():
    graph = graph_of(Net)
    (group,) = graph.hidden_groups
    assert group.is_diagonal_recurrence is True
    assert group.snap is None
    assert group.descent is None
    assert group.trace_state_width == group.num_state == 2
    _, env = values_of(graph)
    old = [env[id(v)] + 0.3 for v in group.hidden_invars]
    constants = [env[id(v)] for v in group.transition_jaxpr_constvars]
    full = group.full_jacobian(old, constants)
    assert full.shape == (H, 2, H, 2)
    diagonal = group.diagonal_jacobian(old, constants)
    for i in range(H):
        for j in range(H):
            want = diagonal[i] if i == j else np.zeros((2, 2))
            np.testing.assert_allclose(full[i, :, j, :], want, rtol=1e-5, atol=1e-7)
    with pytest.raises(AttributeError, match='nothing'):
        _ = group.nothing


def test_members_of_relations():
    model = ready(TwoWays)
    graph = bt.compile_etrace_graph(model, X)
    by_path = {site.path: site for site in graph.hidden_param_op_relations}
    first, pair = by_path['first',], by_path['pair',]
    assert first.x is first.x_var
    assert first.y is first.y_var
    assert first.eqn_params == dict(first.sites[0].equation.params)
    assert first.trainable_vars == {'weight': first.parameters[0].invar}
    assert first.trainable_leaf_indices == {'weight': 0}
    assert first.trainable_param_states['weight'] is model.first
    (chain,) = first.trainable_processing_chains.values()
    assert [primitive.name for primitive in chain] == ['abs']
    assert first.control_flow_context is None
    assert pair.trainable_leaf_indices == {'b': 1}
    assert pair.trainable_param_states['b'] is model.pair
    (looped,) = [
        site
        for site in graph_of(TwoWays, loop=True).hidden_param_op_relations
        if 'a' in site.trainable_vars
    ]
    assert looped.control_flow_context == 'scan'


def test_hidden_values_from_the_result_of_a_relation():
    graph = graph_of(Net)
    hidden, env = values_of(graph)
    for site in graph.hidden_param_op_relations:
        constants = {
            v: env[id(v)]
            for program in site.y_to_hidden_group_jaxprs
            for v in program.constvars
        }
        y = env[id(site.y_var)]
        ((h, c),) = site.y_to_hidden_groups(y, constants, concat_hidden_vals=False)
        group = site.hidden_groups[0]
        for path, value in zip(group.hidden_paths, (h, c), strict=True):
            np.testing.assert_allclose(value, hidden[path], rtol=1e-6)
        (joined,) = site.y_to_hidden_groups(y, constants)
        np.testing.assert_allclose(joined, jnp.stack([h, c], -1))


def test_members_of_a_traced_module():
    info = graph_of(Net).module_info
    assert info.control_flow == bt.ControlFlowPolicy()


# ---------------------------------------------------------------- switches

GRAPH_FUNCTIONS = {
    'compile_etrace_graph': lambda net, **o: bt.compile_etrace_graph(net, X, **o),
    'find_hidden_groups_from_module': lambda net, **o: (
        bt.find_hidden_groups_from_module(net, X, **o)
    ),
    'find_hidden_groups_from_minfo': lambda net, **o: bt.find_hidden_groups_from_minfo(
        bt.extract_module_info(net, X), **o
    ),
    'ETraceGraphExecutor': lambda net, **o: bt.ETraceGraphExecutor(net, **o),
    'ETraceVjpGraphExecutor': lambda net, **o: bt.ETraceVjpGraphExecutor(net, **o),
}


@pytest.mark.parametrize('name', GRAPH_FUNCTIONS)
def test_switches_of_graph_functions(name):
    call, net = GRAPH_FUNCTIONS[name], ready(Net)
    with warnings.catch_warnings():
        warnings.simplefilter('error')
        call(
            net,
            include_recurrent_mixing=False,
            sparse_n=None,
            snap_max_jacobian_elements=16777216,
        )
    with pytest.warns(UserWarning, match='snap_max_jacobian_elements=4'):
        call(net, snap_max_jacobian_elements=4)
    with pytest.raises(bt.NotSupportedError, match=rf'^{name}(.|\n)*coupled'):
        call(net, include_recurrent_mixing=True)
    with pytest.raises(bt.NotSupportedError, match=rf'^{name}(.|\n)*SnAp'):
        call(net, sparse_n=2)


def test_policies_and_loops_are_accepted():
    net, policy = ready(Net), bt.ControlFlowPolicy(scan_unroll_limit=4)
    info = bt.extract_module_info(net, X, control_flow=None)
    for function in (bt.extract_module_info, bt.compile_etrace_graph):
        with pytest.warns(UserWarning, match='control_flow=.*ignored'):
            function(net, X, control_flow=policy)
    none = frozenset()
    groups, by_path = bt.find_hidden_groups_from_minfo(
        info, descended_scan_eqn_ids=none, descended_hidden_paths=none
    )
    assert len(groups) == 1
    sites = bt.find_hidden_param_op_relations_from_minfo(
        info, by_path, descended_scan_eqn_ids=none
    )
    assert len(sites) == len(
        bt.find_hidden_param_op_relations_from_minfo(info, by_path)
    )
    perturbation = bt.add_hidden_perturbation_from_minfo(
        info, descended_scan_eqn_ids=none
    )
    assert len(perturbation.perturb_vars) == 2


def test_switches_are_not_part_of_the_signatures_here():
    named = inspect.signature(bt.compile_etrace_graph).parameters
    assert list(named)[:3] == ['model', 'model_args', 'include_hidden_perturb']
    assert list(inspect.signature(bt.find_hidden_groups_from_minfo).parameters) == [
        'minfo'
    ]


# ---------------------------------------------------------------- executors


def test_jacobians_of_the_published_executor():
    net = ready(Net)
    ours, theirs = bt.ETraceGraphExecutor(net), bt.ETraceVjpGraphExecutor(net)
    for executor in (ours, theirs):
        executor.compile_graph(X)
    out, hidden, others, sites, diagonal = ours.solve_h2w_h2h_jacobian(X)
    found = theirs.solve_h2w_h2h_jacobian(X)
    assert len(found) == 6
    assert found[5] is None
    same = lambda a, b: jax.tree.map(np.testing.assert_allclose, a, b)
    same((*found[:3], found[4]), (out, hidden, others, diagonal))
    inputs, derivatives = found[3]
    relations = theirs.graph.hidden_param_op_relations
    for relation, site in zip(relations, sites, strict=True):
        if relation.x_var is not None:
            same(inputs[id(relation.x_var)], site.x)
        for index, jacobian in site.hidden_to_y.items():
            same(derivatives[id(relation.y_var), f'hidden_group_{index}'], jacobian)
    more = theirs.solve_h2w_h2h_l2h_jacobian(X)
    assert len(more) == 7
    same(more[:5], found[:5])
    signal = ours.solve_h2w_h2h_l2h_jacobian(X)[-1]
    same(more[5](jnp.ones(2)), signal(jnp.ones(2)))
    assert more[6] is None
    with pytest.raises(bt.NotSupportedError, match='etrace_stepper'):
        theirs.solve_h2w_h2h_jacobian(X, etrace_stepper=lambda trace: trace)


def test_full_jacobians_of_the_published_executor():
    net = ready(Net)
    full, diagonal = (
        bt.ETraceVjpGraphExecutor(net, full_jacobian=whole) for whole in (True, False)
    )
    for executor in (full, diagonal):
        executor.compile_graph(X)
    (whole,) = full.solve_h2w_h2h_jacobian(X)[4]
    (blocks,) = diagonal.solve_h2w_h2h_jacobian(X)[4]
    assert whole.shape == (H, 2, H, 2)
    np.testing.assert_allclose(
        jnp.einsum('isit->ist', whole), blocks, rtol=1e-5, atol=1e-7
    )
    np.testing.assert_allclose(jnp.abs(whole).sum(), jnp.abs(blocks).sum(), rtol=1e-5)
