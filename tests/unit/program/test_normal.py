"""The normal form of a program computes what the program did, with the derivatives that JAX gives the program."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from braintrace.compat import (
    changed,
    close,
    is_var,
    open_jaxpr,
    replace_sub_programs,
    sub_programs,
)
from braintrace.program import normal_form

X = jnp.asarray([0.7, -0.4, 1.3])
TABLE = jnp.asarray([2.0, 3.0, 5.0])


@jax.custom_jvp
def slope_five(x):
    return 2 * x


slope_five.defjvp(lambda x, t: (slope_five(*x), 5 * t[0]))


@jax.custom_vjp
def slope_three(x):
    return 2 * x


slope_three.defvjp(lambda x: (slope_three(x), None), lambda _, bar: (3 * bar,))


def calls(x):
    """Calls in calls, one of them twice, with constants of their own."""
    scaled = jax.jit(lambda x: jax.jit(jnp.sin)(x) * TABLE)
    y = jax.checkpoint(lambda x: jnp.tanh(scaled(x) + scaled(2 * x)))(x)
    return jax.jit(lambda a, b: (b, a, jax.jit(jnp.cos)(a)))(y, x[0])


def own_derivatives(x):
    return jax.jit(lambda x: slope_five(x) * slope_three(jnp.cos(x)))(x)


def loops(x):
    def body(carry, y):
        new = jax.jit(jnp.sin)(carry * y)
        return new, (new, new)

    return jax.lax.scan(body, x, jnp.stack([x, x + 1]))


def branches(x):
    same = lambda x: (x, x, jnp.zeros(()))
    other = lambda x: (jax.jit(jnp.sin)(x), x * TABLE, x.sum())
    return [jax.lax.cond(y > 0, same, other, x) for y in (x[0], x[1])]


def unread(x):
    """Results that nothing reads, in a body too."""
    jnp.cos(x) * TABLE

    def body(carry, _):
        jnp.exp(carry) + jnp.arange(3)
        return carry * 0.5, None

    return jax.lax.scan(body, x, length=3)[0]


PROGRAMS = {f.__name__: f for f in (calls, own_derivatives, loops, branches, unread)}


def run_by(closed):
    return lambda *args: jax.core.eval_jaxpr(closed.jaxpr, closed.consts, *args)


def programs_in(closed):
    """The program and all programs inside it."""
    yield closed
    for eqn in open_jaxpr(closed).eqns:
        for sub in sub_programs(eqn):
            yield from programs_in(sub.jaxpr)


def primitives(closed):
    return [e.primitive.name for p in programs_in(closed) for e in open_jaxpr(p).eqns]


def same(a, b, rtol=1e-12):
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol), a, b)


@pytest.mark.parametrize('name', PROGRAMS)
def test_values_and_derivatives_stay(name, x64):
    function = PROGRAMS[name]
    x = X.astype(float)
    closed = normal_form(jax.make_jaxpr(function)(x))
    flat = lambda x: jax.tree.leaves(function(x))
    same(run_by(closed)(x), flat(x))
    same(jax.jacrev(run_by(closed))(x), jax.jacrev(flat)(x))


@pytest.mark.parametrize('name', PROGRAMS)
def test_neither_calls_nor_unread_results_are_left(name):
    traced = jax.make_jaxpr(PROGRAMS[name])(X)
    plain = {'jit', 'pjit', 'remat', 'remat2', 'checkpoint', 'closed_call'}
    assert plain & {*primitives(traced)} or name == 'unread'
    closed = normal_form(traced)
    assert not plain & {*primitives(closed)}
    for program in map(open_jaxpr, programs_in(closed)):
        read = [v for e in program.eqns for v in e.invars] + list(program.outvars)
        read = {v for v in read if is_var(v)}
        assert all(read & {*e.outvars} for e in program.eqns)
        assert read >= {*program.constvars}


def test_a_program_reads_the_variables_that_it_read_before():
    traced = jax.make_jaxpr(calls)(X)
    closed = normal_form(traced)
    assert list(closed.jaxpr.invars) == list(traced.jaxpr.invars)
    again = normal_form(closed)
    assert str(again) == str(closed)
    assert again.jaxpr.outvars == closed.jaxpr.outvars
    names = [v for e in closed.jaxpr.eqns for v in e.outvars]
    assert len(names) == len({*names})  # also where a call stands twice


def test_one_program_with_two_sets_of_constants():
    """JAX may keep a traced program and close it twice."""
    call = jax.jit(lambda x: jnp.sin(x) * TABLE)
    closed = jax.make_jaxpr(lambda x: (call(x), call(x)))(X)
    first, second = closed.jaxpr.eqns
    (sub,) = sub_programs(second)
    if not sub.jaxpr.consts:
        pytest.skip('this JAX passes constants as operands')
    other = close(open_jaxpr(sub.jaxpr), [10 * c for c in sub.jaxpr.consts])
    second = replace_sub_programs(second, {sub.key: other})
    found = normal_form(changed(closed, equations=[first, second]))
    same(run_by(found)(X), [jnp.sin(X) * TABLE, 10 * jnp.sin(X) * TABLE], 1e-6)


def makers(jaxpr):
    return {v: e.primitive.name for e in jaxpr.eqns for v in e.outvars}


def test_results_of_a_scan_leave_by_a_copy():
    """Where the scan made an output, others read the copy, so that a cut at one operand cuts all of it."""

    def function(x):
        carry, ys = loops(x)
        return carry, ys[0].sum()

    jaxpr = normal_form(jax.make_jaxpr(function)(X)).jaxpr
    assert makers(jaxpr)[jaxpr.outvars[0]] == 'copy'
    (scan,) = [e for e in jaxpr.eqns if e.primitive.name == 'scan']
    assert not {*scan.outvars} & {*jaxpr.outvars}
    body = open_jaxpr(scan.params['jaxpr'])
    assert len(body.outvars) == len({*body.outvars}) == 3


def test_results_of_branches_are_variables_of_their_own():
    jaxpr = normal_form(jax.make_jaxpr(branches)(X)).jaxpr
    for eqn in jaxpr.eqns:
        for branch in map(open_jaxpr, eqn.params.get('branches', ())):
            results = [v for v in branch.outvars if is_var(v)]
            assert len(results) == len({*results})
            assert not {*results} & {*branch.invars}


def test_effects_stay_in_their_order_although_nothing_is_read():
    seen = []

    def note(k, x):
        jax.debug.callback(lambda x: seen.append((k, float(x))), x, ordered=True)

    def function(x):
        note('first', x[0])
        jax.jit(lambda x: note('called', 2 * x[1]))(x)
        return x + 1

    closed = normal_form(jax.make_jaxpr(function)(X))
    assert closed.jaxpr.effects
    run_by(closed)(X)
    jax.effects_barrier()
    assert seen == [('first', float(X[0])), ('called', float(2 * X[1]))]


def test_code_of_python_gets_operands_without_a_derivative():
    """JAX refuses to differentiate it."""

    def function(x):
        shape = jax.ShapeDtypeStruct(x.shape, x.dtype)
        return x**2 + jax.pure_callback(lambda x: np.sin(x), shape, 3 * x)

    closed = normal_form(jax.make_jaxpr(function)(X))
    (value,) = run_by(closed)(X)
    np.testing.assert_allclose(value, X**2 + np.sin(3 * X), rtol=1e-6)
    slope = jax.grad(lambda x: run_by(closed)(x)[0].sum())(X)
    np.testing.assert_allclose(slope, 2 * X, rtol=1e-6)
    with pytest.raises(ValueError, match='callbacks'):
        jax.grad(lambda x: function(x).sum())(X)


def test_equations_of_a_call_keep_the_names_of_its_scopes():
    def function(x):
        with jax.named_scope('outer'):
            return jax.jit(jax.named_scope('inner')(jnp.sin))(x)

    (eqn,) = normal_form(jax.make_jaxpr(function)(X)).jaxpr.eqns
    assert str(eqn.source_info.name_stack) == 'outer/inner'
