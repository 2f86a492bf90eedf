"""The documented compiler: records of what was found in a model's step, for its user.

etrace_graph         :class:`ETraceGraph` and the functions that compile one
hidden_perturbation  new hidden values with a zero added to each
executor             compiles a module's graph; Jacobians of one step
diagnostics          records of what was found; findings and relation_records write them
"""
