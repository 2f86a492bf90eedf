"""The documented records of every model of the zoo, in numbers.

The oracle is the model's own program differentiated by JAX: the whole step with the cuts put in, its
dense Jacobians by `jax.jacrev`, and the plain one-step gradient. It shares no slicing with the compiler.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from braintrace.analysis.analysed import analyse
from braintrace.compat import evaluate, evaluate_equation, is_var
from braintrace.graph.executor import ETraceGraphExecutor
from braintrace.program import slice_back
from oracle import close_to, local_step, precision
from zoo import CASES


def bits(x):
    return np.asarray(
        jax.random.key_data(x) if jnp.issubdtype(x.dtype, jax.dtypes.prng_key) else x
    )


def measure(model, inputs):
    """Everything the tests compare, in one compiled program."""
    executor = ETraceGraphExecutor(model)
    executor.compile_graph(*inputs)
    graph, program = executor.graph, executor.graph.module_info.program
    analysed = analyse(program)
    flat = [
        x if isinstance(x, jax.Array) else jnp.asarray(x)
        for x in graph.module_info.flat_inputs(inputs, None, {})
    ]
    place = {v: i for i, v in enumerate(program.closed.jaxpr.invars)}
    outs = {v: i for i, v in enumerate(program.closed.jaxpr.outvars) if is_var(v)}
    thetas = [p.invar for p in program.parameters]
    draw = np.random.default_rng(0)
    gammas = [
        jnp.asarray(draw.standard_normal((*g.varshape, g.num_state)), jnp.float32)
        for g in graph.hidden_groups
    ]

    def replaced(values, variables, new):
        values = list(values)
        for v, x in zip(variables, new, strict=True):
            values[place[v]] = x
        return values

    def loss(results):
        total = 0.0
        for x in results[: len(program.outputs)]:
            if jnp.issubdtype(x.dtype, jnp.inexact):
                total = total + jnp.sum(
                    jnp.sin(1.0 + jnp.arange(x.size).reshape(x.shape))
                    * (x * x.conj()).real
                )
        return total

    def plain(values):
        return evaluate(program.closed.jaxpr, program.closed.consts, *values)

    def everything(flat):
        result = {'plain': plain(flat), 'groups': []}
        *_, h2w, h2h, l2h = executor.solve_h2w_h2h_l2h_jacobian(*inputs)
        for g, (group, members, positions) in enumerate(
            zip(graph.hidden_groups, analysed.members, analysed.positions, strict=True)
        ):
            local = local_step(program, members, positions)
            old = group.concat_hidden([flat[place[v]] for v in group.hidden_invars])

            def new(h, values=flat, group=group, local=local):
                out = local(
                    replaced(values, group.hidden_invars, group.split_hidden(h))
                )
                return group.concat_hidden([out[outs[v]] for v in group.hidden_outvars])

            def of_theta(theta, old=old, new=new):
                return new(old, replaced(flat, thetas, theta))

            _, pull = jax.vjp(of_theta, [flat[place[v]] for v in thetas])
            result['groups'].append(
                {
                    'values': local(flat),
                    'jacobian': jax.jacrev(new)(old),
                    'diagonal': h2h[g],
                    'theta': pull(gammas[g].astype(old.dtype))[0],
                    'sites': site_gradients(graph, g, h2w, gammas[g], flat, place),
                }
            )
        deltas = [
            group.split_hidden(x * 0)
            for group, x in zip(graph.hidden_groups, gammas, strict=True)
        ]
        zeros = graph.hidden_perturb.init_perturb_data()
        perturbed = lambda values: graph.hidden_perturb.eval_jaxpr(values, zeros)
        through = lambda run: lambda theta: loss(run(replaced(flat, thetas, theta)))
        theta = [flat[place[v]] for v in thetas]
        result['perturbed'] = perturbed(flat)
        result['gradient'] = jax.grad(through(plain))(theta)
        result['perturbed_gradient'] = jax.grad(through(perturbed))(theta)
        out_leaves = plain(flat)[: len(program.outputs)]
        cotangents = jax.grad(lambda o: loss(o), allow_int=True)(out_leaves)
        signals = l2h(jax.tree.unflatten(graph.module_info.out_tree, cotangents))
        result['through_sites'] = [
            sum(parts)
            for parts in zip(
                *(
                    site_gradients(graph, g, h2w, signals[g], flat, place)
                    for g in range(len(signals))
                ),
                strict=True,
            )
        ]
        result['deltas'] = deltas
        return result

    return graph, analysed.dependence, analysed, jax.jit(everything)(flat)


def site_gradients(graph, g, h2w, gamma, flat, place):
    """γ · ∂h/∂θ of one group, put together from the sites alone."""
    program = graph.module_info.program
    env = dict(zip(graph.module_info.jaxpr.invars, flat, strict=True))
    total = {
        p.invar: jnp.zeros(p.invar.aval.shape, p.invar.aval.dtype)
        for p in program.parameters
    }
    info = graph.module_info
    results = evaluate(info.jaxpr, info.closed_jaxpr.consts, *flat)
    env.update(
        (v, x) for v, x in zip(info.jaxpr.outvars, results, strict=True) if is_var(v)
    )
    env.update(zip(info.jaxpr.constvars, info.closed_jaxpr.consts, strict=True))
    for relation, jacobian in zip(graph.hidden_param_op_relations, h2w, strict=True):
        if g not in jacobian.hidden_to_y:
            continue
        site = relation.sites[-1]
        which = [group.index for group in site.hidden_groups].index(g)
        y, states = site.y_var.aval, gamma.shape[-1]
        slopes, sources = jacobian.hidden_to_y[g], site.y_sources[which]
        if sources is None:
            positions = site.y_positions[which]
            spread = (
                gamma.reshape(-1, states)[np.maximum(positions, 0)]
                * (positions >= 0)[..., None]
            )
            y_bar = jnp.sum(spread * slopes, axis=-1).astype(y.dtype)
        else:  # summed over the positions that an element reaches
            at = np.flatnonzero(sources >= 0)
            credit = jnp.sum(gamma * slopes, axis=-1).reshape(-1)[at].astype(y.dtype)
            y_bar = jnp.zeros(y.size, y.dtype).at[sources[at]].add(credit)
            y_bar = y_bar.reshape(y.shape)
        for site in reversed(relation.sites):
            if site.y_var is not relation.y_var:  # before the bias, perhaps transposed
                y_bar = pull_result(
                    program, site.y_var, relation.sites[-1].x_var, y_bar
                )
            for v, grad in zip(
                site.weight_jaxpr.invars,
                pull_site(graph, site, env, y_bar),
                strict=True,
            ):
                total[v] = total[v] + grad
    return [total[p.invar] for p in program.parameters]


def pull_result(program, y, moved, moved_bar):
    """Gradient of an operation's result from that of the same, moved to where the bias
    is added."""
    producer = {v: i for i, e in enumerate(program.equations) for v in e.outvars}
    path = slice_back(program.equations, producer, [y], moved)
    zero = jnp.zeros(y.aval.shape, y.aval.dtype)
    _, pull = jax.vjp(lambda value: evaluate(path, [], value)[0], zero)
    return pull(moved_bar)[0]


def pull_site(graph, site, env, y_bar):
    """Gradient of a site's parameters from that of its y, by evaluating its equation alone."""
    program = site.weight_jaxpr
    producer = {v: e for e in graph.module_info.jaxpr.eqns for v in e.outvars}

    def value(atom):
        if not is_var(atom):
            return atom.val
        if atom not in env:
            e = producer[atom]
            for v, x in zip(
                e.outvars,
                evaluate_equation(e, [value(a) for a in e.invars]),
                strict=True,
            ):
                env[v] = x
        return env[atom]

    operands = [value(v) for v in site.equation.invars]
    index = [v is site.y_var for v in site.equation.outvars].index(True)

    def of_theta(*theta):
        (weight,) = evaluate(program, [value(v) for v in program.constvars], *theta)
        return evaluate_equation(
            site.equation,
            [*operands[: site.operand], weight, *operands[site.operand + 1 :]],
        )[index]

    _, pull = jax.vjp(of_theta, *(env[v] for v in program.invars))
    return pull(y_bar)


@pytest.fixture
def case(request):
    with precision(CASES[request.param]):
        yield CASES[request.param]


@pytest.mark.parametrize('case', CASES, indirect=True)
def test_numbers(case):
    model, inputs = case.build()
    before = [s.value for s in model.states().values()]
    graph, dependence, analysed, got = measure(model, inputs)

    for values in [got['perturbed'], *(g['values'] for g in got['groups'])]:
        for a, b in zip(values, got['plain'], strict=True):
            np.testing.assert_array_equal(bits(a), bits(b))
    for a, b in zip(got['gradient'], got['perturbed_gradient'], strict=True):
        close_to(a, b, case)

    for group, numbers in zip(graph.hidden_groups, got['groups'], strict=True):
        size, states = int(np.prod(group.varshape)), group.num_state
        dense = np.array(numbers['jacobian'], float).reshape(size, states, size, states)
        blocks = np.einsum('psqr->pqsr', dense).copy()
        diagonal = blocks[np.arange(size), np.arange(size)].copy()
        blocks[np.arange(size), np.arange(size)] = 0
        assert not blocks.any()
        close_to(
            diagonal,
            np.asarray(numbers['diagonal'], float).reshape(size, states, states),
            case,
        )
        for a, b in zip(numbers['theta'], numbers['sites'], strict=True):
            close_to(a, b, case)

    for i, parameter in enumerate(dependence.program.parameters):
        bit = dependence.bit[parameter.invar]
        direct = any(
            dependence.direct[v].grads & bit
            for v in dependence.program.outputs
            if is_var(v) and v in dependence.direct
        )
        is_cut = any(
            c.bits.grads & bit for found in analysed.positions for c in found.found
        )
        if not direct and not is_cut:
            close_to(got['gradient'][i], got['through_sites'][i], case)

    assert all(
        old is state.value
        for old, state in zip(before, model.states().values(), strict=True)
    )
