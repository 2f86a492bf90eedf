"""The same model gives the same text: twice in a process, and in processes with other hash seeds."""

import os
import pathlib
import subprocess
import sys

import braintrace as bt

from zoo import CASES

NAMES = ['brainpy_ei_network', 'brainpy_stack', 'gru_batched', 'brainpy_coba_lif', 'brainpy_alif_recurrent']
HERE = pathlib.Path(__file__).parent


def describe():
    """Everything with an order: equations, groups, sites, records, extra outputs."""
    lines = []
    for name in NAMES:
        model, inputs = CASES[name].build()
        graph = bt.compile_etrace_graph(model, *inputs)
        info = graph.module_info
        order = {v: i for i, v in enumerate([*info.jaxpr.invars, *(v for e in info.jaxpr.eqns for v in e.outvars)])}
        lines += [name, str(info.jaxpr), str(graph.hidden_perturb.perturb_jaxpr), repr(graph), graph.report.to_str('info')]
        lines += [str(group.transition_jaxpr) for group in graph.hidden_groups]
        lines += [str(part) for site in graph.hidden_param_op_relations for part in site.y_to_hidden_group_jaxprs]
        lines += [str([order.get(v) for v in info.jaxpr.outvars]), str(list(info.state_id_to_path.values()))]
        lines += [str(list(d)) for d in (info.hidden_path_to_invar, info.weight_path_to_invars, graph.hid_path_to_group)]
    return '\n'.join(lines)


def in_a_process(seed):
    source = os.pathsep.join([str(HERE), str(HERE.parent / 'src'), os.environ.get('PYTHONPATH', '')])
    env = os.environ | {'PYTHONHASHSEED': seed, 'PYTHONPATH': source}
    code = 'import conftest, test_determinism; print(test_determinism.describe())'
    return subprocess.Popen([sys.executable, '-c', code], env=env, stdout=subprocess.PIPE, text=True)


def test_same_text_everywhere():
    fresh = [in_a_process(seed) for seed in ('1', '2')]
    here = describe()
    assert describe() == here
    for process in fresh:
        text, _ = process.communicate(timeout=120)
        assert process.returncode == 0
        assert text.rstrip('\n') == here
