"""The graph, the report and its levels."""

from common import Net, data, seeded

import braintrace

xs, ys = data()
learner = braintrace.compile(seeded(Net), 'd_rtrl', xs[0], batch_size=xs.shape[1])
report = learner.report
assert report.to_str(level=1)
report.show(level=2)
assert learner.show_graph(verbose=False, return_msg=True)
assert len(learner.graph.hidden_groups) == 1
records = learner.graph.explain(weight_path=('rnn', 'Wh', 'weight'))
assert all(record.level.value in ('info', 'notice', 'warning') for record in records)
losses = [float(len(learner.graph.hidden_groups))]
