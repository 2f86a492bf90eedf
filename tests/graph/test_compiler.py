"""The compiler's public records, name by name, against hand-derived facts and `jax.jacrev`."""

import inspect
import io
import os

import brainstate
import brainunit as u
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import braintrace as bt
from braintrace.compat import is_var
from braintrace.source_lines import short_source
from zoo.base import Step, array, hidden, other, weight

B, I, H = 2, 3, 4  # noqa: E741


class LSTM(brainstate.nn.Module):
    """c = f·c + i·g, h = o·tanh(c), gates from [x, h]; every step is written out for the hand-derived tests."""

    def __init__(self):
        super().__init__()
        self.w, self.b = weight(I + H, 4 * H), weight(4 * H)
        self.h, self.c = hidden(B, H), hidden(B, H)

    def gates(self, x):
        z = jnp.concatenate([x, self.h.value], -1) @ self.w.value + self.b.value
        i, f, g, o = jnp.split(z, 4, axis=-1)
        return jax.nn.sigmoid(i), jax.nn.sigmoid(f), jnp.tanh(g), jax.nn.sigmoid(o)

    def update(self, x):
        i, f, g, o = self.gates(x)
        self.c.value = f * self.c.value + i * g
        self.h.value = o * jnp.tanh(self.c.value)
        return self.h.value


class Layer(brainstate.nn.Module):
    def __init__(self, inputs, units):
        super().__init__()
        self.w, self.h = weight(inputs, units), hidden(B, units)

    def update(self, x):
        self.h.value = jnp.tanh(0.5 * self.h.value + x @ self.w.value)
        return self.h.value


class Stack(brainstate.nn.Module):
    def __init__(self):
        super().__init__()
        self.layers, self.out = [Layer(I, H), Layer(H, 2)], weight(2, 2)

    def update(self, x):
        for layer in self.layers:
            x = layer(x)
        return x @ self.out.value


def lif(m, x):
    """Membrane and adaptation, a counter, a read-out of the old membrane, a parameter nobody reads."""
    spike = jax.nn.sigmoid(m.V.value)
    m.a.value = 0.8 * m.a.value + spike
    drive = 0.9 * m.V.value + x @ m.w.value
    m.V.value = drive + spike @ m.rec.value - m.a.value  # the line that mixes
    m.count.value = m.count.value + 1
    return spike @ m.out.value


MIXING_LINE = inspect.getsourcelines(lif)[1] + 5


def make_lif():
    parts = {
        'w': weight(I, H),
        'rec': weight(H, H),
        'out': weight(H, 2),
        'idle': weight(2),
    }
    return Step(
        lif,
        **parts,
        V=hidden(B, H),
        a=hidden(B, H),
        count=other(jnp.zeros((), jnp.int32)),
    )


X = jnp.asarray(np.random.default_rng(0).standard_normal((B, I)), jnp.float32)
MODELS = {'lstm': LSTM, 'stack': Stack, 'lif': make_lif}


@pytest.fixture(scope='module')
def compiled():
    """Model and graph of each of the three."""
    models = {name: make() for name, make in MODELS.items()}
    return {
        name: (model, bt.compile_etrace_graph(model, X))
        for name, model in models.items()
    }


def close(a, b):
    np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)


def values(group, graph, x=X):
    """Old values of a group and the inputs of its transition, from a plain call."""
    info = graph.module_info
    flat = info.flat_inputs((x,), None, {})
    *_, extra = info.jaxpr_call(x)
    env = dict(zip(info.jaxpr.constvars, info.closed_jaxpr.consts, strict=True)) | extra
    env |= dict(zip(info.jaxpr.invars, flat, strict=True))
    results = jax.core.eval_jaxpr(info.jaxpr, info.closed_jaxpr.consts, *flat)
    env |= {v: r for v, r in zip(info.jaxpr.outvars, results, strict=True) if is_var(v)}
    return [env[v] for v in group.hidden_invars], [
        env[v] for v in group.transition_jaxpr_constvars
    ]


def test_the_small_facts():
    gru = bt.nn.GRUCell(3, 4)
    brainstate.nn.init_all_states(gru)
    x = jnp.ones(3)
    groups, by_path = bt.find_hidden_groups_from_module(gru, x)
    assert len(groups) == 1
    assert by_path == {('h',): groups[0]}
    assert len(bt.add_hidden_perturbation_in_module(gru, x).perturb_vars) == 1
    graph = bt.compile_etrace_graph(gru, x)
    assert isinstance(graph, bt.ETraceGraph)
    assert len(graph.hidden_groups) == 1


# ---------------------------------------------------------------- HiddenGroup


def test_hidden_group_fields(compiled):
    model, graph = compiled['lstm']
    (group,) = graph.hidden_groups
    assert group._fields == (
        'index', 'hidden_paths', 'hidden_states', 'hidden_invars', 'hidden_outvars', 'transition_jaxpr',
        'transition_jaxpr_constvars',
    )  # fmt: skip
    assert group.index == 0
    assert set(group.hidden_paths) == {('h',), ('c',)}
    assert group.hidden_states == [model.states()[p] for p in group.hidden_paths]
    info = graph.module_info
    assert group.hidden_invars == [
        info.hidden_path_to_invar[p] for p in group.hidden_paths
    ]
    assert group.hidden_outvars == [
        info.hidden_path_to_outvar[p] for p in group.hidden_paths
    ]
    assert list(group.transition_jaxpr.constvars) == group.transition_jaxpr_constvars
    assert (group.varshape, group.num_state) == ((B, H), 2)
    assert group.dict() == group._asdict()
    assert repr(group) == 'HiddenGroup(0: c, h; positions (2, 4), 2 state(s) each)'


@pytest.mark.parametrize('name', MODELS)
def test_transition_gives_the_models_new_values_and_its_diagonal(compiled, name):
    _, graph = compiled[name]
    _, new, _, _ = graph.module_info.jaxpr_call(X)
    for group in graph.hidden_groups:
        old, inputs = values(group, graph)
        for path, value in zip(
            group.hidden_paths, group.transition(old, inputs), strict=True
        ):
            close(value, new[path])
        states, size = group.num_state, int(np.prod(group.varshape))
        step = lambda h, g=group, inputs=inputs: g.concat_hidden(
            g.transition(g.split_hidden(h), inputs)
        )
        dense = jax.jit(jax.jacrev(step))(group.concat_hidden(old)).reshape(
            size, states, size, states
        )
        diagonal = jax.jit(group.diagonal_jacobian)(old, inputs)
        assert diagonal.shape == (*group.varshape, states, states)
        close(
            diagonal.reshape(size, states, states),
            dense[np.arange(size), :, np.arange(size)],
        )
        off = dense.transpose(0, 2, 1, 3)[~np.eye(size, dtype=bool)]
        assert not off.any()


def test_the_diagonal_of_a_leaky_pair_by_hand(compiled):
    _, graph = compiled['lif']
    (group,) = graph.hidden_groups
    assert group.hidden_paths == [('V',), ('a',)]
    old, inputs = values(group, graph)
    slope = jax.nn.sigmoid(old[0]) * (1 - jax.nn.sigmoid(old[0]))
    got = group.diagonal_jacobian(old, inputs)
    close(got[..., 1, 0], slope)
    close(got[..., 1, 1], np.full((B, H), 0.8))
    close(
        got[..., 0, 0], 0.9 - slope
    )  # the recurrent matmul is cut, the adaptation is not
    close(got[..., 0, 1], np.full((B, H), -0.8))


def kinds_of_state():
    tree = brainstate.HiddenTreeState(
        {'V': array(B, H) * u.mV, 'a': array(B, H) * u.ms}
    )
    wave = brainstate.HiddenState(array(B, H) + 1j * array(B, H))
    return {
        'group': (brainstate.HiddenGroupState(array(B, H, 3)), 3),
        'tree': (tree, 2),
        'complex': (wave, 2),
        'unit': (brainstate.HiddenState(array(B, H) * u.mV), 1),
        'half': (brainstate.HiddenState(array(B, H, dtype=jnp.float16)), 1),
    }


def couple(m, x):
    """Every state moves towards a shared membrane, so all of them form one group."""
    drive = x @ m.w.value + 0.9 * m.v.value
    grouped = hasattr(m.s, 'name2index')
    old = u.get_mantissa(m.s.value)
    new = (0.5 * old + (drive[..., None] if grouped else drive)).astype(old.dtype)
    m.s.value = u.maybe_decimal(u.Quantity(new, unit=u.get_unit(m.s.value)))
    m.v.value = drive + 0.1 * (new.sum(-1) if grouped else new).real.astype(jnp.float32)
    return m.v.value


@pytest.mark.parametrize('kind', kinds_of_state())
def test_states_of_every_kind_share_positions(kind):
    state, count = kinds_of_state()[kind]
    model = Step(couple, w=weight(I, H), v=hidden(B, H), s=state)
    graph = bt.compile_etrace_graph(model, X)
    (group,) = graph.hidden_groups
    assert group.varshape == (B, H)
    assert group.num_state == 1 + count
    old, inputs = values(group, graph)
    joined = group.concat_hidden(old)
    assert joined.shape == (B, H, 1 + count)
    assert not isinstance(
        group.concat_hidden([s.value for s in group.hidden_states]), u.Quantity
    )
    for back, value in zip(group.split_hidden(joined), old, strict=True):
        assert back.dtype == value.dtype
        np.testing.assert_array_equal(back, value)
    assert group.diagonal_jacobian(old, inputs).shape == (B, H, 1 + count, 1 + count)
    np.testing.assert_array_equal(
        group.concat_hidden(group.split_hidden(joined)), joined
    )


def test_shapes_that_differ_are_refused(compiled):
    _, graph = compiled['lif']
    (group,) = graph.hidden_groups
    group.check_consistent_varshape()
    odd = group._replace(
        hidden_states=[group.hidden_states[0], brainstate.HiddenState(jnp.zeros(7))]
    )
    with pytest.raises(bt.NotSupportedError, match=r'\(2, 4\).*\(7,\)'):
        odd.check_consistent_varshape()


def test_helpers():
    fn = lambda h: jnp.stack([h[..., 0] * h[..., 1], jnp.sin(h[..., 2]), h[..., 0]], -1)
    h = array(B, H, 3)
    got = bt.jacrev_last_dim(fn, h)
    assert got.shape == (B, H, 3, 3)
    close(got, jax.jit(jax.vmap(jax.vmap(jax.jacrev(fn))))(h))
    merged = bt.group_merging([{1, 2}, [3], {2, 5}, {4, 3}, {5, 4}, {9}])
    assert sorted(map(sorted, merged)) == [[1, 2, 3, 4, 5], [9]]
    assert bt.group_merging([]) == []


@pytest.mark.parametrize('name', MODELS)
def test_all_ways_to_find_groups_and_sites_agree(compiled, name):
    model, graph = compiled[name]
    info = bt.extract_module_info(model, X)
    names = lambda found: [
        (g.index, g.hidden_paths, g.varshape, str(g.transition_jaxpr)) for g in found
    ]
    want = names(graph.hidden_groups)
    for groups, by_path in (
        bt.find_hidden_groups_from_module(model, X),
        bt.find_hidden_groups_from_minfo(info),
    ):
        assert names(groups) == want
        assert by_path == {p: g for g in groups for p in g.hidden_paths}
    roles = (
        info.hidden_outvar_to_invar,
        info.weight_invars,
        info.invar_to_hidden_path,
        info.outvar_to_hidden_path,
    )
    for program in (info.jaxpr, info.closed_jaxpr):
        groups, _ = bt.find_hidden_groups_from_jaxpr(
            program, *roles, info.retrieved_model_states
        )
        assert names(groups) == want
    perturbed = bt.add_hidden_perturbation_in_jaxpr(
        info.closed_jaxpr, *roles, info.retrieved_model_states
    )
    assert perturbed.perturb_hidden_paths == graph.hidden_perturb.perturb_hidden_paths
    assert str(perturbed.perturb_jaxpr) == str(graph.hidden_perturb.perturb_jaxpr)

    sites = [repr(s) for s in graph.hidden_param_op_relations]
    assert sites == [
        repr(s) for s in bt.find_hidden_param_op_relations_from_module(model, X)
    ]
    assert sites == [
        repr(s) for s in bt.find_hidden_param_op_relations_from_minfo(info)
    ]
    assert sites == [
        repr(s)
        for s in bt.find_hidden_param_op_relations_from_minfo(
            info, graph.hid_path_to_group
        )
    ]
    assert bt.find_hidden_param_op_relations_from_minfo(info, {}) == []


# ---------------------------------------------------------------- HiddenParamOpRelation


def test_a_relation(compiled):
    _, graph = compiled['lif']
    (group,) = graph.hidden_groups
    relation, recurrent = graph.hidden_param_op_relations
    assert (relation.path, relation.trainable_paths) == (('w',), {'weight': ('w',)})
    assert recurrent.path == ('rec',)
    assert relation.primitive.name == 'dot_general'
    assert relation.x_var is graph.module_info.jaxpr.invars[0]
    assert relation.y_var.aval.shape == (B, H)
    assert relation.hidden_groups == [group]
    assert relation.connected_hidden_paths == [('V',)]
    (program,) = relation.y_to_hidden_group_jaxprs
    assert program.invars == [relation.y_var]
    assert relation.dict()['trainable_paths'] == {'weight': ('w',)}
    assert repr(relation) == 'HiddenParamOpRelation(w → dot_general → y[2, 4] → V)'
    (site,) = relation.sites
    np.testing.assert_array_equal(site.y_positions[0], np.arange(B * H).reshape(B, H))
    assert not site.marked
    assert repr(site) == 'Site(w → dot_general → y[2, 4] → V)'


def sites_of(model):
    relations = bt.find_hidden_param_op_relations_from_module(model, X)
    return [site for relation in relations for site in relation.sites]


def test_marked_sites():
    plain, marked = (
        Step(
            lambda m, x, op=op: setattr(m.h, 'value', 0.9 * m.h.value + op(m, x)),
            w=weight(I, H),
            h=hidden(B, H),
        )
        for op in (lambda m, x: x @ m.w.value, lambda m, x: bt.matmul(x, m.w.value))
    )
    assert [s.marked for s in sites_of(plain)] == [False]
    assert [s.marked for s in sites_of(marked)] == [True]
    gain = Step(
        lambda m, x: setattr(m.h, 'value', bt.element_wise(m.g.value, weight_fn=jnp.tanh) * m.h.value + x @ m.w.value),
        g=weight(H), w=weight(I, H), h=hidden(B, H),
    )  # fmt: skip
    assert {s.parameters[0].name: s.marked for s in sites_of(gain)} == {
        'g': True,
        'w': False,
    }
    linear = bt.nn.Linear(I, H)
    both = Step(
        lambda m, x: setattr(m.h, 'value', 0.9 * m.h.value + m.l(x)),
        l=linear,
        h=hidden(B, H),
    )
    assert [(s.parameters[0].name, s.marked) for s in sites_of(both)] == [
        ('l.weight.weight', True),
        ('l.weight.bias', True),
    ]


def test_the_factors_of_a_linear_solve_are_no_site():
    """JAX differentiates the matrix of a solve, not its factorisation, which the solve reads too."""

    def implicit_euler(m, x):
        m.h.value = jnp.linalg.solve(
            jnp.eye(H) + m.a.value, (m.h.value + x @ m.w.value).T
        ).T

    model = Step(implicit_euler, a=weight(H, H), w=weight(I, H), h=hidden(B, H))
    (site,) = sites_of(model)
    assert (site.parameters[0].name, site.operand) == ('a', 0)


# ---------------------------------------------------------------- HiddenPerturbation


def outputs_of(graph, deltas):
    return graph.call_hidden_perturb((X,), deltas)


@pytest.mark.parametrize('name', MODELS)
def test_perturbation_of_zero_changes_nothing(compiled, name):
    model, graph = compiled[name]
    perturb = graph.hidden_perturb
    zeros = perturb.init_perturb_data()
    flat = graph.module_info.flat_inputs((X,), None, {})
    plain = jax.core.eval_jaxpr(
        graph.module_info.jaxpr, graph.module_info.closed_jaxpr.consts, *flat
    )
    for a, b in zip(perturb.eval_jaxpr(flat, zeros), plain, strict=False):
        np.testing.assert_array_equal(a, b)
    close(outputs_of(graph, zeros), graph.module_info.jaxpr_call(X)[0])
    assert perturb.perturb_hidden_states == [
        model.states()[p] for p in perturb.perturb_hidden_paths
    ]
    assert [v.aval.shape for v in perturb.perturb_vars] == [
        s.value.shape for s in perturb.perturb_hidden_states
    ]
    assert list(perturb.perturb_jaxpr.jaxpr.invars[-len(zeros) :]) == list(
        perturb.perturb_vars
    )
    assert perturb.dict()['perturb_vars'] is perturb.perturb_vars
    assert all(
        '.'.join(map(str, p)) in repr(perturb) for p in perturb.perturb_hidden_paths
    )


def test_a_wrong_number_of_perturbations(compiled):
    _, graph = compiled['lstm']
    by_group = lambda data: graph.hidden_perturb.perturb_data_to_hidden_group_data(
        data, graph.hidden_groups
    )
    for call, error in (
        (lambda data: outputs_of(graph, data), ValueError),
        (by_group, AssertionError),
    ):
        with pytest.raises(error, match='3 perturbation'):
            call([jnp.zeros((B, H))] * 3)


def test_perturbations_by_group(compiled):
    _, graph = compiled['stack']
    data = [array(*v.aval.shape) for v in graph.hidden_perturb.perturb_vars]
    by_path = dict(zip(graph.hidden_perturb.perturb_hidden_paths, data, strict=True))
    got = graph.hidden_perturb.perturb_data_to_hidden_group_data(
        data, graph.hidden_groups
    )
    for group, joined in zip(graph.hidden_groups, got, strict=True):
        np.testing.assert_array_equal(
            joined, group.concat_hidden([by_path[p] for p in group.hidden_paths])
        )
    unit = Step(lambda m, x: setattr(m.v, 'value', 0.9 * m.v.value + (x @ m.w.value) * u.mV), w=weight(I, H),
                v=brainstate.HiddenState(array(B, H) * u.mV))  # fmt: skip
    graph = bt.compile_etrace_graph(unit, X)
    (joined,) = graph.hidden_perturb.perturb_data_to_hidden_group_data(
        [data[0] * u.mV], graph.hidden_groups
    )
    assert not isinstance(joined, u.Quantity)


def lstm_by_hand(model, a):
    """∂ℓ/∂h and ∂ℓ/∂c of ℓ = Σ a·h."""
    i, f, g, o = model.gates(X)
    c = f * model.c.value + i * g
    return a, a * o * (1 - jnp.tanh(c) ** 2)


def test_signal_of_an_lstm_total_and_joint(compiled):
    model, graph = compiled['lstm']
    a = array(B, H)
    total = jax.grad(lambda d: jnp.sum(a * outputs_of(graph, d)))(
        graph.hidden_perturb.init_perturb_data()
    )
    total = dict(zip(graph.hidden_perturb.perturb_hidden_paths, total, strict=True))
    of_h, of_c = lstm_by_hand(model, a)
    close(total['h',], of_h)
    close(total['c',], of_c)

    executor = bt.ETraceGraphExecutor(model)
    executor.compile_graph(X)
    *_, pull = executor.solve_h2w_h2h_l2h_jacobian(X)
    (signal,) = pull(a)
    (group,) = executor.graph.hidden_groups
    joint = dict(zip(group.hidden_paths, group.split_hidden(signal), strict=True))
    close(joint['h',], of_h)
    close(
        joint['c',], np.zeros((B, H))
    )  # c reaches the loss through h only, which the group's own D counts


def test_signal_of_a_stack_total_and_joint(compiled):
    model, graph = compiled['stack']
    a = array(B, 2)
    _, new, _, _ = graph.module_info.jaxpr_call(X)
    upper = a @ model.out.value.T
    lower = (upper * (1 - new['layers', 1, 'h'] ** 2)) @ model.layers[1].w.value.T
    total = jax.grad(lambda d: jnp.sum(a * outputs_of(graph, d)))(
        graph.hidden_perturb.init_perturb_data()
    )
    total = dict(zip(graph.hidden_perturb.perturb_hidden_paths, total, strict=True))
    executor = bt.ETraceGraphExecutor(model)
    executor.compile_graph(X)
    joint = executor.solve_h2w_h2h_l2h_jacobian(X)[-1](a)
    for path, want, signal in zip(
        (('layers', 0, 'h'), ('layers', 1, 'h')), (lower, upper), joint, strict=True
    ):
        close(total[path], want)
        close(signal[..., 0], want)  # another group reads the new h: that path stays


def two_at_once(m, x):
    both = jnp.stack([0.5 * m.a.value + x @ m.w.value, 0.7 * m.b.value])
    m.a.value, m.b.value = jnp.unstack(jnp.tanh(both))
    return m.a.value * m.b.value


def by_control_flow(m, x):
    step = lambda h, _: (0.5 * h + x @ m.w.value, None)
    m.a.value = jax.lax.scan(step, m.a.value, None, length=2)[0]
    m.b.value = jax.lax.cond(x[0, 0] > 0, jnp.sin, jnp.cos, m.b.value)
    return m.a.value * m.b.value


def passed_through(m, x):
    kept = m.b.value
    m.a.value = 0.5 * m.a.value + x @ m.w.value
    m.b.value = kept
    return m.a.value * m.b.value


def both_the_same(m, x):
    m.a.value = m.b.value = 0.5 * m.a.value * m.b.value + x @ m.w.value
    return m.a.value


def set_to_a_constant(m, x):
    m.a.value = 0.5 * m.a.value + x @ m.w.value
    m.b.value = jnp.zeros_like(m.b.value)
    return m.a.value * 0.0 + m.b.value


@pytest.mark.parametrize(
    'step',
    [two_at_once, by_control_flow, passed_through, both_the_same, set_to_a_constant],
)
def test_states_written_in_unusual_ways_are_perturbed(step):
    model = Step(step, w=weight(I, H), a=hidden(B, H), b=hidden(B, H))
    graph = bt.compile_etrace_graph(model, X)
    info, perturb = graph.module_info, graph.hidden_perturb
    _, new, _, _ = info.jaxpr_call(X)
    deltas = [array(B, H), array(B, H)]
    da, db = (
        dict(zip(perturb.perturb_hidden_paths, deltas, strict=True))[p,] for p in 'ab'
    )
    results = perturb.eval_jaxpr(info.flat_inputs((X,), None, {}), deltas)
    moved = {
        v: r
        for v, r in zip(perturb.perturb_jaxpr.jaxpr.outvars, results, strict=True)
        if is_var(v)
    }
    by_path = {p: moved[v] for p, v in info.hidden_path_to_outvar.items()}
    close(by_path['a',], new['a',] + da)
    close(
        by_path['b',], new['b',] + db + (da if step is both_the_same else 0)
    )  # there b is a copy of a
    want = {
        'both_the_same': new['a',] + da,
        'passed_through': (new['a',] + da)
        * new['b',],  # to read b is to read the old b, which is the same
        'set_to_a_constant': db,
    }
    out = graph.call_hidden_perturb((X,), deltas)
    close(out, want.get(step.__name__, (new['a',] + da) * (new['b',] + db)))


# ---------------------------------------------------------------- ModuleInfo


def test_module_info(compiled):
    model, _ = compiled['lif']
    info = bt.extract_module_info(model, X)
    assert isinstance(info, bt.ModuleInfo)
    states = dict(model.states())
    assert info.jaxpr is info.closed_jaxpr.jaxpr
    assert info.retrieved_model_states == states
    assert set(map(id, info.compiled_model_states)) == {
        id(s) for p, s in states.items() if p != ('idle',)
    }
    assert all(info.state_id_to_path[id(s)] == p for p, s in states.items())
    assert (
        len(info.state_tree_invars)
        == len(info.state_tree_outvars)
        == len(info.compiled_model_states)
    )
    assert (info.num_var_out, info.num_var_state) == (1, 6)
    assert (
        set(info.hidden_path_to_invar)
        == {('V',), ('a',)}
        == set(info.hidden_path_to_outvar)
    )
    for path, invar in info.hidden_path_to_invar.items():
        outvar = info.hidden_path_to_outvar[path]
        assert (
            info.invar_to_hidden_path[invar]
            == info.outvar_to_hidden_path[outvar]
            == path
        )
        assert info.hidden_outvar_to_invar[outvar] is invar
    assert set(info.weight_path_to_invars) == {('w',), ('rec',), ('out',)}
    assert {info.invar_to_weight_path[v] for v in info.weight_invars} == set(
        info.weight_path_to_invars
    )
    assert callable(info.stateful_model)
    assert info.dict()['num_var_out'] == 1
    assert repr(info).startswith('ModuleInfo(')
    assert all(name in repr(info) for name in ('V', 'a', 'w', 'rec', 'out'))

    parameters, hiddens, others = info.split_state_outvars()
    assert set(parameters) == {('w',), ('rec',), ('out',)}
    assert hiddens == info.hidden_path_to_outvar
    assert set(others) == {('count',)}


def test_jaxpr_call_and_extra_outputs(compiled):
    model, _ = compiled['lif']
    info = bt.extract_module_info(model, X)
    before = {p: s.value for p, s in model.states().items()}
    out, new, others, extra = info.jaxpr_call(X)
    assert extra == {}
    assert all(s.value is before[p] for p, s in model.states().items())
    twin = make_lif()
    for path, state in twin.states().items():
        state.value = before[path]
    close(twin.update(X), out)
    for path in (('V',), ('a',)):
        close(twin.states()[path].value, new[path])
    assert others['count',] == 1
    close(others['w',], before['w',])

    doubled = [2 * s.value for s in info.compiled_model_states]
    for path, state in twin.states().items():
        state.value = 2 * before[path]
    close(twin.update(X), info.jaxpr_call(X, old_state_vals=doubled)[0])

    inner = info.jaxpr.eqns[0].outvars[0]
    more = info.add_jaxpr_outs([inner])
    assert list(more.jaxpr.outvars[:-1]) == list(info.jaxpr.outvars)
    assert len(info.jaxpr.outvars) == info.num_var_out + info.num_var_state
    assert list(more.jaxpr_call(X)[-1]) == [inner]
    close(more.jaxpr_call(X)[0], out)
    with pytest.raises(ValueError, match='compiled for'):
        info.jaxpr_call(jnp.zeros((9, I)))


# ---------------------------------------------------------------- ETraceGraph


@pytest.mark.parametrize('name', MODELS)
def test_graph_outputs_hold_what_the_derivative_programs_read(compiled, name):
    _, graph = compiled[name]
    info = graph.module_info
    outvars, constants = (
        list(info.jaxpr.outvars),
        [*info.jaxpr.invars, *info.jaxpr.constvars],
    )
    plain = info.num_var_out + info.num_var_state
    assert len(set(outvars[plain:])) == len(outvars) - plain
    assert not set(outvars[plain:]) & set(filter(is_var, outvars[:plain]))
    assert [g.index for g in graph.hidden_groups] == list(
        range(len(graph.hidden_groups))
    )
    assert graph.hid_path_to_group == {
        p: g for g in graph.hidden_groups for p in g.hidden_paths
    }
    sites = graph.hidden_param_op_relations
    wanted = [s.x_var for s in sites]
    wanted += [
        v
        for s in sites
        for part in s.y_to_hidden_group_jaxprs
        for v in (*part.invars, *part.constvars)
    ]
    wanted += [v for g in graph.hidden_groups for v in g.transition_jaxpr_constvars]
    assert [v for v in dict.fromkeys(wanted) if v not in outvars[:plain]] == outvars[
        plain:
    ]
    assert set(wanted) <= {*outvars, *constants}


def test_explain(compiled):
    _, graph = compiled['lif']
    assert graph.explain() == graph.diagnostics
    credits = graph.explain(kind='credit')
    assert credits == graph.explain(kind=bt.DiagnosticKind.CREDIT)
    assert {r.weight_path for r in credits} == {('w',), ('rec',), ('out',), ('idle',)}
    of_w = graph.explain(weight_path=('w',))
    assert of_w
    assert all(r.weight_path == ('w',) for r in of_w)
    into_v = graph.explain(hidden_path=('V',))
    assert into_v
    assert all(('V',) in r.hidden_paths for r in into_v)
    both = graph.explain(weight_path=('w',), hidden_path=('V',), kind='credit')
    assert both == tuple(
        r for r in graph.diagnostics if r in of_w and r in into_v and r in credits
    )
    assert len(both) == 1
    assert graph.explain(weight_path=('nobody',)) == ()
    with pytest.raises(ValueError, match='nonsense'):
        graph.explain(kind='nonsense')


def test_call_hidden_perturb_from_other_states(compiled):
    model, graph = compiled['stack']
    zeros = graph.hidden_perturb.init_perturb_data()
    halves = [0.5 * s.value for s in graph.module_info.compiled_model_states]
    close(
        graph.call_hidden_perturb((X,), zeros, halves),
        graph.module_info.jaxpr_call(X, old_state_vals=halves)[0],
    )
    bare = bt.compile_etrace_graph(model, X, include_hidden_perturb=False)
    assert bare.hidden_perturb is None
    with pytest.raises(AssertionError, match='include_hidden_perturb'):
        bare.call_hidden_perturb((X,), zeros)
    assert graph.dict()['hidden_perturb'] is graph.hidden_perturb
    assert repr(graph).count('HiddenGroup(') == 2


# ---------------------------------------------------------------- executor


def test_executor_before_compiling():
    with pytest.raises(TypeError, match=r'Executor\(int\)'):
        bt.ETraceGraphExecutor(3)
    with pytest.raises(ValueError, match='before compiling'):
        _ = bt.ETraceGraphExecutor(make_lif()).graph


@pytest.mark.parametrize('name', MODELS)
def test_executor(compiled, name, capsys):
    model, _ = compiled[name]
    executor = bt.ETraceGraphExecutor(model)
    executor.compile_graph(X)
    assert executor.states == executor.path_to_states == dict(model.states())
    assert executor.state_id_to_path == {id(s): p for p, s in model.states().items()}
    assert executor.show_graph() is None
    shown = capsys.readouterr().out
    message = executor.show_graph(verbose=False, return_msg=True)
    assert capsys.readouterr().out == ''
    assert message == shown.rstrip('\n')
    assert all('.'.join(map(str, path)) in message for path in model.states())

    graph = executor.graph
    before = {p: s.value for p, s in model.states().items()}
    out, new, others, h2w, h2h = executor.solve_h2w_h2h_jacobian(X)
    want = graph.module_info.jaxpr_call(X)
    jax.tree.map(close, (out, new, others), want[:3])
    assert all(s.value is before[p] for p, s in model.states().items())
    assert [d.shape for d in h2h] == [
        (*g.varshape, g.num_state, g.num_state) for g in graph.hidden_groups
    ]
    for site, jacobian in zip(graph.hidden_param_op_relations, h2w, strict=True):
        assert list(jacobian.hidden_to_y) == [g.index for g in site.hidden_groups]
        for group in site.hidden_groups:
            assert jacobian.hidden_to_y[group.index].shape == (
                *site.y_var.aval.shape,
                group.num_state,
            )
        assert jacobian.weight.shape == site.sites[0].weight_var.aval.shape
    *again, pull = executor.solve_h2w_h2h_l2h_jacobian(X)
    jax.tree.map(close, again, [out, new, others, h2w, h2h])
    assert [s.shape for s in pull(jnp.ones_like(out))] == [
        (*g.varshape, g.num_state) for g in graph.hidden_groups
    ]

    jitted = brainstate.transform.jit(lambda x: executor.solve_h2w_h2h_jacobian(x))(X)
    jax.tree.map(close, jitted, (out, new, others, h2w, h2h))


def test_site_jacobian_by_hand(compiled):
    model, _ = compiled['stack']
    executor = bt.ETraceGraphExecutor(model)
    executor.compile_graph(X)
    _, new, _, (first, second), _ = executor.solve_h2w_h2h_jacobian(X)
    close(first.x, X)
    close(first.hidden_to_y[0][..., 0], 1 - new['layers', 0, 'h'] ** 2)
    close(second.x, new['layers', 0, 'h'])
    close(second.weight, model.layers[1].w.value)


# ---------------------------------------------------------------- diagnostics


def test_report(compiled):
    _, graph = compiled['lif']
    report = graph.report
    assert isinstance(report, bt.CompilationReport)
    assert report.hidden_groups == graph.hidden_groups
    assert report.etrace_weights == {('w',): 'local', ('rec',): 'local'}
    assert set(report.excluded_weights) == {('out',), ('idle',)}
    assert report.dynamic_states == (('count',),)
    assert report.diagnostics == graph.diagnostics
    assert report.counts == {
        'local': 2,
        'exact': 1,
        'none': 1,
        'cut': report.counts['cut'],
        'hidden_group_merged': 1,
        'relation_included': 2,
        'relation_excluded_non_temporal': 1,
        'state_mismatch': 1,
    }
    text = report.to_str()
    parameters, operations = text.split('\nOperations, with their sizes\n')
    for name, credit, reason in (
        (
            'w',
            'local',
            f'cut at matmul ({os.path.relpath(__file__)}:{MIXING_LINE})',
        ),
        (
            'rec',
            'local',
            f'cut at matmul ({os.path.relpath(__file__)}:{MIXING_LINE})',
        ),
        ('out', 'exact', 'acts on outputs of its own step only'),
        ('idle', 'none', 'the step never reads it'),
    ):
        lines = parameters.splitlines()
        (line,) = [line for line in lines if line.split()[:1] == [name]]
        assert credit in line
        assert reason in line
    assert report.dict()['counts'] is report.counts
    assert (
        repr(report)
        == f'CompilationReport(1 hidden group(s); 1 exact, 2 local, 1 none, {report.counts["cut"]} cut)'
    )
    assert 'V, a' in text
    assert 'positions 2×4' in text
    assert 'count' in text
    used = [line.split()[0] for line in operations.split('\n\n')[0].splitlines()]
    assert sorted(used) == ['out', 'rec', 'w']

    assert (
        text
        == str(report)
        == report.to_str('notice')
        == report.to_str(bt.DiagnosticLevel.NOTICE)
    )
    assert 'cut:' in report.to_str('info')
    assert 'Diagnostics' not in report.to_str('warning')
    file = io.StringIO()
    report.show('info', file=file)
    assert file.getvalue() == report.to_str('info') + '\n'


def test_records(compiled):
    _, graph = compiled['lif']
    record = bt.CompilationRecord(
        bt.DiagnosticKind.CUT, bt.DiagnosticLevel.INFO, 'told'
    )
    assert record[3:] == (None, None, (), None)
    assert record.dict()['message'] == 'told'
    assert 'cut: told' in repr(record)
    cuts = graph.explain(kind='cut')
    assert {r.primitive for r in cuts} == {'dot_general'}
    assert {r.context['source'] for r in cuts} == {f'{__file__}:{MIXING_LINE}'}
    assert all(r.level is bt.DiagnosticLevel.NOTICE for r in cuts)
    idle, unread = graph.explain(weight_path=('idle',))
    assert idle.level is bt.DiagnosticLevel.WARNING
    assert unread.kind is bt.DiagnosticKind.STATE_MISMATCH


def test_every_leaf_of_a_parameter_is_listed():
    model = bt.nn.LSTMCell(I, H)
    brainstate.nn.init_all_states(model, batch_size=B)
    report = bt.compile_etrace_graph(model, X).report
    leaves = [
        '.'.join(map(str, (*path, *(k.key for k in keys))))
        for path, state in model.states(brainstate.ParamState).items()
        for keys, _ in jax.tree_util.tree_flatten_with_path(state.value)[0]
    ]
    assert sorted(r.context['name'] for r in report.credits) == sorted(leaves)
    assert all(
        r.context['credit'] == 'local' and r.context['reason'] for r in report.credits
    )


def through_a_current(m, x):
    """The current remembers nothing; V integrates it."""
    m.i.value = x @ m.w.value
    m.V.value = 0.9 * m.V.value + m.i.value
    return m.V.value


def through_dendrites(m, x):
    """The same, but the memoryless state has another shape: the path to V leads through another group."""
    m.i.value = (x @ m.w.value).reshape(B, H // 2, 2)
    m.V.value = 0.9 * m.V.value + m.i.value.reshape(B, H)
    return m.V.value


def both_ways(m, x):
    """And once more, beside a path that keeps positions."""
    y = x @ m.w.value
    m.i.value = y.reshape(B, H // 2, 2)
    m.V.value = 0.9 * m.V.value + y + m.i.value.reshape(B, H)
    return m.V.value


def stored_readout(m, x):
    """A memoryless read-out of the old V, kept in a hidden state: not a direct read, nor one by way of the new V."""
    m.i.value = jnp.tanh(m.V.value).reshape(B, H // 2, 2)
    m.V.value = 0.9 * m.V.value + x @ m.w.value
    return m.i.value


@pytest.mark.parametrize(
    ('step', 'shape', 'credit'),
    [
        (through_a_current, (B, H), 'exact'),
        (through_dendrites, (B, H // 2, 2), 'instantaneous'),
        (both_ways, (B, H // 2, 2), 'local'),
        (stored_readout, (B, H // 2, 2), 'none'),
    ],
)
def test_credit_by_way_of_a_state_without_memory(step, shape, credit):
    graph = bt.compile_etrace_graph(
        Step(step, w=weight(I, H), V=hidden(B, H), i=hidden(*shape)), X
    )
    assert len(graph.hidden_groups) == (1 if shape == (B, H) else 2)
    (record,) = graph.explain(kind='credit')
    assert record.context['credit'] == credit


def test_lines_point_to_the_caller_of_cached_functions():
    """Library functions are traced once: a second caller must not be told the first one's line."""
    lines = []
    for _ in range(2):

        def step(m, x):
            m.h.value = 0.9 * m.h.value + jax.nn.softmax(x @ m.w.value)
            return m.h.value

        def other(m, x):
            m.h.value = 0.8 * m.h.value + jax.nn.softmax(x @ m.w.value)
            return m.h.value

        for fn in (step, other):
            graph = bt.compile_etrace_graph(Step(fn, w=weight(I, H), h=hidden(B, H)), X)
            (cut, *_) = graph.explain(kind='cut')
            lines.append(
                cut.context['source']
                == f'{__file__}:{inspect.getsourcelines(fn)[1] + 1}'
            )
    assert all(lines)


def inhibition(m, x):
    """No output reads i in its step: e feels it a step later."""
    e = m.e.value
    m.e.value = 0.9 * e + x @ m.w.value - m.i.value @ m.back.value
    m.i.value = 0.8 * m.i.value + e @ m.to.value
    return m.e.value


def test_what_no_output_feels_has_no_credit_and_names_the_line():
    parts = {
        'w': weight(I, H),
        'back': weight(3, H),
        'to': weight(H, 3),
        'e': hidden(B, H),
        'i': hidden(B, 3),
    }
    graph = bt.compile_etrace_graph(Step(inhibition, **parts), X)
    credits = {r.context['name']: r.context for r in graph.explain(kind='credit')}
    assert {name: c['credit'] for name, c in credits.items()} == {
        'w': 'local',
        'back': 'local',
        'to': 'none',
    }
    first = inspect.getsourcelines(inhibition)[1]
    lines = {'e': first + 4, 'i': first + 3}
    assert credits['to']['reason'].endswith(
        f'i feeds e, another group ({os.path.relpath(__file__)}:{lines["i"]})'
    )
    cuts = [r for r in graph.explain(kind='cut') if 'another group' in r.message]
    assert {r.hidden_paths[0][0]: r.context['source'] for r in cuts} == {
        k: f'{__file__}:{n}' for k, n in lines.items()
    }


def test_sources_are_told_from_their_package_or_the_working_folder():
    assert (
        short_source('/somewhere/site-packages/brainstate/nn/_linear.py:129')
        == 'brainstate/nn/_linear.py:129'
    )
    assert short_source(f'{os.getcwd()}/mine.py:3') == 'mine.py:3'
    assert short_source('/elsewhere/mine.py:3') == '/elsewhere/mine.py:3'
