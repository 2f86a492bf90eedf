"""Members of a learner."""

import contextlib

import brainstate
import jax.numpy as jnp
from common import Net, data, seeded

import braintrace

xs, ys = data()
net = seeded(Net)
brainstate.nn.init_all_states(net, batch_size=xs.shape[1])
learner = braintrace.D_RTRL(net)
assert not learner.is_compiled
learner.compile_graph(xs[0])
learner.init_etrace_state()
assert learner.is_compiled
assert learner.config.describe() == "trace_factorization='per_param'"
assert ('rnn', 'h') in learner.path_to_states
assert ('rnn', 'h') in learner.state_id_to_path.values()
assert learner.graph_executor is learner.executor
assert learner.get_etrace_of(net.rnn.Wh.weight)
assert learner.get_etrace_of(('rnn', 'Wh', 'weight'))
with contextlib.suppress(KeyError, ValueError):
    learner.get_etrace_of('nothing')
assert int(learner.running_index.value) == 0
losses = [float(jnp.mean(learner(xs[0]) ** 2))]
assert int(learner.running_index.value) == 1
