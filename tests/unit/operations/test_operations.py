"""What models are made of: every primitive on a differentiable path has a family, or is reported.

By default functions and a few modules; `make operations` walks every module of the packages as well.
"""

import os
import pathlib
import sys

import jax
import jax.numpy as jnp
import numpy as np

import braintrace
from braintrace.graph.diagnostics import DiagnosticKind

sys.path.insert(0, str(pathlib.Path(__file__).parents[3] / 'scripts'))
from operations import OPAQUE, coverage, primitives, treatment

ALL = os.environ.get('OPERATIONS') == 'all'


def test_no_operation_has_a_gap():
    found = coverage(ALL)
    assert not found.gaps
    assert len(found.walked) > (390 if ALL else 150)
    assert {'gap'}.isdisjoint(how for how, _ in found.users)


def test_a_gap_is_seen():
    primitive = jax.extend.core.Primitive('unheard_of')
    primitive.def_abstract_eval(lambda x: x)
    (eqn,) = primitives(jax.make_jaxpr(primitive.bind)(1.0))
    assert treatment(eqn) == 'gap'


def test_opaque_operations_are_reported():
    """No credit passes, and the report names the primitive, the line and every parameter that loses by it."""
    shape = jax.ShapeDtypeStruct((2, 4), jnp.float32)
    opaque = lambda x: jax.pure_callback(np.sin, shape, x, vmap_method='sequential')

    def step(p, s, x):
        y = x @ p['w']
        h = 0.5 * opaque(jnp.tanh(s['h']) + y * p['v']) + y
        return {'h': h}, h @ p['out']

    parameters = {
        'w': jnp.full((3, 4), 0.1),
        'v': jnp.full(4, 0.2),
        'out': jnp.ones((4, 2)),
    }
    state, x = {'h': jnp.zeros((2, 4))}, jnp.ones((2, 3))
    graph = braintrace.compile_etrace_graph(step, parameters, state, x)
    (record,) = graph.explain(kind=DiagnosticKind.NOT_DIFFERENTIABLE)
    assert record.primitive in OPAQUE
    assert __file__.rpartition('/')[2] in record.message
    credits = {
        r.context['name']: (r.context['credit'], r.context['reason'])
        for r in graph.report.credits
    }
    assert {n: c for n, (c, _) in credits.items()} == {
        'w': 'instantaneous',
        'v': 'none',
        'out': 'exact',
    }
    assert all('no credit passes' in credits[n][1] for n in 'wv')
