"""The compiler's documented interface, sentence by sentence: types of fields, names of arguments, defaults, errors."""

import doctest
import enum
import inspect
import io
import threading
from dataclasses import dataclass, field

import brainstate
import brainunit as u
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import braintrace as bt
from braintrace.compat import is_var
from zoo.base import Step, array, hidden, other, weight

B, I, H = 2, 3, 4  # noqa: E741


@dataclass
class Model:
    """A model, the arguments of its step, and what a person would draw of it."""

    module: brainstate.nn.Module
    args: tuple
    groups: list[list[tuple]]
    varshape: tuple[int, ...]
    num_state: int
    kwargs: dict = field(default_factory=dict)

    @property
    def inputs(self):
        """All inputs by position, those given by keyword last."""
        return (*self.args, *(self.kwargs[name] for name in sorted(self.kwargs)))


def gru():
    cell = bt.nn.GRUCell(I, H)
    brainstate.nn.init_all_states(cell)
    cell.h.value = array(H)
    return Model(cell, (array(I),), [[('h',)]], (H,), 1)


def batched_lstm():
    cell = bt.nn.LSTMCell(I, H)
    brainstate.nn.init_all_states(cell, batch_size=B)
    cell.h.value, cell.c.value = array(B, H), array(B, H)
    return Model(cell, (array(B, I),), [[('c',), ('h',)]], (B, H), 2)


def states_on_an_axis():
    """A membrane and three currents of its own, kept in one `HiddenGroupState`."""

    def step(m, x):
        m.i.value = 0.5 * m.i.value + (x @ m.w.value)[..., None]
        m.v.value = 0.9 * m.v.value + m.i.value.sum(-1)
        m.steps.value = m.steps.value + 1
        return m.v.value

    currents = brainstate.HiddenGroupState(array(B, H, 3))
    module = Step(
        step,
        w=weight(I, H),
        v=hidden(B, H),
        i=currents,
        steps=other(jnp.zeros((), jnp.int32)),
    )
    return Model(module, (array(B, I),), [[('i',), ('v',)]], (B, H), 4)


def control_flow():
    """A state written by a loop and one written by a branch."""

    def step(m, x):
        drive = x @ m.w.value
        m.a.value = jax.lax.scan(
            lambda a, _: (0.5 * a + drive, None), m.a.value, None, length=2
        )[0]
        m.b.value = jax.lax.cond(x.sum() > 0, jnp.sin, jnp.cos, m.b.value + drive)
        return m.a.value * m.b.value

    module = Step(step, w=weight(I, H), a=hidden(B, H), b=hidden(B, H))
    return Model(module, (array(B, I),), [[('a',)], [('b',)]], (B, H), 1)


def without_parameters():
    def step(m, x):
        m.h.value = jnp.tanh(0.9 * m.h.value + x)
        return 2 * m.h.value

    return Model(Step(step, h=hidden(B, H)), (array(B, H),), [[('h',)]], (B, H), 1)


class KeywordStep(brainstate.nn.Module):
    def __init__(self):
        super().__init__()
        self.w, self.h = weight(I, H), hidden(B, H)

    def update(self, x, *, bias=0.0, gain):
        self.h.value = 0.9 * self.h.value + gain * (x @ self.w.value) + bias
        return self.h.value


def keyword_arguments():
    given = {'gain': array(H), 'bias': array(H)}
    return Model(KeywordStep(), (array(B, I),), [[('h',)]], (B, H), 1, given)


MAKERS = {
    make.__name__: make
    for make in (
        gru,
        batched_lstm,
        states_on_an_axis,
        control_flow,
        without_parameters,
        keyword_arguments,
    )
}


@pytest.fixture(scope='module', params=MAKERS)
def model(request):
    return MAKERS[request.param]()


@pytest.fixture(scope='module')
def graph(model):
    return bt.compile_etrace_graph(model.module, *model.args, **model.kwargs)


@pytest.fixture
def info(model):
    return bt.extract_module_info(model.module, *model.args, **model.kwargs)


@pytest.fixture
def executor(model):
    made = bt.ETraceGraphExecutor(model.module)
    made.compile_graph(*model.args, **model.kwargs)
    return made


def plain_call(model):
    """Outputs and new hidden values of the module itself; its states are put back."""
    before = {path: state.value for path, state in model.module.states().items()}
    out = model.module(*model.args, **model.kwargs)
    states = model.module.states(brainstate.HiddenState)
    new = {path: state.value for path, state in states.items()}
    for path, state in model.module.states().items():
        state.value = before[path]
    return out, new


def environment(model, graph):
    """The value of every variable that the graph's program takes or returns."""
    info = graph.module_info
    flat = jax.tree.leaves(
        (model.inputs, [s.value for s in info.compiled_model_states])
    )
    results = jax.core.eval_jaxpr(info.jaxpr, info.closed_jaxpr.consts, *flat)
    found = dict(zip(info.jaxpr.constvars, info.closed_jaxpr.consts, strict=True))
    found |= dict(zip(info.jaxpr.invars, flat, strict=True))
    return found | {
        v: x for v, x in zip(info.jaxpr.outvars, results, strict=True) if is_var(v)
    }


def read(group, env):
    """Old values of a group and the inputs of its transition."""
    return [env[v] for v in group.hidden_invars], [
        env[v] for v in group.transition_jaxpr_constvars
    ]


def close(a, b):
    np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)


def parameters_of(function):
    return list(inspect.signature(function).parameters)


# ---------------------------------------------------------------- HiddenGroup

FIELDS = [
    'index', 'hidden_paths', 'hidden_states', 'hidden_invars', 'hidden_outvars', 'transition_jaxpr',
    'transition_jaxpr_constvars',
]  # fmt: skip


def test_a_hidden_group_has_the_seven_fields_in_this_order(graph):
    assert issubclass(bt.HiddenGroup, tuple)
    assert list(bt.HiddenGroup._fields) == parameters_of(bt.HiddenGroup) == FIELDS
    for group in graph.hidden_groups:
        assert [getattr(group, name) for name in FIELDS] == list(group)


def test_a_hidden_group_is_built_from_the_seven_fields_alone(model, graph):
    env = environment(model, graph)
    for group in graph.hidden_groups:
        by_position = bt.HiddenGroup(*(getattr(group, name) for name in FIELDS))
        by_keyword = bt.HiddenGroup(**{name: getattr(group, name) for name in FIELDS})
        assert by_position == by_keyword == group
        old, inputs = read(group, env)
        close(
            by_keyword.diagonal_jacobian(old, inputs),
            group.diagonal_jacobian(old, inputs),
        )


def test_a_hidden_group_of_states_alone_knows_shapes_and_joins_values(graph):
    for group in graph.hidden_groups:
        bare = bt.HiddenGroup(
            0, group.hidden_paths, group.hidden_states, [], [], None, []
        )
        assert (bare.varshape, bare.num_state) == (group.varshape, group.num_state)
        values = [state.value for state in bare.hidden_states]
        joined = bare.concat_hidden(values)
        np.testing.assert_array_equal(joined, group.concat_hidden(values))
        jax.tree.map(np.testing.assert_array_equal, bare.split_hidden(joined), values)


@pytest.mark.parametrize(
    'name', [name for name in FIELDS if name not in ('index', 'transition_jaxpr')]
)
def test_the_fields_of_a_hidden_group_that_hold_several_are_lists(graph, name):
    assert all(type(getattr(group, name)) is list for group in graph.hidden_groups)


def test_the_variables_of_the_transition_are_those_of_the_group(graph):
    for group in graph.hidden_groups:
        assert (
            list(group.transition_jaxpr.constvars) == group.transition_jaxpr_constvars
        )
        assert list(group.transition_jaxpr.invars) == group.hidden_invars
        assert list(group.transition_jaxpr.outvars) == group.hidden_outvars


def test_paths_and_states_of_a_group_belong_together(model, graph):
    assert [group.hidden_paths for group in graph.hidden_groups] == model.groups
    for group in graph.hidden_groups:
        assert group.hidden_states == [
            model.module.states()[path] for path in group.hidden_paths
        ]


def test_varshape_has_no_trailing_state_axis_and_num_state_counts_all(model, graph):
    for group in graph.hidden_groups:
        assert group.varshape == model.varshape
        assert group.num_state == model.num_state


def test_check_consistent_varshape_is_silent_where_shapes_agree(graph):
    assert all(
        group.check_consistent_varshape() is None for group in graph.hidden_groups
    )


@pytest.mark.parametrize(
    'states',
    [
        [brainstate.HiddenState(jnp.zeros(7)), brainstate.HiddenState(jnp.zeros(5))],
        [
            brainstate.HiddenState(jnp.zeros(7)),
            brainstate.HiddenGroupState(jnp.zeros((5, 2))),
        ],
        [
            brainstate.HiddenGroupState(jnp.zeros((7, 2))),
            brainstate.HiddenGroupState(jnp.zeros((5, 2))),
        ],
        [
            brainstate.HiddenState(jnp.zeros(7) * u.mV),
            brainstate.HiddenState(jnp.zeros(5) * u.ms),
        ],
        [
            brainstate.ShortTermState(jnp.zeros(7)),
            brainstate.ShortTermState(jnp.zeros(5)),
        ],
        [
            brainstate.ParamState({'w': jnp.zeros(7)}),
            brainstate.HiddenState(jnp.zeros(5)),
        ],
        [
            brainstate.ShortTermState(jnp.zeros(7) * u.mV),
            brainstate.State(jnp.zeros(5)),
        ],
        [
            brainstate.State((jnp.zeros(7), jnp.zeros(2))),
            brainstate.State((jnp.zeros(5), jnp.zeros(2))),
        ],
        [brainstate.HiddenState(jnp.zeros(7))] * 2
        + [brainstate.HiddenState(jnp.zeros(5))],
    ],
)
def test_check_consistent_varshape_raises_whatever_the_states_are(graph, states):
    group = graph.hidden_groups[0]._replace(hidden_states=states)
    with pytest.raises(bt.NotSupportedError, match=r'7,(.|\n)*5,'):
        group.check_consistent_varshape()


def test_transition_gives_new_values_from_old(model, graph):
    env, (_, new) = environment(model, graph), plain_call(model)
    assert parameters_of(bt.HiddenGroup.transition) == [
        'self',
        'hidden_vals',
        'input_vals',
    ]
    for group in graph.hidden_groups:
        old, inputs = read(group, env)
        got = group.transition(hidden_vals=old, input_vals=inputs)
        for path, value in zip(group.hidden_paths, got, strict=True):
            close(value, new[path])


def test_diagonal_jacobian_is_that_of_new_by_old_states(model, graph):
    env = environment(model, graph)
    assert parameters_of(bt.HiddenGroup.diagonal_jacobian) == [
        'self',
        'hidden_vals',
        'input_vals',
    ]
    for group in graph.hidden_groups:
        old, inputs = read(group, env)
        got = group.diagonal_jacobian(hidden_vals=old, input_vals=inputs)
        assert got.shape == (*group.varshape, group.num_state, group.num_state)
        step = lambda h, g=group, inputs=inputs: g.concat_hidden(
            g.transition(g.split_hidden(h), inputs)
        )
        dense = jax.jacfwd(step)(group.concat_hidden(old))
        for place in np.ndindex(group.varshape):
            close(got[place], dense[place][(slice(None), *place)])


def test_concat_hidden_stacks_along_a_new_last_axis(model, graph):
    assert parameters_of(bt.HiddenGroup.concat_hidden) == ['self', 'splitted_hid_vals']
    for group in graph.hidden_groups:
        values = [state.value for state in group.hidden_states]
        joined = group.concat_hidden(splitted_hid_vals=values)
        assert joined.shape == (*group.varshape, group.num_state)
        has_axis = [
            isinstance(s, brainstate.HiddenGroupState) for s in group.hidden_states
        ]
        parts = [
            x if has else x[..., None] for x, has in zip(values, has_axis, strict=True)
        ]
        np.testing.assert_array_equal(joined, jnp.concatenate(parts, -1))


def test_split_hidden_gives_a_list_of_one_array_per_state(graph):
    assert parameters_of(bt.HiddenGroup.split_hidden) == ['self', 'concat_hid_vals']
    for group in graph.hidden_groups:
        values = [state.value for state in group.hidden_states]
        back = group.split_hidden(concat_hid_vals=group.concat_hidden(values))
        assert type(back) is list
        assert len(back) == len(values)
        jax.tree.map(np.testing.assert_array_equal, back, values)


def test_every_record_has_a_dictionary_and_a_repr_that_names_its_paths(model, graph):
    paths = lambda found: ['.'.join(map(str, path)) for path in found]
    named = [(group, paths(group.hidden_paths)) for group in graph.hidden_groups]
    named += [
        (site, paths(site.connected_hidden_paths))
        for site in graph.hidden_param_op_relations
    ]
    named.append(
        (graph.hidden_perturb, paths(graph.hidden_perturb.perturb_hidden_paths))
    )
    named += [
        (record, paths(graph.hid_path_to_group))
        for record in (graph, graph.module_info)
    ]
    for record, names in named:
        assert record.dict() == record._asdict()
        assert list(record.dict()) == list(record._fields)
        assert repr(record).startswith(type(record).__name__)
        assert all(name in repr(record) for name in names)
        assert 'object at 0x' not in repr(record)
    report = graph.report
    assert report.dict()['diagnostics'] == graph.diagnostics
    assert repr(report).startswith('CompilationReport(')
    for record in graph.diagnostics:
        assert record.dict() == record._asdict()
        assert record.message in repr(record)


@pytest.mark.parametrize(
    'name', ['HiddenGroup', 'ETraceGraph', 'ETraceGraphExecutor', 'HiddenPerturbation']
)
def test_the_module_of_the_public_classes_is_braintrace(name):
    kind = getattr(bt, name)
    assert kind.__module__ == 'braintrace'
    assert kind.__qualname__ == name


def test_examples_of_classes_that_name_another_module_are_run():
    """Doctests are collected by the module that a class names."""
    tests = {test.name: test for test in doctest.DocTestFinder().find(bt)}
    assert tests['braintrace.ETraceGraphExecutor'].examples


# ---------------------------------------------------------------- finding groups


def roles(info):
    """The arguments of the functions that take a bare program, after the program."""
    return {
        'hidden_outvar_to_invar': info.hidden_outvar_to_invar,
        'weight_invars': info.weight_invars,
        'invar_to_hidden_path': info.invar_to_hidden_path,
        'outvar_to_hidden_path': info.outvar_to_hidden_path,
        'path_to_state': info.retrieved_model_states,
    }


WAYS = {
    'module': lambda model, info: bt.find_hidden_groups_from_module(
        model.module, *model.args, **model.kwargs
    ),
    'minfo': lambda model, info: bt.find_hidden_groups_from_minfo(info),
    'jaxpr': lambda model, info: bt.find_hidden_groups_from_jaxpr(
        info.jaxpr, *roles(info).values()
    ),
    'closed jaxpr': lambda model, info: bt.find_hidden_groups_from_jaxpr(
        info.closed_jaxpr, *roles(info).values()
    ),
    'keywords': lambda model, info: bt.find_hidden_groups_from_jaxpr(
        jaxpr=info.jaxpr, **roles(info)
    ),
}


@pytest.mark.parametrize('way', WAYS)
def test_hidden_groups_are_found_with_a_pretty_mapping_from_path_to_group(
    model, info, graph, way
):
    groups, by_path = WAYS[way](model, info)
    assert [g.hidden_paths for g in groups] == model.groups
    assert [g.index for g in groups] == list(range(len(groups)))
    assert isinstance(by_path, brainstate.util.PrettyDict)
    assert by_path == {path: group for group in groups for path in group.hidden_paths}
    assert list(by_path) == list(graph.hid_path_to_group)
    assert [str(g.transition_jaxpr) for g in groups] == [
        str(g.transition_jaxpr) for g in graph.hidden_groups
    ]
    assert isinstance(graph.hid_path_to_group, brainstate.util.PrettyDict)
    assert all('.'.join(path) in repr(by_path) for path in by_path)


@pytest.mark.parametrize('way', ['jaxpr', 'closed jaxpr', 'keywords'])
def test_groups_of_a_bare_program_have_its_own_variables(model, info, way):
    groups, _ = WAYS[way](model, info)
    for group in groups:
        assert group.hidden_invars == [
            info.hidden_path_to_invar[path] for path in group.hidden_paths
        ]
        assert group.hidden_outvars == [
            info.hidden_path_to_outvar[path] for path in group.hidden_paths
        ]


def test_the_functions_on_bare_programs_have_these_arguments():
    more = [
        'hidden_outvar_to_invar',
        'weight_invars',
        'invar_to_hidden_path',
        'outvar_to_hidden_path',
        'path_to_state',
    ]
    assert parameters_of(bt.find_hidden_groups_from_jaxpr) == ['jaxpr', *more]
    assert parameters_of(bt.add_hidden_perturbation_in_jaxpr) == ['closed_jaxpr', *more]


def traced_by_hand():
    """A program with a call, a constant and a state passed through, traced by JAX alone."""
    mask = np.array([1.0, 0.0, 1.0, 1.0], np.float32)
    inner = jax.jit(lambda w, h, k, x: jnp.tanh(mask * h + x @ w + k))
    closed = jax.make_jaxpr(lambda w, h, k, x: (x.sum(), inner(w, h, k, x), k))(
        jnp.zeros((I, H)), jnp.zeros(H), jnp.zeros(H), jnp.zeros(I)
    )
    w, h, k, _ = closed.jaxpr.invars
    _, new_h, new_k = closed.jaxpr.outvars
    assert new_k is k
    return closed, {
        'hidden_outvar_to_invar': {new_h: h, new_k: k},
        'weight_invars': [w],
        'invar_to_hidden_path': {h: ('h',), k: ('k',)},
        'outvar_to_hidden_path': {new_h: ('h',), new_k: ('k',)},
        'path_to_state': {
            (name,): brainstate.HiddenState(jnp.zeros(H)) for name in 'hk'
        },
    }


@pytest.mark.parametrize('opened', [False, True])
def test_a_program_that_jax_alone_has_traced(opened):
    closed, given = traced_by_hand()
    jaxpr = closed.jaxpr if opened else closed
    groups, by_path = bt.find_hidden_groups_from_jaxpr(jaxpr, **given)
    (group,) = groups
    assert set(by_path) == set(group.hidden_paths) == {('h',), ('k',)}
    assert group.hidden_invars == list(closed.jaxpr.invars[1:3])
    assert group.hidden_outvars[0] is closed.jaxpr.outvars[1]
    perturb = bt.add_hidden_perturbation_in_jaxpr(closed, **given)
    values = [array(I, H), array(H), array(H), array(I)]
    delta_h, delta_k = array(H), array(H)
    _, new_h, new_k = perturb.eval_jaxpr(values, [delta_h, delta_k])
    _, plain_h, plain_k = jax.core.eval_jaxpr(closed.jaxpr, closed.consts, *values)
    close(new_h, plain_h + delta_h)
    close(new_k, plain_k + delta_k)


def test_the_functions_on_modules_take_the_arguments_of_the_step():
    for function in (
        bt.find_hidden_groups_from_module,
        bt.find_hidden_param_op_relations_from_module,
        bt.add_hidden_perturbation_in_module,
        bt.extract_module_info,
    ):
        assert parameters_of(function) == ['model', 'model_args', 'model_kwargs']
    for function in (
        bt.find_hidden_groups_from_minfo,
        bt.add_hidden_perturbation_from_minfo,
    ):
        assert parameters_of(function) == ['minfo']


# ---------------------------------------------------------------- helpers


@pytest.mark.parametrize('version', [0, 1])
def test_group_merging_merges_sets_that_intersect(version):
    groups = [{1, 2}, [3], {2, 5}, {4, 3}, {5, 4}, {9}]
    merged = bt.group_merging(groups, version=version)
    assert type(merged) is list
    assert all(type(group) is frozenset for group in merged)
    assert set(merged) == {frozenset({1, 2, 3, 4, 5}), frozenset({9})}
    assert merged == bt.group_merging(groups) == bt.group_merging(groups, 1 - version)
    assert inspect.signature(bt.group_merging).parameters['version'].default == 1
    assert bt.group_merging([], version) == []


@pytest.mark.parametrize('version', [-1, 2, None, 'new'])
def test_group_merging_knows_two_versions(version):
    with pytest.raises(ValueError, match='version'):
        bt.group_merging([{1}], version=version)


def test_jacrev_last_dim_is_the_jacobian_of_the_last_axis():
    assert parameters_of(bt.jacrev_last_dim) == ['fn', 'hid_vals']
    fn = lambda h: jnp.stack([h[..., 0] * h[..., 1], jnp.sin(h[..., 0])], -1)
    h = array(B, H, 2)
    got = bt.jacrev_last_dim(fn=fn, hid_vals=h)
    assert got.shape == (B, H, 2, 2)
    for place in np.ndindex(B, H):
        close(got[place], jax.jacfwd(fn)(h[place]))


@pytest.mark.parametrize('count', [1, 3])
def test_jacrev_last_dim_asserts_as_many_new_states_as_old(count):
    fn = lambda h: jnp.repeat(h[..., :1], count, -1)
    with pytest.raises(AssertionError, match=rf'\({H}, 2\)(.|\n)*\({H}, {count}\)'):
        bt.jacrev_last_dim(fn, array(H, 2))


# ---------------------------------------------------------------- HiddenPerturbation


PERTURBED = {
    'graph': lambda model, info, graph: graph.hidden_perturb,
    'module': lambda model, info, graph: bt.add_hidden_perturbation_in_module(
        model.module, *model.args, **model.kwargs
    ),
    'minfo': lambda model, info, graph: bt.add_hidden_perturbation_from_minfo(info),
    'jaxpr': lambda model, info, graph: bt.add_hidden_perturbation_in_jaxpr(
        info.closed_jaxpr, *roles(info).values()
    ),
    'keywords': lambda model, info, graph: bt.add_hidden_perturbation_in_jaxpr(
        closed_jaxpr=info.closed_jaxpr, **roles(info)
    ),
}


@pytest.mark.parametrize('way', PERTURBED)
def test_a_perturbation_is_added_to_every_new_hidden_value(model, info, graph, way):
    perturb = PERTURBED[way](model, info, graph)
    assert isinstance(perturb, bt.HiddenPerturbation)
    fields = [
        'perturb_vars',
        'perturb_hidden_paths',
        'perturb_hidden_states',
        'perturb_jaxpr',
    ]
    assert list(perturb._fields) == parameters_of(bt.HiddenPerturbation) == fields
    assert (
        len(perturb.perturb_vars)
        == len(perturb.perturb_hidden_states)
        == sum(map(len, model.groups))
    )
    states = model.module.states()
    assert list(perturb.perturb_hidden_states) == [
        states[path] for path in perturb.perturb_hidden_paths
    ]

    _, new = plain_call(model)
    deltas = [array(*v.aval.shape) for v in perturb.perturb_vars]
    flat = jax.tree.leaves(
        (model.inputs, [s.value for s in info.compiled_model_states])
    )
    results = perturb.eval_jaxpr(inputs=flat, perturb_data=deltas)
    places = dict(
        zip(
            info.jaxpr.outvars[info.num_var_out :],
            results[info.num_var_out :],
            strict=True,
        )
    )
    moved = dict(zip(perturb.perturb_hidden_paths, deltas, strict=True))
    if set(new) == {('c',), ('h',)}:  # the LSTM's h is read from the new c
        close(places[info.hidden_path_to_outvar['c',]], new['c',] + moved['c',])
        return
    for path, value in new.items():
        want = value + moved[path]
        if path == ('v',):  # the membrane sums the currents of its own step
            want = want + moved['i',].sum(-1)
        close(places[info.hidden_path_to_outvar[path]], want)


def test_init_perturb_data_is_zero_and_changes_nothing(model, graph):
    perturb = graph.hidden_perturb
    zeros = perturb.init_perturb_data()
    assert [(z.shape, z.dtype) for z in zeros] == [
        (v.aval.shape, v.aval.dtype) for v in perturb.perturb_vars
    ]
    assert not any(z.any() for z in zeros)
    out, _ = plain_call(model)
    close(graph.call_hidden_perturb(model.inputs, zeros), out)


def test_the_gradient_of_a_perturbation_is_that_of_the_new_hidden_value():
    """Everything later in the step reads the sum; here the output is 2·h."""
    model = without_parameters()
    graph = bt.compile_etrace_graph(model.module, *model.args)
    a = array(B, H)
    loss = lambda data: jnp.sum(a * graph.call_hidden_perturb(model.args, data))
    (got,) = jax.grad(loss)(graph.hidden_perturb.init_perturb_data())
    close(got, 2 * a)


def test_perturb_data_to_hidden_group_data_gives_one_array_per_group(graph):
    perturb = graph.hidden_perturb
    assert parameters_of(bt.HiddenPerturbation.perturb_data_to_hidden_group_data)[
        1:
    ] == [
        'perturb_data',
        'hidden_groups',
    ]
    data = [array(*v.aval.shape) for v in perturb.perturb_vars]
    by_path = dict(zip(perturb.perturb_hidden_paths, data, strict=True))
    with_unit = [x * u.mV for x in data]
    for given in (data, with_unit):
        got = perturb.perturb_data_to_hidden_group_data(given, graph.hidden_groups)
        assert len(got) == len(graph.hidden_groups)
        for joined, group in zip(got, graph.hidden_groups, strict=True):
            assert not isinstance(joined, u.Quantity)
            np.testing.assert_array_equal(
                joined, group.concat_hidden([by_path[p] for p in group.hidden_paths])
            )


@pytest.mark.parametrize('change', [-1, 1])
def test_perturb_data_of_a_wrong_length_is_an_assertion_error_with_both_numbers(
    graph, change
):
    perturb = graph.hidden_perturb
    data = [*perturb.init_perturb_data(), jnp.zeros(H)][
        : len(perturb.perturb_vars) + change
    ]
    numbers = rf'{len(data)} perturbation(.|\n)*{len(perturb.perturb_vars)} hidden'
    with pytest.raises(AssertionError, match=numbers):
        perturb.perturb_data_to_hidden_group_data(data, graph.hidden_groups)


# ---------------------------------------------------------------- ModuleInfo


def test_module_info_has_the_documented_fields_and_they_agree(model, info):
    documented = [
        'stateful_model', 'closed_jaxpr', 'retrieved_model_states', 'compiled_model_states', 'state_id_to_path',
        'state_tree_invars', 'state_tree_outvars', 'hidden_path_to_invar', 'hidden_path_to_outvar',
        'invar_to_hidden_path', 'outvar_to_hidden_path', 'hidden_outvar_to_invar', 'weight_invars',
        'weight_path_to_invars', 'invar_to_weight_path', 'num_var_out', 'num_var_state',
    ]  # fmt: skip
    assert isinstance(info, bt.ModuleInfo)
    assert list(info._fields[: len(documented)]) == documented
    states = dict(model.module.states())
    assert dict(info.retrieved_model_states) == states
    assert info.jaxpr is info.closed_jaxpr.jaxpr
    assert all(
        info.state_id_to_path[id(state)] == path for path, state in states.items()
    )
    assert (
        len(info.compiled_model_states)
        == len(info.state_tree_invars)
        == len(info.state_tree_outvars)
    )
    hidden_paths = {path for group in model.groups for path in group}
    assert (
        hidden_paths
        == set(info.hidden_path_to_invar)
        == set(info.hidden_path_to_outvar)
    )
    assert info.invar_to_hidden_path == {
        v: path for path, v in info.hidden_path_to_invar.items()
    }
    assert info.outvar_to_hidden_path == {
        v: path for path, v in info.hidden_path_to_outvar.items()
    }
    assert info.hidden_outvar_to_invar == {
        info.hidden_path_to_outvar[path]: info.hidden_path_to_invar[path]
        for path in hidden_paths
    }
    weights = model.module.states(brainstate.ParamState)
    assert set(info.weight_path_to_invars) == set(weights)
    leaves = {
        v: path
        for path, tree in info.weight_path_to_invars.items()
        for v in jax.tree.leaves(tree)
    }
    assert leaves == info.invar_to_weight_path
    assert set(info.weight_invars) == set(leaves)
    assert len(info.jaxpr.outvars) == info.num_var_out + info.num_var_state


def test_add_jaxpr_outs_is_a_new_record_whose_jaxpr_also_returns_the_variables(
    model, info
):
    assert parameters_of(bt.ModuleInfo.add_jaxpr_outs) == ['self', 'jax_vars']
    inner = info.jaxpr.eqns[0].outvars[0]
    before = list(info.jaxpr.outvars)
    more = info.add_jaxpr_outs(jax_vars=[inner])
    assert isinstance(more, bt.ModuleInfo)
    assert list(info.jaxpr.outvars) == before
    assert list(more.jaxpr.outvars) == [*before, inner]
    *_, extra = more.jaxpr_call(*model.args, **model.kwargs)
    assert list(extra) == [inner]


def test_split_state_outvars_sorts_new_states_by_role(model, info):
    parameters, hiddens, others = info.split_state_outvars()
    assert set(parameters) == set(model.module.states(brainstate.ParamState))
    assert hiddens == info.hidden_path_to_outvar
    assert set(others) == {path for path in model.module.states() if path == ('steps',)}


def test_jaxpr_call_runs_the_step_from_current_or_given_values(model, info):
    out, new = plain_call(model)
    got, hiddens, _, _ = info.jaxpr_call(*model.args, **model.kwargs)
    close(got, out)
    jax.tree.map(close, hiddens, new)
    values = [state.value for state in info.compiled_model_states]
    halves = jax.tree.map(
        lambda x: x if jnp.issubdtype(x.dtype, jnp.integer) else x / 2, values
    )
    moved, *_ = info.jaxpr_call(*model.args, old_state_vals=halves, **model.kwargs)
    for state, half in zip(info.compiled_model_states, halves, strict=True):
        state.value = half
    want, _ = plain_call(model)
    for state, value in zip(info.compiled_model_states, values, strict=True):
        state.value = value
    close(moved, want)


# ---------------------------------------------------------------- HiddenParamOpRelation


def test_relations_name_operation_variables_groups_and_parameters(model, info, graph):
    first = [
        'primitive', 'x_var', 'y_var', 'hidden_groups', 'y_to_hidden_group_jaxprs', 'connected_hidden_paths',
    ]  # fmt: skip
    assert list(bt.HiddenParamOpRelation._fields[: len(first)]) == first
    sites = graph.hidden_param_op_relations
    weights = set(model.module.states(brainstate.ParamState))
    assert bool(sites) == bool(weights)
    outvars = set(filter(is_var, graph.module_info.jaxpr.outvars)) | set(
        graph.module_info.jaxpr.invars
    )
    for site in sites:
        assert isinstance(site, bt.HiddenParamOpRelation)
        assert site.x_var is None or site.x_var in outvars
        assert site.path in site.trainable_paths
        assert set(site.trainable_paths.values()) <= weights
        assert set(site.connected_hidden_paths) <= set(graph.hid_path_to_group)
        assert all(graph.hidden_groups[g.index] == g for g in site.hidden_groups)
        for group, program in zip(
            site.hidden_groups, site.y_to_hidden_group_jaxprs, strict=True
        ):
            assert list(program.invars) == [site.y_var]
            assert list(program.outvars) == group.hidden_outvars
    named = [repr(site) for site in sites]
    from_module = bt.find_hidden_param_op_relations_from_module(
        model.module, *model.args, **model.kwargs
    )
    from_minfo = bt.find_hidden_param_op_relations_from_minfo(
        minfo=info, hid_path_to_group=graph.hid_path_to_group
    )
    assert named == [repr(s) for s in from_module] == [repr(s) for s in from_minfo]


# ---------------------------------------------------------------- ETraceGraph


def test_a_graph_has_these_fields_and_no_diagnostics_by_default(graph):
    fields = [
        'module_info', 'hidden_groups', 'hid_path_to_group', 'hidden_param_op_relations', 'hidden_perturb',
        'diagnostics',
    ]  # fmt: skip
    assert issubclass(bt.ETraceGraph, tuple)
    assert list(bt.ETraceGraph._fields) == parameters_of(bt.ETraceGraph) == fields
    assert bt.ETraceGraph(*graph[:5]).diagnostics == ()
    assert (
        bt.ETraceGraph(**{name: getattr(graph, name) for name in fields[:5]}).explain()
        == ()
    )


def test_explain_gives_a_tuple_of_records_in_their_order_and_combines_filters(graph):
    keywords = inspect.signature(bt.ETraceGraph.explain).parameters
    assert list(keywords) == ['self', 'weight_path', 'hidden_path', 'kind']
    only = inspect.Parameter.KEYWORD_ONLY
    assert all(
        (p.kind, p.default) == (only, None)
        for name, p in keywords.items()
        if name != 'self'
    )
    assert type(graph.explain()) is tuple
    assert graph.explain() == tuple(graph.diagnostics)
    filters = {
        'weight_path': [
            (path, lambda r, path=path: r.weight_path == path)
            for path in {('w',), ('nobody',)}
        ],
        'hidden_path': [
            (path, lambda r, path=path: path in r.hidden_paths)
            for path in graph.hid_path_to_group
        ],
        'kind': [
            (kind, lambda r, kind=kind: r.kind is kind) for kind in bt.DiagnosticKind
        ],
    }
    for name, choices in filters.items():
        for value, fits in choices:
            got = graph.explain(**{name: value})
            assert type(got) is tuple
            assert got == tuple(filter(fits, graph.diagnostics))
    for path, of_path in filters['hidden_path']:
        for kind, of_kind in filters['kind']:
            both = graph.explain(hidden_path=path, kind=kind)
            assert both == tuple(
                r for r in graph.diagnostics if of_path(r) and of_kind(r)
            )


def test_call_hidden_perturb_starts_from_current_values_unless_given(model, graph):
    assert parameters_of(bt.ETraceGraph.call_hidden_perturb) == [
        'self',
        'args',
        'perturb_data',
        'old_state_vals',
    ]
    assert (
        inspect.signature(bt.ETraceGraph.call_hidden_perturb)
        .parameters['old_state_vals']
        .default
        is None
    )
    zeros = graph.hidden_perturb.init_perturb_data()
    current = [state.value for state in graph.module_info.compiled_model_states]
    twice = jax.tree.map(lambda x: 2 * x, current)
    close(
        graph.call_hidden_perturb(args=model.inputs, perturb_data=zeros),
        plain_call(model)[0],
    )
    got = graph.call_hidden_perturb(model.inputs, zeros, old_state_vals=twice)
    close(
        got,
        graph.module_info.jaxpr_call(*model.args, old_state_vals=twice, **model.kwargs)[
            0
        ],
    )
    close(graph.call_hidden_perturb(model.inputs, zeros, current), plain_call(model)[0])


def test_call_hidden_perturb_without_a_perturbation_is_an_assertion_error(model):
    bare = bt.compile_etrace_graph(
        model.module, *model.args, include_hidden_perturb=False, **model.kwargs
    )
    assert bare.hidden_perturb is None
    with pytest.raises(AssertionError, match='include_hidden_perturb'):
        bare.call_hidden_perturb(model.inputs, [])


def test_compile_etrace_graph_takes_the_model_and_the_arguments_of_its_step(
    model, graph
):
    signature = inspect.signature(bt.compile_etrace_graph).parameters
    assert list(signature)[:3] == ['model', 'model_args', 'include_hidden_perturb']
    assert signature['include_hidden_perturb'].default is True
    assert signature['include_hidden_perturb'].kind is inspect.Parameter.KEYWORD_ONLY
    assert isinstance(graph, bt.ETraceGraph)
    assert [group.index for group in graph.hidden_groups] == list(
        range(len(model.groups))
    )


def test_the_program_of_a_graph_also_returns_what_derivatives_read(graph):
    info, sites = graph.module_info, graph.hidden_param_op_relations
    outvars, plain = list(info.jaxpr.outvars), info.num_var_out + info.num_var_state
    states = [v for tree in info.state_tree_outvars for v in jax.tree.leaves(tree)]
    assert outvars[info.num_var_out : plain] == states
    wanted = [site.x_var for site in sites if site.x_var is not None]
    wanted += [
        v
        for s in sites
        for part in s.y_to_hidden_group_jaxprs
        for v in (*part.invars, *part.constvars)
    ]
    wanted += [
        v for group in graph.hidden_groups for v in group.transition_jaxpr_constvars
    ]
    returned = {v for v in outvars[:plain] if is_var(v)}
    assert outvars[plain:] == [v for v in dict.fromkeys(wanted) if v not in returned]


def test_the_same_model_compiled_twice_gives_the_same_order(model, graph):
    again = bt.compile_etrace_graph(model.module, *model.args, **model.kwargs)
    text = lambda g: (
        f'{g!r}\n{g.module_info.jaxpr}\n{g.hidden_perturb.perturb_jaxpr}\n{list(g.hid_path_to_group)}'
    )
    assert text(again) == text(graph)


def test_a_recursive_call_is_not_implemented_and_other_threads_are_free(model):
    inner = lambda: bt.compile_etrace_graph(model.module, *model.args, **model.kwargs)
    found = []

    def step(m, x):
        thread = threading.Thread(target=lambda: found.append(inner()))
        thread.start()
        thread.join()
        return inner()

    with pytest.raises(NotImplementedError, match='being compiled'):
        bt.compile_etrace_graph(Step(step, h=hidden(H)), array(H))
    assert (
        len(found[0].hidden_groups) == len(inner().hidden_groups) == len(model.groups)
    )


def test_the_small_facts():
    gru = bt.nn.GRUCell(3, 4)
    brainstate.nn.init_all_states(gru)
    x = jnp.ones((3,))
    groups, _ = bt.find_hidden_groups_from_module(gru, x)
    assert len(groups) == 1
    assert len(bt.add_hidden_perturbation_in_module(gru, x).perturb_vars) == 1
    graph = bt.compile_etrace_graph(gru, x)
    assert isinstance(graph, bt.ETraceGraph)
    assert len(graph.hidden_groups) == 1


# ---------------------------------------------------------------- models without parameters


def test_only_a_learner_is_refused_for_a_step_that_reads_no_parameter():
    model = without_parameters()
    graph = bt.compile_etrace_graph(model.module, *model.args)
    assert (len(graph.hidden_groups), len(graph.hidden_perturb.perturb_vars)) == (1, 1)
    assert graph.hidden_param_op_relations == []
    assert 'Hidden groups' in graph.report.to_str('info')
    assert '<html' in graph.report.to_html()
    refused = 'reads no parameter'
    with pytest.raises(bt.CompilationError, match=refused):
        bt.compile(model.module, 'd_rtrl', *model.args)
    learner = bt.D_RTRL(model.module)
    with pytest.raises(bt.CompilationError, match=refused):
        learner.compile_graph(*model.args)
    with pytest.raises(ValueError, match='before compiling'):
        _ = learner.graph
    with pytest.raises(bt.CompilationError, match=refused):
        bt.D_RTRL(model.module, vmap=True).compile_graph(*model.args)


def test_a_step_without_hidden_states_has_no_graph():
    model = Step(lambda m, x: x @ m.w.value, w=weight(I, H))
    with pytest.raises(bt.CompilationError, match='no hidden state'):
        bt.compile_etrace_graph(model, array(B, I))


# ---------------------------------------------------------------- ETraceGraphExecutor


@pytest.mark.parametrize(
    'model', [None, 3, lambda x: x], ids=['nothing', 'number', 'function']
)
def test_the_executor_takes_modules_only(model):
    with pytest.raises(TypeError, match='ETraceGraphExecutor'):
        bt.ETraceGraphExecutor(model)


def test_there_is_no_graph_before_compiling(model):
    executor = bt.ETraceGraphExecutor(model.module)
    with pytest.raises(ValueError, match='before compiling'):
        _ = executor.graph
    assert executor.compile_graph(*model.args, **model.kwargs) is None
    assert isinstance(executor.graph, bt.ETraceGraph)


WRAPPED = {
    'single': bt.SingleStepData,
    'multi': lambda x: bt.MultiStepData(jnp.stack([x, 2 * x, 3 * x])),
    'abstract': lambda x: bt.MultiStepData(
        jax.ShapeDtypeStruct((5, *x.shape), x.dtype)
    ),
}


@pytest.mark.parametrize('wrap', WRAPPED)
def test_compile_graph_takes_wrapped_inputs(model, executor, wrap):
    args, kwargs = jax.tree.map(WRAPPED[wrap], (model.args, model.kwargs))
    wrapped = bt.ETraceGraphExecutor(model.module)
    wrapped.compile_graph(*args, **kwargs)
    assert str(wrapped.graph.module_info.jaxpr) == str(executor.graph.module_info.jaxpr)
    close(
        wrapped.solve_h2w_h2h_jacobian(*model.args, **model.kwargs)[0],
        plain_call(model)[0],
    )


@pytest.mark.parametrize('wrap', ['single', 'multi'])
def test_a_learner_compiles_for_wrapped_inputs_too(wrap):
    model = batched_lstm()
    learner = bt.D_RTRL(model.module)
    learner.compile_graph(*map(WRAPPED[wrap], model.args))
    want, _ = plain_call(model)
    close(learner(*model.args), want)


@pytest.mark.parametrize('data', [jnp.zeros(()), jnp.zeros((0, B, I))])
def test_a_window_without_a_first_step_is_refused(data):
    model = batched_lstm()
    with pytest.raises(ValueError, match='MultiStepData'):
        bt.ETraceGraphExecutor(model.module).compile_graph(bt.MultiStepData(data))


def test_states_by_path_are_a_flatted_dict(model, executor):
    for found in (executor.states, executor.path_to_states):
        assert isinstance(found, brainstate.util.FlattedDict)
        assert dict(found) == dict(model.module.states())


def test_state_id_to_path_maps_the_identity_of_states(model, executor):
    assert executor.state_id_to_path == {
        id(state): path for path, state in model.module.states().items()
    }


def test_show_graph_names_groups_other_states_and_parameters(capsys):
    def step(m, x):
        m.h.value = 0.9 * m.h.value + x @ m.w.value
        m.count.value = m.count.value + 1
        return m.h.value @ m.out.value

    parts = {
        'w': weight(I, H),
        'out': weight(H, 2),
        'h': hidden(B, H),
        'count': other(jnp.zeros((), jnp.int32)),
    }
    executor = bt.ETraceGraphExecutor(Step(step, **parts))
    executor.compile_graph(array(B, I))
    text = executor.show_graph(verbose=False, return_msg=True)
    assert capsys.readouterr().out == ''
    groups, rest = text.split('Dynamic states that are not hidden:')
    dynamic, rest = rest.split('Parameters tied to groups:')
    tied, others = rest.split('Other parameters:')
    assert '(0: h;' in groups
    assert dynamic.split() == ['count']
    assert tied.split()[:4] == ['w', '→', 'group', '0']
    assert others.split()[0] == 'out:'


def test_show_graph_prints_by_default_and_returns_on_demand(model, executor, capsys):
    signature = inspect.signature(bt.ETraceGraphExecutor.show_graph).parameters
    assert {n: p.default for n, p in signature.items() if n != 'self'} == {
        'verbose': True,
        'return_msg': False,
    }
    assert executor.show_graph() is None
    shown = capsys.readouterr().out
    assert executor.show_graph(verbose=False, return_msg=True) == shown.rstrip('\n')
    for number, paths in enumerate(model.groups):
        assert (
            f'({number}: {", ".join(".".join(map(str, path)) for path in paths)};'
            in shown
        )
    assert all('.'.join(map(str, path)) in shown for path in model.module.states())


def test_the_jacobians_of_a_step_are_a_tuple_of_five(model, executor):
    solved = executor.solve_h2w_h2h_jacobian(*model.args, **model.kwargs)
    assert type(solved) is tuple
    out, hiddens, others, h2w, h2h = solved
    want, new = plain_call(model)
    close(out, want)
    jax.tree.map(close, hiddens, new)
    assert not set(others) & set(hiddens)
    assert len(h2w) == len(executor.graph.hidden_param_op_relations)
    env = environment(model, executor.graph)
    for group, jacobian in zip(executor.graph.hidden_groups, h2h, strict=True):
        close(jacobian, group.diagonal_jacobian(*read(group, env)))


def test_with_the_loss_they_are_the_same_five_and_the_residuals(model, executor):
    solved = executor.solve_h2w_h2h_l2h_jacobian(*model.args, **model.kwargs)
    assert type(solved) is tuple
    assert len(solved) == 6
    jax.tree.map(
        close, solved[:5], executor.solve_h2w_h2h_jacobian(*model.args, **model.kwargs)
    )
    signals = solved[5](jnp.ones_like(solved[0]))
    assert [s.shape for s in signals] == [
        (*g.varshape, g.num_state) for g in executor.graph.hidden_groups
    ]


# ---------------------------------------------------------------- diagnostics and errors


def test_a_compilation_record_has_these_fields_and_defaults():
    fields = inspect.signature(bt.CompilationRecord).parameters
    assert list(fields) == [
        'kind', 'level', 'message', 'primitive', 'weight_path', 'hidden_paths', 'context',
    ]  # fmt: skip
    record = bt.CompilationRecord(
        bt.DiagnosticKind.CUT, bt.DiagnosticLevel.INFO, 'a message'
    )
    assert record[3:] == (None, None, (), None)


def test_hidden_paths_of_records_are_tuples(graph):
    assert all(type(record.hidden_paths) is tuple for record in graph.diagnostics)


def test_kinds_and_levels_are_enumerations(graph):
    assert issubclass(bt.DiagnosticKind, enum.Enum)
    assert issubclass(bt.DiagnosticLevel, enum.Enum)
    for record in graph.diagnostics:
        assert isinstance(record, bt.CompilationRecord)
        assert isinstance(record.kind, bt.DiagnosticKind)
        assert isinstance(record.level, bt.DiagnosticLevel)


def test_levels_are_strings_in_the_order_of_what_they_mean():
    levels = list(bt.DiagnosticLevel)
    assert levels == ['info', 'notice', 'warning', 'error']
    assert [level.name for level in levels] == ['INFO', 'NOTICE', 'WARNING', 'ERROR']
    for i, a in enumerate(levels):
        for j, b in enumerate(levels):
            assert (a < b, a <= b, a > b, a >= b) == (i < j, i <= j, i > j, i >= j)


def test_a_compilation_report_has_these_members(model, graph):
    report = graph.report
    assert isinstance(report, bt.CompilationReport)
    assert report.hidden_groups == graph.hidden_groups
    weights = set(model.module.states(brainstate.ParamState))
    assert set(report.etrace_weights) | set(report.excluded_weights) == weights
    assert not set(report.etrace_weights) & set(report.excluded_weights)
    assert set(report.dynamic_states) == {
        path for path in model.module.states() if path == ('steps',)
    }
    assert report.diagnostics == graph.diagnostics
    assert sum(report.counts.values()) == len(report.diagnostics)
    for number, level in enumerate(bt.DiagnosticLevel):
        assert (
            report.to_str(level) == report.to_str(level.name) == report.to_str(number)
        )
        file = io.StringIO()
        report.show(level, file=file)
        assert file.getvalue() == report.to_str(level) + '\n'


def test_the_errors_are_exceptions_of_their_own():
    for error in (bt.NotSupportedError, bt.CompilationError):
        assert issubclass(error, Exception)
        assert not issubclass(error, (ValueError, TypeError))
