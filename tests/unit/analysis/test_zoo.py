"""Every model of the zoo is analysed as a person would draw it."""

import pytest

from braintrace.graph.etrace_graph import compile_etrace_graph
from oracle import precision
from zoo import CASES


@pytest.fixture(params=CASES, ids=str)
def case(request):
    with precision(CASES[request.param]):
        yield CASES[request.param]


def test_as_drawn_by_hand(case):
    model, inputs = case.build()
    graph = compile_etrace_graph(model, *inputs)
    assert {frozenset(g.hidden_paths) for g in graph.hidden_groups} == set(case.groups)
    assert [g.index for g in graph.hidden_groups] == list(range(len(case.groups)))
    sites = {leaf: set() for leaf in case.sites}
    for site in graph.hidden_param_op_relations:
        for parameter in site.parameters:
            sites[parameter.path + parameter.leaf] |= {
                frozenset(g.hidden_paths) for g in site.hidden_groups
            }
    assert sites == case.sites
    drawn = {'.'.join(map(str, leaf)): credit for leaf, credit in case.credit.items()}
    assert {
        r.context['name']: r.context['credit'] for r in graph.report.credits
    } == drawn


def test_zoo_is_large_enough():
    assert len(CASES) >= 280
