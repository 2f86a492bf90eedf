"""The compiler's own functions."""

import brainstate
from common import Net, data, seeded

import braintrace

xs, ys = data()
net = seeded(Net)
brainstate.nn.init_all_states(net, batch_size=xs.shape[1])
graph = braintrace.compile_etrace_graph(net, xs[0])
groups, by_path = braintrace.find_hidden_groups_from_module(net, xs[0])
info = braintrace.extract_module_info(net, xs[0])
perturbation = braintrace.add_hidden_perturbation_in_module(net, xs[0])
executor = braintrace.ETraceVjpGraphExecutor(net)
executor.compile_graph(xs[0])
out = executor.solve_h2w_h2h_jacobian(xs[0])[0]
losses = [
    float(len(groups)),
    float(len(perturbation.perturb_vars)),
    float((out**2).sum()),
]
assert executor.is_single_step_vjp
