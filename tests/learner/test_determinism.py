"""The same model gives the same text: twice in a process, and in processes with other hash seeds."""

import os
import pathlib
import subprocess
import sys

import brainstate
import jax
import jax.numpy as jnp

import braintrace as bt

ZERO = (
    brainstate.nn.init.ZeroInit()
)  # random draws take longer to compile than everything else here
HERE = pathlib.Path(__file__).parent


class Network(brainstate.nn.Module):
    """Layers in a list and a dictionary, shared weights, a loop, a branch, an other state, cuts of every kind."""

    def __init__(self):
        super().__init__()
        self.cells = [
            bt.nn.GRUCell(3, 4, w_init=ZERO),
            bt.nn.LSTMCell(4, 4, w_init=ZERO),
        ]
        self.named = {
            name: bt.nn.Linear(4, 4, w_init=ZERO) for name in ('zeta', 'alpha', 'mid')
        }
        self.tied, self.idle = self.named['alpha'], brainstate.ParamState(jnp.ones(2))
        self.readout = brainstate.nn.Linear(4, 2, w_init=ZERO)

    def init_state(self, batch_size=None):
        self.v, self.a = (
            brainstate.HiddenState(jnp.ones((batch_size, 4))) for _ in range(2)
        )
        self.seen = brainstate.ShortTermState(jnp.zeros((batch_size, 4)))

    def update(self, x):
        for cell in self.cells:
            x = cell(x)
        drive = sum(layer(x) for layer in self.named.values()) + self.tied(self.v.value)
        self.a.value = 0.9 * self.a.value + jax.nn.softmax(self.v.value)
        self.v.value = jax.lax.fori_loop(
            0, 2, lambda _, v: 0.5 * v + drive - self.a.value, self.v.value
        )
        self.seen.value = 0.5 * self.seen.value + jax.lax.cond(
            x.sum() > 0, jnp.sin, jnp.cos, self.v.value
        )
        return self.readout(self.v.value), self.seen.value


def models():
    network = Network()
    brainstate.nn.init_all_states(network, batch_size=2)
    yield network
    cell = brainstate.nn.LSTMCell(3, 4, w_init=ZERO)
    brainstate.nn.init_all_states(cell, batch_size=2)
    yield cell


def describe():
    """Everything with an order: equations, groups, sites, records, extra outputs."""
    lines = []
    for model in models():
        graph = bt.compile_etrace_graph(model, jnp.ones((2, 3)))
        info = graph.module_info
        order = {
            v: i
            for i, v in enumerate(
                [*info.jaxpr.invars, *(v for e in info.jaxpr.eqns for v in e.outvars)]
            )
        }
        lines += [
            str(info.jaxpr),
            str(graph.hidden_perturb.perturb_jaxpr),
            repr(graph),
            graph.report.to_str('info'),
        ]
        lines.append(graph.report.to_html())
        lines += [str(group.transition_jaxpr) for group in graph.hidden_groups]
        lines += [
            str(part)
            for site in graph.hidden_param_op_relations
            for part in site.y_to_hidden_group_jaxprs
        ]
        lines += [
            str([order.get(v) for v in info.jaxpr.outvars]),
            str(list(info.state_id_to_path.values())),
        ]
        lines += map(repr, graph.diagnostics)
        lines += [
            str(list(d))
            for d in (
                info.hidden_path_to_invar,
                info.weight_path_to_invars,
                graph.hid_path_to_group,
            )
        ]
    return '\n'.join(lines)


def in_a_process(seed):
    source = os.pathsep.join(
        [str(HERE), str(HERE.parents[1] / 'src'), os.environ.get('PYTHONPATH', '')]
    )
    env = os.environ | {'PYTHONHASHSEED': seed, 'PYTHONPATH': source}
    code = 'import test_determinism; print(test_determinism.describe())'
    return subprocess.Popen(
        [sys.executable, '-c', code], env=env, stdout=subprocess.PIPE, text=True
    )


def test_same_text_everywhere():
    fresh = [in_a_process(seed) for seed in ('1', '2')]
    here = describe()
    assert describe() == here
    for process in fresh:
        text, _ = process.communicate(timeout=120)
        assert process.returncode == 0
        assert text.rstrip('\n') == here
