"""The compiler's records."""

import io

import brainstate
import jax
import jax.numpy as jnp
from checking import (
    CELLS,
    H,
    I,
    Net,
    Op,
    X,
    check,
    each,
    graph_of,
    ones,
    raises,
    ready,
    shapes,
)

import braintrace
from braintrace import DiagnosticKind, DiagnosticLevel, nn

RELATIONS = {
    'ValinaRNNCell': ['W'],
    'GRUCell': ['Wz', 'Wh'],
    'MGUCell': ['Wf', 'Wh'],
    'LSTMCell': ['Wi', 'Wg', 'Wf', 'Wo'],
    'MinimalRNNCell': ['phi', 'W_u'],
    'MiniGRU': ['W_z', 'W_x'],
    'MiniLSTM': ['W_f', 'W_i', 'W_x'],
    'CFNCell': ['Wf', 'Wi', 'Wh'],
}


@each(*CELLS)
def check_one_group(cell):
    graph = graph_of(getattr(nn, cell)(I, H), X)
    assert isinstance(graph, braintrace.ETraceGraph)
    assert len(graph.hidden_groups) == 1
    group = graph.hidden_groups[0]
    assert isinstance(group, braintrace.HiddenGroup)
    assert group.varshape == (2, H)
    assert group.num_state == (2 if 'LSTM' in cell and cell != 'MiniLSTM' else 1)
    assert set(graph.hid_path_to_group) == set(group.hidden_paths)


@each(*RELATIONS)
def check_relations(cell):
    graph = graph_of(getattr(nn, cell)(I, H), X)
    relations = graph.hidden_param_op_relations
    assert isinstance(relations, list)
    assert sorted(r.path[0] for r in relations) == sorted(RELATIONS[cell])
    for r in relations:
        assert r.primitive.name == 'etp_mm'
        assert isinstance(r.primitive, braintrace.ETPPrimitive)
        assert r.trainable_paths == {'weight': r.path, 'bias': r.path}
        assert r.trainable_leaf_indices == {'weight': 1, 'bias': 0}
        assert set(r.trainable_vars) == {'weight', 'bias'}
        assert r.trainable_vars['bias'].aval.shape == (H,)
        assert r.trainable_processing_chains == {'weight': (), 'bias': ()}
        assert all(
            isinstance(s, brainstate.ParamState)
            for s in r.trainable_param_states.values()
        )
        assert r.x is r.x_var
        assert r.y is r.y_var
        assert r.y_var.aval.shape == (2, H)
        assert r.control_flow_context is None
        assert len(r.y_to_hidden_group_jaxprs) == len(r.hidden_groups) == 1


@each(*RELATIONS)
def check_relations_of_one_sample(cell):
    graph = graph_of(getattr(nn, cell)(I, H), X[0], batch=None)
    relations = graph.hidden_param_op_relations
    assert {r.primitive.name for r in relations} == {'etp_mv'}


@each(*RELATIONS)
def check_included(cell):
    graph = graph_of(getattr(nn, cell)(I, H), X)
    included = graph.explain(kind=DiagnosticKind.RELATION_INCLUDED)
    relations = graph.hidden_param_op_relations
    assert [r.weight_path for r in included] == [r.path for r in relations]
    assert all(r.level is DiagnosticLevel.INFO for r in included)
    assert all(r.context['hidden_group_indices'] == (0,) for r in included)
    assert [r.primitive for r in included] == [r.primitive for r in relations]


@check
def check_reset_gate_is_excluded():
    graph = graph_of(nn.GRUCell(I, H), X)
    kind = DiagnosticKind.RELATION_EXCLUDED_WEIGHT_TO_WEIGHT
    (record,) = graph.explain(kind=kind)
    assert record.weight_path == ('Wr', 'weight')
    assert record.level is DiagnosticLevel.WARNING


@check
def check_readout_is_excluded():
    graph = graph_of(Net(), X)
    kind = DiagnosticKind.RELATION_EXCLUDED_NON_TEMPORAL
    (record,) = graph.explain(kind=kind)
    assert record.weight_path == ('out', 'weight')
    assert record.level is DiagnosticLevel.WARNING


@check
def check_partial_path():
    graph = graph_of(nn.MinimalRNNCell(I, H), X)
    (record,) = graph.explain(kind=DiagnosticKind.RELATION_PARTIAL_PATH)
    assert record.level is DiagnosticLevel.WARNING
    assert record.context == {'classification': 'mixed'}


@check
def check_merged():
    graph = graph_of(nn.LSTMCell(I, H), X)
    (record,) = graph.explain(kind=DiagnosticKind.HIDDEN_GROUP_MERGED)
    assert set(record.hidden_paths) == {('h',), ('c',)}


@check
def check_explain_filters():
    graph = graph_of(nn.LSTMCell(I, H), X)
    found = graph.explain(weight_path=('Wo', 'weight'), hidden_path=('h',))
    assert isinstance(found, tuple)
    assert found
    assert not graph.explain(weight_path=('nothing',))


def mm(s, x):
    return braintrace.matmul(x, s.W.value, s.b.value)


W, b = ones((I, H)), ones(H)
OPS = {
    'matmul': (mm, X, 'etp_mm', {'W': W, 'b': b}, ['weight', 'bias']),
    'no_bias': (
        lambda s, x: braintrace.matmul(x, s.W.value),
        X,
        'etp_mm',
        {'W': W},
        ['weight'],
    ),
    'element_wise': (
        lambda s, x: braintrace.element_wise(s.W.value) * x[:, :1],
        X,
        'etp_elemwise',
        {'W': b},
        ['weight'],
    ),
    'lora': (
        lambda s, x: braintrace.lora_matmul(x, s.B.value, s.A.value, bias=s.b.value),
        X,
        'etp_lora_mm',
        {'B': ones((I, 2)), 'A': ones((2, H)), 'b': b},
        ['lora_b', 'lora_a', 'bias'],
    ),
    'einsum': (
        lambda s, x: braintrace.einsum('bi,ij->bj', x, s.W.value),
        X,
        'etp_einsum',
        {'W': W},
        ['weight'],
    ),
    'embedding': (
        lambda s, x: braintrace.embedding(x, s.W.value),
        jnp.array([1, 2]),
        'etp_emb',
        {'W': ones((5, H))},
        ['weight'],
    ),
}


@each(*OPS)
def check_roles(name):
    drive, x, primitive, params, roles = OPS[name]
    graph = graph_of(Op(drive, **params), x)
    (relation,) = graph.hidden_param_op_relations
    assert relation.primitive.name == primitive
    assert list(relation.trainable_paths) == roles
    assert list(relation.trainable_vars) == roles
    assert [p[0] for p in relation.trainable_paths.values()] == list(params)


@check
def check_roles_of_conv():
    drive = lambda s, x: braintrace.conv(
        x, s.K.value, s.b.value, dimension_numbers=('NWC', 'WIO', 'NWC')
    )
    model = Op(drive, (5, H), K=ones((3, I, H)), b=b)
    (relation,) = graph_of(model, ones((2, 5, I))).hidden_param_op_relations
    assert relation.primitive.name == 'etp_conv'
    assert relation.trainable_paths == {'weight': ('K',), 'bias': ('b',)}
    assert relation.y_var.aval.shape == (2, 5, H)


@check
def check_roles_of_groups():
    drive = lambda s, x: braintrace.grouped_matmul(x, s.W.value, s.b.value)
    model = Op(drive, (2, H), W=ones((2, I, H)), b=ones((2, H)))
    (relation,) = graph_of(model, ones((2, 2, I))).hidden_param_op_relations
    assert relation.primitive.name == 'etp_gmm'
    assert relation.trainable_paths == {'weight': ('W',), 'bias': ('b',)}


@check
def check_processing_chain():
    drive = lambda s, x: braintrace.matmul(x, jnp.abs(s.W.value))
    (relation,) = graph_of(Op(drive, W=W), X).hidden_param_op_relations
    names = [p.name for p in relation.trainable_processing_chains['weight']]
    assert names == ['abs']


@check
def check_weight_fn_is_no_processing():
    drive = lambda s, x: braintrace.matmul(x, s.W.value, weight_fn=jnp.abs)
    (relation,) = graph_of(Op(drive, W=W), X).hidden_param_op_relations
    assert relation.trainable_processing_chains == {'weight': ()}


@check
def check_two_uses():
    drive = lambda s, x: mm(s, x) + braintrace.matmul(2 * x, s.W.value)
    relations = graph_of(Op(drive, W=W, b=b), X).hidden_param_op_relations
    assert [list(r.trainable_paths) for r in relations] == [
        ['weight', 'bias'],
        ['weight'],
    ]


@check
def check_relation_is_made_from_its_fields():
    (relation,) = graph_of(Op(mm, W=W, b=b), X).hidden_param_op_relations
    made = braintrace.HiddenParamOpRelation(
        primitive=relation.primitive,
        x_var=relation.x_var,
        y_var=relation.y_var,
        hidden_groups=relation.hidden_groups,
        y_to_hidden_group_jaxprs=relation.y_to_hidden_group_jaxprs,
        connected_hidden_paths=relation.connected_hidden_paths,
        eqn_params=relation.eqn_params,
        trainable_paths={'weight': ('W',)},
    )
    assert made.path == ('W',)
    assert 'primitive' in made.dict()


@check
def check_y_to_hidden_groups():
    net = ready(Op(mm, W=W, b=b))
    graph = braintrace.compile_etrace_graph(net, X)
    (relation,) = graph.hidden_param_op_relations
    (program,) = relation.y_to_hidden_group_jaxprs
    values = {v: jnp.zeros(v.aval.shape, v.aval.dtype) for v in program.constvars}
    (new,) = relation.y_to_hidden_groups(ones((2, H)), values)
    assert new.shape == (2, H, 1)


@check
def check_find_relations():
    net = ready(Net())
    found = braintrace.find_hidden_param_op_relations_from_module(net, X)
    info = braintrace.extract_module_info(net, X)
    groups, by_path = braintrace.find_hidden_groups_from_minfo(info)
    again = braintrace.find_hidden_param_op_relations_from_minfo(info, by_path)
    assert isinstance(groups, list)
    assert [r.path for r in found] == [r.path for r in again]
    assert len(found) == 2


@each(*CELLS)
def check_module_info(cell):
    net = ready(getattr(nn, cell)(I, H))
    info = braintrace.extract_module_info(net, X)
    assert isinstance(info, braintrace.ModuleInfo)
    assert isinstance(info.hidden_path_to_invar, dict)
    assert isinstance(info.weight_invars, list)
    assert isinstance(info.compiled_model_states, list)
    assert set(info.hidden_path_to_invar) == set(info.hidden_path_to_outvar)
    assert set(info.weight_path_to_invars) == set(net.states(brainstate.ParamState))
    out, hidden, *_ = info.jaxpr_call(X)
    assert out.shape == (2, H)
    assert set(hidden) == set(info.hidden_path_to_invar)
    assert len(info.split_state_outvars()) == 3
    assert info.num_var_out == 1
    assert isinstance(info.retrieved_model_states, brainstate.util.FlattedDict)


@each(*CELLS)
def check_perturbation(cell):
    graph = graph_of(getattr(nn, cell)(I, H), X)
    perturb = graph.hidden_perturb
    assert isinstance(perturb, braintrace.HiddenPerturbation)
    assert isinstance(perturb.perturb_vars, list)
    data = perturb.init_perturb_data()
    assert all(shape == (2, H) for shape in map(jnp.shape, data))
    by_group = perturb.perturb_data_to_hidden_group_data(data, graph.hidden_groups)
    assert by_group[0].shape == (2, H, graph.hidden_groups[0].num_state)
    assert graph.call_hidden_perturb((X,), data) is not None


@check
def check_without_perturbation():
    net = ready(Net())
    graph = braintrace.compile_etrace_graph(net, X, include_hidden_perturb=False)
    assert graph.hidden_perturb is None


@check
def check_switches_by_position():
    net = ready(Net())
    info = braintrace.extract_module_info(net, X)
    groups, _ = braintrace.find_hidden_groups_from_minfo(info, False, None, 16777216)
    assert len(groups) == 1
    executor = braintrace.ETraceGraphExecutor(net, False, None)
    executor.compile_graph(X)
    assert len(executor.graph.hidden_groups) == 1


@check
def check_executor():
    net = ready(Net())
    executor = braintrace.ETraceGraphExecutor(net)
    raises(ValueError, lambda: executor.graph)
    executor.compile_graph(X)
    assert isinstance(executor.graph, braintrace.ETraceGraph)
    assert executor.model is net
    assert executor.include_recurrent_mixing is False
    assert executor.sparse_n is None
    assert executor.control_flow is None
    assert executor.snap_max_jacobian_elements == 16777216
    assert ('rnn', 'h') in executor.path_to_states
    text = executor.show_graph(verbose=False, return_msg=True)
    assert isinstance(text, str)
    raises(TypeError, braintrace.ETraceGraphExecutor, lambda x: x)


@each('single-step', 'multi-step')
def check_vjp_executor(method):
    executor = braintrace.ETraceVjpGraphExecutor(ready(Net()), method)
    executor.compile_graph(X)
    assert executor.is_single_step_vjp == (method == 'single-step')
    assert executor.is_multi_step_vjp == (method == 'multi-step')
    out, hidden, _, h2w, h2h, etrace = executor.solve_h2w_h2h_jacobian(X)
    assert out.shape == (2, 2)
    assert set(hidden) == {('rnn', 'h')}
    inputs, derivatives = h2w
    assert sorted(shapes(list(inputs.values()))) == [(2, 7), (2, 7)]
    assert shapes(list(derivatives.values())) == [(2, H, 1)] * 2
    assert h2h[0].shape == (2, H, 1, 1)
    assert etrace is None


@check
def check_vjp_executor_refuses_other_methods():
    raises(
        (AssertionError, ValueError),
        braintrace.ETraceVjpGraphExecutor,
        ready(Net()),
        'other',
    )


@check
def check_report_of_a_graph():
    graph = graph_of(Net(), X)
    report = braintrace.CompilationReport(graph)
    assert report.graph is graph
    assert report.counts['hidden_groups'] == 1
    assert report.counts['etrace_weights'] == 4
    assert report.counts['excluded_weights'] == 2
    assert report.counts['warnings'] == 2
    assert report.counts['errors'] == 0
    assert [index for index, _ in report.hidden_groups] == [0]
    assert {path for path, _ in report.etrace_weights} == {
        ('rnn', 'Wz', 'weight'),
        ('rnn', 'Wh', 'weight'),
    }
    assert {path for path, _ in report.excluded_weights} == {
        ('rnn', 'Wr', 'weight'),
        ('out', 'weight'),
    }
    assert report.dynamic_states == []
    assert report.diagnostics == graph.diagnostics


@each(1, 2, 3)
def check_report_text(level):
    report = braintrace.CompilationReport(graph_of(Net(), X))
    text = report.to_str(level)
    assert isinstance(text, str)
    file = io.StringIO()
    report.show(level, file=file)
    assert file.getvalue().strip() == text.strip()


KINDS = [
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


@each(*KINDS)
def check_kind(name):
    assert DiagnosticKind[name].value == name.lower()


@each('INFO', 'WARNING', 'ERROR')
def check_level(name):
    assert DiagnosticLevel[name].value == name.lower()


@check
def check_record():
    record = braintrace.CompilationRecord(
        DiagnosticKind.RELATION_INCLUDED, DiagnosticLevel.INFO, 'text'
    )
    assert record.primitive is None
    assert record.weight_path is None
    assert record.hidden_paths == ()
    assert record.context is None


# ---------------------------------------------------------------- branches and loops


class Branch(Op):
    """A branch on the way to the state."""

    def update(self, x):
        y = braintrace.matmul(x, self.W.value)
        on = jnp.mean(x) > 0
        self.h.value = jax.lax.cond(
            on,
            lambda h: jnp.tanh(0.5 * h + y),
            lambda h: 0.9 * h + y,
            self.h.value,
        )
        return self.h.value


class Loop(Op):
    """A short loop over the state."""

    def update(self, x):
        y = braintrace.matmul(x, self.W.value)
        body = lambda h, _: (jnp.tanh(0.5 * h + y), None)
        self.h.value, _ = jax.lax.scan(body, self.h.value, None, length=self.steps)
        return self.h.value


class While(Op):
    """A loop with a condition beside the way to the state."""

    def update(self, x):
        y = braintrace.matmul(x, self.W.value)
        count = jax.lax.while_loop(lambda n: n < 3, lambda n: n + 1, 0)
        self.h.value = jnp.tanh(0.5 * self.h.value + y) + 0.0 * count
        return self.h.value


def kinds_of(model):
    return {record.kind for record in graph_of(model, X).diagnostics}


@check
def check_branch():
    graph = graph_of(Branch(None, W=W), X)
    assert len(graph.hidden_groups) == 1
    (relation,) = graph.hidden_param_op_relations
    assert relation.path == ('W',)
    assert DiagnosticKind.COND_IF_CONVERTED in {r.kind for r in graph.diagnostics}


@each(3, 40)
def check_loop(steps):
    model = Loop(None, W=W)
    model.steps = steps
    graph = graph_of(model, X)
    (relation,) = graph.hidden_param_op_relations
    assert relation.path == ('W',)
    assert graph.hidden_groups[0].varshape == (2, H)


@check
def check_short_loop_is_a_finding():
    model = Loop(None, W=W)
    model.steps = 3
    assert DiagnosticKind.SCAN_UNROLLED in kinds_of(model)


@check
def check_while_beside():
    graph = graph_of(While(None, W=W), X)
    assert len(graph.hidden_param_op_relations) == 1


@check
def check_policy():
    policy = braintrace.ControlFlowPolicy()
    assert policy.cond == 'convert'
    assert policy.scan_unroll_limit == 16
    assert policy.while_hidden == 'opaque-fwd'
    assert policy.etp_in_control_flow == 'error'
    assert policy.scan_descent == 'auto'
    assert policy.fixpoint_iteration_limit == 64
    assert policy == braintrace.ControlFlowPolicy()
    assert hash(policy) == hash(braintrace.ControlFlowPolicy())


@each(('scan_descent', 'other'), ('fixpoint_iteration_limit', 0))
def check_policy_refuses(field, value):
    raises((ValueError, TypeError), braintrace.ControlFlowPolicy, **{field: value})


@each('convert', 'opaque')
def check_policy_in_a_graph(cond):
    policy = braintrace.ControlFlowPolicy(cond=cond)
    graph = braintrace.compile_etrace_graph(ready(Net()), X, control_flow=policy)
    assert len(graph.hidden_param_op_relations) == 2
